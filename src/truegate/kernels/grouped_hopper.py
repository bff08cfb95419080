"""The product of kernels/grouped.py for NVIDIA sm_90: one warp group copies, two multiply, 64 rows each.

Invariant: computes what `grouped._grouped` computes from the same order. Programs take the next free tile; which one
takes it changes no value. Twin: kernels/ref/grouped.py. J slots a row; a product has C columns and depth D; a tile is
[128, 256], in a gated product 128 columns of gate and the same 128 of up. ROWS rows of W from one expert to the next.
"""

from functools import cache
from typing import Any

import torch
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra import libdevice

from truegate.kernels.permute import Order
from truegate.kernels.sizes import Sizes
from truegate.law.spec import Activation

STAGES_AHEAD = 4  # 192 KiB of shared memory
BM, BN, BK = gl.constexpr(128), gl.constexpr(256), gl.constexpr(64)
SLOTS = gl.constexpr(8)  # tiles that the copies may be ahead, at any depth
BOX = gl.constexpr(gl.NVMMASharedLayout(128, 16, rank=2))


@gluon.jit
def _next_stage(stage, phase, STAGES: gl.constexpr):
    wraps = stage == STAGES - 1
    return gl.where(wraps, 0, stage + 1), gl.where(wraps, phase ^ 1, phase)


@gluon.jit
def _before(stage, STAGES: gl.constexpr):
    # not a variable that the loop carries: Triton 3.6 loses "last = stage", and no stage but one is ever freed
    return gl.where(stage == 0, STAGES - 1, stage - 1)


@gluon.jit
def _copies(
    a, a_box, w_box, order, tile_expert, tile_start, tile_rows, total, taken, tile_buf, a_buf, b_buf, full, empty,
    J: gl.constexpr, C: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr, GATHER: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Stage by stage 64 values of a tile's rows of A, in two halves, and of 256 rows of W; then the next free tile."""
    columns: gl.constexpr = BN // 2 if GATED else BN
    blocks: gl.constexpr = C // columns
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    lane = gl.arange(0, 64, gl.SliceLayout(1, layout))
    k_lane = gl.arange(0, BK, gl.SliceLayout(0, layout))
    stage = 0
    phase = 1
    slot = 0
    i = gl.program_id(0)
    while i < total:
        tile = i // blocks
        expert = gl.load(tile_expert + tile)
        start = gl.load(tile_start + tile)
        rows = gl.load(tile_rows + tile)
        block = i % blocks
        i = gl.num_programs(0) + gl.atomic_add(taken, 1, sem="relaxed")
        if expert >= 0:
            first = expert * ROWS + block * columns
            second = first + C if GATED else first + 128
            if GATHER:
                # behind the last row the last row again: a sum of its own that is not stored
                n0 = gl.load(order + start + gl.minimum(lane, rows - 1))
                n1 = gl.load(order + start + gl.minimum(lane + 64, rows - 1))
                at0 = a + (n0 // J).to(gl.int64)[:, None] * D + k_lane[None, :]
                at1 = a + (n1 // J).to(gl.int64)[:, None] * D + k_lane[None, :]
            # seen by who has waited for the tile's first stage; SLOTS - 1 tiles ahead of the slowest at most
            tile_buf.index(slot).store(gl.full([1], start, gl.int32, one))
            tile_buf.index(slot + 1).store(gl.full([1], rows, gl.int32, one))
            tile_buf.index(slot + 2).store(gl.full([1], block, gl.int32, one))
            slot = (slot + 3) % (3 * SLOTS)
            for k in range(0, D, BK):
                mbarrier.wait(empty.index(stage), phase)
                ready = full.index(stage)
                b = b_buf.index(stage)
                mbarrier.expect(ready, BN * BK * 2 if GATHER else (BM + BN) * BK * 2)
                tma.async_copy_global_to_shared(w_box, [first, k], ready, b.slice(0, 128, 0))
                tma.async_copy_global_to_shared(w_box, [second, k], ready, b.slice(128, 128, 0))
                if GATHER:
                    async_copy.async_copy_global_to_shared(a_buf.index(2 * stage), at0 + k)
                    if rows > 64:
                        async_copy.async_copy_global_to_shared(a_buf.index(2 * stage + 1), at1 + k)
                    async_copy.mbarrier_arrive(ready, increment_count=False)
                else:
                    tma.async_copy_global_to_shared(a_box, [start, k], ready, a_buf.index(2 * stage))
                    tma.async_copy_global_to_shared(a_box, [start + 64, k], ready, a_buf.index(2 * stage + 1))
                stage, phase = _next_stage(stage, phase, STAGES)
    mbarrier.wait(empty.index(stage), phase)
    tile_buf.index(slot + 1).store(gl.full([1], 0, gl.int32, one))  # no rows: the end
    mbarrier.expect(full.index(stage), 0)
    if GATHER:
        async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
    if gl.atomic_add(taken + 1, 1) == gl.num_programs(0) - 1:  # nobody takes any more: as it was, for the next launch
        gl.store(taken, 0)
        gl.store(taken + 1, 0)


@gluon.jit
def _step(acc, k, stage, phase, a_buf, b_buf, full, empty, HALF: gl.constexpr, GATHER: gl.constexpr,
          STAGES: gl.constexpr):  # fmt: skip
    """Add 64 values of depth; the stage before is free again."""
    mbarrier.wait(full.index(stage), phase)
    if GATHER:
        fence_async_shared()  # A was written by ordinary copies
    acc = warpgroup_mma(a_buf.index(2 * stage + HALF), b_buf.index(stage).permute((1, 0)), acc, use_acc=k > 0,
                        is_async=True)  # fmt: skip
    acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
    mbarrier.arrive(empty.index(_before(stage, STAGES)), pred=k > 0)
    stage, phase = _next_stage(stage, phase, STAGES)
    return acc, stage, phase


@gluon.jit
def _store(at, half, ok, wide: gl.constexpr):
    left, right = gl.split(gl.permute(gl.reshape(half, [64, 2, 64]), [0, 2, 1]))
    gl.store(at, gl.convert_layout(left, wide), mask=ok)
    gl.store(at + 64, gl.convert_layout(right, wide), mask=ok)


@gluon.jit
def _products(weights, out, order, tile_buf, a_buf, b_buf, full, empty, HALF: gl.constexpr, C: gl.constexpr,
              D: gl.constexpr, GATED: gl.constexpr, GATHER: gl.constexpr, WEIGH: gl.constexpr,
              STAGES: gl.constexpr):  # fmt: skip
    """Rows 64 * HALF.. of every tile; where a tile has none there, it only lets the copies go on."""
    columns: gl.constexpr = BN // 2 if GATED else BN
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 256, 16])
    # what goes to memory at once: 128 columns of h, or 64 of out, of which there are four and little room
    at_once: gl.constexpr = 128 if GATED else 64
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16] if GATED else [4, 8], [4, 1], [1, 0])
    one: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    row = gl.arange(0, 64, gl.SliceLayout(1, wide))
    lane = gl.arange(0, at_once, gl.SliceLayout(0, wide))
    m = gl.arange(0, 64, one)
    dtype: gl.constexpr = out.dtype.element_ty
    stage = 0
    phase = 0
    slot = 0
    mbarrier.wait(full.index(stage), phase)
    rows = gl.max(tile_buf.index(1).load(one), 0)
    while rows > 0:
        start = gl.max(tile_buf.index(slot).load(one), 0) + 64 * HALF
        block = gl.max(tile_buf.index(slot + 2).load(one), 0)
        rows -= 64 * HALF
        if rows > 0:
            if not GATHER:
                n_m = gl.load(order + start + m, mask=m < rows, other=0)
            acc = gl.zeros([64, BN], gl.float32, layout)
            acc, stage, phase = _step(acc, 0, stage, phase, a_buf, b_buf, full, empty, HALF, GATHER, STAGES)
            if WEIGH:  # not before the first step: it would wait for the order
                scale = gl.load(weights + n_m, mask=m < rows, other=0.0)
            for k in range(BK, D, BK):
                acc, stage, phase = _step(acc, k, stage, phase, a_buf, b_buf, full, empty, HALF, GATHER, STAGES)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index(_before(stage, STAGES)))
            if WEIGH:
                acc *= gl.convert_layout(scale, gl.SliceLayout(1, layout)).to(gl.float32)[:, None]
            left, right = gl.split(gl.permute(gl.reshape(acc, [64, 2, 128]), [0, 2, 1]))
            if GATHER:  # the first product, gated or not, is read again in the order it is written in
                n = start + row
            else:
                n = gl.convert_layout(n_m, gl.SliceLayout(1, wide))
            at = out + n.to(gl.int64)[:, None] * C + (block * columns + lane)[None, :]
            ok = (row < rows)[:, None]
            if GATED:
                # SiLU in few instructions: where exp(-left) is near infinity the quotient is 0
                h = libdevice.fast_dividef(left * right, 1.0 + libdevice.exp2(left * -1.4426950408889634))
                gl.store(at, gl.convert_layout(h.to(dtype), wide), mask=ok)
            else:
                _store(at, left.to(dtype), ok, wide)
                _store(at + 128, right.to(dtype), ok, wide)
        else:
            for _ in range(0, D, BK):
                mbarrier.wait(full.index(stage), phase)
                mbarrier.arrive(empty.index(stage))
                stage, phase = _next_stage(stage, phase, STAGES)
        slot = (slot + 3) % (3 * SLOTS)
        mbarrier.wait(full.index(stage), phase)
        rows = gl.max(tile_buf.index(slot + 1).load(one), 0)


@gluon.jit
def _grouped(a, a_box, w_box, weights, out, order, tile_expert, tile_start, tile_rows, state,
             J: gl.constexpr, C: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, GATED: gl.constexpr,
             GATHER: gl.constexpr, WEIGH: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    dtype: gl.constexpr = out.dtype.element_ty
    a_buf = gl.allocate_shared_memory(dtype, [2 * STAGES, 64, BK], BOX)
    b_buf = gl.allocate_shared_memory(dtype, [STAGES, BN, BK], BOX)
    tile_buf = gl.allocate_shared_memory(gl.int32, [3 * SLOTS, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(full.index(s), count=129 if GATHER else 1)
        mbarrier.init(empty.index(s), count=2)
    total = gl.load(state) * (C // (BN // 2 if GATED else BN))
    gl.warp_specialize(
        [
            (_products, (weights, out, order, tile_buf, a_buf, b_buf, full, empty, 0, C, D, GATED, GATHER, WEIGH,
                         STAGES)),
            (_copies, (a, a_box, w_box, order, tile_expert, tile_start, tile_rows, total, state + 1, tile_buf, a_buf,
                       b_buf, full, empty, J, C, D, ROWS, GATED, GATHER, STAGES)),
            (_products, (weights, out, order, tile_buf, a_buf, b_buf, full, empty, 1, C, D, GATED, GATHER, WEIGH,
                         STAGES)),
        ],
        [4, 4],
        [72, 216],
    )  # fmt: skip


def usable(a: torch.Tensor, w: torch.Tensor, sizes: Sizes, block_m: int, *, gated: bool) -> bool:
    """Whether `grouped` can: sm_90, 16-bit values, tiles of 128 rows, SiLU, depth and columns multiples of a tile's."""
    C, depth = w.shape[1] // 2 if gated else w.shape[1], w.shape[2]
    columns = BN.value // 2 if gated else BN.value
    fits = block_m == BM.value and depth % BK.value == 0 and C % columns == 0 and a.element_size() == 2
    return fits and (sizes.activation is Activation.SILU or not gated) and _is_hopper(a.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    nvidia = device.type == "cuda" and torch.version.hip is None
    return nvidia and torch.cuda.get_device_capability(device)[0] == 9


def grouped(
    a: torch.Tensor, w: torch.Tensor, rows: tuple[int, int], weights_TJ: torch.Tensor, order: Order, out: torch.Tensor,
    width: int, processors: int, *, first: bool, gated: bool, weigh: bool, start: dict[str, Any],
) -> None:  # fmt: skip
    """Fill `out` as `grouped.grouped_gemm` says, J = width, rows as `rows_apart` has them; a program a processor."""
    apart, last = rows
    depth, columns = a.shape[1], BN.value // 2 if gated else BN.value
    programs = min(processors, order.tile_expert_Q.shape[0] * out.shape[1] // columns)
    a_box = TensorDescriptor(a, list(a.shape), [depth, 1], [64, BK.value], BOX.value)
    w_box = TensorDescriptor(w, [last, depth], [depth, 1], [128, BK.value], BOX.value)
    _grouped[(programs,)](
        a, a_box, w_box, weights_TJ, out, *order, J=width, C=out.shape[1], D=depth, ROWS=apart,
        GATED=gated, GATHER=first, WEIGH=weigh, STAGES=STAGES_AHEAD, **start, num_warps=4,
    )  # fmt: skip
