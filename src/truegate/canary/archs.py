"""The canary's config.json per family: shapes that choose kernels are kept from the real model, sizes are cut.

Invariant: the config loads unchanged in transformers, and `law.families` reads the real model's routing from it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from truegate.errors import UserError
from truegate.law.families import family_of, specs_of, text_config
from truegate.law.spec import Denominator

_MAX_HEADS = 16


@dataclass(frozen=True, kw_only=True)
class Arch:
    """One family: architecture class, default routing (a small relative of the real model), and key names."""

    model_type: str
    architecture: str
    routing: Mapping[str, Any]
    keep: tuple[str, ...]  # keys taken over from a real config, besides the routing's
    expert_width: str = "moe_intermediate_size"
    dense_width: str | None = "intermediate_size"
    shared_width: str | None = None
    mla: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)


_GQA = ("head_dim", "num_key_value_heads", "rope_theta", "rope_parameters", "partial_rotary_factor", "rotary_dim",
        "attention_bias", "use_qk_norm", "qkv_bias")  # fmt: skip
_MLA = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "rope_theta")
_MLA_DEFAULT = {"q_lora_rank": 256, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
                "v_head_dim": 128}  # fmt: skip  # 512 + 64 is the only latent size that the MLA kernels of engines take
_YARN = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
         "original_max_position_embeddings": 4096}  # fmt: skip

ARCHS: dict[str, Arch] = {
    "deepseek_v3": Arch(
        model_type="deepseek_v3", architecture="DeepseekV3ForCausalLM", mla=True, keep=_MLA,
        routing={"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
                 "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1,
                 "scoring_func": "sigmoid", "topk_method": "noaux_tc", "moe_layer_freq": 1},
        extra=_MLA_DEFAULT | {"num_nextn_predict_layers": 0}),
    "deepseek_v2": Arch(
        model_type="deepseek_v2", architecture="DeepseekV2ForCausalLM", mla=True, keep=_MLA,
        routing={"n_routed_experts": 64, "num_experts_per_tok": 6, "n_group": 8, "topk_group": 3, "n_shared_experts": 2,
                 "routed_scaling_factor": 16.0, "norm_topk_prob": False, "first_k_dense_replace": 1,
                 "scoring_func": "softmax", "topk_method": "group_limited_greedy", "moe_layer_freq": 1},
        extra=_MLA_DEFAULT),
    "glm4_moe": Arch(
        model_type="glm4_moe", architecture="Glm4MoeForCausalLM", keep=_GQA,
        routing={"n_routed_experts": 64, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
                 "routed_scaling_factor": 2.5, "norm_topk_prob": True, "first_k_dense_replace": 1},
        extra={"head_dim": 128, "num_key_value_heads": 4, "attention_bias": False, "use_qk_norm": True,
               "partial_rotary_factor": 0.5, "num_nextn_predict_layers": 0}),
    "qwen3_moe": Arch(
        model_type="qwen3_moe", architecture="Qwen3MoeForCausalLM", keep=_GQA,
        routing={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
                 "mlp_only_layers": []},
        extra={"head_dim": 128, "num_key_value_heads": 4, "attention_bias": False}),
    "qwen2_moe": Arch(
        model_type="qwen2_moe", architecture="Qwen2MoeForCausalLM", keep=_GQA,
        shared_width="shared_expert_intermediate_size",
        routing={"num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False, "decoder_sparse_step": 1,
                 "mlp_only_layers": []},
        extra={"num_key_value_heads": 4, "qkv_bias": True}),
    "mixtral": Arch(
        model_type="mixtral", architecture="MixtralForCausalLM", keep=_GQA, expert_width="intermediate_size",
        dense_width=None, routing={"num_local_experts": 8, "num_experts_per_tok": 2},
        extra={"head_dim": 128, "num_key_value_heads": 4}),
    "gpt_oss": Arch(
        model_type="gpt_oss", architecture="GptOssForCausalLM", keep=("head_dim", "num_key_value_heads", "rope_theta"),
        expert_width="intermediate_size", dense_width=None,
        routing={"num_local_experts": 32, "num_experts_per_tok": 4, "swiglu_limit": 7.0},
        extra={"head_dim": 64, "num_key_value_heads": 4, "attention_bias": True, "sliding_window": 128}),
    "olmoe": Arch(
        model_type="olmoe", architecture="OlmoeForCausalLM", keep=("num_key_value_heads", "rope_theta", "clip_qkv"),
        expert_width="intermediate_size", dense_width=None,
        routing={"num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False},
        extra={"num_key_value_heads": 4}),
    "minimax_m2": Arch(
        model_type="minimax_m2", architecture="MiniMaxM2ForCausalLM", keep=_GQA, expert_width="intermediate_size",
        dense_width=None,
        routing={"num_local_experts": 64, "num_experts_per_tok": 8, "scoring_func": "sigmoid",
                 "use_routing_bias": True, "shared_intermediate_size": 0},
        extra={"head_dim": 128, "num_key_value_heads": 4, "rotary_dim": 64, "use_qk_norm": True,
               "qk_norm_type": "per_layer"}),
    "llama4": Arch(
        model_type="llama4_text", architecture="Llama4ForCausalLM", keep=("head_dim", "num_key_value_heads",
        "rope_theta", "use_qk_norm", "attention_chunk_size"), expert_width="intermediate_size",
        dense_width="intermediate_size_mlp",
        routing={"num_local_experts": 16, "num_experts_per_tok": 1, "interleave_moe_layer_step": 1},
        extra={"head_dim": 128, "num_key_value_heads": 4, "use_qk_norm": True}),
}  # fmt: skip
_ROUTING_KEYS = (
    "n_routed_experts", "num_experts", "num_local_experts", "num_experts_per_tok", "n_group", "topk_group",
    "n_shared_experts", "routed_scaling_factor", "norm_topk_prob", "first_k_dense_replace", "scoring_func",
    "topk_method", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers", "swiglu_limit", "use_routing_bias",
    "interleave_moe_layer_step", "hidden_act", "rms_norm_eps",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the user asked for; None takes the real model's value (hidden) or a small default."""

    hidden: int | None = None
    layers: int | None = None  # None: three with experts, after one dense layer where the family begins with some
    intermediate: int | None = None
    tp: int = 1
    dtype: str = "bfloat16"
    num_experts: int | None = None


def default_config(arch: str) -> dict[str, Any]:
    """A small relative of the family's real model, as a config to be `--like`."""
    if arch not in ARCHS:
        raise UserError(f"--arch {arch} is not known; choose one of {', '.join(ARCHS)}")
    a = ARCHS[arch]
    return {"model_type": a.model_type, "hidden_size": 512, **a.routing, **a.extra}


def canary_config(like: Mapping[str, Any], sizes: Sizes, vocab_size: int) -> dict[str, Any]:
    """config.json of a canary with the routing and kernel-choosing shapes of `like`."""
    a = ARCHS.get(family_of(like))
    if a is None:
        raise UserError(f"{family_of(like)}: no canary for this family yet; there are {', '.join(ARCHS)}")
    real = text_config(like)
    hidden = sizes.hidden or real.get("hidden_size") or 512
    layers = sizes.layers if sizes.layers is not None else _three_moe_layers(real | {"hidden_size": hidden}, a)
    if layers < 1:
        raise UserError("--layers must be at least 1")
    width = sizes.intermediate or 128 * sizes.tp
    if width % (4 * sizes.tp):
        raise UserError(f"--intermediate {width} must be a multiple of 4 x tp {sizes.tp}")
    heads = _heads(real, a, hidden)
    config: dict[str, Any] = {
        "architectures": [a.architecture], "model_type": a.model_type, "dtype": sizes.dtype,
        "torch_dtype": sizes.dtype, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "vocab_size": vocab_size, "max_position_embeddings": 8192,
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02,
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    }  # fmt: skip
    config |= a.extra | _explicit(like, a)
    config |= {k: real[k] for k in (*_ROUTING_KEYS, *a.keep)
               if k in real and (real[k] is not None or k == "q_lora_rank")}  # fmt: skip  # null: queries are not cut
    if a.model_type == "gpt_oss":  # engines read yarn's keys without looking whether they are there
        config |= {"rope_parameters": _YARN | {"rope_theta": _theta(real)}, "max_position_embeddings": 131072}
    elif "rope_parameters" in config:
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": _theta(real), **_partial(config)}
    _fit(config, a, layers, width, heads)
    if sizes.num_experts:
        key = next(k for k in ("n_routed_experts", "num_experts", "num_local_experts") if k in a.routing)
        config[key] = sizes.num_experts
    if all(spec is None for spec in specs_of(config)):
        raise UserError(f"{layers} layers of this model hold no MoE layer; give more --layers")
    return config


def _explicit(like: Mapping[str, Any], a: Arch) -> dict[str, Any]:
    """The family's routing keys with the values that the real model's spec has, for keys that its config omits."""
    specs = specs_of(like)
    first = next((i for i, spec in enumerate(specs) if spec is not None), None)
    if first is None or (spec := specs[first]) is None:
        raise UserError("this model has no MoE layer; a canary audits MoE layers")
    groups = spec.groups
    derived = {
        "n_routed_experts": spec.num_experts, "num_experts": spec.num_experts, "num_local_experts": spec.num_experts,
        "num_experts_per_tok": spec.top_k, "n_group": groups.count if groups else 1,
        "topk_group": groups.kept if groups else 1, "n_shared_experts": spec.num_shared_slots,
        "routed_scaling_factor": spec.routed_scale, "norm_topk_prob": spec.denominator is not Denominator.NONE,
        "first_k_dense_replace": first, "swiglu_limit": spec.clamp, "use_routing_bias": spec.has_selection_bias,
    }  # fmt: skip
    if a.model_type == "deepseek_v2":
        derived["topk_method"] = "greedy" if groups is None else "group_limited_greedy"
    return {key: derived.get(key, value) for key, value in a.routing.items()}


def _three_moe_layers(real: Mapping[str, Any], a: Arch) -> int:
    """Layers of which three hold experts, in the pattern of the real model (its dense beginning cut to one)."""
    first = min(real.get("first_k_dense_replace", a.routing.get("first_k_dense_replace", 0)) or 0, 1)
    step = real.get("decoder_sparse_step") or real.get("interleave_moe_layer_step") or 1
    return first + 3 * step


def _fit(config: dict[str, Any], a: Arch, layers: int, width: int, heads: int) -> None:
    """Cut the keys that depend on the number of layers, heads or widths, in place."""
    config[a.expert_width] = width
    if a.dense_width and a.dense_width != a.expert_width:
        config[a.dense_width] = width
    if a.shared_width:
        config[a.shared_width] = 2 * width
    if a.mla:
        config["num_key_value_heads"] = heads
    else:
        config["num_key_value_heads"] = min(config["num_key_value_heads"], heads)
    if "first_k_dense_replace" in config:
        config["first_k_dense_replace"] = min(config["first_k_dense_replace"], 1, layers - 1)
    if "mlp_only_layers" in config:
        config["mlp_only_layers"] = [i for i in config["mlp_only_layers"] if i < layers]
    if a.model_type == "gpt_oss":
        config["layer_types"] = [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]


def _heads(real: Mapping[str, Any], a: Arch, hidden: int) -> int:
    """At most 16 attention heads, a divisor of the hidden size where the family derives the head size from it."""
    heads = min(int(real.get("num_attention_heads") or _MAX_HEADS), _MAX_HEADS)
    if a.model_type in ("qwen2_moe", "olmoe"):
        heads = max(1, hidden // 128)
        while hidden % heads:
            heads -= 1
    if a.model_type == "deepseek_v2":
        while hidden % heads:
            heads -= 1
    return heads


def _theta(real: Mapping[str, Any]) -> float:
    parameters = real.get("rope_parameters") or {}
    return float(real.get("rope_theta") or parameters.get("rope_theta") or 10000.0)


def _partial(config: Mapping[str, Any]) -> dict[str, Any]:
    factor = config.get("partial_rotary_factor") or (config.get("rope_parameters") or {}).get("partial_rotary_factor")
    return {} if factor is None else {"partial_rotary_factor": factor}


def attention_tensors(config: Mapping[str, Any], layer: int) -> dict[str, tuple[int, ...]]:
    """Name -> shape of one layer's attention weights, in the family's own names."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    prefix = f"model.layers.{layer}.self_attn."
    if "kv_lora_rank" in config:
        nope, rope, value = (config[k] for k in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
        latent, query = config["kv_lora_rank"], config.get("q_lora_rank")
        shapes = {"kv_a_proj_with_mqa.weight": (latent + rope, hidden), "kv_a_layernorm.weight": (latent,),
                  "kv_b_proj.weight": (heads * (nope + value), latent),
                  "o_proj.weight": (hidden, heads * value)}  # fmt: skip
        if query:
            shapes |= {"q_a_proj.weight": (query, hidden), "q_a_layernorm.weight": (query,),
                       "q_b_proj.weight": (heads * (nope + rope), query)}  # fmt: skip
        else:
            shapes["q_proj.weight"] = (heads * (nope + rope), hidden)
        return {prefix + n: s for n, s in shapes.items()}
    size, groups = config.get("head_dim") or hidden // heads, config["num_key_value_heads"]
    shapes = {"q_proj.weight": (heads * size, hidden), "k_proj.weight": (groups * size, hidden),
              "v_proj.weight": (groups * size, hidden), "o_proj.weight": (hidden, heads * size)}  # fmt: skip
    model = config["model_type"]
    if config.get("attention_bias") or (model == "qwen2_moe" and config.get("qkv_bias", True)):
        shapes |= {"q_proj.bias": (heads * size,), "k_proj.bias": (groups * size,), "v_proj.bias": (groups * size,)}
    if model == "gpt_oss":
        shapes |= {"sinks": (heads,)} | ({"o_proj.bias": (hidden,)} if config.get("attention_bias") else {})
    if model == "qwen3_moe" or (model == "glm4_moe" and config.get("use_qk_norm")):
        shapes |= {"q_norm.weight": (size,), "k_norm.weight": (size,)}
    if model in ("olmoe", "minimax_m2"):
        shapes |= {"q_norm.weight": (heads * size,), "k_norm.weight": (groups * size,)}
    return {prefix + n: s for n, s in shapes.items()}


def dense_prefix(config: Mapping[str, Any], layer: int) -> str:
    """Prefix of a dense layer's gate_proj, up_proj and down_proj."""
    block = "feed_forward" if config["model_type"] == "llama4_text" else "mlp"
    return f"model.layers.{layer}.{block}."
