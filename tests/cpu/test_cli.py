"""The command line's law: a user's mistake is one clear line and exit code 64, never a traceback."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from truegate import __version__
from truegate.cli import app, explain, main
from truegate.errors import InvalidRun, Refused, UserError
from truegate.hub import model_folder
from truegate.moe.backends import names as backends

V3 = {
    "model_type": "deepseek_v3", "num_hidden_layers": 5, "first_k_dense_replace": 3, "hidden_size": 7168,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048, "norm_topk_prob": True,
}  # fmt: skip


@pytest.fixture
def truegate(capsys, monkeypatch):
    """Run the entry point as the shell does: (exit code, standard output, standard error)."""

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["truegate", *map(str, words)])
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code, out, err

    return run


@pytest.fixture
def v3(tmp_path) -> Path:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(V3))
    return path


def verbs(command=None, path=()) -> list[tuple[str, ...]]:
    """Every verb, those of groups included, from the app itself."""
    command = typer.main.get_command(app) if command is None else command
    inner = getattr(command, "commands", None)
    if inner is None:
        return [path]
    return [path, *(verb for name, sub in inner.items() for verb in verbs(sub, (*path, name)))]


def names(verb):
    return " ".join(verb) or "truegate"


@pytest.mark.parametrize("verb", verbs(), ids=names)
def test_a_bogus_flag_is_one_line_and_64(truegate, verb):
    code, out, err = truegate(*verb, "--bogus-flag")
    assert code == 64
    assert out == ""
    assert err.count("\n") == 1
    assert "--bogus-flag" in err
    assert "--help" in err
    assert err.startswith("truegate: ")
    assert "Traceback" not in err


@pytest.mark.parametrize("verb", verbs(), ids=names)
def test_every_verb_has_help_that_says_something(truegate, verb):
    for flag in ("--help", "-h"):
        code, out, err = truegate(*verb, flag)
        assert (code, err) == (0, "")
        assert "Usage" in out
        assert len(out.split()) > 20


@pytest.mark.parametrize("verb", [v for v in verbs() if v], ids=names)
def test_every_verb_and_option_explains_itself(verb):
    command = typer.main.get_command(app)
    for name in verb:
        command = command.commands[name]
    assert command.help
    for param in command.params:
        assert getattr(param, "help", None), f"{names(verb)}: {param.name} has no help"


@pytest.mark.parametrize("words", [("nosuch",), ("plan",), ("plan", "a", "b"), ("plan", "x", "--ep", "two"), ("run",)])
def test_a_wrong_word_is_one_line_and_64(truegate, words):
    code, out, err = truegate(*words)
    assert (code, out, err.count("\n")) == (64, "", 1)


@pytest.mark.parametrize("words", [(), ("canary",), ("eval",)])
def test_no_verb_shows_help_and_no_empty_complaint(truegate, words):
    code, out, err = truegate(*words)
    assert code == 64
    assert "Usage" in out + err
    assert "truegate:  " not in err


def test_version(truegate):
    assert truegate("--version") == (0, f"truegate {__version__}\n", "")


def test_completion_is_offered_and_shown(truegate):
    assert "--show-completion" in truegate("--help")[1]
    script = Path(sys.executable).with_name("truegate")
    env = {"_TRUEGATE_COMPLETE": "source_bash", "PATH": "/usr/bin:/bin"}
    done = subprocess.run([script], capture_output=True, text=True, env=env, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert "_truegate_completion()" in done.stdout
    asked = env | {"_TRUEGATE_COMPLETE": "complete_bash", "COMP_WORDS": "truegate pl", "COMP_CWORD": "1"}
    assert subprocess.run([script], capture_output=True, text=True, env=asked, timeout=60).stdout.split() == ["plan"]


@pytest.mark.parametrize("words", [("--debug", "plan", "/nonexistent"), ("plan", "/nonexistent", "--debug")])
def test_debug_shows_the_traceback_wherever_it_stands(monkeypatch, words):
    monkeypatch.setattr(sys, "argv", ["truegate", *words])
    with pytest.raises(UserError, match="/nonexistent"):
        main()


def test_the_installed_script_ends_with_the_code_and_no_traceback():
    script = Path(sys.executable).with_name("truegate")
    done = subprocess.run([script, "plan", "/nonexistent"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1)
    assert "/nonexistent" in done.stderr


def test_exit_codes_follow_the_error():
    assert explain(Refused("a and b"))[1] == 64
    assert explain(InvalidRun("the server died"))[1] == 3
    line, code = explain(ZeroDivisionError("division by zero"))
    assert code == 3
    assert "--debug" in line


# truegate plan


def plan_json(truegate, *words):
    code, out, err = truegate("plan", *words, "--json")
    assert (code, err) == (0, "")
    return json.loads(out)


def test_plan_prints_the_scaling_law_of_the_first_report(truegate, v3):
    shown = plan_json(truegate, v3, "--ep", 8, "--experts", "aiter", "--dispatch", "mori", "--fuse-shared")
    assert shown["router"] == "aiter"
    want = {"shared_weight": 1.0, "folded_factor": 2.5, "later_factor": 1.0, "shared_copies": 1, "slots_per_rank": 33}
    assert {key: shown[key] for key in want} == want
    example = shown["example"]
    assert example["physical_ids"] == [e + e // 32 for e in example["logical_ids"]] + [7 * 33 + 32]
    assert example["weights"][-1] == 1.0


@pytest.mark.parametrize(("scale_at", "shared", "folded", "later"), [("weights", 1, 2.5, 1), ("output", 0.4, 1, 2.5)])
def test_plan_says_where_the_scale_multiplies(truegate, v3, scale_at, shared, folded, later):
    words = (
        "--ep",
        8,
        "--experts",
        "deep_gemm",
        "--dispatch",
        "deepep_normal",
        "--fuse-shared",
        "--scale-at",
        scale_at,
    )
    shown = plan_json(truegate, v3, *words)
    got = (shown["shared_weight"], shown["folded_factor"], shown["later_factor"], shown["slots_per_rank"])
    assert got == (shared, folded, later, 33)


def test_plan_replicates_a_tail_slot_when_asked(truegate, v3):
    shown = plan_json(truegate, v3, "--ep", 8, "--dispatch", "allgather", "--fuse-shared", "--replicate-shared")
    assert (shown["shared_copies"], shown["shared_weight"]) == (8, 0.125)


def test_plan_gives_the_padding_rule_of_each_edge(truegate, v3):
    edges = plan_json(truegate, v3, "--experts", "aiter", "--fuse-shared")["edges"]
    pads = {edge["target"]: edge["pad"] for edge in edges if "pad" in edge}
    assert pads == {"dispatch local": "ZeroWeight(0)", "experts aiter": "ZeroWeight(0)"}
    edges = plan_json(truegate, v3, "--ep", 8, "--experts", "aiter", "--dispatch", "deepep_normal")["edges"]
    last = next(edge for edge in edges if edge["target"] == "experts aiter")
    assert (last["pad"], last["converted_from"]) == ("ZeroWeight(0)", "Drop(-1)")
    assert any(edge["source"] == "shared expert" for edge in edges)


def test_plan_counts_redundant_slots(truegate, v3):
    assert plan_json(truegate, v3, "--ep", 32, "--redundant", 32)["slots_per_rank"] == 9


def test_plan_in_words_has_the_ledger_and_the_equation(truegate, v3):
    code, out, err = truegate("plan", v3, "--ep", 8, "--experts", "aiter", "--dispatch", "mori", "--fuse-shared")
    assert (code, err) == (0, "")
    for part in ("definition", "sigmoid", "2.5", "who multiplies what", "shared slot weight = 1", "ZeroWeight(0)",
                 "33 a rank", "example row", "contract only"):  # fmt: skip
        assert part in out, part


def test_the_plan_in_words_uses_w_for_one_thing(truegate, v3):
    out = truegate("plan", v3)[1]
    assert "w = s[ids] / (sum s[ids] + 1e-20)\n" in out
    assert "y = sum_j 2.5 w[j] F_ids[j](h) + G(h)" in out
    assert "routed coefficient = w * 2.5 * 1 = 2.5 w" in out


@pytest.mark.parametrize("fuse", ["--fuse-shared", "--no-fuse-shared"])
def test_the_ledger_keeps_a_sigmoid_gate_of_the_shared_expert(truegate, tmp_path, fuse):
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_moe"}')
    ledger = truegate("plan", tmp_path, fuse)[1].partition("who multiplies what")[2].partition("what passes")[0]
    assert "sigmoid(h . g)" in ledger


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--redundant", 10**12), ("redundant experts: 1000000000000", "--redundant")),
        (("--ep", 8, "--dispatch", "local"), ("local", "--ep 8", "--dispatch allgather")),
        (("--ep", 7), ("256", "7 ranks", "--redundant")),
        (("--experts", "nosuch"), ("--experts nosuch", "torch")),
        (("--router", "nosuch"), ("--router nosuch", "aiter")),
        (("--dispatch", "nosuch"), ("--dispatch nosuch", "mori")),
        (("--scale-at", "middle"), ("--scale-at middle", "weights or output")),
        (("--redundant", -1), ("redundant", "-1")),
        (("--tp", 0), ("--tp 0",)),
        (("--ep", 0), ("--ep 0",)),
        (("--ep", 8, "--tp", 3), ("--ep 8", "6 ranks")),
        (("--layer", 0), ("--layer 0", "dense", "3..4")),
        (("--layer", 99), ("--layer 99",)),
        (("--layer", -1), ("--layer -1",)),
        (("--experts", "flashinfer_trtllm", "--router", "torch"), ("flashinfer_trtllm", "router torch", "--router")),
        (("--experts", "flashinfer_trtllm", "--scale-at", "output"), ("flashinfer_trtllm", "--scale-at weights")),
        (("--ep", 8, "--experts", "aiter", "--dispatch", "deepep_low_latency"), ("aiter", "low_latency", "twice")),
        (("--ep", 8, "--experts", "triton", "--dispatch", "mori", "--fuse-shared"), ("triton", "mori", "--no-")),
        (("--replicate-shared",), ("--replicate-shared", "--fuse-shared")),
        (("--dp", 4), ("local", "torch", "dp 4")),
    ],
    ids=lambda x: " ".join(map(str, x)) if isinstance(x, tuple) else str(x),
)  # fmt: skip
def test_plan_refuses_naming_both_sides_and_the_remedy(truegate, v3, words, says):
    code, out, err = truegate("plan", v3, *words)
    assert (code, out, err.count("\n")) == (64, "", 1)
    for part in says:
        assert part in err, err


def test_plan_refuses_what_is_no_config(truegate, tmp_path):
    for content in ("", "{", "[]", '{"model_type": "llama"}', '{"model_type": 3}', "{}"):
        (tmp_path / "config.json").write_text(content)
        code, out, err = truegate("plan", tmp_path)
        assert (code, out, err.count("\n")) == (64, "", 1), (content, err)


def test_plan_reads_a_folder_as_its_config(truegate, v3):
    assert plan_json(truegate, v3.parent) == plan_json(truegate, v3)


def test_help_says_which_contracts_have_run(truegate):
    text = re.sub(r"\s+", " ", truegate("plan", "--help")[1])
    assert "contracts" in text
    assert "enable-dp-attention" in text


@pytest.mark.parametrize("words", [["check"], ["run", "hi"], ["serve"]], ids=" ".join)
def test_a_verb_of_the_engine_says_so_where_only_the_base_is_installed(words):
    code = "import sys; sys.modules['torch'] = sys.modules['fastapi'] = None; from truegate.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr.count("\n")) == (64, "", 1), done.stderr
    assert "torch is not installed: pip install 'truegate[serve]'" in done.stderr


def test_a_module_that_no_extra_brings_is_a_defect():
    assert explain(ModuleNotFoundError("No module named 'nosuch'", name="nosuch"))[1] == 3


@pytest.mark.parametrize(
    "words",
    [("--cases", 5), ("--cases", -1, "--mutants"), ("--mutants", "--dtype", "bfloat16"),
     ("--mutants", "--fault", "scale-twice"), ("--mutants", "--fuse-shared"), ("--device", "tpu")],
    ids=lambda words: " ".join(map(str, words)),
)  # fmt: skip
def test_check_ignores_no_flag(truegate, words):
    code, out, err = truegate("check", *words)
    assert (code, out, err.count("\n")) == (64, "", 1), err
    assert words[0].strip("-") in err


def test_check_measures_what_serve_runs_by_default():
    """Each flag that both have means the same when it is left out; what None then means is decided in one place."""
    check, serve = (
        {one.name: one.default for one in typer.main.get_command(app).commands[verb].params}
        for verb in ("check", "serve")
    )
    shared = {"model", "device", "dtype", "router", "experts", "dispatch", "fuse_shared", "scale_at", "fault"}
    assert shared <= check.keys() & serve.keys()
    assert {name: check[name] for name in shared} == {name: serve[name] for name in shared}


@pytest.mark.parametrize(
    ("words", "ran"), [((), "cpu, float32, experts torch,"), (("--dtype", "bfloat16"), "cpu, bfloat16, experts torch,")]
)
def test_check_says_what_was_measured(truegate, words, ran):
    code, out, err = truegate("check", "--device", "cpu", *words)
    assert (code, err) == (0, "")
    assert f"deepseek_v3, {ran}" in out


OTHERS = {
    "olmoe": {"model_type": "olmoe", "hidden_size": 64, "intermediate_size": 32},
    "gpt_oss": {"model_type": "gpt_oss", "hidden_size": 64, "intermediate_size": 32},
    "quantization_config": json.loads((model_folder(None) / "config.json").read_text())
    | {"quantization_config": {"quant_method": "fp8"}},
}  # fmt: skip


@pytest.mark.parametrize("name", OTHERS)
def test_check_measures_a_model_that_serve_does_not_run_and_says_so(truegate, tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(OTHERS[name]))
    code, out, err = truegate("check", "--device", "cpu", tmp_path / "config.json")
    assert (code, err) == (0, "")
    assert "every measured coefficient is right" in out
    assert "does not run this model: config.json: " in out.splitlines()[-1]
    assert name in out.splitlines()[-1]


def test_check_leaves_out_the_layers_that_serve_does_not_run(truegate):
    """The embedded model's layer 6 predicts the token after the next one."""
    out = truegate("check", "--device", "cpu")[1]
    assert "ledger, layers 1..5" in out
    assert "does not run" not in out


def test_the_help_of_plan_lists_every_backend():
    params = {p.name: p.help for p in typer.main.get_command(app).commands["plan"].params}
    for flag, part in (("router", "routers"), ("experts", "experts"), ("dispatch", "dispatch")):
        listed = re.split(r"[,;:.] ?", params[flag])
        assert set(backends(part)) <= set(listed), params[flag]


# truegate serve


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [(("--api-key", ""), None, "--api-key"), (("--api-key", " k"), None, "--api-key"),
     (("--api-key", "k", "--api-key", ""), "k", "--api-key"), ((), "", "TRUEGATE_API_KEY"),
     ((), " ", "TRUEGATE_API_KEY"), (("--served-model-name", ""), None, "--served-model-name")],
)  # fmt: skip
def test_serve_refuses_a_key_or_a_name_that_is_empty(truegate, monkeypatch, words, key, says):
    """An empty key would be a server that everybody may use, though somebody thought to protect it."""
    if key is not None:
        monkeypatch.setenv("TRUEGATE_API_KEY", key)
    code, out, err = truegate("serve", "/nonexistent", *words)
    assert (code, out, err.count("\n")) == (64, "", 1), err
    assert says in err
    assert "empty" in err
