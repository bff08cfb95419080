"""Router logits: a narrow product of 16-bit rows with float32 weights, in one launch, as exact as float32.

    logits[t, e] = sum_d x[t, d] W[e, d] + b[e]

Invariant: a float32 weight is the sum of three bf16 ones (of other inputs' products: of its 32-bit format's), so sums
differ from float32's by its own rounding; no atomics. Twin: kernels/ref/gate.py.
T rows, E outputs, D width.
"""

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import early, take_turn


@triton.jit
def _gate_kernel(
    x, weight, bias, y, T, x_row,
    E: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    ok_t, ok_e = t < T, e < E
    acc = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    rest = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    last = tl.zeros([BLOCK_T, BLOCK_E], tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        ok_d = d < D
        rows = tl.load(x + t.to(tl.int64)[:, None] * x_row + d[None, :], mask=ok_t[:, None] & ok_d[None, :], other=0.0)
        tile = tl.load(weight + e[:, None] * D + d[None, :], mask=ok_e[:, None] & ok_d[None, :], other=0.0)
        if SPLIT:  # three independent sums: one chain of products is as slow as its latency
            tile = tl.trans(tile)
            first = tile.to(tl.bfloat16)
            tile -= first.to(tl.float32)
            second = tile.to(tl.bfloat16)
            third = (tile - second.to(tl.float32)).to(tl.bfloat16)
            acc = tl.dot(rows, first, acc)
            rest = tl.dot(rows, second, rest)
            last = tl.dot(rows, third, last)
        else:
            acc = tl.dot(rows.to(tl.float32), tl.trans(tile), acc, input_precision=PRECISION)
    acc += rest + last
    if BIASED:
        acc += tl.load(bias + e, mask=ok_e, other=0.0)[None, :]
    tl.store(y + t.to(tl.int64)[:, None] * E + e[None, :], acc, mask=ok_t[:, None] & ok_e[None, :])


def gate(x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """y_TE float32; x_TD any float dtype with unit last stride, weight_ED and bias_E float32."""
    num_rows, width = x_TD.shape
    num_out = weight_ED.shape[0]
    y_TE = torch.empty((num_rows, num_out), dtype=torch.float32, device=x_TD.device)
    block = 16 if num_rows <= 512 else 64
    _gate_kernel[(triton.cdiv(num_rows, block), triton.cdiv(num_out, block))](
        x_TD, weight_ED, x_TD if bias_E is None else bias_E, y_TE, num_rows, x_TD.stride(0), E=num_out, D=width,
        BIASED=bias_E is not None, BLOCK_T=block, BLOCK_E=block, BLOCK_D=128 if block == 16 else 64,
        SPLIT=x_TD.dtype == torch.bfloat16, PRECISION="ieee" if torch.version.hip else "tf32x3", num_warps=4,
        num_stages=3, **early(x_TD.device),
    )  # fmt: skip
    return y_TE
