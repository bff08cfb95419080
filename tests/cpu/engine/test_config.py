"""Settings are resolved once, to a new object, and what cannot be is refused by name."""

import json
from dataclasses import replace

import pytest

from truegate.config import EngineConfig, ModelFacts, fit, resolve
from truegate.errors import UserError
from truegate.hub import model_folder
from truegate.moe import defaults

FACTS = ModelFacts(max_position=1000, bytes_per_token=1 << 10, free_bytes=1 << 34)


def test_resolving_leaves_the_argument_alone_and_nothing_undecided():
    config = EngineConfig()
    resolved, num_pages = fit(resolve(config, cuda=False), FACTS)
    assert config == EngineConfig()
    assert (resolved.device, resolved.dtype, resolved.overlap, resolved.max_model_len) == (
        "cpu",
        "float32",
        False,
        1000,
    )
    assert num_pages > 1000 // resolved.page_size


def test_more_running_sequences_than_rows_are_refused_and_the_default_follows_the_rows():
    with pytest.raises(UserError, match="chunked_prefill_tokens 8"):
        resolve(EngineConfig(max_running=9, chunked_prefill_tokens=8), cuda=False)
    assert resolve(EngineConfig(chunked_prefill_tokens=8), cuda=False).max_running == 8
    for device, rows in (("cpu", 512), ("cuda", 8192)):
        assert resolve(EngineConfig(device=device), cuda=True).chunked_prefill_tokens == rows


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"device": "tpu"}, "tpu"),
        ({"device": ""}, "device is empty"),
        ({"experts": ""}, "experts is empty"),
        ({"scale_at": ""}, "scale_at is empty"),
        ({"device": "cuda"}, "no GPU"),
        ({"dtype": "int8"}, "int8"),
        ({"load_format": "auto"}, "checkpoint or dummy"),
        ({"max_model_len": 0}, "max_model_len"),
        ({"page_size": -1}, "page_size"),
        ({"threads": 0}, "threads"),
        ({"kv_cache_gib": float("nan")}, "kv_cache_gib"),
        ({"mem_fraction": 1.5}, "mem_fraction"),
        ({"mem_fraction": 0.5, "kv_cache_gib": 1.0}, "give one"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_name(settings, message):
    with pytest.raises(UserError, match=message):
        resolve(EngineConfig(**settings), cuda=False)


def test_the_cache_holds_one_whole_sequence_or_the_start_is_refused():
    asked = resolve(EngineConfig(max_model_len=1000, kv_cache_gib=0.0001), cuda=False)
    with pytest.raises(UserError, match="raise --kv-cache-gib"):
        fit(asked, FACTS)
    with pytest.raises(UserError, match="above the model's 1000"):
        fit(resolve(EngineConfig(max_model_len=1001), cuda=False), FACTS)
    fitted, num_pages = fit(resolve(EngineConfig(kv_cache_gib=0.0001), cuda=False), FACTS)
    assert fitted.max_model_len == (num_pages - 1) * fitted.page_size == 96  # 6 whole pages of 16 KiB in 107,374 bytes


def test_a_cache_of_more_than_the_sequences_fill_is_cut_aloud_and_one_that_does_not_fit_is_refused(caplog):
    """Two sequences of 63 pages of 16 KiB, twice: 252 pages; FACTS has 16 GiB free."""
    for settings in ({"kv_cache_gib": 1000.0}, {"mem_fraction": 0.5}):
        _, num_pages = fit(resolve(EngineConfig(max_running=2, **settings), cuda=False), FACTS)
        assert num_pages == 252 + 1
        (line,) = caplog.messages
        assert line.startswith("the cache is cut to 0.00 GiB of the ")
        assert "2 sequences (--max-running) of 1000 tokens (--max-model-len)" in line
        caplog.clear()
    for settings in ({}, {"kv_cache_gib": 0.003}):
        fit(resolve(EngineConfig(max_running=2, **settings), cuda=False), FACTS)
    assert caplog.messages == []
    long = replace(FACTS, max_position=1 << 20)
    with pytest.raises(UserError, match=r"--kv-cache-gib 20: 20.00 GiB of it would be used, 16.00 GiB are free"):
        fit(resolve(EngineConfig(kv_cache_gib=20), cuda=False), long)
    assert fit(resolve(EngineConfig(kv_cache_gib=16), cuda=False), long)[1] == 1 + (1 << 20)


QWEN2 = {
    "model_type": "qwen2_moe", "hidden_size": 64, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "norm_topk_prob": False, "hidden_act": "silu",
}  # fmt: skip
WIDE = {"shared_expert_intermediate_size": 48}  # no whole number of slots of 32
MANY = {"num_experts": 2048}  # more than the router that goes with triton handles


def filled(settings, model, folder):
    (folder / "config.json").write_text(json.dumps({**QWEN2, **model}))
    return defaults.fill(EngineConfig(**{"device": "cuda", **settings}), folder)


@pytest.mark.parametrize(
    ("settings", "model", "fused"),
    [({}, {}, True), ({"fuse_shared": False}, {}, False), ({"device": "cpu"}, {}, False), ({}, WIDE, False),
     ({"fuse_shared": True}, WIDE, True), ({}, MANY, False), ({"router": "torch"}, MANY, True),
     ({"scale_at": "nowhere"}, {}, False), ({}, {"model_type": "qwen3_moe"}, False)],
)  # fmt: skip
def test_a_gpu_fuses_shared_experts_where_the_plan_allows_it(settings, model, fused, tmp_path):
    """What is asked for is kept, and refused when it is compiled; qwen3_moe has no shared expert."""
    assert filled(settings, model, tmp_path).fuse_shared is fused


@pytest.mark.parametrize(
    ("model", "dtype"),
    [({}, "bfloat16"), ({"dtype": "float16"}, "float16"), ({"torch_dtype": "float32"}, "float32"),
     ({"dtype": "float16", "torch_dtype": "float32"}, "float16")],
)  # fmt: skip
def test_a_gpu_computes_in_the_dtype_that_the_config_states(model, dtype, tmp_path):
    assert filled({}, model, tmp_path).dtype == dtype
    assert filled({"dtype": "bfloat16"}, model, tmp_path).dtype == "bfloat16"


def test_a_config_that_states_another_dtype_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(UserError, match="names the dtype 'float8_e4m3fn': give --dtype float32, bfloat16 or float16"):
        filled({}, {"torch_dtype": "float8_e4m3fn"}, tmp_path)
    assert filled({"dtype": "float16"}, {"torch_dtype": "float8_e4m3fn"}, tmp_path).dtype == "float16"


@pytest.mark.parametrize(
    ("settings", "cuda", "runs"),
    [({}, True, ("cuda", "bfloat16", "triton", "local")), ({}, False, ("cpu", "float32", "torch", "local")),
     ({"device": "cpu"}, True, ("cpu", "float32", "torch", "local")),
     ({"experts": "torch", "dtype": "float16"}, True, ("cuda", "float16", "torch", "local"))],
)  # fmt: skip
def test_a_layer_runs_on_the_gpu_that_is_there_in_the_checkpoints_dtype_through_triton(settings, cuda, runs):
    """What `truegate serve` runs and `truegate check` measures of the embedded model, whose config says bfloat16."""
    got = defaults.fill(resolve(EngineConfig(**settings), cuda=cuda), model_folder(None))
    assert (got.device, got.dtype, got.experts, got.dispatch) == runs


def test_a_gpu_keeps_free_what_steps_need():
    """At least 1 GiB; more for long steps, of which the model knows what they hold."""
    asked = []

    def step_bytes(num_rows, context):
        asked.append((num_rows, context))
        return num_rows << 20

    facts = replace(FACTS, max_position=1 << 20, bytes_per_token=1 << 20, step_bytes=step_bytes)
    free = []
    for rows in (64, 4096, 8192):
        config = resolve(EngineConfig(device="cuda", chunked_prefill_tokens=rows, max_model_len=500), cuda=True)
        _, num_pages = fit(config, facts)
        free.append(facts.free_bytes - (num_pages - 1) * config.page_size * facts.bytes_per_token)
    assert asked == [(64, 500), (4096, 500), (8192, 500)]
    assert (1 << 30) < free[0] < (1 << 30) + facts.free_bytes // 40
    assert free[1] > 1.3 * (4096 << 20)
    assert free[2] > 1.3 * (8192 << 20)
