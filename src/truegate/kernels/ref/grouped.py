"""Twins of kernels/grouped.py: both products, expert by expert, in float64."""

import torch

from truegate.kernels.ref.activation import activate


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
