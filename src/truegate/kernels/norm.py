"""Norms with what surrounds them: residual sums, rotary embedding, the write into the pool; and the gated SiLU.

Invariant: sums and rotations are fp32 inside, whatever the tensors' dtype; each row is computed alone, by one program.
Twin: kernels/ref/norm.py. T rows, D width, H query heads, K key heads, E head size, X positions, R rotary dimensions
of a head, C latent, W = C + R, F intermediate.
"""

import torch
import triton
import triton.language as tl

from truegate.kernels.launch import cdiv, early, power_of_2, take_turn


@triton.jit
def _rms_norm_kernel(
    x, residual, weight, y, eps, x_row, D: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr
):
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    ok = column < D
    value = tl.load(x + row * x_row + column, mask=ok, other=0.0).to(tl.float32)
    if ADD:
        value += tl.load(residual + row * D + column, mask=ok, other=0.0).to(tl.float32)
        rounded = value.to(residual.dtype.element_ty)
        tl.store(residual + row * D + column, rounded, mask=ok)
        value = rounded.to(tl.float32)  # the norm of what the next layer adds to
    value *= tl.rsqrt(tl.sum(value * value, 0) / D + eps)
    value *= tl.load(weight + column, mask=ok, other=0.0).to(tl.float32)
    tl.store(y + row * D + column, value.to(y.dtype.element_ty), mask=ok)


def rms_norm(
    x_TD: torch.Tensor, weight_D: torch.Tensor, eps: float, residual_TD: torch.Tensor | None = None
) -> torch.Tensor:
    """y = v / sqrt(mean(v^2) + eps) * weight with v = x, or v = residual += x in place (rounded to its dtype).

    x_TD may be a view with a row stride; residual_TD is contiguous; y is new, in x's dtype.
    """
    num_rows, width = x_TD.shape
    y_TD = torch.empty((num_rows, width), dtype=x_TD.dtype, device=x_TD.device)
    block = power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x_TD, x_TD if residual_TD is None else residual_TD, weight_D, y_TD, eps, x_TD.stride(0), D=width, BLOCK=block,
        ADD=residual_TD is not None, **early(x_TD.device), num_warps=min(8, max(1, block // 512)),
    )  # fmt: skip
    return y_TD


@triton.jit
def _rotated(even, odd, rotations, position, R: tl.constexpr, BLOCK_P: tl.constexpr):
    """(even + i odd) * (cos + i sin) on the first R / 2 pairs; the others stay."""
    pair = tl.arange(0, BLOCK_P)
    ok = pair < R // 2
    cos = tl.load(rotations + position * R + 2 * pair, mask=ok, other=1.0)
    sin = tl.load(rotations + position * R + 2 * pair + 1, mask=ok, other=0.0)
    return even * cos - odd * sin, even * sin + odd * cos


@triton.jit
def _rotate_store_kernel(
    qkv, weight, rotations, positions, slots, pool, eps, qkv_row, pool_slot,
    H: tl.constexpr, K: tl.constexpr, E: tl.constexpr, R: tl.constexpr, NORM: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    column = tl.arange(0, 2 * BLOCK_P)
    place = head[:, None] * E + column[None, :]
    ok = (head < H + 2 * K)[:, None] & (column < E)[None, :]
    source = qkv + row * qkv_row + place
    raw = tl.load(source, mask=ok, other=0.0)
    turned = raw.to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(turned * turned, 1) / E + eps)[:, None]
        weighted = ok & (head < H + K)[:, None]
        turned *= factor * tl.load(weight + place, mask=weighted, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(turned, [BLOCK_H, BLOCK_P, 2]))
    even, odd = _rotated(even, odd, rotations, tl.load(positions + row), R, BLOCK_P)
    turned = tl.reshape(tl.join(even, odd), [BLOCK_H, 2 * BLOCK_P])
    out = tl.where((head >= H + K)[:, None], raw, turned.to(raw.dtype))
    tl.store(source, out, mask=ok & (head < H)[:, None])
    stored = pool + tl.load(slots + row).to(tl.int64) * pool_slot + place - H * E
    tl.store(stored, out, mask=ok & (head >= H)[:, None])


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
    size = qkv_TX.shape[1] // (num_heads + 2 * num_keys)
    weight, eps = (qkv_TX, 0.0) if norm is None else norm
    block_h = 4  # 2 us at 32 rows; tiles of 16 heads took 10 at 128
    _rotate_store_kernel[(qkv_TX.shape[0], cdiv(num_heads + 2 * num_keys, block_h))](
        qkv_TX, weight, rotations_XR, step.positions_T, step.slots_T, pool_SW, eps, qkv_TX.stride(0), pool_SW.stride(0),
        H=num_heads, K=num_keys, E=size, R=rotations_XR.shape[1], NORM=norm is not None, BLOCK_H=block_h,
        BLOCK_P=power_of_2(size // 2), num_warps=2, **early(qkv_TX.device),
    )  # fmt: skip


@triton.jit
def _latent_store_kernel(
    latent, q_rope, weight, rotations, positions, slots, pool, eps, latent_row, q_row, q_head, pool_slot,
    H: tl.constexpr, C: tl.constexpr, R: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    take_turn(EARLY)
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    pair = tl.arange(0, BLOCK_P)
    ok_p = pair < R // 2
    dtype = pool.dtype.element_ty
    if tl.program_id(1) == 0:
        stored = pool + tl.load(slots + row).to(tl.int64) * pool_slot
        column = tl.arange(0, BLOCK_C)
        ok_c = column < C
        value = tl.load(latent + row * latent_row + column, mask=ok_c, other=0.0).to(tl.float32)
        value *= tl.rsqrt(tl.sum(value * value, 0) / C + eps)
        value *= tl.load(weight + column, mask=ok_c, other=0.0).to(tl.float32)
        tl.store(stored + column, value.to(dtype), mask=ok_c)
        source = latent + row * latent_row + C + 2 * pair
        k_even = tl.load(source, mask=ok_p, other=0.0).to(tl.float32)
        k_odd = tl.load(source + 1, mask=ok_p, other=0.0).to(tl.float32)
        k_even, k_odd = _rotated(k_even, k_odd, rotations, position, R, BLOCK_P)
        tl.store(stored + C + 2 * pair, k_even.to(dtype), mask=ok_p)
        tl.store(stored + C + 2 * pair + 1, k_odd.to(dtype), mask=ok_p)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        ok = (head < H)[:, None] & ok_p[None, :]
        place = q_rope + row * q_row + head[:, None] * q_head + 2 * pair[None, :]
        even = tl.load(place, mask=ok, other=0.0).to(tl.float32)
        odd = tl.load(place + 1, mask=ok, other=0.0).to(tl.float32)
        even, odd = _rotated(even, odd, rotations, position, R, BLOCK_P)
        tl.store(place, even.to(dtype), mask=ok)
        tl.store(place + 1, odd.to(dtype), mask=ok)


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
    block_h = min(16, power_of_2(num_heads))
    _latent_store_kernel[(num_rows, 1 + cdiv(num_heads, block_h))](
        latent_TW, q_rope_THR, weight_C, rotations_XR, step.positions_T, step.slots_T, pool_SW, eps,
        latent_TW.stride(0), q_rope_THR.stride(0), q_rope_THR.stride(1), pool_SW.stride(0), H=num_heads,
        C=weight_C.shape[0], R=rotary, BLOCK_C=power_of_2(weight_C.shape[0]), BLOCK_H=block_h,
        BLOCK_P=power_of_2(rotary // 2), num_warps=2, **early(latent_TW.device),
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
