"""The sum over each row's slots.

Invariant: a slot whose id is outside 0..P-1 is neither read nor summed; sums run in slot order in fp32. Twin:
kernels/ref/combine.py. T rows, J slots a row, N = T * J assignments n = t * J + j, P local experts, D hidden.
"""

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, power_of_2, take_turn


@triton.jit
def _combine(out, ids, y, y_row, J: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    take_turn(EARLY)
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(J):
        expert = tl.load(ids + t * J + j)
        ok = (expert >= 0) & (expert < P) & (column < D)
        total += tl.load(out + (t * J + j) * D + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + t * y_row + column, total.to(y.dtype.element_ty), mask=column < D)


def columns(num_rows: int) -> int:
    """Columns that a program adds up, at most."""
    return 256 if num_rows < 256 else 1024


def combine(out_ND: torch.Tensor, ids_TJ: torch.Tensor, num_slots: int, y_TD: torch.Tensor) -> torch.Tensor:
    """y[t] = sum_j out[t * J + j] over valid slots, in slot order, fp32; y_TD in out's dtype, returned.

    out_ND contiguous; y_TD may be some columns of wider rows.
    """
    (num_rows, width), hidden = ids_TJ.shape, out_ND.shape[1]
    block = min(columns(num_rows), power_of_2(hidden))
    _combine[(num_rows, cdiv(hidden, block))](
        out_ND, ids_TJ, y_TD, y_TD.stride(0), J=width, P=num_slots, D=hidden, BLOCK=block, **early(out_ND.device),
        num_warps=2 if block <= 256 else 4,
    )  # fmt: skip
    return y_TD
