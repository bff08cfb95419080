"""Expert kernels: assignments put in expert order, one grouped product each way, a sum over each row's slots.

    h[n] = act(x[t] W_gate^T, x[t] W_up^T);  out[n] = weights[n] * (h[n] W_down^T);  y[t] = sum_j out[t * J + j]

Invariant: a slot whose id is outside 0..P-1 is never read, computed or summed; sums run in slot order in fp32, without
atomics; grids depend on shapes only, so everything is graph-safe. Twin: kernels/ref/experts.py.
T rows, J slots a row, N = T * J assignments n = t * J + j, P local experts, D hidden, F expert width, Q tiles of BM
rows; a product has C columns and depth D.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from truegate.kernels.launch import cdiv, current, early, power_of_2, take_turn
from truegate.kernels.tuning import Config, Product
from truegate.law.spec import Activation

CHUNKS = ((128, 4), (1024, 4), (4096, 8))  # ids a program of `_permute` looks at together, its warps
MANY, PART = 4096, 128  # above so many ids `permute` counts first, so many a program
PLAIN = Product(block_n=32, block_k=32, stages=2, warps=4)


class Order(NamedTuple):
    """Assignments in expert order, int32: a tile is order_N[start..start + rows), all of one expert; -1: no tile."""

    order_N: torch.Tensor
    tile_expert_Q: torch.Tensor
    tile_start_Q: torch.Tensor
    tile_rows_Q: torch.Tensor
    state_3: torch.Tensor  # behind so many tiles there is none; two zeros for kernels/experts_hopper.py


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a launch needs to know of a layer beside its tensors."""

    num_slots: int  # P
    hidden: int  # D
    width: int  # F
    activation: Activation
    clamp: float | None
    at_input: bool  # the weight multiplies x, not the output
    weighs: bool = True  # False: somebody else multiplies by the weights
    sparse: bool = False  # most slots are some other rank's


@triton.jit
def _reset(state, num_tiles):
    tl.store(state, num_tiles)
    tl.store(state + 1, 0)
    tl.store(state + 2, 0)


@triton.jit
def _tiles(tile, last, e, start, count, tile_expert, tile_start, tile_rows, BM: tl.constexpr, CHUNK: tl.constexpr):
    """Expert e's tiles, from `tile` on, and none up to `last`."""
    for first in range(tile, last, CHUNK):
        q = first + tl.arange(0, CHUNK)
        real = (q - tile) * BM < count
        tl.store(tile_expert + q, tl.where(real, e, -1), mask=q < last)
        tl.store(tile_start + q, start + (q - tile) * BM, mask=q < last)
        tl.store(tile_rows + q, tl.minimum(count - (q - tile) * BM, BM), mask=q < last)


@triton.jit(do_not_specialize=["N", "num_tiles"])
def _permute(ids, order, tile_expert, tile_start, tile_rows, state, N, num_tiles, P: tl.constexpr, BM: tl.constexpr,
             CHUNK: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """Program e: where expert e's assignments start (how many ids are lower), then their numbers in order."""
    take_turn(EARLY)
    e = tl.program_id(0)
    lane = tl.arange(0, CHUNK)
    lower = tl.zeros([CHUNK], tl.int32)
    equal = tl.zeros([CHUNK], tl.int32)
    for first in range(0, N, CHUNK):
        found = tl.load(ids + first + lane, mask=first + lane < N, other=-1)
        lower += ((found >= 0) & (found < e)).to(tl.int32)
        equal += (found == e).to(tl.int32)
    start = tl.sum(lower, 0)
    count = tl.sum(equal, 0)
    if count > 0:
        done = start
        for first in range(0, N, CHUNK):
            same = (tl.load(ids + first + lane, mask=first + lane < N, other=-1) == e).to(tl.int32)
            rank = tl.cumsum(same, 0)
            tl.store(order + done + rank - 1, first + lane, mask=same == 1)
            done += tl.sum(same, 0)
    # expert e may use tiles start // BM + e and on: never more than its neighbour leaves, so no prefix sum over experts
    tile = start // BM + e
    last = (start + count) // BM + e + 1
    if e == P - 1:
        last = num_tiles
        _reset(state, last)
    _tiles(tile, last, e, start, count, tile_expert, tile_start, tile_rows, BM, CHUNK)


@triton.jit(do_not_specialize=["N", "parts"])
def _count(ids, counts, N, parts, P: tl.constexpr, PP: tl.constexpr, PART: tl.constexpr, EARLY: tl.constexpr):
    """Program c: how many of the c-th PART ids are each expert's: counts[e, c]."""
    take_turn(EARLY)
    c = tl.program_id(0)
    n = c * PART + tl.arange(0, PART)
    found = tl.load(ids + n, mask=n < N, other=-1)
    e = tl.arange(0, PP)
    many = tl.histogram(found, PP, mask=(found >= 0) & (found < P))
    tl.store(counts + e * parts + c, many, mask=e < P)


@triton.jit(do_not_specialize=["parts"])
def _add_up(counts, totals, parts, CHUNK: tl.constexpr, EARLY: tl.constexpr):
    """Program e: counts[e, c] becomes the number in the parts before c, totals[e] the number in all."""
    take_turn(EARLY)
    e = tl.program_id(0)
    total = 0
    for first in range(0, parts, CHUNK):
        c = first + tl.arange(0, CHUNK)
        many = tl.load(counts + e * parts + c, mask=c < parts, other=0)
        tl.store(counts + e * parts + c, total + tl.cumsum(many, 0) - many, mask=c < parts)
        total += tl.sum(many, 0)
    tl.store(totals + e, total)


@triton.jit(do_not_specialize=["N", "num_tiles", "parts"])
def _place(
    ids, counts, totals, order, tile_expert, tile_start, tile_rows, state, N, num_tiles, parts, P: tl.constexpr,
    PP: tl.constexpr, BM: tl.constexpr, PART: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program c: the places of the c-th PART ids' assignments; and the tiles of every parts-th expert."""
    take_turn(EARLY)
    c = tl.program_id(0)
    n = c * PART + tl.arange(0, PART)
    found = tl.load(ids + n, mask=n < N, other=-1)
    ok = (found >= 0) & (found < P)
    ahead = tl.zeros([32, PART], tl.int32)
    for first in range(0, P, 32):  # all that lower experts have
        e = first + tl.arange(0, 32)
        some = tl.load(totals + e, mask=e < P, other=0)
        ahead += tl.where(e[:, None] < found[None, :], some[:, None], 0)
    for first in range(0, PART, 32):  # the same expert's in this part
        m = c * PART + first + tl.arange(0, 32)
        other = tl.load(ids + m, mask=m < N, other=-1)
        ahead += ((other[:, None] == found[None, :]) & (m[:, None] < n[None, :])).to(tl.int32)
    place = tl.load(counts + found * parts + c, mask=ok, other=0) + tl.sum(ahead, 0)
    tl.store(order + place, n, mask=ok)
    expert = tl.arange(0, PP)
    total = tl.load(totals + expert, mask=expert < P, other=0)
    for e in range(c, P, parts):
        start = tl.sum(tl.where(expert < e, total, 0), 0)
        count = tl.sum(tl.where(expert == e, total, 0), 0)
        tile = tl.sum(tl.where(expert < e, (total + BM - 1) // BM, 0), 0)
        last = tile + (count + BM - 1) // BM
        if e == P - 1:
            _reset(state, last)
            last = num_tiles
        _tiles(tile, last, e, start, count, tile_expert, tile_start, tile_rows, BM, CHUNK)


def num_tiles(num_assignments: int, num_slots: int, block_m: int) -> int:
    """Q: tiles that any choice of ids can need, and how `permute` numbers them."""
    return num_assignments // block_m + num_slots


def permute(ids_TJ: torch.Tensor, num_slots: int, block_m: int) -> Order:
    """Stable order of the valid assignments by local expert id, cut into tiles of block_m rows; one launch, or three.

    ids_TJ int32 contiguous, invalid where outside 0..num_slots-1. What no tile refers to is left unwritten.
    """
    num, tiles = ids_TJ.numel(), num_tiles(ids_TJ.numel(), num_slots, block_m)
    buffer = torch.empty(num + 3 * tiles + 3, dtype=torch.int32, device=ids_TJ.device)
    order = Order(*buffer.split([num, tiles, tiles, tiles, 3]))
    if num > MANY:
        parts = cdiv(num, PART)
        counts = torch.empty((parts + 1) * num_slots, dtype=torch.int32, device=ids_TJ.device)
        totals = counts[parts * num_slots :]
        common = {"P": num_slots, "PP": max(32, power_of_2(num_slots)), "PART": PART}
        start = early(ids_TJ.device)
        _count[(parts,)](ids_TJ, counts, num, parts, **common, **start, num_warps=1)
        _add_up[(num_slots,)](counts, totals, parts, CHUNK=min(1024, power_of_2(parts)), **start, num_warps=4)
        _place[(parts,)](
            ids_TJ, counts, totals, *order, num, tiles, parts, BM=block_m, CHUNK=128, **common, **start, num_warps=4
        )  # fmt: skip
        return order
    chunk, warps = next(pair for pair in CHUNKS if num <= pair[0] or pair is CHUNKS[-1])
    _permute[(num_slots,)](
        ids_TJ, *order, num, tiles, P=num_slots, BM=block_m, CHUNK=chunk, **early(ids_TJ.device), num_warps=warps
    )  # fmt: skip
    return order


@triton.jit
def _activate(gate, up, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """The gated activation in fp32."""
    if ACT == "silu":
        return gate * tl.sigmoid(gate) * up
    elif ACT == "gelu":
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476)) * up
    elif ACT == "gelu_tanh":
        inner = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * inner) * up  # (1 + tanh z) / 2 = sigmoid(2 z)
    else:
        gate = tl.minimum(gate, CLAMP)
        up = tl.minimum(tl.maximum(up, -CLAMP), CLAMP)
        return (up + 1.0) * gate * tl.sigmoid(1.702 * gate)


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
    J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    CLAMP: tl.constexpr, WEIGH: tl.constexpr, INLINE: tl.constexpr, NP: tl.constexpr, TMA_A: tl.constexpr,
    TMA_B: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One [BM, BN] tile. Gated: gate and up columns of W [P, 2C, D] at once, then the activation; else W [P, C, D]."""
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
        in_rows = 2 * C if GATED else C
        base = expert.to(tl.int64) * in_rows
        first = expert * in_rows + block * BN
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
            acc += tl.load(bias + expert * in_rows + column, mask=column_ok, other=0.0).to(tl.float32)[None, :]
            if GATED:
                more = tl.load(bias + expert * in_rows + C + column, mask=column_ok, other=0.0)
                acc_up += more.to(tl.float32)[None, :]
        if GATED:
            acc = _activate(acc, acc_up, ACT, CLAMP)
        if WEIGH == "output":
            acc *= scale[:, None]
        tl.store(
            out + out_row[:, None] * C + column[None, :], acc.to(out.dtype.element_ty),
            mask=row_ok[:, None] & column_ok[None, :],
        )  # fmt: skip


@triton.jit
def _tile_of_its_height(
    i, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
    J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    CLAMP: tl.constexpr, WEIGH: tl.constexpr, INLINE: tl.constexpr, NP: tl.constexpr, TMA_A: tl.constexpr,
    TMA_B: tl.constexpr, PRECISION: tl.constexpr, HALVE: tl.constexpr,
):  # fmt: skip
    """The i-th tile, blocks of columns side by side; an expert's last one is half as high where that will do."""
    blocks: tl.constexpr = (C + BN - 1) // BN
    tile = i // blocks
    block = i % blocks
    if HALVE:
        if tl.load(tile_rows + tile) > BM // 2:
            _tile(tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows,
                  N, J, P, C, D, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B,
                  PRECISION)  # fmt: skip
        else:
            _tile(tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows,
                  N, J, P, C, D, BM // 2, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, False, TMA_B,
                  PRECISION)  # fmt: skip
    else:
        _tile(tile, block, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
              J, P, C, D, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B,
              PRECISION)  # fmt: skip


@triton.jit(do_not_specialize=["N", "tiles"])
def _grouped(
    a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N, tiles,
    J: tl.constexpr, P: tl.constexpr, C: tl.constexpr, D: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, FIRST: tl.constexpr, GATED: tl.constexpr, ACT: tl.constexpr,
    CLAMP: tl.constexpr, WEIGH: tl.constexpr, INLINE: tl.constexpr, NP: tl.constexpr, TMA_A: tl.constexpr,
    TMA_B: tl.constexpr, PRECISION: tl.constexpr, HALVE: tl.constexpr, PERSISTENT: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    if PERSISTENT:
        for i in range(tl.program_id(0), tiles * ((C + BN - 1) // BN), tl.num_programs(0)):
            _tile_of_its_height(
                i, a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N, J, P, C,
                D, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B, PRECISION, HALVE,
            )  # fmt: skip
    else:
        _tile_of_its_height(
            tl.program_id(0), a, a_box, w, w_box, bias, weights, out, ids, order, tile_expert, tile_start, tile_rows, N,
            J, P, C, D, BM, BN, BK, STAGES, FIRST, GATED, ACT, CLAMP, WEIGH, INLINE, NP, TMA_A, TMA_B, PRECISION, HALVE,
        )  # fmt: skip


def grouped_gemm(
    a: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, weights_TJ: torch.Tensor, ids_TJ: torch.Tensor,
    order: Order | None, sizes: Sizes, block_m: int, tiling: Product, *, first: bool, gated: bool,
) -> torch.Tensor:  # fmt: skip
    """first: x [T, D] and W [P, 2F, D] -> h [N, F], or [N, 2F] not gated; else h [N, F] and W [P, D, F] -> out [N, D].

    order None: every program finds its own rows, for few assignments. Rows of h stand in expert order where there is
    one, else at n; out always at n. Rows of invalid slots are left unwritten. a's dtype in and out, fp32 accumulators.
    """
    num, width = ids_TJ.numel(), ids_TJ.shape[1]
    depth = a.shape[1]
    C = w.shape[1] // 2 if gated else w.shape[1]
    out = torch.empty((num, C), dtype=a.dtype, device=a.device)
    tiles = num if order is None else order.tile_expert_Q.shape[0]
    tma = tiling.tma and _can_describe(w, depth)
    tma_a = tma and not first and order is not None
    weigh = "no"
    if sizes.weighs and sizes.at_input == first:
        weigh = "input" if first else "output"
    if tiling.split and order is not None and bias is None and weigh != "input":
        from truegate.kernels import experts_hopper as hopper  # NVIDIA's alone: not before it is asked for

        if hopper.usable(a, w, sizes, block_m, gated=gated):
            hopper.grouped(a, w, weights_TJ, order, out, width, _processors(a.device), first=first, gated=gated,
                           weigh=weigh != "no", start=early(a.device))  # fmt: skip
            return out
    total = tiles * cdiv(C, tiling.block_n)
    programs = min(total, tiling.persistent * _processors(a.device)) if tiling.persistent else total
    _grouped[(programs,)](
        a, TensorDescriptor.from_tensor(a, [block_m, tiling.block_k]) if tma_a else None,
        w, TensorDescriptor.from_tensor(w.view(-1, depth), [tiling.block_n, tiling.block_k]) if tma else None,
        bias, weights_TJ, out, ids_TJ if order is None else None, *(order or (None,) * 4)[:4], num, tiles,
        J=width, P=sizes.num_slots, C=C, D=depth, BM=block_m, BN=tiling.block_n, BK=tiling.block_k,
        STAGES=tiling.stages, FIRST=first, GATED=gated, ACT=sizes.activation.value, CLAMP=sizes.clamp or 0.0,
        WEIGH=weigh, INLINE=order is None, NP=_padded(num) if order is None else 1, TMA_A=tma_a,
        TMA_B=tma, PRECISION="ieee" if a.dtype is torch.float32 else "tf32",
        HALVE=tiling.halve and order is not None and block_m >= 32, PERSISTENT=tiling.persistent > 0,
        **early(a.device), num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def _padded(num: int) -> int:
    """Few sizes, so that few kernels are compiled."""
    return 32 if num <= 32 else max(128, power_of_2(num))


def _can_describe(w: torch.Tensor, depth: int) -> bool:
    """Whether the copy engine can read rows of `depth` values: its strides are multiples of 16 bytes."""
    return depth * w.element_size() % 16 == 0


def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def _combine(out, ids, y, J: tl.constexpr, P: tl.constexpr, D: tl.constexpr, BLOCK: tl.constexpr,
             EARLY: tl.constexpr):  # fmt: skip
    take_turn(EARLY)
    t = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(J):
        expert = tl.load(ids + t * J + j)
        ok = (expert >= 0) & (expert < P) & (column < D)
        total += tl.load(out + (t * J + j) * D + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + t * D + column, total.to(y.dtype.element_ty), mask=column < D)


def combine(out_ND: torch.Tensor, ids_TJ: torch.Tensor, num_slots: int) -> torch.Tensor:
    """y[t] = sum_j out[t * J + j] over valid slots, in slot order, fp32; out's dtype."""
    (num_rows, width), hidden = ids_TJ.shape, out_ND.shape[1]
    y_TD = torch.empty((num_rows, hidden), dtype=out_ND.dtype, device=out_ND.device)
    block = 256 if num_rows < 256 else 1024
    block = min(block, power_of_2(hidden))
    _combine[(num_rows, cdiv(hidden, block))](
        out_ND, ids_TJ, y_TD, J=width, P=num_slots, D=hidden, BLOCK=block, **early(out_ND.device),
        num_warps=2 if block <= 256 else 4,
    )  # fmt: skip
    return y_TD


@triton.jit
def _two_rows(gate, up, x, scale, rows, f_ok, k, kk, F: tl.constexpr, D: tl.constexpr, WEIGH: tl.constexpr):
    """Add x[k..] times the gate and up rows' values there."""
    ok = f_ok[:, None] & (k + kk < D)[None, :]
    # x is read as wide as the rows are: the values already stand where they are used, without a barrier
    x_FK = tl.load(x + k + tl.broadcast_to(kk[None, :], ok.shape), mask=ok, other=0.0)
    if WEIGH == "input":
        x_FK *= scale.to(x_FK.dtype)
    x_FK = x_FK.to(tl.float32)
    gate += tl.load(rows + k, mask=ok, other=0.0).to(tl.float32) * x_FK
    up += tl.load(rows + F * D + k, mask=ok, other=0.0).to(tl.float32) * x_FK
    return gate, up


@triton.jit
def _units(
    n, expert, x, w, bias, weights, h, J: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, WEIGH: tl.constexpr,
):  # fmt: skip
    """BF units of assignment n: two dot products a unit."""
    f = tl.program_id(0) * BF + tl.arange(0, BF)
    kk = tl.arange(0, BK)
    rows = w + expert.to(tl.int64) * 2 * F * D + f[:, None] * D + kk[None, :]
    x += n // J * D
    scale = 1.0
    if WEIGH == "input":
        scale = tl.load(weights + n)
    gate = tl.zeros([BF, BK], tl.float32)
    up = tl.zeros([BF, BK], tl.float32)
    if STAGES == 0:  # unrolled: every load can be on its way at once
        for k in tl.static_range(0, D, BK):
            gate, up = _two_rows(gate, up, x, scale, rows, f < F, k, kk, F, D, WEIGH)
    else:
        for k in tl.range(0, D, BK, num_stages=STAGES):
            gate, up = _two_rows(gate, up, x, scale, rows, f < F, k, kk, F, D, WEIGH)
    gate_F, up_F = tl.sum(gate, 1), tl.sum(up, 1)
    if bias is not None:
        gate_F += tl.load(bias + expert * 2 * F + f, mask=f < F, other=0.0).to(tl.float32)
        up_F += tl.load(bias + expert * 2 * F + F + f, mask=f < F, other=0.0).to(tl.float32)
    tl.store(h + n * F + f, _activate(gate_F, up_F, ACT, CLAMP).to(h.dtype.element_ty), mask=f < F)


@triton.jit
def _live(ids, J: tl.constexpr, P: tl.constexpr):
    """Which of a row's slots are valid, padded to a power of two."""
    j = tl.arange(0, triton.next_power_of_2(J))
    expert = tl.load(ids + j, mask=j < J, other=-1)
    return (expert >= 0) & (expert < P)


@triton.jit
def _next(live, j):
    """The valid slot after j; past them all, one that is none."""
    slot = tl.arange(0, live.shape[0])
    return tl.min(tl.where(live & (slot > j), slot, live.shape[0]), 0)


@triton.jit
def _gate_up_rows(
    x, w, bias, weights, ids, h, J: tl.constexpr, P: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BF: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, ACT: tl.constexpr, CLAMP: tl.constexpr, WEIGH: tl.constexpr,
    SPARSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """h[n] on the ordinary cores: memory is what limits one row. SPARSE: one program looks at all slots of a row."""
    take_turn(EARLY)
    if SPARSE:
        j = -1
        live = _live(ids + tl.program_id(1) * J, J, P)
        for _ in range(tl.sum(live.to(tl.int32), 0)):
            j = _next(live, j)
            n = tl.program_id(1) * J + j
            _units(n, tl.load(ids + n), x, w, bias, weights, h, J, F, D, BF, BK, STAGES, ACT, CLAMP, WEIGH)
    else:
        n = tl.program_id(1)
        expert = tl.load(ids + n)
        if (expert >= 0) & (expert < P):
            _units(n, expert, x, w, bias, weights, h, J, F, D, BF, BK, STAGES, ACT, CLAMP, WEIGH)


@triton.jit
def _down_tile(w, expert, live, k, d, F: tl.constexpr, D: tl.constexpr):
    """An expert's down rows d at k; nothing is read where the slot is invalid."""
    ok = (d < D)[:, None] & (live & (k < F))[None, :]
    return tl.load(w + expert.to(tl.int64) * D * F + d[:, None] * F + k[None, :], mask=ok, other=0.0)


@triton.jit
def _add_slot(acc, tile, h, weights, n, live, k, F: tl.constexpr, WEIGH: tl.constexpr):
    """Add assignment n's h[k] times its expert's rows, weighed."""
    ok = tl.broadcast_to((live & (k < F))[None, :], tile.shape)
    h_DK = tl.load(h + n * F + tl.broadcast_to(k[None, :], tile.shape), mask=ok, other=0.0).to(tl.float32)
    if WEIGH == "output":
        h_DK *= tl.load(weights + n, mask=live, other=0.0).to(tl.float32)
    return acc + tile.to(tl.float32) * h_DK


@triton.jit
def _one_slot(acc, h, w, ids, weights, n, k, d, P: tl.constexpr, F: tl.constexpr, D: tl.constexpr,
              WEIGH: tl.constexpr):  # fmt: skip
    expert = tl.load(ids + n)
    live = (expert >= 0) & (expert < P)
    return _add_slot(acc, _down_tile(w, expert, live, k, d, F, D), h, weights, n, live, k, F, WEIGH)


@triton.jit
def _down_rows(
    h, w, bias, weights, ids, y, J: tl.constexpr, P: tl.constexpr, F: tl.constexpr, D: tl.constexpr, BD: tl.constexpr,
    BK: tl.constexpr, STAGES: tl.constexpr, WEIGH: tl.constexpr, SPARSE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BD channels of one row's sum over its slots. SPARSE: slots that are invalid are passed over, not masked."""
    t = tl.program_id(1)
    d = tl.program_id(0) * BD + tl.arange(0, BD)
    kk = tl.arange(0, BK)
    blocks: tl.constexpr = (F + BK - 1) // BK
    acc = tl.zeros([BD, BK], tl.float32)
    if SPARSE:
        # ids and W are older than h: the kernel ahead waited for them before it let this one in
        live = _live(ids + t * J, J, P)
        num_live = tl.sum(live.to(tl.int32), 0)
        j = _next(live, -1)
        expert = tl.load(ids + t * J + j, mask=num_live > 0, other=0)
        tile = _down_tile(w, expert, num_live > 0, kk, d, F, D)
        take_turn(EARLY)
        acc = _add_slot(acc, tile, h, weights, t * J + j, num_live > 0, kk, F, WEIGH)
        if num_live > 0:
            for i in tl.static_range(1, blocks):
                acc = _one_slot(acc, h, w, ids, weights, t * J + j, i * BK + kk, d, P, F, D, WEIGH)
        for _ in range(1, num_live):
            j = _next(live, j)
            for i in tl.static_range(blocks):
                acc = _one_slot(acc, h, w, ids, weights, t * J + j, i * BK + kk, d, P, F, D, WEIGH)
    else:
        take_turn(EARLY)
        if STAGES == 0:
            for i in tl.static_range(0, J * blocks):
                acc = _one_slot(acc, h, w, ids, weights, t * J + i // blocks, i % blocks * BK + kk, d, P, F, D, WEIGH)
        else:
            for i in tl.range(0, J * blocks, num_stages=STAGES):
                acc = _one_slot(acc, h, w, ids, weights, t * J + i // blocks, i % blocks * BK + kk, d, P, F, D, WEIGH)
    total = tl.sum(acc, 1)
    if bias is not None:
        for j in tl.static_range(0, J):
            expert = tl.load(ids + t * J + j)
            live = (expert >= 0) & (expert < P)
            more = tl.load(bias + expert * D + d, mask=live & (d < D), other=0.0).to(tl.float32)
            if WEIGH == "output":
                more *= tl.load(weights + t * J + j, mask=live, other=0.0).to(tl.float32)
            total += more
    tl.store(y + t * D + d, total.to(y.dtype.element_ty), mask=d < D)


def by_rows(x_TD: Any, gate_up_PHD: Any, down_PDF: Any, biases: tuple[Any, Any], ids_TJ: Any, weights_TJ: Any,
            sizes: Sizes, config: Config) -> torch.Tensor:  # fmt: skip
    """y_TD for one row, or very few that share no expert: two launches, each weight read once for each assignment."""
    (num_rows, width), F, D = ids_TJ.shape, sizes.width, sizes.hidden
    h_NF = torch.empty((num_rows * width, F), dtype=x_TD.dtype, device=x_TD.device)
    y_TD = torch.empty_like(x_TD)
    one, two = config.gate_up, config.down
    start = {"SPARSE": sizes.sparse, **early(x_TD.device)}
    _gate_up_rows[(cdiv(F, one.block_n), num_rows if sizes.sparse else num_rows * width)](
        x_TD, gate_up_PHD, biases[0], weights_TJ, ids_TJ, h_NF, J=width, P=sizes.num_slots, F=F, D=D, BF=one.block_n,
        BK=one.block_k, STAGES=one.stages, ACT=sizes.activation.value, CLAMP=sizes.clamp or 0.0,
        WEIGH="input" if sizes.at_input and sizes.weighs else "no", **start, num_warps=one.warps,
    )  # fmt: skip
    _down_rows[(cdiv(D, two.block_n), num_rows)](
        h_NF, down_PDF, biases[1], weights_TJ, ids_TJ, y_TD, J=width, P=sizes.num_slots, F=F, D=D, BD=two.block_n,
        BK=two.block_k, STAGES=two.stages, WEIGH="output" if sizes.weighs and not sizes.at_input else "no",
        **start, num_warps=two.warps,
    )  # fmt: skip
    return y_TD


def experts(
    x_TD: torch.Tensor, gate_up_PHD: torch.Tensor, down_PDF: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None], ids_TJ: torch.Tensor, weights_TJ: torch.Tensor,
    sizes: Sizes, config: Config, *, activate: Callable | None = None,
) -> torch.Tensor:  # fmt: skip
    """y_TD in x's dtype; x_TD and W [P, 2F, D], [P, D, F] contiguous and of one dtype, ids_TJ int32, weights_TJ fp32.

    activate(gate_NF, up_NF) -> h_NF, where given, runs between the products in place of the fused activation.
    """
    if x_TD.shape[0] == 0:
        return torch.empty_like(x_TD)
    with current(x_TD.device):
        if config.path == "rows" and activate is None:
            return by_rows(x_TD, gate_up_PHD, down_PDF, biases, ids_TJ, weights_TJ, sizes, config)
        block_m = max(16, config.block_m)
        order = permute(ids_TJ, sizes.num_slots, block_m) if config.path == "ordered" else None
        common = (weights_TJ, ids_TJ, order, sizes, block_m)
        one, two = (PLAIN, PLAIN) if config.path == "rows" else (config.gate_up, config.down)
        h_NF = grouped_gemm(x_TD, gate_up_PHD, biases[0], *common, one, first=True, gated=activate is None)
        if activate is not None:
            h_NF = activate(*h_NF.chunk(2, -1)).contiguous()
        out_ND = grouped_gemm(h_NF, down_PDF, biases[1], *common, two, first=False, gated=False)
        return combine(out_ND, ids_TJ, sizes.num_slots)
