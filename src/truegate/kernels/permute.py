"""Assignments in expert order, cut into tiles that each hold rows of one expert.

Invariant: the order is stable, an id outside 0..P-1 stands nowhere in it, grids depend on shapes only and there are no
atomics. Twin: kernels/ref/permute.py. T rows, J slots a row, N = T * J assignments n = t * J + j, P local experts, Q
tiles of BM rows.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, power_of_2, take_turn

CHUNKS = ((128, 4), (1024, 4), (4096, 8))  # ids a program of `_permute` looks at together, its warps
MANY, PART = 4096, 128  # above so many ids `permute` counts first, so many a program


class Order(NamedTuple):
    """Assignments in expert order, int32: a tile is order_N[start..start + rows), all of one expert; -1: no tile."""

    order_N: torch.Tensor
    tile_expert_Q: torch.Tensor
    tile_start_Q: torch.Tensor
    tile_rows_Q: torch.Tensor
    state_3: torch.Tensor  # behind so many tiles there is none; two zeros for kernels/grouped_hopper.py


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


def way(num: int) -> tuple[int, int] | None:
    """How so many ids are ordered, each way by another form of kernels: one of CHUNKS, or None: counted first."""
    return next(pair for pair in CHUNKS if num <= pair[0]) if num <= MANY else None


def permute(ids_TJ: torch.Tensor, num_slots: int, block_m: int) -> Order:
    """Stable order of the valid assignments by local expert id, cut into tiles of block_m rows; one launch, or three.

    ids_TJ int32 contiguous, invalid where outside 0..num_slots-1. What no tile refers to is left unwritten.
    """
    num = ids_TJ.numel()
    tiles = num // block_m + num_slots  # as many as any choice of ids can need
    sizes = num, tiles, tiles, tiles, 3
    room = [cdiv(size, 4) * 4 for size in sizes]  # each begins at 16 bytes, or kernels have forms for every alignment
    buffer = torch.empty(sum(room), dtype=torch.int32, device=ids_TJ.device)
    order = Order(*(part[:size] for part, size in zip(buffer.split(room), sizes, strict=True)))
    one_launch = way(num)
    if one_launch is None:
        parts = cdiv(num, PART)
        first = cdiv(parts * num_slots, 4) * 4
        counts = torch.empty(first + num_slots, dtype=torch.int32, device=ids_TJ.device)
        totals = counts[first:]
        common = {"P": num_slots, "PP": max(32, power_of_2(num_slots)), "PART": PART}
        start = early(ids_TJ.device)
        _count[(parts,)](ids_TJ, counts, num, parts, **common, **start, num_warps=1)
        _add_up[(num_slots,)](counts, totals, parts, CHUNK=256, **start, num_warps=4)
        _place[(parts,)](
            ids_TJ, counts, totals, *order, num, tiles, parts, BM=block_m, CHUNK=128, **common, **start, num_warps=4
        )  # fmt: skip
        return order
    chunk, warps = one_launch
    _permute[(num_slots,)](
        ids_TJ, *order, num, tiles, P=num_slots, BM=block_m, CHUNK=chunk, **early(ids_TJ.device), num_warps=warps
    )  # fmt: skip
    return order
