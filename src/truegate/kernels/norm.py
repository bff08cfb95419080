"""Norms with what surrounds them: residual sums, rotary embedding, the write into the pool; and the gated SiLU.

Invariant: sums and rotations are fp32 inside, whatever the tensors' dtype; a row's result depends on no other row.
Twin: kernels/ref/norm.py. T rows, D width, H query heads, K key heads, E head size, X positions, R rotary dimensions
of a head, C latent, W = C + R, F intermediate.
"""

from math import gcd

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, power_of_2, take_turn

MANY = 128  # rows from which rotation works on tiles of several rows


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, y, eps, x_row, y_row, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < D
    scale = tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    take_turn(EARLY)  # the weight may come before: nothing ahead writes it
    value = tl.load(x + row * x_row + column, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * D + column, mask=ok, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * D + column, rounded, mask=ok)
        value = rounded.to(tl.float32)  # the norm of what the next layer adds to
    value *= tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    tl.store(y + row * y_row + column, (value * scale).to(y.dtype.element_ty), mask=ok)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """y = v / sqrt(mean(v^2) + eps) * weight with v = x; or with v = residual += x (rounded to its dtype), y over x.

    x_TD may be a view with a row stride. Without a residual, y is new and in x's dtype; with one, which is contiguous,
    x_TD is overwritten with y and returned.
    """
    num_rows, width = x_TD.shape
    y_TD = x_TD if residual_TD is not None else torch.empty((num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    block = power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x_TD, x_TD if residual_TD is None else residual_TD, weight_D, y_TD, eps, x_TD.stride(0), y_TD.stride(0),
        D=width, BLOCK=block, ADD=residual_TD is not None, **early(x_TD.device),
        num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return y_TD


@triton.jit
def _turns(rotations, position_N, ok_N, R: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """Cosines and sines [BLOCK_N, BLOCK_R / 2] of N positions; pairs beyond R stay as they are."""
    column = tl.arange(0, BLOCK_R)
    stay = tl.where(column % 2 == 0, 1.0, 0.0)[None, :]
    ok = ok_N[:, None] & (column < R)[None, :]
    turns = tl.load(rotations + position_N[:, None] * R + column[None, :], mask=ok, other=stay)
    return tl.split(tl.reshape(turns, [BLOCK_N, BLOCK_R // 2, 2]))


@triton.jit
def _rotated(x_NR, cos, sin, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr):
    """(even + i odd) * (cos + i sin) of neighbours, which one thread holds: nothing is exchanged."""
    even, odd = tl.split(tl.reshape(x_NR, [BLOCK_N, BLOCK_R // 2, 2]))
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), [BLOCK_N, BLOCK_R])


@triton.jit(do_not_specialize=["T"])
def _rotate_store_kernel(
    qkv, weight, rotations, positions, slots, pool, eps, T, qkv_row, pool_slot,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows of BLOCK_H heads, which are all queries, all keys or all values."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    first = tl.program_id(1) * BLOCK_H
    column = tl.arange(0, BLOCK_E)
    ok_t = t < T
    ok = ok_t[:, None] & (column < E)[None, :]
    scales = ()
    if NORM:
        for h in tl.static_range(BLOCK_H):
            ok_w = (column < E) & (first < H + K)
            scales += (tl.load(weight + (first + h) * E + column, mask=ok_w, other=0.0),)
    take_turn(EARLY)
    position = tl.load(positions + t, mask=ok_t, other=0)
    slot = tl.load(slots + t, mask=ok_t, other=0).to(tl.int64)
    source = qkv + t.to(tl.int64)[:, None] * qkv_row + first * E + column[None, :]
    raws = ()  # all on their way before the first is used
    for h in tl.static_range(BLOCK_H):
        raws += (tl.load(source + h * E, mask=ok, other=0.0),)
    stored = pool + slot[:, None] * pool_slot + (first - H) * E + column[None, :]  # keys and values
    if first >= H + K:
        for h in tl.static_range(BLOCK_H):
            tl.store(stored + h * E, raws[h], mask=ok)
    else:
        cos, sin = _turns(rotations, position, ok_t, R, BLOCK_T, BLOCK_E)
        for h in tl.static_range(BLOCK_H):
            x = raws[h].to(tl.float32)
            if NORM:
                x *= tl.rsqrt(tl.sum(x * x, 1) / E + eps)[:, None] * scales[h].to(tl.float32)[None, :]
            y = _rotated(x, cos, sin, BLOCK_T, BLOCK_E).to(qkv.dtype.element_ty)
            if first >= H:  # a pointer to one of two tensors does not compile for AMD
                tl.store(stored + h * E, y, mask=ok)
            else:
                tl.store(source + h * E, y, mask=ok)


def rotate_and_store(
    qkv_TX: torch.Tensor,
    heads: tuple[int, int],
    norm: tuple[torch.Tensor, float] | None,
    rotations_XR: torch.Tensor,
    step,
    pool_SW: torch.Tensor,
) -> None:
    """Norm (norm = weight_HE of the H + K heads and eps, or None) and rotate q and k; q in place, k and v to the pool.

    qkv_TX: heads (H, K) give X = (H + 2K) * E. rotations_XR fp32: cosines at even, sines at odd columns. `step` gives
    positions_T and slots_T int64. pool_SW: a slot's row is K keys, then K values.
    """
    num_heads, num_keys = heads
    num_rows, size = qkv_TX.shape[0], qkv_TX.shape[1] // (num_heads + 2 * num_keys)
    weight, eps = (qkv_TX, 0.0) if norm is None else norm
    block_e = power_of_2(size)
    if num_rows < MANY:
        block_t, block_h, num_warps = 1, gcd(num_heads, num_keys, 4), 1
    else:  # tiles of 2,048 elements: cosines and sines are read once for two heads
        block_t, block_h, num_warps = max(1, 2048 // block_e), gcd(num_heads, num_keys, 2), 8
    _rotate_store_kernel[(cdiv(num_rows, block_t), (num_heads + 2 * num_keys) // block_h)](
        qkv_TX, weight, rotations_XR, step.positions_T, step.slots_T, pool_SW, eps, num_rows, qkv_TX.stride(0),
        pool_SW.stride(0), H=num_heads, K=num_keys, E=size, R=rotations_XR.shape[1], NORM=norm is not None,
        BLOCK_T=block_t, BLOCK_H=block_h, BLOCK_E=block_e, num_warps=num_warps, **early(qkv_TX.device),
    )  # fmt: skip


@triton.jit
def _store_latents(
    latent, weight, rotations, positions, slots, pool, eps, T, latent_row, pool_slot,
    C: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_R: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """BLOCK_T rows of the pool."""
    c, r = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_R)
    scale = tl.load(weight + c, mask=c < C, other=0.0).to(tl.float32)
    take_turn(EARLY)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    ok_t = t < T
    ok_c, ok_r = ok_t[:, None] & (c < C)[None, :], ok_t[:, None] & (r < R)[None, :]
    position = tl.load(positions + t, mask=ok_t, other=0)
    stored = pool + tl.load(slots + t, mask=ok_t, other=0).to(tl.int64)[:, None] * pool_slot
    source = latent + t.to(tl.int64)[:, None] * latent_row
    value = tl.load(source + c[None, :], mask=ok_c, other=0.0).to(tl.float32)
    key = tl.load(source + C + r[None, :], mask=ok_r, other=0.0).to(tl.float32)
    cos, sin = _turns(rotations, position, ok_t, R, BLOCK_T, BLOCK_R)
    value *= tl.rsqrt(tl.sum(value * value, 1) / C + eps)[:, None] * scale[None, :]
    tl.store(stored + c[None, :], value.to(pool.dtype.element_ty), mask=ok_c)
    key = _rotated(key, cos, sin, BLOCK_T, BLOCK_R)
    tl.store(stored + C + r[None, :], key.to(pool.dtype.element_ty), mask=ok_r)


@triton.jit
def _rotate_queries(
    q_rope, rotations, positions, T, q_row, q_head,
    H: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_H: tl.constexpr, GROUPS: tl.constexpr,
    BLOCK_R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GROUPS times BLOCK_H heads of BLOCK_T rows."""
    n, r = tl.arange(0, BLOCK_T * BLOCK_H), tl.arange(0, BLOCK_R)
    head = (tl.program_id(1) - 1) * BLOCK_H * GROUPS + n % BLOCK_H
    t = tl.program_id(0) * BLOCK_T + n // BLOCK_H
    ok_n, ok_r = t < T, (r < R)[None, :]
    source = q_rope + t.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + r[None, :]
    take_turn(EARLY)
    position = tl.load(positions + t, mask=ok_n, other=0)
    raws = ()  # all on their way before the first is used
    for g in tl.static_range(GROUPS):
        ok = (ok_n & (head + g * BLOCK_H < H))[:, None] & ok_r
        raws += (tl.load(source + g * BLOCK_H * q_head, mask=ok, other=0.0),)
    cos, sin = _turns(rotations, position, ok_n, R, BLOCK_T * BLOCK_H, BLOCK_R)
    for g in tl.static_range(GROUPS):
        ok = (ok_n & (head + g * BLOCK_H < H))[:, None] & ok_r
        out = _rotated(raws[g].to(tl.float32), cos, sin, BLOCK_T * BLOCK_H, BLOCK_R)
        tl.store(source + g * BLOCK_H * q_head, out.to(q_rope.dtype.element_ty), mask=ok)


@triton.jit(do_not_specialize=["T"])
def _latent_store_kernel(
    latent, q_rope, weight, rotations, positions, slots, pool, eps, T, latent_row, q_row, q_head, pool_slot,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_H: tl.constexpr, GROUPS: tl.constexpr, BLOCK_R: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if tl.program_id(1) == 0:
        _store_latents(
            latent, weight, rotations, positions, slots, pool, eps, T, latent_row, pool_slot, C, R, BLOCK_T, BLOCK_C,
            BLOCK_R, EARLY,
        )  # fmt: skip
    else:
        _rotate_queries(q_rope, rotations, positions, T, q_row, q_head, H, R, BLOCK_T, BLOCK_H, GROUPS, BLOCK_R, EARLY)


def store_latent(
    latent_TW: torch.Tensor,
    q_rope_THR: torch.Tensor,
    norm: tuple[torch.Tensor, float],
    rotations_XR: torch.Tensor,
    step,
    pool_SW: torch.Tensor,
) -> None:
    """Pool row = (rms_norm(latent_C) | rotated k_rope_R); q_rope is rotated in place.

    latent_TW and q_rope_THR may be views of wider rows (unit last stride); the latent itself stays as it is. norm:
    weight_C and eps. `step` and rotations_XR as in `rotate_and_store`.
    """
    num_rows, num_heads, rotary = q_rope_THR.shape
    weight_C, eps = norm
    block_t, block_h, groups = (1, min(16, power_of_2(num_heads)), 1) if num_rows < MANY else (4, 4, 4)
    _latent_store_kernel[(cdiv(num_rows, block_t), 1 + cdiv(num_heads, block_h * groups))](
        latent_TW, q_rope_THR, weight_C, rotations_XR, step.positions_T, step.slots_T, pool_SW, eps, num_rows,
        latent_TW.stride(0), q_rope_THR.stride(0), q_rope_THR.stride(1), pool_SW.stride(0), H=num_heads,
        C=weight_C.shape[0], R=rotary, BLOCK_T=block_t, BLOCK_C=power_of_2(weight_C.shape[0]), BLOCK_H=block_h,
        GROUPS=groups, BLOCK_R=power_of_2(rotary), num_warps=4, **early(latent_TW.device),
    )  # fmt: skip


@triton.jit
def _silu_mul_kernel(x, y, x_row, F: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    ok = column < F
    gate = tl.load(x + row * x_row + column, mask=ok, other=0.0).to(tl.float32)
    up = tl.load(x + row * x_row + F + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + row * F + column, (gate * tl.sigmoid(gate) * up).to(y.dtype.element_ty), mask=ok)


def silu_mul(gate_up_TX: torch.Tensor) -> torch.Tensor:
    """y_TF = silu(gate) * up of gate_up_TX, X = 2F: gate columns, then up columns."""
    num_rows, width = gate_up_TX.shape[0], gate_up_TX.shape[1] // 2
    y_TF = torch.empty((num_rows, width), dtype=gate_up_TX.dtype, device=gate_up_TX.device)
    block = min(1024, power_of_2(width))
    _silu_mul_kernel[(num_rows, cdiv(width, block))](
        gate_up_TX, y_TF, gate_up_TX.stride(0), F=width, BLOCK=block, num_warps=4, **early(y_TF.device)
    )
    return y_TF
