"""DeepSeek-V2, V2-Lite, V3, R1, Kimi-K2, Moonlight: latent attention, dense layers first, shared experts.

Invariant: softmax scale = (nope + rope)^-1/2, times YaRN's mscale_all_dim squared where the config has one; the norms
inside attention have eps 1e-6 whatever rms_norm_eps says, as the published code has it.
H heads, C key/value latent, R rotary, U nope, V value size.
"""

from collections.abc import Iterator

import torch

from truegate.cache.pools import MLAPool
from truegate.law.keys import Keys
from truegate.layers.mla import MLA
from truegate.layers.rope import interleave_rows, rope_spec
from truegate.models.causal import CausalLM
from truegate.models.frame import Frame
from truegate.models.weights import Target, into

FAMILIES = ("deepseek_v2", "deepseek_v3")
LATENT_NORM_EPS = 1e-6


def build(keys: Keys, frame: Frame) -> CausalLM:
    """The model with unfilled buffers."""
    v2 = keys.family == "deepseek_v2"
    num_heads = keys.integer("num_attention_heads", 32 if v2 else 128)
    sizes = frame.sizes(
        keys, pool=MLAPool, pool_width=0, hidden=4096 if v2 else 7168, vocab_size=102400 if v2 else 129280,
        max_position=2048 if v2 else 4096, norm_eps=1e-6)  # fmt: skip
    keys.only("num_key_value_heads", num_heads, "every head has its own keys in latent attention")
    if keys.value("model_type", None)[1] == "deepseek_v32":
        raise keys.refuse("model_type", "is 'deepseek_v32': its sparse attention is not implemented")
    rope_dim = keys.integer("qk_rope_head_dim", 64)
    keys.only("head_dim", rope_dim, "rotary frequencies are those of qk_rope_head_dim")
    nope_dim, value_dim = keys.integer("qk_nope_head_dim", 128), keys.integer("v_head_dim", 128)
    keys.only("qk_head_dim", nope_dim + rope_dim, "it is the sum of the nope and rope sizes")
    kv_rank = keys.integer("kv_lora_rank", 512)
    q_rank = None if keys.value("q_lora_rank", 1536)[1] is None else keys.integer("q_lora_rank", 1536)
    bias = keys.flag("attention_bias", False)
    rope = rope_spec(keys.config, head_dim=rope_dim)

    def attention(layer: int) -> MLA:
        return MLA(
            layer=layer, hidden=sizes.hidden, num_heads=num_heads, q_rank=q_rank, kv_rank=kv_rank, nope_dim=nope_dim,
            rope_dim=rope_dim, value_dim=value_dim, scale=(nope_dim + rope_dim) ** -0.5 * rope.softmax_factor,
            bias=bias, norm_eps=LATENT_NORM_EPS, dtype=frame.dtype, device=frame.device)  # fmt: skip

    dense_width = keys.integer("intermediate_size", 11008 if v2 else 18432)
    return frame.assemble(keys, sizes.with_pool(kv_rank + rope_dim), rope, attention, dense_width)


def attention_targets(keys: Keys, attention: MLA, prefix: str) -> Iterator[tuple[str, Target]]:
    """Checkpoint rows per head are (nope | rope); ours are all heads' nope, then all heads' rope (see `MLA`)."""
    halves = keys.family == "deepseek_v3" and not keys.flag("rope_interleave", True)
    order_R = interleave_rows(attention.rope_dim) if halves else torch.arange(attention.rope_dim)
    heads, nope, rope, kv = attention.num_heads, attention.nope_dim, attention.rope_dim, attention.kv_rank
    order_head = torch.cat((torch.arange(nope), nope + order_R))
    order_kv = torch.cat((torch.arange(kv), kv + order_R))
    down = attention.down
    if attention.up is None:
        split = (heads * nope, kv + rope, heads * rope)
        q_nope, latent, q_rope = down.weight.split(split)
        q_name, q_width = "q_proj", down.weight.shape[1]
    else:
        q_latent, latent = down.weight.split((attention.q_rank, kv + rope))
        yield f"{prefix}q_a_proj.weight", into(q_latent)
        yield f"{prefix}q_a_layernorm.weight", into(attention.q_norm.weight)
        q_nope, q_rope = attention.up.weight.split((heads * nope, heads * rope))
        q_name, q_width = "q_b_proj", attention.q_rank

    def put_q(tensor: torch.Tensor) -> None:
        by_head = tensor.unflatten(0, (heads, nope + rope))[:, order_head]
        q_nope.view(heads, nope, -1).copy_(by_head[:, :nope])
        q_rope.view(heads, rope, -1).copy_(by_head[:, nope:])

    yield f"{prefix}{q_name}.weight", Target(shape=(heads * (nope + rope), q_width), put=put_q)
    yield f"{prefix}kv_a_proj_with_mqa.weight", into(latent, order_kv)
    yield f"{prefix}kv_a_layernorm.weight", into(attention.kv_norm.weight)
    yield f"{prefix}kv_b_proj.weight", into(attention.kv_up.flatten(0, 1))
    yield f"{prefix}o_proj.weight", into(attention.out.weight)
    if down.bias is not None:
        if attention.up is None:
            latent_bias = down.bias[heads * nope :][: kv + rope]
        else:
            q_bias, latent_bias = down.bias.split((attention.q_rank, kv + rope))
            yield f"{prefix}q_a_proj.bias", into(q_bias)
        yield f"{prefix}kv_a_proj_with_mqa.bias", into(latent_bias, order_kv)
        yield f"{prefix}o_proj.bias", into(attention.out.bias)
