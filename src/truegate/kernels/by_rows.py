"""One row's experts, or those of very few rows that share none: dot products on the ordinary cores.

    h[n] = act(x[t] W_gate^T, x[t] W_up^T);  y[t] = sum_j weights[n] * (h[n] W_down^T), n = t * J + j

Invariant: a slot whose id is outside 0..P-1 is never read, computed or summed; sums are fp32 in a fixed order; grids
depend on shapes only. Twin: kernels/ref/experts.py. T rows, J slots a row, N = T * J assignments, P local experts, D
hidden, F expert width.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from truegate.kernels.activation import activate
from truegate.kernels.launch import cdiv, early, take_turn
from truegate.kernels.sizes import Sizes
from truegate.kernels.tuning import Config


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
    tl.store(h + n * F + f, activate(gate_F, up_F, ACT, CLAMP).to(h.dtype.element_ty), mask=f < F)


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
        WEIGH=sizes.weigh(first=True), **start, num_warps=one.warps,
    )  # fmt: skip
    _down_rows[(cdiv(D, two.block_n), num_rows)](
        h_NF, down_PDF, biases[1], weights_TJ, ids_TJ, y_TD, J=width, P=sizes.num_slots, F=F, D=D, BD=two.block_n,
        BK=two.block_k, STAGES=two.stages, WEIGH=sizes.weigh(first=False), **start, num_warps=two.warps,
    )  # fmt: skip
    return y_TD
