"""Twin of kernels/activation.py: the gated activations, from their formulas."""

import torch

from truegate.law.spec import Activation


def activate(activation: Activation, clamp: float | None, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """The gated activations, from their formulas."""
    if activation is Activation.SWIGLU_CLAMP:
        gate, up = gate.clip(max=clamp), up.clip(-clamp, clamp)
        return (up + 1) * gate * torch.sigmoid(1.702 * gate)
    if activation is Activation.SILU:
        return gate * torch.sigmoid(gate) * up
    inner = gate / 2**0.5
    if activation is Activation.GELU:
        return 0.5 * gate * (1 + torch.erf(inner)) * up
    return 0.5 * gate * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
