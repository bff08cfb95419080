"""Twins of kernels/experts.py: the same order, products and sums, expert by expert on torch in float64."""

import torch

from truegate.law.spec import Activation


def permute(ids_TJ: torch.Tensor, num_slots: int, block_m: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """(numbers of the valid assignments, stably by expert; (expert, first place) of every tile of block_m rows)."""
    order, tiles, place = [], [], 0
    for e in range(num_slots):
        numbers = (ids_TJ.flatten() == e).nonzero()[:, 0]
        order.append(numbers.to(torch.int32))
        tiles += [(e, first) for first in range(place, place + len(numbers), block_m)]
        place += len(numbers)
    return torch.cat(order), tiles


def activate(activation: Activation, clamp: float | None, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activations, from their formulas."""
    if activation is Activation.SWIGLU_CLAMP:
        gate, up = gate.clip(max=clamp), up.clip(-clamp, clamp)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation is Activation.SILU:
        return gate * torch.sigmoid(gate) * up
    inner = gate / 2**0.5
    if activation is Activation.GELU:
        return 0.5 * gate * (1 + torch.erf(inner)) * up
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up


def gate_up(x_TD, w_PHD, bias_PH, weights_TJ, ids_TJ, activation, clamp, *, at_input: bool) -> torch.Tensor:
    """h[n] = act of the two halves of (weights[n] * x[t], or x[t]) W[ids[n]]^T + bias[ids[n]], fp64 [N, F]; else 0."""
    num, width = ids_TJ.numel(), ids_TJ.shape[1]
    h_NF = torch.zeros((num, w_PHD.shape[1] // 2), dtype=torch.float64, device=x_TD.device)
    for e in range(len(w_PHD)):
        numbers = (ids_TJ.flatten() == e).nonzero()[:, 0]
        x = x_TD[numbers // width].double()
        if at_input:
            x = x * weights_TJ.flatten()[numbers].double()[:, None]
        both = x @ w_PHD[e].double().T + (0 if bias_PH is None else bias_PH[e].double())
        h_NF[numbers] = activate(activation, clamp, *both.chunk(2, -1))
    return h_NF


def down(h_NF, w_PDF, bias_PD, weights_TJ, ids_TJ, *, at_output: bool) -> torch.Tensor:
    """out[n] = weights[n] * (h[n] W[ids[n]]^T + bias[ids[n]]), fp64 [N, D]; 0 where the slot is invalid."""
    out_ND = torch.zeros((ids_TJ.numel(), w_PDF.shape[1]), dtype=torch.float64, device=h_NF.device)
    for e in range(len(w_PDF)):
        numbers = (ids_TJ.flatten() == e).nonzero()[:, 0]
        out = h_NF[numbers].double() @ w_PDF[e].double().T + (0 if bias_PD is None else bias_PD[e].double())
        out_ND[numbers] = out * (weights_TJ.flatten()[numbers].double()[:, None] if at_output else 1.0)
    return out_ND


def combine(out_ND: torch.Tensor, ids_TJ: torch.Tensor, num_slots: int) -> torch.Tensor:
    """y[t] = sum_j out[t * J + j] over valid slots."""
    ok_TJ = (ids_TJ >= 0) & (ids_TJ < num_slots)
    out_TJD = out_ND.double().reshape(*ids_TJ.shape, -1)
    return torch.where(ok_TJ[..., None], out_TJD, 0.0).sum(1)
