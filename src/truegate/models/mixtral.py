"""Mixtral: grouped-query attention without biases, every layer MoE.

Invariant: a sliding window shorter than the longest sequence is refused, not ignored.
"""

from collections.abc import Iterator

from truegate.law.keys import Keys
from truegate.layers.attention import Attention
from truegate.models.causal import CausalLM
from truegate.models.frame import Frame, Gqa
from truegate.models.weights import Target, gqa_targets

FAMILIES = ("mixtral",)


def build(keys: Keys, frame: Frame) -> CausalLM:
    """The model with unfilled buffers."""
    window = keys.value("sliding_window", None)[1]
    longest = keys.integer("max_position_embeddings", 131072)
    if window is not None and window < longest:
        raise keys.refuse("sliding_window", f"is {window}, below max_position_embeddings {longest}: not implemented")
    return frame.gqa(
        keys,
        Gqa(
            hidden=4096, vocab_size=32000, max_position=131072, norm_eps=1e-5, num_heads=32, num_kv_heads=8,
            default_theta=1e6, dense_width=14336))  # fmt: skip


def attention_targets(keys: Keys, attention: Attention, prefix: str) -> Iterator[tuple[str, Target]]:
    return gqa_targets(attention, prefix)
