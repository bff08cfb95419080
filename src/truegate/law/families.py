"""Hugging Face configs to routing specs and tensor names, one per layer: the only place that knows model families.

Invariant: a key that the config omits takes the default that transformers gives it; a key whose value the family's
mathematics does not cover is refused by name, never ignored.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from truegate.errors import UserError
from truegate.law.keys import Config, Keys, read_config, shown
from truegate.law.names import (
    PER_EXPERT,
    PER_EXPERT_W123,
    STACKED,
    STACKED_GPT_OSS,
    STACKED_GPT_OSS_MXFP4,
    STACKED_IN_OUT,
    Layout,
    MoeNames,
)
from truegate.law.spec import (
    MOST_SHARED,
    Denominator,
    Groups,
    GroupScore,
    RoutingSpec,
    Score,
    SelectOn,
    Shared,
    SharedGate,
    WeightAt,
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """One routing mathematics and its checkpoint layouts, for the `model_type`s that share them."""

    name: str
    model_types: tuple[str, ...]
    num_layers: int  # transformers' default of num_hidden_layers
    spec: Callable[[Keys, int], RoutingSpec | None]  # layer -> its spec, None where dense
    layouts: tuple[Layout, ...]  # as published checkpoints have it first, as transformers' modules are named second
    wrapper: str | None = None  # model_type of a multimodal config that holds this one in `text_config`
    aliases: tuple[tuple[str, str], ...] = ()  # (key, other name transformers reads and may write it under)

    def keys(self, config: Mapping[str, Any]) -> Keys:
        return Keys(self.name, config, num_layers=self.num_layers, aliases=dict(self.aliases))


def specs_of(config: Config) -> list[RoutingSpec | None]:
    """One spec per layer, None where the layer is dense; next-token layers last, if the config declares any."""
    family, keys, _ = _open(config)
    return [family.spec(keys, layer) for layer in range(keys.num_layers)]


def main_specs_of(config: Config) -> list[RoutingSpec | None]:
    """Those of the layers that a forward pass runs: `specs_of` without the next-token layers."""
    return specs_of(config)[: _open(config)[1].num_main_layers]


def names_of(config: Config) -> list[tuple[MoeNames, ...] | None]:
    """Per layer the tensor names in each checkpoint layout of the family, likeliest first; None where dense."""
    family, _, prefix = _open(config)
    return [
        None if spec is None else tuple(layout.names(prefix, layer, spec) for layout in family.layouts)
        for layer, spec in enumerate(specs_of(config))
    ]


def family_of(config: Config) -> str:
    """The family's name."""
    return _open(config)[0].name


def families() -> tuple[Family, ...]:
    """Every family, in the order of docs/routing.md."""
    return _FAMILIES


def text_config(config: Config) -> dict[str, Any]:
    """The language model's own keys: `config` itself, or its `text_config` for a family that nests it."""
    return dict(_open(config)[1].config)


def _open(config: Config) -> tuple[Family, Keys, str]:
    """Family, its keys and the prefix of its layers' tensor names."""
    top = read_config(config)
    model_type = top.get("model_type")
    for family in _FAMILIES:
        if model_type in family.model_types:
            return family, family.keys(top), "model.layers."
        if model_type == family.wrapper and model_type is not None:
            inner = top.get("text_config")
            if not isinstance(inner, Mapping):
                raise UserError(f"config ({model_type}): text_config is missing, the routing keys live there")
            return family, family.keys(inner), "language_model.model.layers."
    if model_type is None:
        raise UserError("config: model_type is missing, so the model family is unknown")
    known = ", ".join(t for f in _FAMILIES for t in (*f.model_types, *([f.wrapper] if f.wrapper else [])))
    raise UserError(f"config: model_type {shown(model_type)} is not a known MoE family; known are {known}")


def _shared_copies(keys: Keys, key: str, default: int, width: int) -> Shared | None:
    """A shared expert `key` times as wide as a routed one; 0 or null: none."""
    count = 0 if keys.value(key, default)[1] is None else keys.integer(key, default, least=0, most=MOST_SHARED)
    return Shared(intermediate=count * width) if count else None


def _renormalised(keys: Keys, default: bool, eps: float = 0.0) -> dict[str, Any]:
    if not keys.flag("norm_topk_prob", default):
        return {"denominator": Denominator.NONE}
    return {"denominator": Denominator.SUM, "eps": eps}


def _dense_at_start(keys: Keys, layer: int, default: int) -> bool:
    """DeepSeek's rule: MoE from first_k_dense_replace on where moe_layer_freq divides; next-token layers are MoE."""
    first, every = keys.integer("first_k_dense_replace", default), keys.integer("moe_layer_freq", 1, least=1)
    return layer < keys.num_main_layers and (layer < first or layer % every != 0)


def _deepseek_v2(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; groups by max, dropped ones filled 0 (group_limited_greedy) or none (greedy); w = r s."""
    keys.only("scoring_func", "softmax", "DeepSeek-V2 scores by softmax")
    keys.only("norm_topk_prob", False, "transformers ignores it and DeepSeek's code then drops routed_scaling_factor")
    keys.only("mlp_bias", False, "the shared expert has no bias")
    if _dense_at_start(keys, layer, 0):
        return None
    method_key, method = keys.value("topk_method", "greedy")
    if method not in ("greedy", "group_limited_greedy"):
        raise keys.refuse(method_key, f"is {shown(method)}, must be 'greedy' or 'group_limited_greedy'")
    groups = None
    keys.value("n_group", None), keys.value("topk_group", None)  # these speak only where groups are chosen
    if method == "group_limited_greedy":
        count, kept = keys.integer("n_group", None), keys.integer("topk_group", None)
        groups = Groups(count=count, kept=kept, score=GroupScore.MAX, fill=0.0)
    width = keys.integer("moe_intermediate_size", 1407)
    return keys.spec(
        num_experts=keys.integer("n_routed_experts", 64), top_k=keys.integer("num_experts_per_tok", None),
        score=Score.SOFTMAX, groups=groups, routed_scale=keys.number("routed_scaling_factor", 1.0),
        shared=_shared_copies(keys, "n_shared_experts", 2, width),
        hidden=keys.integer("hidden_size", 4096), expert_intermediate=width)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _BiasedGrouped:
    """DeepSeek-V3's routing: c = sigmoid(x) + b; groups by top-2 sum, others -inf; w = r s / (sum + 1e-20)."""

    experts: int = 256
    width: int = 2048
    hidden: int = 7168
    scale: float = 2.5
    groups: tuple[int, int] = (8, 4)
    dense: int = 3

    def __call__(self, keys: Keys, layer: int) -> RoutingSpec | None:
        keys.only("scoring_func", "sigmoid", "this family scores by sigmoid")
        keys.only("topk_method", "noaux_tc", "this family selects with a bias and without auxiliary loss")
        keys.only("mlp_bias", False, "the shared expert has no bias")
        if self._is_dense(keys, layer):
            return None
        count, kept = keys.integer("n_group", self.groups[0]), keys.integer("topk_group", self.groups[1])
        width = keys.integer("moe_intermediate_size", self.width)
        return keys.spec(
            num_experts=keys.integer("n_routed_experts", self.experts), top_k=keys.integer("num_experts_per_tok", 8),
            score=Score.SIGMOID, has_selection_bias=True, **_renormalised(keys, True, 1e-20),
            groups=Groups(count=count, kept=kept, score=GroupScore.TOP2_SUM, fill=float("-inf")),
            routed_scale=keys.number("routed_scaling_factor", self.scale),
            shared=_shared_copies(keys, "n_shared_experts", 1, width),
            hidden=keys.integer("hidden_size", self.hidden), expert_intermediate=width)  # fmt: skip

    def _is_dense(self, keys: Keys, layer: int) -> bool:
        name, kinds = keys.value("mlp_layer_types", None)
        if kinds is None or layer >= keys.num_main_layers:
            return _dense_at_start(keys, layer, self.dense)
        named = isinstance(kinds, list) and all(kind in ("dense", "sparse") for kind in kinds)
        if not named or len(kinds) != keys.num_main_layers:
            raise keys.refuse(name, f"must give 'dense' or 'sparse' for each of {keys.num_main_layers} layers")
        return bool(kinds[layer] == "dense")


def _qwen_is_dense(keys: Keys, layer: int) -> bool:
    every = keys.integer("decoder_sparse_step", 1, least=1)
    return layer in (keys.layers("mlp_only_layers") or []) or (layer + 1) % every != 0


def _qwen2_moe(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; w = s, or s / sum s; shared expert gated by a per-token sigmoid, its width free."""
    num_experts = keys.integer("num_experts", 60, least=0)
    if num_experts == 0 or _qwen_is_dense(keys, layer):
        return None
    shared = keys.integer("shared_expert_intermediate_size", 5632, least=0)
    return keys.spec(
        num_experts=num_experts, top_k=keys.integer("num_experts_per_tok", 4), score=Score.SOFTMAX,
        **_renormalised(keys, False),
        shared=Shared(intermediate=shared, gate=SharedGate.SIGMOID) if shared else None,
        hidden=keys.integer("hidden_size", 2048),
        expert_intermediate=keys.integer("moe_intermediate_size", 1408))  # fmt: skip


def _qwen3_moe(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; w = s, or s / sum s; no shared expert."""
    num_experts = keys.integer("num_experts", 128, least=0)
    if num_experts == 0 or _qwen_is_dense(keys, layer):
        return None
    return keys.spec(
        num_experts=num_experts, top_k=keys.integer("num_experts_per_tok", 8), score=Score.SOFTMAX,
        **_renormalised(keys, False), hidden=keys.integer("hidden_size", 2048),
        expert_intermediate=keys.integer("moe_intermediate_size", 768))  # fmt: skip


def _mixtral(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; w = s / sum s."""
    return keys.spec(
        num_experts=keys.integer("num_local_experts", 8), top_k=keys.integer("num_experts_per_tok", 2),
        score=Score.SOFTMAX, denominator=Denominator.SUM, hidden=keys.integer("hidden_size", 4096),
        expert_intermediate=keys.integer("intermediate_size", 14336))  # fmt: skip


def _gpt_oss(keys: Keys, layer: int) -> RoutingSpec | None:
    """x = W h + c; top-k of x; w = softmax(x[ids]); clamped SwiGLU and biases in the experts."""
    keys.only("swiglu_alpha", 1.702, "the clamped SwiGLU's slope is fixed")
    limit = keys.number("swiglu_limit", 7.0)
    if limit <= 0:
        raise keys.refuse("swiglu_limit", f"is {limit}, must be positive")
    return keys.spec(
        num_experts=keys.integer("num_local_experts", 128), top_k=keys.integer("num_experts_per_tok", 4),
        score=Score.SOFTMAX, select_on=SelectOn.LOGITS, denominator=Denominator.SOFTMAX_TOPK, has_gate_bias=True,
        hidden=keys.integer("hidden_size", 2880), expert_intermediate=keys.integer("intermediate_size", 2880),
        clamp=limit, has_expert_bias=True)  # fmt: skip


def _olmoe(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; w = s, or s / sum s."""
    return keys.spec(
        num_experts=keys.integer("num_experts", 64), top_k=keys.integer("num_experts_per_tok", 8),
        score=Score.SOFTMAX, **_renormalised(keys, False), hidden=keys.integer("hidden_size", 2048),
        expert_intermediate=keys.integer("intermediate_size", 2048))  # fmt: skip


def _minimax_m2(keys: Keys, layer: int) -> RoutingSpec | None:
    """c = sigmoid(x) + b; w = s / sum s."""
    keys.only("scoring_func", "sigmoid", "MiniMax-M2 scores by sigmoid")
    keys.only("shared_intermediate_size", 0, "MiniMax-M2 has no shared expert")
    return keys.spec(
        num_experts=keys.integer("num_local_experts", 256), top_k=keys.integer("num_experts_per_tok", 8),
        score=Score.SIGMOID, has_selection_bias=keys.flag("use_routing_bias", True), denominator=Denominator.SUM,
        hidden=keys.integer("hidden_size", 3072),
        expert_intermediate=keys.integer("intermediate_size", 1536))  # fmt: skip


def _llama4(keys: Keys, layer: int) -> RoutingSpec | None:
    """Top-k of x; w = sigmoid(x), multiplying the expert's input; one shared expert of the routed width."""
    moe_layers = keys.layers("moe_layers")
    if moe_layers is None:
        step = keys.integer("interleave_moe_layer_step", 1, least=1)
        moe_layers = list(range(step - 1, keys.num_main_layers, step))
    if layer not in moe_layers:
        return None
    width = keys.integer("intermediate_size", 8192)
    return keys.spec(
        num_experts=keys.integer("num_local_experts", 16), top_k=keys.integer("num_experts_per_tok", 1),
        score=Score.SIGMOID, select_on=SelectOn.LOGITS, weight_at=WeightAt.INPUT, shared=Shared(intermediate=width),
        hidden=keys.integer("hidden_size", 5120), expert_intermediate=width)  # fmt: skip


def _ernie4_5_moe(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; c = s + b; w = s / max(sum s, moe_norm_min). Its next-token layers are dense."""
    keys.only("use_bias", False, "experts have no biases")
    every = keys.integer("moe_layer_interval", 1, least=1)
    first, last = keys.integer("moe_layer_start_index", 1), keys.integer("moe_layer_end_index", -1)
    last = keys.num_main_layers - 1 if last == -1 else last
    if layer >= keys.num_main_layers or (layer + 1) % every != 0 or not first <= layer <= last:
        return None
    width = keys.integer("moe_intermediate_size", 1536)
    return keys.spec(
        num_experts=keys.integer("moe_num_experts", 64), top_k=keys.integer("moe_k", 6), score=Score.SOFTMAX,
        has_selection_bias=keys.flag("moe_use_aux_free", True), denominator=Denominator.SUM_AT_LEAST,
        eps=keys.number("moe_norm_min", 1e-12), shared=_shared_copies(keys, "moe_num_shared_experts", 2, width),
        hidden=keys.integer("hidden_size", 2560), expert_intermediate=width)  # fmt: skip


def _hunyuan_v1_moe(keys: Keys, layer: int) -> RoutingSpec | None:
    """s = softmax; w = s / sum s; K (and E) may differ by layer; a shared expert of the routed width."""
    if layer < keys.integer("moe_layer_num_skipped", 0, least=0):
        return None
    keys.only("norm_topk_prob", True, "transformers always renormalises")
    width = keys.integer("intermediate_size", 11008)
    for key, covered in (("moe_intermediate_size", width), ("num_shared_expert", 1)):
        name, value = keys.value(key, covered)
        if value is not None and keys.integer(key, covered, layer=layer) != covered:
            raise keys.refuse(
                name, f"is {shown(value)}, only {covered} is supported: transformers gives no other width"
            )
    return keys.spec(
        num_experts=keys.integer("num_experts", 1, layer=layer), top_k=keys.integer("moe_topk", 1, layer=layer),
        score=Score.SOFTMAX, denominator=Denominator.SUM,
        shared=Shared(intermediate=width) if keys.flag("use_mixed_mlp_moe", True) else None,
        hidden=keys.integer("hidden_size", 4096), expert_intermediate=width)  # fmt: skip


_MLP = (Layout(block="mlp.", experts=PER_EXPERT), Layout(block="mlp.", experts=STACKED))
_N_ROUTED = (("n_routed_experts", "num_local_experts"),)
_LLAMA4_LAYOUT = Layout(block="feed_forward.", router="router.weight", shared="shared_expert.", experts=STACKED_IN_OUT)
_FAMILIES: tuple[Family, ...] = (
    Family(
        name="deepseek_v2", model_types=("deepseek_v2",), num_layers=32, spec=_deepseek_v2, layouts=_MLP,
        aliases=(("n_routed_experts", "num_experts"),)),
    Family(
        name="deepseek_v3", model_types=("deepseek_v3", "deepseek_v32", "kimi_k2"), num_layers=61,
        spec=_BiasedGrouped(), layouts=_MLP, aliases=_N_ROUTED),
    Family(
        name="glm4_moe", model_types=("glm4_moe",), num_layers=46, layouts=_MLP, aliases=_N_ROUTED,
        spec=_BiasedGrouped(experts=128, width=1408, hidden=4096, scale=1.0, groups=(1, 1), dense=1)),
    Family(
        name="qwen2_moe", model_types=("qwen2_moe",), num_layers=24, spec=_qwen2_moe,
        layouts=tuple(Layout(block="mlp.", shared="shared_expert.", experts=e) for e in (PER_EXPERT, STACKED))),
    Family(
        name="qwen3_moe", model_types=("qwen3_moe",), num_layers=24, spec=_qwen3_moe, layouts=_MLP,
        aliases=(("num_experts", "num_local_experts"),)),
    Family(
        name="mixtral", model_types=("mixtral",), num_layers=32, spec=_mixtral,
        layouts=(Layout(block="block_sparse_moe.", experts=PER_EXPERT_W123), Layout(block="mlp.", experts=STACKED)),
        aliases=(("num_local_experts", "num_experts"),)),
    Family(
        name="gpt_oss", model_types=("gpt_oss",), num_layers=36, spec=_gpt_oss,
        layouts=tuple(
            Layout(block="mlp.", router="router.weight", gate_bias="router.bias", experts=e)
            for e in (STACKED_GPT_OSS_MXFP4, STACKED_GPT_OSS))),
    Family(
        name="olmoe", model_types=("olmoe",), num_layers=16, spec=_olmoe, layouts=_MLP,
        aliases=(("num_experts", "num_local_experts"),)),
    Family(
        name="minimax_m2", model_types=("minimax_m2",), num_layers=62, spec=_minimax_m2,
        layouts=tuple(
            Layout(block=b, selection_bias="e_score_correction_bias", experts=e)
            for b, e in (("block_sparse_moe.", PER_EXPERT_W123), ("mlp.", STACKED))),
        aliases=(("num_local_experts", "num_experts"),)),
    Family(
        name="llama4", model_types=("llama4_text",), wrapper="llama4", num_layers=48, spec=_llama4,
        layouts=(_LLAMA4_LAYOUT,)),
    Family(
        name="ernie4_5_moe", model_types=("ernie4_5_moe",), num_layers=28, spec=_ernie4_5_moe,
        layouts=(
            Layout(block="mlp.", selection_bias="moe_statics.e_score_correction_bias", experts=PER_EXPERT),
            Layout(block="mlp.", selection_bias="gate.moe_statics.e_score_correction_bias", experts=STACKED)),
        aliases=(("moe_num_experts", "num_experts"), ("moe_k", "num_experts_per_tok"))),
    Family(
        name="hunyuan_v1_moe", model_types=("hunyuan_v1_moe",), num_layers=32, spec=_hunyuan_v1_moe,
        layouts=tuple(
            Layout(block="mlp.", router="gate.wg.weight", shared="shared_mlp.", experts=e)
            for e in (PER_EXPERT, STACKED)),
        aliases=(("moe_topk", "num_experts_per_tok"), ("num_experts", "num_local_experts"))),
)  # fmt: skip
