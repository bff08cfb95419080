"""What a family's file builds with: where tensors live, which layers are MoE and through which backends they run.

Invariant: whether a layer is dense is the routing spec's word (None), never a guess from names or sizes.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from truegate.cache.pools import MHAPool, Pool
from truegate.law.keys import Keys
from truegate.law.placement import place
from truegate.law.plan import Choices
from truegate.law.spec import Activation, RoutingSpec
from truegate.layers.attention import Attention
from truegate.layers.linear import GatedMLP
from truegate.layers.rope import RopeSpec, rope_spec
from truegate.models.causal import CausalLM, Sizes
from truegate.moe.backends import Backends, compile_layer
from truegate.moe.layer import MoELayer


@dataclass(frozen=True, kw_only=True)
class Gqa:
    """A family's defaults (transformers' own) for keys its config may omit, and what its attention has."""

    hidden: int
    vocab_size: int
    max_position: int
    norm_eps: float
    num_heads: int
    num_kv_heads: int
    dense_width: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm_eps: float | None = None
    default_theta: float = 10000.0
    default_rotary_fraction: float | None = None  # None: the family rotates whole heads


@dataclass(frozen=True, kw_only=True)
class Frame:
    """The run's dtype and device, the layers' routing specs, and the MoE backends."""

    config: Mapping[str, Any]  # config.json as read, for the model to keep
    dtype: torch.dtype
    device: torch.device
    specs: Sequence[RoutingSpec | None]  # of the main layers
    backends: Backends
    choices: Choices

    def sizes(
        self, keys: Keys, *, pool: type[Pool], pool_width: int, hidden: int, vocab_size: int, max_position: int,
        norm_eps: float,
    ) -> Sizes:  # fmt: skip
        """The shared decoder's sizes; the arguments are the family's defaults."""
        return Sizes(
            num_layers=keys.num_main_layers,
            hidden=keys.integer("hidden_size", hidden, least=1),
            vocab_size=keys.integer("vocab_size", vocab_size, least=1),
            max_position=keys.integer("max_position_embeddings", max_position, least=1),
            norm_eps=keys.number("rms_norm_eps", norm_eps),
            tied=keys.flag("tie_word_embeddings", False),
            pool=pool,
            pool_width=pool_width,
        )

    def assemble(
        self, keys: Keys, sizes: Sizes, rope: RopeSpec, attention: Callable[[int], nn.Module], dense_width: int
    ) -> CausalLM:
        """The decoder with these attention layers, and per layer the MoE its spec describes or a dense MLP."""

        def mlp(layer: int) -> GatedMLP | MoELayer:
            spec = self.specs[layer]
            if spec is None:
                if keys.activation() is not Activation.SILU:
                    raise keys.refuse("hidden_act", "must be 'silu' where layers are dense")
                return GatedMLP(sizes.hidden, dense_width, dtype=self.dtype, device=self.device)
            plan = compile_layer(spec, self.backends, place(num_experts=spec.num_experts), self.choices)
            return MoELayer(plan, self.backends, dtype=self.dtype, device=self.device)

        return CausalLM(self.config, sizes, rope, attention, mlp, dtype=self.dtype, device=self.device)

    def gqa(self, keys: Keys, family: Gqa) -> CausalLM:
        """A decoder with grouped-query attention."""
        num_heads = keys.integer("num_attention_heads", family.num_heads, least=1)
        num_kv_heads = keys.integer("num_key_value_heads", family.num_kv_heads, least=1)
        if num_heads % num_kv_heads:
            raise keys.refuse("num_key_value_heads", f"is {num_kv_heads}, must divide num_attention_heads {num_heads}")
        sizes = self.sizes(
            keys, pool=MHAPool, pool_width=0, hidden=family.hidden, vocab_size=family.vocab_size,
            max_position=family.max_position, norm_eps=family.norm_eps)  # fmt: skip
        head_dim = keys.value("head_dim", None)[1]
        head_dim = sizes.hidden // num_heads if head_dim is None else keys.integer("head_dim", None, least=1)
        rope = rope_spec(
            keys.config,
            head_dim=head_dim,
            default_theta=family.default_theta,
            default_fraction=family.default_rotary_fraction,
        )

        def attention(layer: int) -> Attention:
            return Attention(
                layer=layer, hidden=sizes.hidden, num_heads=num_heads, num_kv_heads=num_kv_heads, head_dim=head_dim,
                rotary_dim=2 * len(rope.inv_freq), qkv_bias=family.qkv_bias, out_bias=family.out_bias,
                qk_norm_eps=family.qk_norm_eps, dtype=self.dtype, device=self.device)  # fmt: skip

        width = keys.integer("intermediate_size", family.dense_width, least=1)
        return self.assemble(keys, sizes.with_pool(2 * num_kv_heads * head_dim), rope, attention, width)
