"""The verbs as a user types them: exit codes, one-line errors, JSON on standard output, and no torch."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from eval_endpoint import Endpoint, reply
from test_eval_compare import OFF, PATCHED, UNPATCHED, save
from test_eval_endpoint import write_items
from typer.testing import CliRunner

from truegate.errors import TruegateError
from truegate.evals.cli import app


def call(*arguments: object) -> tuple[int, str]:
    """(exit code, output) of `truegate eval ...`, an error as its code and line."""
    result = CliRunner().invoke(app, [str(a) for a in arguments])
    if isinstance(result.exception, TruegateError):
        return result.exception.exit_code, str(result.exception)
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize(
    ("a", "b", "code"), [("192/200", "190/200", 2), ("161/200", "125/200", 1), ("164/200", "161/200", 2)]
)
def test_published_counts_decide_the_exit_code(a: str, b: str, code: int) -> None:
    assert call("compare", "--counts", a, b)[0] == code


def test_the_report_as_a_user_judges_it(tmp_path: Path) -> None:
    unpatched, patched, off = (save(tmp_path / r.name, r) for r in (UNPATCHED, PATCHED, OFF))
    assert call("compare", off, unpatched)[0] == 1
    code, text = call("compare", off, patched)
    assert code == 2
    assert "INCONCLUSIVE" in text
    reference = ("--gate", "mlperf", "--reference", "81.3582", "--reference-tokens", "3886.2274")
    assert call("compare", unpatched, *reference)[0] == 1
    code, text = call("compare", patched, *reference)
    assert code == 2
    assert "missed" in text
    assert call("compare", patched, unpatched, *reference, "--json")[0] == 1
    assert call("compare", off, off)[0] == 0


def test_a_run_and_its_comparison_end_to_end(tmp_path: Path) -> None:
    items = write_items(tmp_path / "own.jsonl", {f"q{i}": "1" for i in range(120)})
    loops = "Wait, I should check this again. " * 100
    with (
        Endpoint(lambda *_: reply("#### 1")) as right,
        Endpoint(
            lambda prompt, *_: reply(loops, finish="length", tokens=900) if int(prompt[1:]) < 20 else reply("#### 1")
        ) as wrong,
    ):
        for name, endpoint in (("right", right), ("wrong", wrong)):
            code, text = call("run", items, "--url", f"{endpoint.url}/v1", "--save", tmp_path / name, "--json")
            assert code == 0
            assert json.loads(text[text.index("{") :])["answers"] == 120
    page = tmp_path / "report.html"
    code, text = call("compare", tmp_path / "right", tmp_path / "wrong", "--html", page)
    assert code == 1
    assert "16.7% of B's answers run away" in " ".join(text.split())
    assert "<mark>Wait, I should check this again." in page.read_text()
    assert call("loops", tmp_path / "wrong")[0] == 1
    assert call("loops", tmp_path / "wrong", "--max-rate", "0.2")[0] == 0
    assert call("noise", tmp_path / "right", tmp_path / "wrong")[0] == 1
    assert call("noise", tmp_path / "right", tmp_path / "right")[0] == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("run", "nothing-here"), "there is no task"),
        (("run", "longform", "--concurrency", "0"), "--concurrency 0"),
        (("run", "longform", "--temperature", "nan"), "--temperature nan"),
        (("run", "longform", "--extra", "[1]"), "must be a JSON object"),
        (("run", "longform", "--extra", '{"stream": true}'), "stream cannot be set there"),
        (("run", "longform", "--n", "27"), "longform has 26 items"),
        (("run", "ledger", "--n", "0"), "--n 0: both must be at least 1"),
        (("run", "longform", "--n", "0"), "--n 0"),
        (("run", "longform", "--data", "x"), "--data belongs to gsm8k"),
        (("compare", "x", "y"), "x does not exist"),
        (("compare", "--counts", "a/b", "1/2"), "write CORRECT/ITEMS"),
        (("compare", "--counts", "3/2", "1/2"), "needs 0 <= CORRECT"),
        (("compare", "--counts", "1/2", "1/2", "--margin", "0"), "--margin 0"),
        (("compare", "x"), "compare needs two runs"),
        (("compare", "x", "y", "--json", "--md"), "not both"),
        (("compare", "x", "--gate", "mlperf"), "needs --reference"),
        (("compare", "x", "y", "--reference", "3"), "belong to --gate mlperf"),
        (("power", "--psi", "0.001"), "--psi 0.001"),
        (("power", "--delta", "0"), "needs 0 < delta"),
        (("noise", "x"), "x does not exist"),
        (("noise", "--counts", "1/2", "1/3"), "same number of items"),
        (("loops", "x"), "x does not exist"),
    ],
)
def test_wrong_use_is_one_line_and_64(arguments: tuple[str, ...], message: str) -> None:
    code, line = call(*arguments)
    assert code == 64
    assert message in line
    assert "\n" not in line


def test_power_prints_the_published_numbers() -> None:
    code, text = call("power", "--p", "0.96", "--delta", "0.01", "--psi", "0.03", "--json")
    assert code == 0
    assert json.loads(text)["paired"][0]["items"] == 2353
    assert json.loads(text)["unpaired_per_run"] == 6743


def test_power_names_no_fall_above_the_share_that_changes() -> None:
    _, text = call("power", "--n", "200")
    lines = {line.split("%")[0].split()[-1]: line for line in text.splitlines() if "changing" in line}
    assert "200 items are too few to show any: that takes a fall of 3.9 pp" in lines["1"]
    assert "200 items show 4.4 pp or more" in lines["5"]
    _, text = call("power", "--n", "200", "--json")
    assert [row["psi"] for row in json.loads(text)["paired"] if row["detectable"] is None] == [0.01, 0.02, 0.03]
    assert "2 items are too few to show any fall" in call("power", "--n", "2")[1]
    assert "nothing: too few items" in call("noise", "--counts", "1/2", "1/2")[1]


def test_the_harness_imports_no_torch_and_no_engine() -> None:
    code = (
        "import sys\nfor name in ('torch', 'transformers', 'fastapi', 'scipy'):\n    sys.modules[name] = None\n"
        "import truegate.evals.verbs, truegate.evals.start, truegate.evals.gsm8k, truegate.evals.longform\n"
        "print([m for m in sys.modules if m.split('.')[:2] in (['truegate', 'engine'], ['truegate', 'serve'])])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.stdout.strip(), done.stderr) == ("[]", "")
