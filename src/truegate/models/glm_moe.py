"""GLM-4.5 and 4.6: partial rotary embedding, optional norms on q and k, biased qkv, dense layers first.

Invariant: half of every head rotates unless the config says otherwise (partial_rotary_factor 0.5).
"""

from collections.abc import Iterator

from truegate.law.keys import Keys
from truegate.layers.attention import Attention
from truegate.models.causal import CausalLM
from truegate.models.frame import Frame, Gqa
from truegate.models.weights import Target, gqa_targets

FAMILIES = ("glm4_moe",)


def build(keys: Keys, frame: Frame) -> CausalLM:
    """The model with unfilled buffers."""
    eps = keys.number("rms_norm_eps", 1e-5)
    return frame.gqa(
        keys,
        Gqa(
            hidden=4096, vocab_size=151552, max_position=131072, norm_eps=1e-5, num_heads=96, num_kv_heads=8,
            qkv_bias=keys.flag("attention_bias", False), qk_norm_eps=eps if keys.flag("use_qk_norm", False) else None,
            default_rotary_fraction=0.5, dense_width=10944))  # fmt: skip


def attention_targets(keys: Keys, attention: Attention, prefix: str) -> Iterator[tuple[str, Target]]:
    return gqa_targets(attention, prefix)
