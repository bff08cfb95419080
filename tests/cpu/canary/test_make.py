"""Laws of making: same bytes, exact cover, margins, manifests that notice edits, and refusals that name the remedy."""

import json
from dataclasses import replace
from unittest.mock import Mock

import numpy as np
import pytest
from conftest import small_config
from toy import Toy
from typer.testing import CliRunner

from truegate.canary.archs import Sizes, attention_tensors, canary_config, default_config
from truegate.canary.cli import app
from truegate.canary.definition import Kind
from truegate.canary.make import Recipe, draw, make, one_shape
from truegate.canary.manifest import FILE, load
from truegate.canary.weights import powers, spread
from truegate.errors import UserError
from truegate.law.families import specs_of
from truegate.law.formats import Checkpoint


def test_same_arguments_give_the_same_bytes(tmp_path):
    sizes = Sizes(hidden=384, layers=1, intermediate=16)
    for name in ("a", "b"):
        make(small_config("qwen3_moe"), tmp_path / name, Recipe(sizes=sizes, seed=5))
    files = sorted(p.name for p in (tmp_path / "a").iterdir())
    assert files == sorted(p.name for p in (tmp_path / "b").iterdir())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)


def test_another_seed_gives_another_canary(canary):
    assert load(canary("mixtral")).data["digest"] != load(canary("mixtral", seed=3)).data["digest"]


def test_every_expert_is_chosen_by_two_probes_of_every_layer(canary, family):
    manifest = load(canary(family))
    for layer in manifest.layers.values():
        c_out, _ = layer.coefficients()
        chosen = (c_out != 0)[:, : layer.spec.num_experts]
        assert chosen.sum(axis=0).min() >= 2
        assert (chosen.sum(axis=1) == layer.spec.top_k).all()


def test_real_expert_counts_are_covered_within_groups():
    real = {"model_type": "deepseek_v3", "num_hidden_layers": 61, "hidden_size": 7168}
    manifest = draw(real, Recipe(sizes=Sizes(layers=2)))
    layer = manifest.layers[1]
    assert layer.spec.num_experts == 256
    chosen = layer.coefficients()[0][:, :256] != 0
    assert chosen.sum(axis=0).min() >= 2
    assert ((chosen.reshape(len(chosen), 8, 32).any(axis=2)).sum(axis=1) <= 4).all()


def test_a_top_k_as_small_as_the_kept_groups_is_covered_beside_a_huge_bias():
    """One place of each token belongs to the expert of the huge bias; its own group must still be reached."""
    config = small_config("deepseek_v3") | {
        "n_routed_experts": 16,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
    }
    for layer in draw(config, Recipe(sizes=Sizes(hidden=384))).layers.values():
        chosen = layer.coefficients()[0][:, :16] != 0
        assert chosen.sum(axis=0).min() >= 2
        assert (chosen.sum(axis=1) == 2).all()


def test_every_choice_has_a_margin_that_bf16_scores_keep(canary, family):
    for table in load(canary(family)).data["tables"]:
        assert min(table["margins"]) >= 0.012


def test_table_entries_and_biases_are_exact_in_bf16(canary, family):
    import ml_dtypes

    for table in load(canary(family)).data["tables"]:
        for values in (table["rows"], table["bias"], table["near"]):
            if values is not None:
                exact = np.array(values)
                assert (exact.astype(ml_dtypes.bfloat16).astype(float) == exact).all()


def test_bias_profiles_include_negative_scores_and_one_huge_bias():
    manifest = draw(small_config("deepseek_v3"), Recipe(sizes=Sizes(hidden=384)))
    biases = [np.array(t["bias"]) for t in manifest.data["tables"]]
    assert any((b < -0.5).all() for b in biases)
    assert any((b > 30000).sum() == 1 for b in biases)


def test_readings_of_the_checkpoint_are_those_of_the_manifest(canary, family):
    """A plain forward over the written tensors reads every expected coefficient, to float32."""
    toy = Toy(canary(family))
    m = toy.manifest
    probes = [p for p in m.probes if p.index in m.expected]
    logits = toy.forward([[m.token(p.index)] for p in probes])
    first = m.vocabulary.first_read_out
    got = logits[:, first : first + m.vocabulary.num_read_outs] / m.read_scale
    want = np.array([m.expected[p.index] for p in probes])
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-4)
    successors = [m.token(m.successor(p.index)) for p in probes]
    np.testing.assert_allclose(logits[np.arange(len(probes)), successors], 30, rtol=1e-5)


def test_every_block_of_64_input_columns_feeds_the_gate(canary):
    gate = np.asarray(Checkpoint(canary("deepseek_v3")).read("model.layers.1.mlp.experts.3.gate_proj.weight"))
    assert (gate.reshape(len(gate), -1, 64) != 0).any(axis=2).all()


@pytest.mark.parametrize("count", [1, 3, 8, 45, 64, 112, 384])
@pytest.mark.parametrize("total", [1.0, 16.0, 0.25])
def test_powers_sum_exactly_and_each_half_holds_half(count, total):
    parts = powers(count, total)
    assert parts.sum() == total
    assert (np.log2(parts) % 1 == 0).all()
    if count % 2 == 0:
        assert parts[: count // 2].sum() == total / 2


@pytest.mark.parametrize("count", [4, 8, 32, 45, 112])
def test_spread_keeps_totals_that_are_no_power_of_two(count):
    assert sum(spread(tuple(range(count)), -48.0).values()) == -48.0


def test_an_edited_manifest_is_refused(canary, tmp_path):
    data = json.loads((canary("mixtral") / FILE).read_text())
    data["tables"][0]["rows"][0][0] += 0.5
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(UserError, match="does not match its digest"):
        load(tmp_path)


def test_a_manifest_of_another_definition_is_refused(canary, tmp_path):
    from truegate.canary.manifest import digest, fingerprint_of

    data = json.loads((canary("mixtral") / FILE).read_text())
    probe = next(iter(data["expected"]))
    data["expected"][probe][0][1] *= 1.01
    data["digest"] = digest(data)
    data["fingerprint"] = fingerprint_of(data["digest"])
    (tmp_path / FILE).write_text(json.dumps(data))
    with pytest.raises(UserError, match="differs from this version"):
        load(tmp_path)


def test_like_keeps_the_real_models_routing():
    real = {
        "model_type": "deepseek_v3", "n_routed_experts": 384, "num_experts_per_tok": 8, "n_group": 1, "topk_group": 1,
        "routed_scaling_factor": 2.827, "hidden_size": 7168, "num_hidden_layers": 61, "first_k_dense_replace": 1,
        "num_attention_heads": 64, "quantization_config": {"quant_method": "fp8"},
    }  # fmt: skip
    config = canary_config(real, Sizes(), 1024)
    spec = specs_of(config)[1]
    assert (spec.num_experts, spec.routed_scale, spec.hidden) == (384, 2.827, 7168)
    assert "quantization_config" not in config
    assert config["num_hidden_layers"] == 4


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"hidden": 500}, "multiple of 64"),
        ({"hidden": 64}, "use --hidden"),
        ({"layers": 0}, "--layers"),
        ({"intermediate": 6}, "--intermediate"),
        ({"dtype": "int4"}, "--dtype"),
    ],
)
def test_wrong_sizes_are_refused_with_the_remedy(tmp_path, arguments, words):
    with pytest.raises(UserError, match=words):
        make(default_config("qwen3_moe"), tmp_path / "x", Recipe(sizes=Sizes(**arguments)))


@pytest.mark.parametrize("option", ["--experts", "--hidden", "--intermediate", "--layers", "--tp"])
def test_no_size_may_be_zero(tmp_path, option):
    given = CliRunner().invoke(app, ["make", "--arch", "mixtral", "--out", str(tmp_path / "x"), option, "0"])
    assert given.exit_code == 2, "typer's wrong use; the program's main makes it 64"
    assert not (tmp_path / "x").exists()


def test_a_folder_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="Not a directory"):
        make(small_config("mixtral"), tmp_path / "file" / "x", Recipe())


def test_a_make_that_was_refused_or_interrupted_can_be_repeated(tmp_path, monkeypatch):
    out, sizes = tmp_path / "x", Sizes(hidden=384, layers=1, intermediate=16)
    with pytest.raises(UserError, match="multiple of 64"):
        make(small_config("mixtral"), out, Recipe(sizes=replace(sizes, hidden=100)))
    assert not out.exists()
    with monkeypatch.context() as patch:
        patch.setattr("truegate.canary.make._write_tokenizer", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            make(small_config("mixtral"), out, Recipe(sizes=sizes))
    assert not (out / "config.json").exists()
    make(small_config("mixtral"), out, Recipe(sizes=sizes))
    load(out)


def test_like_keeps_queries_that_the_real_model_does_not_cut():
    real = default_config("deepseek_v2") | {"q_lora_rank": None}
    config = canary_config(real, Sizes(), 1024)
    assert config["q_lora_rank"] is None
    assert "model.layers.0.self_attn.q_proj.weight" in attention_tensors(config, 0)


def test_a_folder_that_is_no_canary_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(UserError, match="is not a canary"):
        make(default_config("mixtral"), tmp_path, Recipe())
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.txt"]


def test_kinds_drive_experts_as_they_say(canary):
    manifest = load(canary("gpt_oss"))
    kinds = {p.kind for p in manifest.probes}
    assert {Kind.LOUD_GATE, Kind.LOUD_UP, Kind.DIM, Kind.EIGHTH, Kind.THIRD} <= kinds


def test_layers_of_different_shapes_are_refused_by_name():
    spec = specs_of(small_config("qwen3_moe") | {"num_hidden_layers": 1})[0]
    with pytest.raises(UserError, match=r"layers 1 and 3 differ in top_k \(4 and 2\).*--layers 3"):
        one_shape({1: spec, 2: spec, 3: replace(spec, top_k=2)})


@pytest.mark.parametrize("family", ["hunyuan_v1_moe", "llama"])
def test_a_family_without_a_canary_is_refused_by_name(family):
    with pytest.raises(UserError, match=family):
        canary_config({"model_type": family, "num_hidden_layers": 4, "hidden_size": 256}, Sizes(), 1024)
