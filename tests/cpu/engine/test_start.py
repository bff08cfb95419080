"""Every flag reaches the layers: what `truegate check` measures and `truegate serve` loads is what was asked for."""

import json
from dataclasses import fields, replace
from typing import get_args

import pytest
import torch
import typer

from truegate.cli import app
from truegate.config import EngineConfig
from truegate.engine.start import load_parts
from truegate.errors import Refused
from truegate.moe import check, selftest, table
from truegate.serve import main

MODEL = {
    "model_type": "deepseek_v3", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 3,
    "first_k_dense_replace": 1, "moe_intermediate_size": 64, "n_routed_experts": 8, "num_experts_per_tok": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 2, "routed_scaling_factor": 2.5, "num_attention_heads": 2,
    "kv_lora_rank": 16, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "max_position_embeddings": 64, "num_nextn_predict_layers": 1,
}  # fmt: skip
RIGHT = {"router": "torch", "experts": "torch", "dtype": torch.float32, "shared": 0, "last": 1.0, "faulty": False}
SETS = [
    ({}, {}),
    ({"dtype": "bfloat16"}, {"dtype": torch.bfloat16}),
    ({"dtype": "float16", "scale_at": "output"}, {"dtype": torch.float16, "last": 2.5}),
    ({"fuse_shared": True}, {"shared": 2}),
    ({"fuse_shared": True, "scale_at": "output"}, {"shared": 2, "last": 2.5}),
    ({"fuse_shared": False, "scale_at": "weights"}, {}),
    ({"router": "triton"}, {"router": "triton"}),
    ({"experts": "triton"}, {"router": "triton", "experts": "triton"}),
    ({"experts": "triton", "router": "torch", "fuse_shared": True}, {"experts": "triton", "shared": 2}),
    ({"fault": "scale-twice", "dispatch": "local"}, {"faulty": True}),
]


@pytest.fixture
def model(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    return str(tmp_path)


@pytest.fixture
def tested(monkeypatch):
    """The layers that were self-tested, none of them measured."""
    layers = []

    def note(layer):
        layers.append(layer)
        return selftest.Report(
            checks=(selftest.Check(name="none", what="none", worst=0.0, ok=True),), seconds=0.0, dtype="none"
        )

    monkeypatch.setattr(check, "self_test", note)
    monkeypatch.setattr(selftest, "self_test", note)
    return layers


def traits(layer) -> dict:
    """What the flags decide about a layer."""
    contracts = {part: getattr(layer.backends, part).CONTRACT for part in ("router", "experts", "dispatch")}
    assert contracts == {part: getattr(layer.plan, part) for part in contracts}
    return {
        "router": layer.plan.router.name, "experts": layer.plan.experts.name, "dtype": layer.w_down.dtype,
        "shared": layer.plan.num_shared, "last": float(layer.plan.scales.finish),
        "faulty": type(layer.router).__name__ == "FaultyRouter",
    }  # fmt: skip


@pytest.mark.parametrize(("flags", "differs"), SETS, ids=lambda one: ",".join(map(str, one.values())))
def test_check_measures_and_serve_loads_what_was_asked_for(flags, differs, model, tested):
    config = EngineConfig(model=model, device="cpu", **flags)
    assert table.check(config)
    (measured,) = tested
    parts = load_parts(replace(config, load_format="dummy", kv_cache_gib=0.01))
    assert [traits(layer) for layer in (measured, *parts.model.moe_layers)] == [{**RIGHT, **differs}] * 3
    assert tested[1] is parts.model.moe_layers[0]
    assert parts.model.dtype == {**RIGHT, **differs}["dtype"]


@pytest.mark.parametrize("flag", [("dispatch", "allgather"), ("experts", "aiter"), ("router", "aiter")], ids=" ".join)
def test_a_backend_that_cannot_run_here_is_refused_by_the_flag_that_was_given(flag, model, tested):
    """aiter's experts bring aiter's router, of which the user said nothing."""
    config = EngineConfig(model=model, device="cpu", load_format="dummy", **dict([flag]))
    for run in (table.check, load_parts):
        with pytest.raises(Refused, match=f"^{' '.join(flag)} cannot run here"):
            run(config)


@pytest.mark.parametrize(("verb", "count"), [("serve", 20), ("check", 8)])
def test_every_flag_of_the_command_line_reaches_the_engines_config(verb, count, monkeypatch):
    """Each is given a value other than its default; what is not a flag keeps its own."""
    seen = []
    monkeypatch.setattr(main, "serve", lambda options: seen.append(options.engine))
    monkeypatch.setattr(table, "check", lambda config, *rest: seen.append(config) or True)
    flags = {one.name for one in typer.main.get_command(app).commands[verb].params}
    values, words = {}, []
    for one in fields(EngineConfig):
        if one.name in flags - {"model"}:
            flag, kinds = one.name.replace("_", "-"), get_args(one.type) or (one.type,)
            if bool in kinds:
                values[one.name] = not one.default
                words.append(f"--{flag}" if values[one.name] else f"--no-{flag}")
            else:
                values[one.name] = {int: 7, float: 0.25, str: f"some-{flag}"}[kinds[0]]
                words += [f"--{flag}", str(values[one.name])]
    assert len(values) == count
    app([verb, "some-model", *words], standalone_mode=False)
    assert seen == [EngineConfig(model="some-model", **values)]
