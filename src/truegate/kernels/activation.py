"""The gated activations, for the kernels that have them inside. Twin: kernels/ref/activation.py."""

import triton
import triton.language as tl


@triton.jit
def activate(gate, up, ACT: tl.constexpr, CLAMP: tl.constexpr):
    """act(gate) * up in fp32; ACT is the value of a law.spec.Activation, CLAMP its bound where it has one."""
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
