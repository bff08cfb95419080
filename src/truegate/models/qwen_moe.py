"""Qwen2-MoE (biased qkv, gated shared expert) and Qwen3-MoE (norms on q and k), dense layers anywhere.

Invariant: sliding windows are refused, not ignored; which layers are dense is the routing specs' business.
"""

from collections.abc import Iterator

from truegate.law.keys import Keys
from truegate.layers.attention import Attention
from truegate.models.causal import CausalLM
from truegate.models.frame import Frame, Gqa
from truegate.models.weights import Target, gqa_targets

FAMILIES = ("qwen2_moe", "qwen3_moe")


def build(keys: Keys, frame: Frame) -> CausalLM:
    """The model with unfilled buffers."""
    keys.only("use_sliding_window", False, "sliding windows are not implemented")
    keys.value("sliding_window", None), keys.value("max_window_layers", None)  # these speak only where it is true
    kinds = keys.value("layer_types", None)[1]
    if kinds is not None and set(kinds) != {"full_attention"}:
        raise keys.refuse("layer_types", "names a layer other than 'full_attention': not implemented")
    qwen2 = keys.family == "qwen2_moe"
    eps = keys.number("rms_norm_eps", 1e-6)
    bias = keys.flag("qkv_bias", True) if qwen2 else keys.flag("attention_bias", False)
    return frame.gqa(
        keys,
        Gqa(
            hidden=2048, vocab_size=151936, max_position=32768, norm_eps=1e-6, num_heads=16 if qwen2 else 32,
            num_kv_heads=16 if qwen2 else 4, qkv_bias=bias, out_bias=bias and not qwen2,
            qk_norm_eps=None if qwen2 else eps, dense_width=5632 if qwen2 else 6144))  # fmt: skip


def attention_targets(keys: Keys, attention: Attention, prefix: str) -> Iterator[tuple[str, Target]]:
    return gqa_targets(attention, prefix)
