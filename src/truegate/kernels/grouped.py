"""The grouped product: each expert's rows times its own matrix, with activation and weights inside.

    h[n] = act(x[t] W_gate^T, x[t] W_up^T);  out[n] = weights[n] * (h[n] W_down^T)

Invariant: a slot whose id is outside 0..P-1 is never read or computed; grids depend on shapes only. Twin:
kernels/ref/grouped.py. T rows, J slots a row, N = T * J assignments n = t * J + j, P local experts, D hidden, F expert
width, Q tiles of BM rows; a product has C columns and depth D; ROWS rows of W from one expert to the next.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from truegate.kernels.activation import activate
from truegate.kernels.launch import cdiv, early, power_of_2, take_turn
from truegate.kernels.permute import Order
from truegate.kernels.sizes import Sizes
from truegate.kernels.tuning import Product

GLUON_IS_KNOWN = triton.__version__.startswith(("3.6.", "3.7."))  # experimental: with what it was tested on alone


@triton.jit
def _inline_rows(ids, tile, N, P: tl.constexpr, BM: tl.constexpr, NP: tl.constexpr):
    """A tile's expert and rows without `permute`: tile n is real where assignment n is every BM-th of its expert.

    Returns (expert or -1, n of each row or -1). For few assignments: every program looks at all of them.
    """
    n = tl.arange(0, NP)
    found = tl.load(ids + n, mask=n < N, other=-1)
    expert = tl.load(ids + tile)
    same = found == expert
    before = tl.sum((same & (n < tile)).to(tl.int32), 0)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    row = before + tl.arange(0, BM)
    n_M = tl.max(tl.where(same[None, :] & (rank[None, :] == row[:, None]), n[None, :], -1), 1)
    real = (expert >= 0) & (expert < P) & (before % BM == 0)
    return tl.where(real, expert, -1), n_M


@triton.jit
def _columns(w, w_box, base, first, k, column, C: tl.constexpr, D: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
             TMA: tl.constexpr):  # fmt: skip
    """W[base + column, k..k+BK) as [BK, BN], zero past D; the copy engine counts from `first`, the block's own row."""
    if TMA:
        return w_box.load([first, k]).T
    else:
        kk = k + tl.arange(0, BK)
        at = w + base * D + column[None, :] * D + kk[:, None]
        if C % BN == 0 and D % BK == 0:
            return tl.load(at)
        else:
            return tl.load(at, mask=(column < C)[None, :] & (kk < D)[:, None], other=0.0)


@triton.jit
def _tile(
    tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
    J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, CLAMP: tl.constexpr, WEIGH: tl.constexpr, INLINE: tl.constexpr, NP: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile. Gated: gate and up columns of W [P, ROWS, D] at once, then the activation; else C of them."""
    if INLINE:
        expert, n = _inline_rows(ids, tile, N, P, BM, NP)
        row_ok = n >= 0
        place = tl.where(row_ok, n, 0)
        n = place
        start = 0
    else:
        expert = tl.load(tile_expert + tile)
        start = tl.load(tile_start + tile)
        place = start + tl.arange(0, BM)
        row_ok = tl.arange(0, BM) < tl.load(tile_rows + tile)
        n = tl.load(order + place, mask=row_ok, other=0)
    if expert >= 0:
        # the first product reads x by row and writes h by place; the second reads h by place and writes by assignment
        if FIRST:
            a_row = (n // J).to(tl.int64)
            out_row = place.to(tl.int64)
        else:
            a_row = place.to(tl.int64)
            out_row = n.to(tl.int64)
        column = block * BN + tl.arange(0, BN)
        column_ok = column < C
        base = expert.to(tl.int64) * ROWS
        first = expert * ROWS + block * BN
        scale = tl.zeros([BM], tl.float32)
        if WEIGH != "no":
            scale = tl.load(weights + n, mask=row_ok, other=0.0).to(tl.float32)
        acc = tl.zeros([BM, BN], tl.float32)
        acc_up = tl.zeros([BM, BN], tl.float32)
        for k in tl.range(0, D, BK, num_stages=STAGES):
            if TMA_A:
                x = a_box.load([start, k])
            else:
                kk = k + tl.arange(0, BK)
                ok = row_ok[:, None]
                if D % BK != 0:
                    ok = ok & (kk < D)[None, :]
                x = tl.load(a + a_row[:, None] * D + kk[None, :], mask=ok, other=0.0)
            if WEIGH == "input":
                x = (x * scale.to(x.dtype)[:, None]).to(x.dtype)
            b = _columns(w, w_box, base, first, k, column, C, D, BN, BK, TMA_B)
            acc = tl.dot(x, b, acc, input_precision=PRECISION)
            if GATED:
                up = _columns(w, w_box, base + C, first + C, k, column, C, D, BN, BK, TMA_B)
                acc_up = tl.dot(x, up, acc_up, input_precision=PRECISION)
        if bias is not None:
            acc += tl.load(bias + expert * ROWS + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
            if GATED:
                more = tl.load(bias + expert * ROWS + C + column, mask=column_ok, other=0.0)
                acc_up += more.to(tl.float32)[None, :]
        if GATED:
            acc = activate(acc, acc_up, ACT, CLAMP)
        if WEIGH == "output":
            acc *= scale[:, None]
        tl.store(
            out + out_row[:, None] * C + column[None, :], acc.to(out.dtype.element_ty),
            mask=row_ok[:, None] & column_ok[None, :],
        )  # fmt: skip


@triton.jit
def _tile_of_its_height(
    i, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
    J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, CLAMP: tl.constexpr, WEIGH: tl.constexpr, INLINE: tl.constexpr, NP: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, PRECISION: tl.constexpr, HALVE: tl.constexpr,
):  # fmt: skip
    """The i-th tile, blocks of columns side by side; an expert's last one is half as high where that will do."""
    blocks: tl.constexpr = (C + BN - 1) // BN
    tile = i // blocks
    block = i % blocks
    if HALVE:
        if tl.load(tile_rows + tile) > BM // 2:
            _tile(tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows,
                  N, J, P, C, D, ROWS, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A,
                  TMA_B, PRECISION)  # fmt: skip
        else:
            _tile(tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows,
                  N, J, P, C, D, ROWS, BM // 2, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, False,
                  TMA_B, PRECISION)  # fmt: skip
    else:
        _tile(tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
              J, P, C, D, ROWS, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B,
              PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["N", "tiles"])
def _grouped(
    a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N, tiles,
    J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BM: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr,
    ACT: tl.constexpr, CLAMP: tl.constexpr, WEIGH: tl.constexpr, INLINE: tl.constexpr, NP: tl.constexpr,
    TMA_A: tl.constexpr, TMA_B: tl.constexpr, PRECISION: tl.constexpr, HALVE: tl.constexpr, PERSISTENT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    if PERSISTENT:
        for i in range(tl.program_id(0), tiles * ((C + BN - 1) // BN), tl.num_programs(0)):
            _tile_of_its_height(
                i, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N, J, P, C,
                D, ROWS, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B, PRECISION,
                HALVE,
            )  # fmt: skip
    else:
        _tile_of_its_height(
            tl.program_id(0), a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
            J, P, C, D, ROWS, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B, PRECISION,
            HALVE,
        )  # fmt: skip


def grouped_gemm(
    a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, weights_TJ: torch.Tensor, ids_TJ: torch.Tensor,
    order: Order | None, sizes: Sizes, block_m: int, tiling: Product, *, first: bool, gated: bool,
) -> torch.Tensor:  # fmt: skip
    """first: x [T, D] and W [P, 2F, D] -> h [N, F], or [N, 2F] not gated; else h [N, F] and W [P, D, F] -> out [N, D].

    order None: every program finds its own rows, for few assignments. Rows of h stand in expert order where there is
    one, else at n; out always at n. Rows of invalid slots are left unwritten. a's dtype in and out, fp32 accumulators.
    W and bias may be some columns' rows of every expert's matrix, matrix[:, some]: then only those columns come out.
    """
    num, width = ids_TJ.numel(), ids_TJ.shape[1]
    depth = a.shape[1]
    C = w.shape[1] // 2 if gated else w.shape[1]
    out = torch.empty((num, C), dtype=a.dtype, device=a.device)
    tiles = num if order is None else order.tile_expert_Q.shape[0]
    tma = tiling.tma and _can_describe(w, depth)
    tma_a = tma and not first and order is not None
    weigh = sizes.weigh(first=first)
    apart, last = rows_apart(w)
    if tiling.split and GLUON_IS_KNOWN and order is not None and bias is None and weigh != "input":
        from truegate.kernels import grouped_hopper as hopper  # NVIDIA's alone: not before it is asked for

        if hopper.usable(a, w, sizes, block_m, gated=gated):
            hopper.grouped(a, w, (apart, last), weights_TJ, order, out, width, _processors(a.device), first=first,
                           gated=gated, weigh=weigh != "no", start=early(a.device))  # fmt: skip
            return out
    total = tiles * cdiv(C, tiling.block_n)
    programs = min(total, tiling.persistent * _processors(a.device)) if tiling.persistent else total
    _grouped[(programs,)](
        a, TensorDescriptor.from_tensor(a, [block_m, tiling.block_k]) if tma_a else None,
        w, TensorDescriptor(w, [last, depth], [depth, 1], [tiling.block_n, tiling.block_k]) if tma else None,
        bias, weights_TJ, out, ids_TJ if order is None else None, *(order or (None,) * 4)[:4], num, tiles,
        J=width, P=sizes.num_slots, C=C, D=depth, ROWS=apart, BM=block_m, BN=tiling.block_n, BK=tiling.block_k,
        STAGES=tiling.stages, FIRST=first, GATED=gated, ACT=sizes.activation.value, CLAMP=sizes.clamp or 0.0,
        WEIGH=weigh, INLINE=order is None, NP=padded(num) if order is None else 1, TMA_A=tma_a,
        TMA_B=tma, PRECISION="ieee" if a.dtype is torch.float32 else "tf32",
        HALVE=tiling.halve and order is not None and block_m >= 32, PERSISTENT=tiling.persistent > 0,
        **early(a.device), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def rows_apart(w: torch.Tensor) -> tuple[int, int]:
    """W [P, R, D], all or some rows of every expert's matrix: rows from one expert to the next, and to the last row."""
    apart = w.stride(0) // w.shape[2]
    return apart, (w.shape[0] - 1) * apart + w.shape[1]


def padded(num: int) -> int:
    """Ids that an unordered tile looks at, at least `num`: few sizes, so that few kernels are compiled."""
    return 32 if num <= 32 else max(128, power_of_2(num))


def _can_describe(w: torch.Tensor, depth: int) -> bool:
    """Whether the copy engine can read rows of `depth` values: its strides are multiples of 16 bytes."""
    return depth * w.element_size() % 16 == 0


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
