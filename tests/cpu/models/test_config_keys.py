"""A config key that changes what a model computes is read or refused by name; one that does not is let through."""

import json

import pytest
from tiny_checkpoints import ARCHITECTURES

from truegate.errors import UserError
from truegate.models import load_model

MLA, GQA = "DeepSeek-V3", "Mixtral"
REFUSED = [
    ("Qwen2-MoE", "use_sliding_window", True),
    ("Qwen3-MoE", "use_sliding_window", True),
    ("Qwen2-MoE", "layer_types", ["full_attention", "sliding_attention", "full_attention"]),
    ("Mixtral", "sliding_window", 128),
    ("GLM-4.5", "sliding_window", 128),
    ("DeepSeek-V3", "quantization_config", {"quant_method": "fp8"}),
    ("DeepSeek-V3", "num_key_value_heads", 2),
    ("DeepSeek-V3", "head_dim", 16),
    ("DeepSeek-V3", "scoring_func", "softmax"),
    ("DeepSeek-V2", "topk_method", "noaux_tc"),
    ("DeepSeek-V3", "hidden_act", "relu"),
    ("Mixtral", "hidden_act", "gelu_made_up"),
    ("Qwen3-MoE", "hidden_act", "gelu"),  # fine in experts, but layer 1 is dense
    ("Mixtral", "attn_logit_softcapping", 50.0),
    ("Qwen3-MoE", "logit_scale", 0.5),
    ("DeepSeek-V3", "index_topk", 2048),
    ("Mixtral", "partial_rotary_factor", 0.5),
    ("Mixtral", "num_key_value_heads", 3),
    ("DeepSeek-V3", "tie_word_embeddings", "yes"),
    ("GLM-4.5", "mlp_bias", True),
]
ROPES = [
    {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0], "rope_theta": 1e4},
    {"rope_type": "llama3", "factor": 8.0, "rope_theta": 1e4},
    {"rope_type": "default", "mrope_section": [2, 2, 2], "rope_theta": 1e4},
    {"rope_type": "yarn", "factor": "4", "rope_theta": 1e4},
]


def write_config(checkpoint, tmp_path, name, **keys):
    stored = json.loads((checkpoint(name)[1] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**stored, **keys}))
    (tmp_path / "model.safetensors").symlink_to(checkpoint(name)[1] / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize(("name", "key", "value"), REFUSED)
def test_a_key_that_changes_the_mathematics_is_refused_by_name(name, key, value, checkpoint, tmp_path):
    with pytest.raises(UserError, match=key):
        load_model(write_config(checkpoint, tmp_path, name, **{key: value}))


@pytest.mark.parametrize("rope", ROPES, ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("spelling", ["rope_parameters", "rope_scaling"])
def test_an_unsupported_rope_is_refused(rope, spelling, checkpoint, tmp_path):
    folder = write_config(checkpoint, tmp_path, "Mixtral", **{"rope_parameters": None, spelling: rope})
    with pytest.raises(UserError, match="rope"):
        load_model(folder)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_config_as_transformers_writes_it_is_let_through(name, checkpoint):
    load_model(checkpoint(name)[1])


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("Mixtral", {"sliding_window": 4096}),  # no sequence is that long
        ("Qwen2-MoE", {"use_sliding_window": False, "sliding_window": 128, "max_window_layers": 2}),
        ("DeepSeek-V3", {"auto_map": {"AutoModel": "x.Y"}, "ep_size": 1, "aux_loss_alpha": 0.001, "seq_aux": True}),
        ("DeepSeek-V3", {"model_type": "kimi_k2"}),
        ("DeepSeek-V2-Lite", {"topk_method": "greedy", "n_group": 1, "topk_group": 1}),  # as it was published
        ("GLM-4.5", {"some_switch": False, "some_factor": None}),
    ],
)
def test_keys_that_change_nothing_are_let_through(name, keys, checkpoint, tmp_path):
    load_model(write_config(checkpoint, tmp_path, name, **keys))


@pytest.mark.parametrize("model_type", ["deepseek_v32", "gpt_oss", "llama"])
def test_an_architecture_the_engine_cannot_run_is_refused(model_type, checkpoint, tmp_path):
    with pytest.raises(UserError, match=model_type):
        load_model(write_config(checkpoint, tmp_path, "DeepSeek-V3", model_type=model_type))


def test_a_folder_without_a_model_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"config\.json"):
        load_model(tmp_path)
