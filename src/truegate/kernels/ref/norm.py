"""Twin of kernels/norm.py: the same functions in plain torch, float32 inside."""

import torch


def rms_norm(x_TD, weight_D, eps: float, residual_TD=None) -> torch.Tensor:
    """y_TD of `kernels.norm.rms_norm`, but always new; adds x to residual_TD in place where it is given."""
    if residual_TD is not None:
        residual_TD.copy_(residual_TD.float() + x_TD.float())
    return _normed(x_TD if residual_TD is None else residual_TD, weight_D, eps).to(x_TD.dtype)


def rotate_and_store(qkv_TX, heads, norm, rotations_XR, step, pool_SW) -> None:
    """q rotated in place; keys and values written to the pool, as `kernels.norm.rotate_and_store` does."""
    num_heads, num_keys = heads
    heads_THE = qkv_TX.unflatten(1, (num_heads + 2 * num_keys, -1))
    turned = heads_THE[:, : num_heads + num_keys].float()
    if norm is not None:
        turned = _normed(turned, *norm)
    turned = rotate(turned, rotations_XR[step.positions_T])
    heads_THE[:, :num_heads] = turned[:, :num_heads].to(qkv_TX.dtype)
    kv = torch.cat((turned[:, num_heads:].to(qkv_TX.dtype), heads_THE[:, num_heads + num_keys :]), dim=1)
    pool_SW[step.slots_T] = kv.flatten(1)


def store_latent(latent_TW, q_rope_THR, norm, rotations_XR, step, pool_SW) -> None:
    """q_rope rotated in place; normed latents and rotated keys written to the pool."""
    weight_C, eps = norm
    width = weight_C.shape[0]
    rotations_TR = rotations_XR[step.positions_T]
    q_rope_THR.copy_(rotate(q_rope_THR, rotations_TR))
    k_rope = rotate(latent_TW[:, None, width:], rotations_TR)[:, 0]
    pool_SW[step.slots_T] = torch.cat((_normed(latent_TW[:, :width], weight_C, eps), k_rope), 1).to(pool_SW.dtype)


def silu_mul(gate_up_TX) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = gate_up_TX.float().chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(gate_up_TX.dtype)


def rotate(x_THE, rotations_TR) -> torch.Tensor:
    """float32: pair (x[2i], x[2i + 1]) turned by (cos, sin) = rotations[2i], rotations[2i + 1]; the rest stays."""
    size = rotations_TR.shape[1]
    cos, sin = rotations_TR[:, None, ::2], rotations_TR[:, None, 1::2]
    y_THE = x_THE.float().clone()
    even, odd = x_THE[..., :size:2].float(), x_THE[..., 1:size:2].float()
    y_THE[..., :size:2], y_THE[..., 1:size:2] = even * cos - odd * sin, even * sin + odd * cos
    return y_THE


def _normed(x, weight, eps: float) -> torch.Tensor:
    x = x.float()
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.float()
