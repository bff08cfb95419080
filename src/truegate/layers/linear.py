"""Linear maps whose weights are several of the checkpoint's matrices stacked, and the dense gated MLP.

Invariant: y_TO = x_TI W_OI^T + b_O. Stacking is done at load, so one product replaces two or three.
T rows, I input width, O output width, D hidden, F intermediate.
"""

import torch
from torch import nn
from torch.nn import functional as F

from truegate.kernels.matrix import matrix
from truegate.layers.norm import RMSNorm

SLICE = 2048  # rows of a dense MLP that run together: its activations would be the most memory a step needs


class Linear(nn.Module):
    """y = x W^T + b, or residual + x W^T + b; weight [O, I] in the run dtype."""

    def __init__(
        self, num_in: int, num_out: int, *, bias: bool = False, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.weight = nn.Buffer(matrix(num_out, num_in, dtype=dtype, device=device))
        self._weight_IO = self.weight.t()
        # zeros: a stacked matrix may have parts without a bias in the checkpoint
        self.bias = nn.Buffer(torch.zeros(num_out, dtype=dtype, device=device)) if bias else None

    def forward(self, x_TI: torch.Tensor, residual_TO: torch.Tensor | None = None) -> torch.Tensor:
        if residual_TO is None:
            if x_TI.is_cuda and x_TI.shape[0] == 1:
                from truegate.kernels.linear import row

                return row(x_TI, self.weight, self.bias)
            return F.linear(x_TI, self.weight, self.bias)
        y_TO = torch.addmm(residual_TO, x_TI, self._weight_IO)
        return y_TO if self.bias is None else y_TO.add_(self.bias)

    def into(self, x_TI: torch.Tensor, y_TO: torch.Tensor) -> torch.Tensor:
        """The same written to y_TO (or, for one row, returned as a new tensor).

        Made before what it is computed from, an output leaves no hole below itself when that is freed.
        """
        if x_TI.shape[0] == 1:
            return self(x_TI)
        if self.bias is None:
            return torch.mm(x_TI, self.weight.t(), out=y_TO)
        return torch.addmm(self.bias, x_TI, self.weight.t(), out=y_TO)

    def normed(
        self, norm: RMSNorm, x_TI: torch.Tensor | None, residual_TI: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """W norm(residual + x) + b and the sum, through the kernels; x None: nothing to add.

        Of several rows residual is overwritten with the sum and x with the norm.
        """
        if residual_TI.shape[0] == 1 and self.weight.is_contiguous():  # a CPU may lay it out the other way
            from truegate.kernels.linear import norm_row

            found = norm_row(x_TI, residual_TI, (norm.weight, norm.eps), self.weight, self.bias)
            return found.y_1O, found.residual_1K
        h_TI = norm.fused(x_TI, residual_TI)
        return F.linear(h_TI, self.weight, self.bias), residual_TI


class GatedMLP(nn.Module):
    """y_TD = residual_TD + W_down (silu(W_gate x) * W_up x); gate and up are one matrix [2F, D]."""

    def __init__(self, hidden: int, intermediate: int, *, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.intermediate = intermediate
        self.gate_up = Linear(hidden, 2 * intermediate, dtype=dtype, device=device)
        self.down = Linear(intermediate, hidden, dtype=dtype, device=device)

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> torch.Tensor:
        gate_TF, up_TF = self.gate_up(x_TD).split(self.intermediate, dim=-1)
        return self.down(F.silu(gate_TF).mul_(up_TF), residual_TD)

    def values(self, num_rows: int) -> int:
        """Numbers that a step holds here at a time beside what goes in and out."""
        return min(num_rows, SLICE) * 3 * self.intermediate

    def fused(self, norm: RMSNorm, x_TD: torch.Tensor, residual_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Through the kernels: what is to be added to the sum residual + x, and that sum; x may be overwritten."""
        from truegate.kernels.norm import silu_mul

        if residual_TD.shape[0] <= SLICE:
            gate_up, residual_TD = self.gate_up.normed(norm, x_TD, residual_TD)
            return self.down(silu_mul(gate_up)), residual_TD
        h_TD = norm.fused(x_TD, residual_TD)
        for rows in h_TD.split(SLICE):
            rows.copy_(self.down(silu_mul(self.gate_up(rows))))
        return h_TD, residual_TD
