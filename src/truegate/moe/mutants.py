"""Does the self-test see every fault of the catalogue, and cry at none that is not there? `truegate check --mutants`.

Invariant: a mutant is planted in a layer as it runs; what counts as caught is the self-test's own verdict.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truegate.errors import UserError
from truegate.law.fault import Fault
from truegate.law.faults import FAULTS
from truegate.law.placement import from_slots
from truegate.law.plan import Choices, Plan
from truegate.law.spec import (
    Activation,
    Denominator,
    Groups,
    GroupScore,
    RoutingSpec,
    Score,
    SelectOn,
    Shared,
    SharedGate,
    WeightAt,
)
from truegate.moe.backends import Backends, choose, compile_layer
from truegate.moe.layer import MoELayer
from truegate.moe.plant import plant
from truegate.moe.selftest import Report, self_test

SIZES = {"num_experts": 64, "top_k": 6, "hidden": 96, "expert_intermediate": 32}
TOP2 = Groups(count=8, kept=3, score=GroupScore.TOP2_SUM, fill=float("-inf"))
MAX = Groups(count=8, kept=3, score=GroupScore.MAX, fill=0.0)
SUM = Denominator.SUM
LAYERS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {
        "score": Score.SIGMOID, "has_selection_bias": True, "groups": TOP2, "denominator": SUM, "eps": 1e-20,
        "routed_scale": 2.5, "shared": Shared(intermediate=64),
    },
    "deepseek_v2": {
        "score": Score.SOFTMAX, "groups": MAX, "routed_scale": 16.0, "shared": Shared(intermediate=64),
    },
    "qwen2_moe": {"score": Score.SOFTMAX, "shared": Shared(intermediate=96, gate=SharedGate.SIGMOID)},
    "qwen3_moe": {"score": Score.SOFTMAX, "denominator": SUM},
    "gpt_oss": {
        "score": Score.SOFTMAX, "select_on": SelectOn.LOGITS, "denominator": Denominator.SOFTMAX_TOPK, "clamp": 7.0,
        "activation": Activation.SWIGLU_CLAMP, "has_gate_bias": True, "has_expert_bias": True,
    },
    "llama4": {
        "score": Score.SIGMOID, "select_on": SelectOn.LOGITS, "top_k": 1, "weight_at": WeightAt.INPUT,
        "shared": Shared(intermediate=32),
    },
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One mutant in one layer: what caught it and what was said."""

    fault: Fault
    layer: str
    report: Report

    @property
    def caught_by(self) -> list[str]:
        return [check.name for check in self.report.checks if not check.ok]

    @property
    def named(self) -> bool:
        """The explanation names the planted fault, alone or among others that give the same numbers here."""
        return self.report.fault == self.fault.name or self.fault.name in self.report.also


def plans(backends: Backends | None = None) -> dict[str, Plan]:
    """The layers that mutants are planted in: each family, fused where it can be, and with shuffled replicas."""
    found = {}
    for family, axes in LAYERS.items():
        spec = RoutingSpec(family=family, **{**SIZES, **axes})
        for fused in (False, True) if spec.shared is not None else (False,):
            for redundant in (0, 8):
                name = family + (", fused shared" if fused else "") + (", replicas" if redundant else "")
                found[name] = _plan(spec, backends or choose(), fused=fused, redundant=redundant, seed=0)
    return found


def _plan(spec: RoutingSpec, backends: Backends, *, fused: bool, redundant: int, seed: int) -> Plan:
    slots = np.arange(spec.num_experts + redundant) % spec.num_experts
    if redundant:
        slots = np.random.default_rng(seed).permutation(slots)
    placement = from_slots(slots, num_experts=spec.num_experts, num_ranks=1)
    return compile_layer(spec, backends, placement, Choices(fuse_shared=fused))


def outcomes(
    *, layers_each: int | None = None, dtype: torch.dtype = torch.float32, backends: Backends | None = None,
    device: str = "cpu", faults: Sequence[Fault] = FAULTS,
) -> Iterator[Outcome]:  # fmt: skip
    """Plant every fault in the first `layers_each` layers it applies to (None: all)."""
    backends = backends or choose()
    every = plans(backends)
    for fault in faults:
        fitting = [name for name, plan in every.items() if fault.applies(plan)]
        for name in fitting[:layers_each]:
            layer = MoELayer(every[name], backends, dtype=dtype, device=device)
            plant(layer, fault)
            yield Outcome(fault=fault, layer=name, report=self_test(layer))


def false_alarms(
    cases: int, *, seed: int = 0, dtype: torch.dtype = torch.float32, backends: Backends | None = None,
    device: str = "cpu",
) -> Iterator[tuple[Plan, Report]]:  # fmt: skip
    """Self-tests of `cases` right layers of random mathematics, sizes, fusion and replicas."""
    rng, backends = np.random.default_rng(seed), backends or choose()
    for _ in range(cases):
        plan = _random_plan(rng, backends)
        layer = MoELayer(plan, backends, dtype=dtype, device=device)
        yield plan, self_test(layer, seed=int(rng.integers(1 << 30)))


def _random_plan(rng: np.random.Generator, backends: Backends) -> Plan:
    """A consistent random layer; what a spec or the plan refuses is drawn again."""
    while True:
        try:
            spec = _random_spec(rng)
            fused = spec.shared is not None and bool(rng.integers(2))
            redundant, seed = int(rng.integers(0, 5)), int(rng.integers(1 << 30))
            return _plan(spec, backends, fused=fused, redundant=redundant, seed=seed)
        except UserError:
            continue


def _random_spec(rng: np.random.Generator) -> RoutingSpec:
    def pick(*options):
        return options[rng.integers(len(options))]

    groups = Groups(
        count=pick(2, 3, 4), kept=pick(1, 2, 3), score=pick(*GroupScore), fill=pick(0.0, float("-inf"))
    )  # fmt: skip
    width = pick(8, 12, 32)
    shared = Shared(intermediate=width * pick(1, 2, 3), gate=pick(*SharedGate))
    score = pick(*Score)
    biased = bool(rng.integers(2))
    if biased and groups.fill == 0.0:
        groups = Groups(count=groups.count, kept=groups.kept, score=groups.score, fill=float("-inf"))
    weight_at = pick(WeightAt.OUTPUT, WeightAt.OUTPUT, WeightAt.INPUT)
    num_identity = 0 if weight_at is WeightAt.INPUT else pick(0, 0, 4)  # the instrument refuses both together
    return RoutingSpec(
        family="random", num_experts=pick(6, 12, 18, 24), top_k=pick(1, 2, 3, 4, 6), score=score,
        select_on=pick(SelectOn.SCORES, SelectOn.SCORES, SelectOn.LOGITS), has_selection_bias=biased,
        groups=pick(None, groups), denominator=pick(*Denominator), eps=pick(0.0, 1e-20, 1e-12),
        routed_scale=pick(1.0, 1.8, 2.5, 16.0), weight_at=weight_at,
        shared=pick(None, shared), num_identity=num_identity, has_gate_bias=bool(rng.integers(2)),
        hidden=pick(16, 33, 64), expert_intermediate=width,
    )  # fmt: skip
