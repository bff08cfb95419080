"""After loading: do the experts in memory compute what the checkpoint's experts compute?

Invariant: the expected output comes from the file's tensors by the formula, in float64; the measured one goes through
the layer's own exchange and kernel, with the routing forced to one expert at a time. It sees what the self-test cannot:
projections swapped, cut, transposed or put into another expert's place while loading.
T rows, D hidden, E routed experts, F expert width, K routed top-k.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from truegate.errors import TruegateError
from truegate.law.families import names_of
from truegate.law.formats import Checkpoint
from truegate.law.keys import read_config
from truegate.law.names import MoeNames, PerExpert, choose
from truegate.law.order import Tables, decode, realise
from truegate.law.spec import WeightAt
from truegate.moe.experts.torch import activate
from truegate.moe.layer import MoELayer

TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}  # of the largest value of the output


class WrongWeights(TruegateError):
    """What was loaded is not what the file holds."""


@torch.inference_mode()
def check_loaded(model: Any, folder: Path, *, per_layer: int = 2, seed: int = 0) -> str:
    """Compare `per_layer` sampled experts of every MoE layer, its gate and its shared expert with the file."""
    checkpoint = Checkpoint(folder)
    available = set(checkpoint)
    names = [choose(one, available) for one in names_of(read_config(folder))[: model.num_layers] if one is not None]
    rng = np.random.default_rng(seed)
    worst = 0.0
    for layer, own in zip(model.moe_layers, names, strict=True):
        x_1D = torch.from_numpy(rng.normal(size=(1, layer.spec.hidden))).to(layer.w_down.dtype).to(layer.w_down.device)
        worst = max(worst, _check_gate(layer, own, checkpoint, x_1D))
        for expert in rng.choice(layer.spec.num_experts, min(per_layer, layer.spec.num_experts), replace=False):
            worst = max(worst, _check_expert(layer, own, checkpoint, x_1D, int(expert)))
    return f"{per_layer} experts, gate and shared expert of {len(names)} layers are the file's (worst {worst:.0e})"


def _check_gate(layer: MoELayer, names: MoeNames, checkpoint: Checkpoint, x_1D: torch.Tensor) -> float:
    right_1E = x_1D.double().cpu() @ _read(checkpoint, names.router).T
    if names.gate_bias is not None:
        right_1E = right_1E + _read(checkpoint, names.gate_bias)
    return _compare(layer, layer.gate(x_1D), right_1E, f"layer {names.layer}: the gate")


def _check_expert(layer: MoELayer, names: MoeNames, checkpoint: Checkpoint, x_1D: torch.Tensor, expert: int) -> float:
    plan, spec = layer.plan, layer.spec
    ids_1K = torch.tensor([[(expert + k) % spec.num_experts for k in range(spec.top_k)]], device=x_1D.device)
    weights_1K = torch.zeros(1, spec.top_k, device=x_1D.device)
    weights_1K[0, 0] = 1
    gate_1 = layer.gate_of_shared(x_1D)
    tables = Tables(layer.replicas_EX, layer.count_E) if plan.placement.has_replicas else None
    routed = realise(plan, ids_1K, weights_1K, shared_gate_T=gate_1, tables=tables, xp=torch)
    sent = layer.dispatch.send(x_1D, routed)
    measured_1D = plan.finish(layer.dispatch.combine(layer.experts(sent), sent), layer.shared(x_1D, gate_1))
    c = float(decode(plan, _on_host(routed))[0, expert])
    x = x_1D[0].double().cpu()
    right_D = _expert(layer, names, checkpoint, c * x if spec.weight_at is WeightAt.INPUT else x, expert)
    right_D = right_D if spec.weight_at is WeightAt.INPUT else c * right_D
    if names.shared is not None:
        gate, up, down = (_read(checkpoint, getattr(names.shared, part)) for part in ("gate", "up", "down"))
        shared_D = down @ activate(spec, gate @ x, up @ x)
        right_D = right_D + shared_D * (1.0 if gate_1 is None else float(gate_1[0]))
    return _compare(layer, measured_1D, right_D[None], f"layer {names.layer}, expert {expert} (with the shared expert)")


def _expert(layer: MoELayer, names: MoeNames, checkpoint: Checkpoint, x_D: torch.Tensor, expert: int) -> torch.Tensor:
    """F_e(x) = W_down act(W_gate x, W_up x) from the file."""
    if isinstance(names.experts, PerExpert):
        parts = (getattr(names.experts, part).format(expert=expert) for part in ("gate", "up", "down"))
        gate, up, down = (_read(checkpoint, name) for name in parts)
    else:
        gate, up = _read(checkpoint, names.experts.gate_up, expert).chunk(2)
        down = _read(checkpoint, names.experts.down, expert)
    return down @ activate(layer.spec, gate @ x_D, up @ x_D)


def _read(checkpoint: Checkpoint, name: str, index: int | None = None) -> torch.Tensor:
    array = checkpoint.read(name)
    return torch.from_numpy((array if index is None else array[index]).astype(np.float64))


def _on_host(routed: Any) -> Any:
    gate_T = routed.shared_gate_T
    gate_T = gate_T.cpu() if gate_T is not None else None
    return replace(routed, ids_TJ=routed.ids_TJ.cpu(), weights_TJ=routed.weights_TJ.cpu(), shared_gate_T=gate_T)


def _compare(layer: MoELayer, measured: torch.Tensor, right: torch.Tensor, what: str) -> float:
    error = float((measured.double().cpu() - right).abs().max() / right.abs().max().clamp(min=1e-30))
    if not error <= TOLERANCE[layer.w_down.dtype]:
        raise WrongWeights(f"{what} does not compute what the checkpoint's tensors give: {error:.2g} off; not served")
    return error
