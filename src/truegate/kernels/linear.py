"""One row times a matrix, alone or with the residual sum and the norm before it: at batch 1 launches cost most.

    y_O = W_OK r + b_O        r = x, or v / sqrt(mean v^2 + eps) * norm weight with v = residual + x in x's dtype

Invariant: the matrix is read once, by programs of whole rows; each program norms the row again, which costs less than
a launch. Sums are fp32 inside. Twin: kernels/ref/linear.py. O outputs, K width.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, power_of_2, take_turn

MAX_WIDTH = 16384  # the row is held in registers
TILE_BYTES = 32768  # of the matrix, in one program


@triton.jit
def _row_kernel(
    x, residual, norm_weight, weight, bias, y, total, normed, eps, num_out,
    K: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_K: tl.constexpr, NORM: tl.constexpr, ADD: tl.constexpr,
    KEEP: tl.constexpr, BIASED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    o = tl.program_id(0) * BLOCK_O + tl.arange(0, BLOCK_O)
    k = tl.arange(0, BLOCK_K)
    ok_o, ok_k = o < num_out, k < K
    tile = tl.load(weight + o.to(tl.int64)[:, None] * K + k[None, :], mask=ok_o[:, None] & ok_k[None, :], other=0.0)
    take_turn(EARLY)  # the matrix may come before: nothing ahead writes it
    row = tl.load(x + k, mask=ok_k, other=0.0).to(tl.float32)
    if NORM:
        if ADD:
            row += tl.load(residual + k, mask=ok_k, other=0.0).to(tl.float32)
        rounded = row.to(total.dtype.element_ty)
        row = rounded.to(tl.float32)
        row *= tl.rsqrt(tl.sum(row * row, 0) / K + eps)
        row *= tl.load(norm_weight + k, mask=ok_k, other=0.0).to(tl.float32)
        h = row.to(total.dtype.element_ty)
        if tl.program_id(0) == 0:
            tl.store(total + k, rounded, mask=ok_k)
            if KEEP:
                tl.store(normed + k, h, mask=ok_k)
        row = h.to(tl.float32)
    out = tl.sum(tile.to(tl.float32) * row[None, :], 1)
    if BIASED:
        out += tl.load(bias + o, mask=ok_o, other=0.0).to(tl.float32)
    tl.store(y + o, out.to(y.dtype.element_ty), mask=ok_o)


class Normed(NamedTuple):
    """What `norm_row` gives: the product, residual + x, and its norm where it was asked for."""

    y_1O: torch.Tensor
    residual_1K: torch.Tensor
    h_1K: torch.Tensor | None


def row(x_1K: torch.Tensor, weight_OK: torch.Tensor, bias_O: torch.Tensor | None = None) -> torch.Tensor:
    """y_1O = x W^T + b in x's dtype; both contiguous, K at most MAX_WIDTH."""
    y_1O = torch.empty((1, weight_OK.shape[0]), dtype=x_1K.dtype, device=x_1K.device)
    _launch(x_1K, None, None, weight_OK, bias_O, Normed(y_1O, x_1K, None))
    return y_1O


def norm_row(
    x_1K: torch.Tensor | None,
    residual_1K: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    weight_OK: torch.Tensor,
    bias_O: torch.Tensor | None = None,
    *,
    keep: bool = False,
) -> Normed:
    """The product with norm(residual + x), x None for nothing; norm = weight_K and eps; residual_1K is not written.

    y has the weight's dtype (router logits float32); `keep` also gives the normed row.
    """
    y_1O = torch.empty((1, weight_OK.shape[0]), dtype=weight_OK.dtype, device=weight_OK.device)
    found = Normed(y_1O, torch.empty_like(residual_1K), torch.empty_like(residual_1K) if keep else None)
    _launch(x_1K, residual_1K, norm, weight_OK, bias_O, found)
    return found


def _launch(x, residual, norm, weight_OK, bias, found: Normed) -> None:
    num_out, width = weight_OK.shape
    assert weight_OK.is_contiguous(), "rows of the matrix must be contiguous"
    block_k = power_of_2(width)
    most = max(1, TILE_BYTES // (block_k * weight_OK.element_size()))
    block_o = min(most, power_of_2(max(1, num_out // 256 + 1)) // 2 or 1)  # enough programs come first
    first = residual if x is None else x
    norm_weight, eps = (first, 0.0) if norm is None else norm
    _row_kernel[(cdiv(num_out, block_o),)](
        first, first if residual is None else residual, norm_weight, weight_OK, first if bias is None else bias,
        found.y_1O, found.residual_1K, first if found.h_1K is None else found.h_1K, eps, num_out, K=width,
        BLOCK_O=block_o, BLOCK_K=block_k, NORM=norm is not None, ADD=x is not None, KEEP=found.h_1K is not None,
        BIASED=bias is not None, num_warps=4 if block_k <= 8192 else 8, **early(weight_OK.device),
    )  # fmt: skip
