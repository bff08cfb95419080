"""Router logits: a narrow product of 16-bit rows with float32 weights, as exact as float32.

    logits[t, e] = sum_d x[t, d] W[e, d] + b[e]

Invariant: products are exact or float32's own; sums are float32, in an order that shapes alone fix; no atomics. With
the matrix units a weight is the sum of three bf16 ones, its 24 bits cut in three (for other inputs, of their 32-bit
format); the width is cut into parts, so that the device is full and no chain of sums too long, summed in order.
Twin: kernels/ref/gate.py. T rows, E outputs, D width, S parts.
"""

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, take_turn

FEW = 256  # rows up to which sums run without the matrix units; of bf16 ones only small products do
BLOCK_D = 64
LONGEST = 2048  # columns in one chain: the matrix units round towards zero, 2e-6 after 2,048, 8e-6 after 7,168
PROGRAMS = 256  # that the width is cut for


@triton.jit
def _cut(tile):
    """The three bf16 numbers whose sum a float32 is; by bits, as conversions run at a quarter of the rate."""
    first = tile.to(tl.int32, bitcast=True)
    tile -= (first & -65536).to(tl.float32, bitcast=True)
    second = tile.to(tl.int32, bitcast=True)
    tile -= (second & -65536).to(tl.float32, bitcast=True)
    return _top(first), _top(second), _top(tile.to(tl.int32, bitcast=True))


@triton.jit
def _top(bits):
    return (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit(do_not_specialize=["T", "part_steps"])
def _gate_kernel(
    x, weight, bias, y, T, x_row, part_steps,
    E: tl.constexpr, D: tl.constexpr, BIASED: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_E: tl.constexpr,
    BLOCK_D: tl.constexpr, SPLIT: tl.constexpr, PRECISION: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The transposed product, W x^T: weights are cut in registers and stay there, only rows pass shared memory."""
    take_turn(EARLY)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    d = tl.arange(0, BLOCK_D)
    first_step = tl.program_id(2) * part_steps
    # what is outside reads the last row there is and is not stored: cheaper than a mask
    rows_at = x + tl.minimum(t, T - 1).to(tl.int64)[:, None] * x_row + d[None, :]
    tile_at = weight + tl.minimum(e, E - 1)[:, None] * D + d[None, :]
    acc = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    rest = tl.zeros([BLOCK_E, BLOCK_T], tl.float32)
    for step in range(first_step, tl.minimum(first_step + part_steps, (D + BLOCK_D - 1) // BLOCK_D)):
        start = step * BLOCK_D
        if D % BLOCK_D == 0:
            rows, tile = tl.load(rows_at + start), tl.load(tile_at + start)
        else:
            ok = (d < D - start)[None, :]
            rows, tile = tl.load(rows_at + start, mask=ok, other=0.0), tl.load(tile_at + start, mask=ok, other=0.0)
        if SPLIT:  # the small ones have their own sum: each step of a large one rounds
            first, second, third = _cut(tile)
            acc = tl.dot(first, tl.trans(rows), acc)
            rest = tl.dot(second, tl.trans(rows), rest)
            rest = tl.dot(third, tl.trans(rows), rest)
        else:
            acc = tl.dot(tile, tl.trans(rows.to(tl.float32)), acc, input_precision=PRECISION)
    acc += rest
    if BIASED:
        acc += tl.load(bias + e, mask=(e < E) & (first_step == 0), other=0.0)[:, None]
    place = (tl.program_id(2) * T + t).to(tl.int64)[None, :] * E + e[:, None]
    tl.store(y + place, acc, mask=(e < E)[:, None] & (t < T)[None, :])


@triton.jit(do_not_specialize=["T", "S"])
def _sum_kernel(parts, y, T, S, E: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """In order; one compiled form for any T and S: E says how the parts are aligned, their number is no constant."""
    take_turn(EARLY)
    AT_ONCE: tl.constexpr = 8 if BLOCK <= 256 else 4  # on their way: what 32 registers hold
    N = T * E
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    ok = n < N
    out = tl.load(parts + n, mask=ok, other=0.0)
    for first in range(1, S, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            s = first + i
            more = tl.load(parts + tl.minimum(s, S - 1) * N + n, mask=ok, other=0.0)
            out = tl.where(s < S, out + more, out)
    tl.store(y + n, out, mask=ok)


@triton.jit(do_not_specialize=["T"])
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
    cut = x_TD.dtype == torch.bfloat16
    y_TE = torch.empty((num_rows, num_out), dtype=torch.float32, device=x_TD.device)
    inputs = x_TD, weight_ED, x_TD if bias_E is None else bias_E
    options = {"E": num_out, "D": width, "BIASED": bias_E is not None, "num_warps": 4, **early(x_TD.device)}
    # 2,048 wide it saves 0.5 us up to 2,048 logits and costs 1 us at 4,096; 7,168 wide it takes twice as long
    if num_rows * num_out <= 2048 and width <= 3072 if cut else num_rows <= FEW:
        block, block_d = (4, 512) if num_rows <= 48 else (8, 128)
        _few_kernel[(cdiv(num_rows, block), cdiv(num_out, block))](
            *inputs, y_TE, num_rows, x_TD.stride(0), BLOCK=block, BLOCK_D=block_d, **options
        )
        return y_TE
    block_t, num_stages, part_steps = _tiling(num_rows, num_out, width, cut)
    parts = cdiv(cdiv(width, BLOCK_D), part_steps)
    parts_STE = y_TE if parts == 1 else y_TE.new_empty((parts, num_rows, num_out))
    _gate_kernel[(cdiv(num_rows, block_t), cdiv(num_out, 64), parts)](
        *inputs, parts_STE, num_rows, x_TD.stride(0), part_steps, BLOCK_T=block_t, BLOCK_E=64, BLOCK_D=BLOCK_D,
        SPLIT=cut, PRECISION="ieee" if torch.version.hip else "tf32x3", num_stages=num_stages, **options,
    )  # fmt: skip
    if parts > 1:
        block = 256 if y_TE.numel() < 1 << 18 else 1024
        _sum_kernel[(cdiv(y_TE.numel(), block),)](
            parts_STE, y_TE, num_rows, parts, E=num_out, BLOCK=block, num_warps=4, **early(x_TD.device)
        )
    return y_TE


def turns(num_out: int, width: int) -> list[int]:
    """Most bf16 rows whose parts are summed by a kernel of its own: above, one part will do, if the width lets it."""
    return [PROGRAMS // 2 // cdiv(num_out, 64) * 128] if width <= LONGEST else []


def _tiling(num_rows: int, num_out: int, width: int, cut: bool) -> tuple[int, int, int]:
    """Rows a program, stages, and steps of BLOCK_D a part: up to PROGRAMS of two steps or more, none too long."""
    block_t = 16 if num_rows <= 16 else 32 if num_rows <= 128 else 64 if num_rows <= 2048 or not cut else 128
    programs, steps = cdiv(num_rows, block_t) * cdiv(num_out, 64), cdiv(width, BLOCK_D)
    parts = max(1, min(32, PROGRAMS // programs, steps // 2), cdiv(width, LONGEST if cut else LONGEST // 4))
    return block_t, 4 if block_t == 64 else 3, cdiv(steps, parts)
