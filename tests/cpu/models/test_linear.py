"""Stacked linear maps and the dense MLP against plain products."""

import pytest
import torch
from torch.nn import functional as F

from truegate.layers import linear
from truegate.layers.norm import RMSNorm

PLACE = {"dtype": torch.float32, "device": torch.device("cpu")}


def filled(one, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    for buffer in one.buffers():
        buffer.copy_(torch.randn(buffer.shape, generator=generator) / buffer.shape[-1] ** 0.5)
    return one


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 5])
def test_an_output_made_before_is_the_product(num_rows, bias):
    one = filled(linear.Linear(24, 40, bias=bias, **PLACE))
    x_TI, y_TO = torch.randn(num_rows, 24), torch.full((num_rows, 40), float("nan"))
    right_TO = F.linear(x_TI, one.weight, one.bias)
    torch.testing.assert_close(one.into(x_TI, y_TO), right_TO)
    if num_rows > 1:
        torch.testing.assert_close(y_TO, right_TO)


def test_a_dense_mlp_in_slices_is_the_whole(monkeypatch):
    """Through the kernels, with a last slice that is not full."""
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    mlp, norm = filled(linear.GatedMLP(16, 48, **PLACE)), RMSNorm((16,), 1e-6, **PLACE)
    norm.weight.fill_(1.5)
    x_TD, residual_TD = torch.randn(2, 11, 16).unbind(0)
    whole, summed = mlp.fused(norm, x_TD.clone(), residual_TD.clone())
    monkeypatch.setattr(linear, "SLICE", 4)
    sliced, summed_too = mlp.fused(norm, x_TD.clone(), residual_TD.clone())
    torch.testing.assert_close(sliced, whole)
    assert torch.equal(summed_too, summed)
    h_TD = F.rms_norm(x_TD + residual_TD, (16,), norm.weight, norm.eps)
    gate_TF, up_TF = F.linear(h_TD, mlp.gate_up.weight).chunk(2, -1)
    torch.testing.assert_close(sliced, F.linear(F.silu(gate_TF) * up_TF, mlp.down.weight))
