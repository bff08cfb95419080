"""Twin of kernels/linear.py."""

import torch

from truegate.kernels.ref.norm import rms_norm


def row(x_1K, weight_OK, bias_O=None) -> torch.Tensor:
    """x W^T + b, float32 inside."""
    y_1O = x_1K.float() @ weight_OK.float().T
    return (y_1O if bias_O is None else y_1O + bias_O.float()).to(x_1K.dtype)


def norm_row(x_1K, residual_1K, norm, weight_OK, bias_O=None):
    """(y_1O, residual + x, its norm)."""
    total_1K = residual_1K.clone()
    if x_1K is not None:
        total_1K = (residual_1K.float() + x_1K.float()).to(residual_1K.dtype)
    h_1K = rms_norm(total_1K, *norm)
    return row(h_1K.float(), weight_OK, bias_O).to(weight_OK.dtype), total_1K, h_1K
