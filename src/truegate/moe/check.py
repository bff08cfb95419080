"""`truegate check MODEL`: the self-test of every kind of MoE layer a config has, without loading its weights.

Invariant: layers with equal plans are measured once, through the backends that were asked for.
"""

from collections.abc import Iterator
from pathlib import Path

import torch

from truegate.errors import UserError
from truegate.law.families import main_specs_of
from truegate.law.fault import Fault
from truegate.law.placement import place
from truegate.law.plan import Choices, Plan
from truegate.moe.backends import Backends, compile_layer
from truegate.moe.layer import MoELayer
from truegate.moe.plant import plant
from truegate.moe.selftest import Report, self_test


def check_config(
    config: str | Path,
    backends: Backends,
    choices: Choices,
    *,
    dtype: torch.dtype,
    device: str,
    free_bytes: int,
    fault: Fault | None = None,
) -> Iterator[tuple[list[int], Plan, Report]]:
    """(layers, plan, report) of each distinct MoE layer of a Hugging Face config; next-token layers are not served."""
    kinds: list[tuple[list[int], Plan]] = []
    for index, spec in enumerate(main_specs_of(config)):
        if spec is None:
            continue
        for layers, plan in kinds:
            if plan.spec == spec:
                layers.append(index)
                break
        else:
            placement = place(num_experts=spec.num_experts)
            kinds.append(([index], compile_layer(spec, backends, placement, choices)))
    if not kinds:
        raise UserError(f"{config}: every layer is dense; there is nothing to check")
    for layers, plan in kinds:
        _fits(plan, dtype, free_bytes)
        layer = MoELayer(plan, backends, dtype=dtype, device=device)
        if fault is not None:
            plant(layer, fault)
        yield layers, plan, self_test(layer)


def _fits(plan: Plan, dtype: torch.dtype, free_bytes: int) -> None:
    spec = plan.spec
    width = spec.shared.intermediate if spec.shared is not None else 0
    units = plan.placement.num_slots * spec.expert_intermediate + width
    needed = 3 * units * spec.hidden * dtype.itemsize
    if needed > free_bytes:
        raise UserError(
            f"one layer of this model takes {needed / 2**30:.1f} GiB in {str(dtype).removeprefix('torch.')}, "
            f"{free_bytes / 2**30:.1f} GiB are free; use --dtype bfloat16, or a machine with more memory"
        )
