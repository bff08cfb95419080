"""Configs to specs and names, held against transformers: its config defaults, its layers, the files it writes.

The strongest law: a layer computed in numpy from a checkpoint's tensors, by spec and names alone, equals the module of
transformers. E experts, D hidden, F expert intermediate, T tokens.
"""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.numpy import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from truegate.errors import UserError
from truegate.law.families import families, family_of, names_of, read_config, specs_of, text_config
from truegate.law.names import Axes, GateUp, PerExpert, choose
from truegate.law.select import coefficients
from truegate.law.spec import Activation, RoutingSpec, SharedGate, WeightAt

NAMED = [(f.name, t) for f in families() for t in f.model_types if t != "kimi_k2"]  # kimi_k2: remote code only
MODEL = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 2, "num_key_value_heads": 2,
    "intermediate_size": 24, "head_dim": 16, "pad_token_id": None, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MLA = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
DEEPSEEK = {"n_routed_experts": 12, "num_experts_per_tok": 3, "n_group": 4, "topk_group": 2, "n_shared_experts": 2,
            "moe_intermediate_size": 16, "first_k_dense_replace": 1}  # fmt: skip
QWEN = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
INDEXER = {"index_topk": 4, "index_head_dim": 16, "index_n_heads": 2}
TINY = {
    "deepseek_v2 greedy": ("deepseek_v2", MLA | DEEPSEEK | {"routed_scaling_factor": 16.0}),
    "deepseek_v2 grouped": ("deepseek_v2", MLA | DEEPSEEK | {"topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", MLA | DEEPSEEK),
    "deepseek_v3 not normalised": ("deepseek_v3", MLA | DEEPSEEK | {"norm_topk_prob": False}),
    "deepseek_v32": ("deepseek_v32", MLA | DEEPSEEK | INDEXER | {"first_k_dense_replace": 2}),
    "deepseek_v32 by type": (
        "deepseek_v32",
        MLA | DEEPSEEK | INDEXER | {"mlp_layer_types": ["sparse", "dense", "sparse", "dense"]},
    ),
    "glm4_moe": ("glm4_moe", DEEPSEEK | {"routed_scaling_factor": 2.5}),
    "qwen2_moe": ("qwen2_moe", QWEN | {"shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
    "qwen3_moe": ("qwen3_moe", QWEN | {"norm_topk_prob": True, "mlp_only_layers": [1, 3]}),
    "mixtral": ("mixtral", {"num_local_experts": 6}),
    "gpt_oss": ("gpt_oss", {"num_local_experts": 6, "num_experts_per_tok": 3, "swiglu_limit": 1.5}),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 3}),
    "minimax_m2": ("minimax_m2", {"num_local_experts": 6, "num_experts_per_tok": 3}),
    "llama4_text": ("llama4_text", {"num_local_experts": 6, "num_experts_per_tok": 2, "interleave_moe_layer_step": 2,
                                    "intermediate_size_mlp": 40}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_num_experts": 6, "moe_k": 3, "moe_intermediate_size": 16,
                                      "moe_layer_interval": 2, "moe_layer_end_index": 2}),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", {"num_experts": 6, "moe_topk": [1, 2, 3, 4], "hidden_act": "gelu"}),
}  # fmt: skip


def tiny_model(model_type: str, keys: dict) -> torch.nn.Module:
    """A tiny model with every weight and bias drawn at random, so that none is silently zero."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(MODEL | keys)), dtype=torch.float32)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if re.search(r"mlp|feed_forward", name):
                tensor.normal_(std=0.3)
    return model.eval()


@pytest.fixture(scope="module", params=TINY)
def saved(request, tmp_path_factory):
    """(model, folder as published checkpoints are laid out, folder as the modules are named)."""
    model = tiny_model(*TINY[request.param])
    folders = []
    for original in (True, False):
        folders.append(tmp_path_factory.mktemp("saved"))
        model.save_pretrained(folders[-1], save_original_format=original)
    return model, *folders


def moe_blocks(model: torch.nn.Module) -> list[torch.nn.Module | None]:
    blocks = [getattr(layer, "mlp", None) or layer.feed_forward for layer in model.model.layers]
    return [block if hasattr(block, "experts") else None for block in blocks]


@pytest.mark.parametrize(("family", "model_type"), NAMED)
def test_omitted_keys_take_the_defaults_of_transformers(family, model_type):
    required = {"num_experts_per_tok": 6} if model_type == "deepseek_v2" else {}
    full = AutoConfig.for_model(model_type, **required).to_dict()
    num_layers = full["num_hidden_layers"]
    specs = specs_of({"model_type": model_type, **required})
    assert family_of(full) == family
    assert specs == specs_of(full)[:num_layers]
    assert len(specs) == num_layers
    for key in set(full) - {"model_type", *required}:
        alone = {k: v for k, v in full.items() if k != key}
        assert specs_of(alone)[:num_layers] == specs, key


def test_specs_are_none_just_where_the_model_is_dense(saved):
    model, *folders = saved
    dense = [block is None for block in moe_blocks(model)]
    for folder in folders:
        specs = specs_of(folder)[: len(dense)]
        assert [spec is None for spec in specs] == dense
        assert [names is None for names in names_of(folder)][: len(dense)] == dense


def test_each_layout_names_every_moe_tensor_of_its_checkpoint(saved):
    model, *folders = saved
    for i, folder in enumerate(folders):
        tensors = load_file(folder / "model.safetensors")
        found = set()
        for alternatives in names_of(folder)[: len(model.model.layers)]:
            if alternatives is not None:
                names = choose(alternatives, tensors)
                per_expert = [isinstance(a.experts, PerExpert) for a in alternatives]
                assert names is alternatives[i] if per_expert == [True, False] else not any(per_expert)
                assert len(names.tensors()) == len(set(names.tensors()))
                found |= set(names.tensors())
        moe = {f"layers.{n}." for n, block in enumerate(moe_blocks(model)) if block is not None}
        expected = {
            name
            for name in tensors
            if any(layer in name for layer in moe) and re.search(r"\.(mlp|feed_forward|block_sparse_moe)\.", name)
        }
        assert found == expected


def act(spec: RoutingSpec, gate: np.ndarray, up: np.ndarray) -> np.ndarray:
    if spec.activation is Activation.SWIGLU_CLAMP:
        gate, up = np.minimum(gate, spec.clamp), np.clip(up, -spec.clamp, spec.clamp)
        return (up + 1) * gate / (1 + np.exp(-1.702 * gate))
    if spec.activation is Activation.SILU:
        return gate / (1 + np.exp(-gate)) * up
    assert spec.activation is Activation.GELU
    return 0.5 * gate * (1 + np.vectorize(math.erf)(gate / math.sqrt(2))) * up


def expert_weights(names, tensors, expert: int) -> tuple[np.ndarray, ...]:
    """(gate [F, D], up [F, D], down [D, F], gate bias, up bias, down bias) of one expert from either layout."""
    experts, zero = names.experts, np.zeros(1)
    if isinstance(experts, PerExpert):
        gate, up, down = (tensors[n.format(expert=expert)] for n in (experts.gate, experts.up, experts.down))
        return gate, up, down, zero, zero, zero
    gate_up, down = tensors[experts.gate_up][expert], tensors[experts.down][expert]
    if experts.axes is Axes.IN_OUT:
        gate_up, down = gate_up.T, down.T
    biases = tensors[experts.gate_up_bias][expert] if experts.gate_up_bias else np.zeros(len(gate_up))
    down_bias = tensors[experts.down_bias][expert] if experts.down_bias else zero
    half = len(gate_up) // 2
    first, second = (slice(0, None, 2), slice(1, None, 2)) if experts.order is GateUp.INTERLEAVED else (
        slice(0, half), slice(half, None))  # fmt: skip
    return gate_up[first], gate_up[second], down, biases[first], biases[second], down_bias


def layer_from_file(spec: RoutingSpec, names, tensors, x_TD: np.ndarray) -> np.ndarray:
    """y_T = sum_e C_out[T,e] F_e(C_in[T,e] x_T) + C_out[T,E] G(x_T), from the file's tensors alone."""
    logits_TE = x_TD @ tensors[names.router].T + (tensors[names.gate_bias] if names.gate_bias else 0)
    bias = None if names.selection_bias is None else tensors[names.selection_bias].reshape(-1)
    gate = 1 / (1 + np.exp(-x_TD @ tensors[names.shared_gate].T)) if names.shared_gate else None
    c_out = coefficients(spec, logits_TE, bias_E=bias, shared_gate_T=gate)
    c_in = coefficients(spec, logits_TE, bias_E=bias, shared_gate_T=gate, at=WeightAt.INPUT)
    y_TD = np.zeros_like(x_TD)
    for e in range(spec.num_experts):
        gate_w, up_w, down_w, gate_b, up_b, down_b = expert_weights(names, tensors, e)
        x = c_in[:, e, None] * x_TD
        y_TD += c_out[:, e, None] * (act(spec, x @ gate_w.T + gate_b, x @ up_w.T + up_b) @ down_w.T + down_b)
    if names.shared is not None:
        gate_w, up_w, down_w = (tensors[n] for n in (names.shared.gate, names.shared.up, names.shared.down))
        assert gate_w.shape == (spec.shared.intermediate, spec.hidden)
        y_TD += c_out[:, -1:] * (act(spec, x_TD @ gate_w.T, x_TD @ up_w.T) @ down_w.T)
    return y_TD


def test_a_layer_computed_from_the_files_tensors_is_the_transformers_layer(saved):
    model, *folders = saved
    x_TD = np.random.default_rng(0).normal(size=(17, MODEL["hidden_size"]))
    for folder in folders:
        tensors = {n: t.astype(np.float64) for n, t in load_file(folder / "model.safetensors").items()}
        pairs = zip(moe_blocks(model), specs_of(folder), names_of(folder), strict=False)
        for block, spec, alternatives in pairs:
            if block is None:
                continue
            with torch.no_grad():
                out = block(torch.from_numpy(x_TD).float()[None])
            expected = (out[0] if isinstance(out, tuple) else out).double().numpy().reshape(x_TD.shape)
            y_TD = layer_from_file(spec, choose(alternatives, tensors), tensors, x_TD)
            np.testing.assert_allclose(y_TD, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


def published(model_type: str, **keys) -> list[RoutingSpec | None]:
    return specs_of({"model_type": model_type, **keys})


def test_published_models_have_the_shapes_they_are_known_for():
    moe = {"num_nextn_predict_layers": 1}
    v3 = published("deepseek_v3", **moe)
    assert (len(v3), v3.count(None), v3[-1].kind, v3[-1].num_shared_slots) == (62, 3, "biased_grouped_sigmoid", 1)
    kimi = published("kimi_k2", n_routed_experts=384, n_group=1, topk_group=1, routed_scaling_factor=2.827,
                     first_k_dense_replace=1, num_nextn_predict_layers=0)  # fmt: skip
    assert (len(kimi), kimi.count(None), kimi[1].kind, float(kimi[1].scale)) == (61, 1, "biased_grouped_sigmoid", 2.827)
    qwen = published("qwen2_moe")
    assert (qwen[0].num_shared_slots, qwen[0].shared.gate) == (4, SharedGate.SIGMOID)
    assert published("qwen2_moe", shared_expert_intermediate_size=20480, moe_intermediate_size=2560)[0].shared
    maverick = published("llama4_text", interleave_moe_layer_step=2, num_local_experts=128)
    assert [spec is None for spec in maverick[:4]] == [True, False, True, False]
    air = published("glm4_moe", **moe)
    assert (len(air), air.count(None), air[-1]) == (47, 1, air[1])


def test_next_token_layers_come_last_under_the_next_layer_number():
    names = names_of({"model_type": "glm4_moe", "num_mtp_layers": 2, "num_hidden_layers": 46})
    assert len(names) == 48
    assert names[47][0].router == "model.layers.47.mlp.gate.weight"
    assert len(specs_of({"model_type": "ernie4_5_moe", "num_nextn_predict_layers": 1})) == 29
    assert specs_of({"model_type": "ernie4_5_moe", "num_nextn_predict_layers": 1})[-1] is None


def test_a_multimodal_config_is_read_through_its_text_config(tmp_path):
    inner = {"model_type": "llama4_text", "num_hidden_layers": 2, "num_local_experts": 4}
    config = {"model_type": "llama4", "num_local_experts": 999, "text_config": inner}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert [spec.num_experts for spec in specs_of(tmp_path)] == [4, 4]
    assert text_config(tmp_path / "config.json") == inner
    assert names_of(str(tmp_path))[1][0].experts.gate_up == (
        "language_model.model.layers.1.feed_forward.experts.gate_up_proj"
    )


def test_gpt_oss_names_its_mxfp4_blocks_before_its_bf16_tensors():
    mxfp4, plain = names_of({"model_type": "gpt_oss"})[0]
    assert mxfp4.experts.gate_up_scales == "model.layers.0.mlp.experts.gate_up_proj_scales"
    assert (mxfp4.experts.axes, plain.experts.axes) == (Axes.OUT_IN, Axes.IN_OUT)
    assert choose((mxfp4, plain), set(plain.tensors())) is plain


def test_a_checkpoint_without_a_tensor_is_refused_by_its_name():
    alternatives = names_of({"model_type": "qwen3_moe"})[0]
    tensors = set(alternatives[0].tensors()) - {"model.layers.0.mlp.experts.7.up_proj.weight"}
    with pytest.raises(UserError, match=r"lacks tensor model\.layers\.0\.mlp\.experts\.7\.up_proj\.weight;"):
        choose(alternatives, tensors)
    with pytest.raises(UserError, match=r"and \d+ more"):
        choose(alternatives, set())


V3 = {"model_type": "deepseek_v3"}


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({**V3, "n_group": 7}, "n_group 7 does not divide the 256 experts"),
        ({**V3, "topk_group": 9}, "topk_group is 9"),
        ({**V3, "num_experts_per_tok": 129}, "num_experts_per_tok 129 exceeds the 128"),
        ({**V3, "num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({**V3, "routed_scaling_factor": -2.5}, "routed_scaling_factor is -2.5"),
        ({**V3, "routed_scaling_factor": "2.5"}, "routed_scaling_factor is '2.5', must be a number"),
        ({**V3, "n_routed_experts": None}, "n_routed_experts is missing"),
        ({**V3, "n_routed_experts": 256.0}, "n_routed_experts is 256.0, must be an integer"),
        ({**V3, "n_routed_experts": 256, "num_local_experts": 128}, "n_routed_experts is 256 but num_local_experts"),
        ({**V3, "norm_topk_prob": "yes"}, "norm_topk_prob is 'yes'"),
        ({**V3, "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({**V3, "topk_method": "greedy"}, "topk_method is 'greedy'"),
        ({**V3, "moe_layer_freq": 0}, "moe_layer_freq is 0"),
        ({**V3, "hidden_size": 0}, "hidden_size is 0"),
        ({**V3, "moe_intermediate_size": -1}, "moe_intermediate_size is -1"),
        ({**V3, "n_shared_experts": -1}, "n_shared_experts is -1"),
        ({**V3, "hidden_act": "relu"}, "hidden_act is 'relu'"),
        ({**V3, "num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ({**V3, "num_nextn_predict_layers": -1}, "num_nextn_predict_layers is -1"),
        (
            {**V3, "num_nextn_predict_layers": 1, "num_mtp_layers": 2},
            "num_nextn_predict_layers is 1 but num_mtp_layers",
        ),
        ({**V3, "mlp_layer_types": ["sparse"]}, "mlp_layer_types must give"),
        ({**V3, "num_local_experts": 100}, "n_group 8 does not divide the 100 experts"),
        ({**V3, "mlp_layer_types": 5}, "mlp_layer_types must give"),
        ({**V3, "mlp_layer_types": [{}] * 61}, "mlp_layer_types must give"),
        ({**V3, "hidden_act": ["silu"]}, "hidden_act is ['silu']"),
        ({**V3, "n_routed_experts": 10**12}, "n_routed_experts is 1000000000000, must be at most"),
        ({**V3, "n_routed_experts": 10**9}, "n_routed_experts is 1000000000, must be at most 65536"),
        ({**V3, "n_shared_experts": 10**6}, "n_shared_experts is 1000000, must be at most 1024"),
        ({**V3, "num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, must be at most 10000"),
        ({**V3, "num_nextn_predict_layers": 10**9}, "num_nextn_predict_layers is 1000000000, must be at most 10000"),
        ({**V3, "routed_scaling_factor": 10**400}, "too large for a float"),
        ({**V3, "routed_scaling_factor": 1e-320}, "routed_scaling_factor is 1e-320, must be in 1e-30..1e+30"),
        ({**V3, "topk_group": [1] * 500}, "1..., must be an integer"),
        (
            {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 10**8},
            "shared_expert_intermediate_size is 100000000, must be at most 1024 times",
        ),
        ({**V3, "n_group": 256, "topk_group": 128}, "n_group 256 leaves 1"),
        ({"model_type": "deepseek_v2"}, "num_experts_per_tok is missing"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "noaux_tc"}, "topk_method is"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"model_type": "deepseek_v2", "num_experts_per_tok": 6, "topk_method": "group_limited_greedy"}, "n_group is"),
        ({"model_type": "qwen2_moe", "decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"model_type": "qwen3_moe", "mlp_only_layers": 3}, "mlp_only_layers is 3"),
        ({"model_type": "mixtral", "num_experts_per_tok": 9}, "num_experts_per_tok 9 exceeds the 8"),
        ({"model_type": "gpt_oss", "swiglu_alpha": 1.0}, "swiglu_alpha is 1.0"),
        ({"model_type": "gpt_oss", "swiglu_limit": -1.0}, "swiglu_limit is -1.0"),
        ({"model_type": "minimax_m2", "scoring_func": "softmax"}, "scoring_func is 'softmax'"),
        ({"model_type": "minimax_m2", "shared_intermediate_size": 8}, "shared_intermediate_size is 8"),
        ({"model_type": "llama4_text", "interleave_moe_layer_step": 0}, "interleave_moe_layer_step is 0"),
        ({"model_type": "llama4"}, "text_config is missing"),
        ({"model_type": "ernie4_5_moe", "use_bias": True}, "use_bias is True"),
        ({"model_type": "ernie4_5_moe", "moe_norm_min": -1.0}, "moe_norm_min is -1.0"),
        ({"model_type": "hunyuan_v1_moe", "num_experts": 4, "moe_topk": [1, 5] * 16}, "moe_topk 5 exceeds the 4"),
        ({"model_type": "hunyuan_v1_moe", "moe_topk": [1, 1]}, "moe_topk lists 2 layers"),
        ({"model_type": "hunyuan_v1_moe", "moe_intermediate_size": [9] * 32}, "moe_intermediate_size is"),
        ({"model_type": "llama"}, "model_type 'llama' is not a known MoE family; known are deepseek_v2"),
        ({}, "model_type is missing"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_that_cannot_be_is_refused_by_its_key(config, key):
    with pytest.raises(UserError, match=re.escape(key)):
        specs_of(config)


def test_a_config_file_that_cannot_be_read_is_refused_by_its_path(tmp_path):
    with pytest.raises(UserError, match=r"config\.json: No such file"):
        specs_of(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("[1")
    with pytest.raises(UserError, match="not JSON"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(UserError, match="holds a list"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(UserError, match="nested too deeply"):
        read_config(tmp_path)
    with pytest.raises(UserError, match="File name too long"):
        read_config("c" * 5000)


@pytest.mark.parametrize("family", [f for f in families() if f.aliases], ids=lambda f: f.name)
def test_two_names_of_one_key_are_read_alike(family):
    values = {"model_type": family.model_types[0], "num_experts_per_tok": 2}
    values |= {key: 2 if key in ("moe_k", "moe_topk") else 64 for key, _ in family.aliases}
    for key, other in family.aliases:
        rest = {k: v for k, v in values.items() if k not in (key, other)}
        specs = specs_of({**rest, key: values[key]})
        assert (
            specs == specs_of({**rest, other: values[key]}) == specs_of({**rest, key: values[key], other: values[key]})
        )
        assert specs != specs_of({**rest, key: values[key] * 2})


def test_the_docs_table_every_moe_family_of_transformers():
    if not transformers.__version__.startswith("5.24."):
        pytest.skip(f"docs/routing.md tables transformers 5.24, this is {transformers.__version__}")
    text = (Path(__file__).parents[3] / "docs" / "routing.md").read_text(encoding="utf-8")
    table = text[text.index("## Every MoE family") :]
    marks = re.compile(r"num_experts|n_routed_experts|num_local_experts|routed_scaling|DeepseekV3|\"deepseek_v3\"")
    found = set()
    for folder in (Path(transformers.__file__).parent / "models").iterdir():
        files = [*folder.glob("modeling_*.py"), *folder.glob("configuration_*.py")]
        if any(marks.search(file.read_text(encoding="utf-8")) for file in files):
            found.add(folder.name)
    found -= {"auto", "bamba"}  # the registry; a field for MoE that Bamba never uses
    assert len(found) > 70
    assert {name for name in found if f"`{name}`" not in table} == set()
    supported = {t.removesuffix("_text") for family in families() for t in family.model_types} - {"kimi_k2"}
    row = next(line for line in table.splitlines() if line.endswith("| supported | above |"))
    assert set(re.findall(r"`(\w+)`", row)) == supported
