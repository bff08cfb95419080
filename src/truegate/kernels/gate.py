"""Router logits: a narrow product of 16-bit rows with float32 weights, in one launch, as exact as float32.

    logits[t, e] = sum_d x[t, d] W[e, d] + b[e]

Invariant: products are exact or float32's own, sums are float32; no atomics. With the matrix units a weight is the sum
of three bf16 ones (for other inputs, of their 32-bit format). Twin: kernels/ref/gate.py.
T rows, E outputs, D width.
"""

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, take_turn

FEW = 256  # rows up to which sums run without the matrix units


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


@triton.jit
def _few_kernel(
    x, weight, bias, y, T, x_row,
    E: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK rows by BLOCK outputs without the matrix units: for few rows their chain of products is too long."""
    t = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok_t, ok_e = t < T, e < E
    take_turn(EARLY)
    acc = tl.zeros([BLOCK, BLOCK, BLOCK_D], tl.float32)
    for start in range(0, D, 4 * BLOCK_D):
        for part in tl.static_range(4):  # four tiles on their way at once
            d = start + part * BLOCK_D + tl.arange(0, BLOCK_D)
            rows = tl.load(x + t[:, None] * x_row + d[None, :], mask=ok_t[:, None] & (d < D)[None, :], other=0.0)
            tile = tl.load(weight + e[:, None] * D + d[None, :], mask=ok_e[:, None] & (d < D)[None, :], other=0.0)
            acc += rows.to(tl.float32)[:, None, :] * tile[None, :, :]
    out = tl.sum(acc, 2)
    if BIASED:
        out += tl.load(bias + e, mask=ok_e, other=0.0)[None, :]
    tl.store(y + t[:, None] * E + e[None, :], out, mask=ok_t[:, None] & ok_e[None, :])


def gate(x_TD: torch.Tensor, weight_ED: torch.Tensor, bias_E: torch.Tensor | None = None) -> torch.Tensor:
    """y_TE float32; x_TD any float dtype with unit last stride, weight_ED and bias_E float32."""
    num_rows, width = x_TD.shape
    num_out = weight_ED.shape[0]
    y_TE = torch.empty((num_rows, num_out), dtype=torch.float32, device=x_TD.device)
    shared = x_TD, weight_ED, x_TD if bias_E is None else bias_E, y_TE, num_rows, x_TD.stride(0)
    if num_rows <= FEW:
        block, block_d = (4, 512) if num_rows <= 48 else (8, 128)
        _few_kernel[(cdiv(num_rows, block), cdiv(num_out, block))](
            *shared, E=num_out, D=width, BIASED=bias_E is not None, BLOCK=block, BLOCK_D=block_d, num_warps=4,
            **early(x_TD.device),
        )  # fmt: skip
        return y_TE
    block = 64
    _gate_kernel[(cdiv(num_rows, block), cdiv(num_out, block))](
        *shared, E=num_out, D=width, BIASED=bias_E is not None, BLOCK_T=block, BLOCK_E=block, BLOCK_D=64,
        SPLIT=x_TD.dtype == torch.bfloat16, PRECISION="ieee" if torch.version.hip else "tf32x3", num_warps=4,
        num_stages=3, **early(x_TD.device),
    )  # fmt: skip
    return y_TE
