"""Laws of asking: every dialect gives the same verdict; a server that dies or hangs is told apart from a fault."""

import html
import json
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from rich.console import Console
from toy import Faults, Manners, Toy, serving

from truegate.canary.api import Api, Completion, Refusal
from truegate.canary.ask import Effort
from truegate.canary.client import Client
from truegate.canary.diff import diff
from truegate.canary.manifest import load
from truegate.canary.report import print_result, read_json, write_html, write_json, write_junit
from truegate.canary.run import Target, audit, explain_again
from truegate.errors import UserError

Canary = Callable[..., Path]
BRIEF = Effort(name="quick", batches=(3,), streams=3, walk=16, long=(5,), questions=120, silence=0.0)


def run(folder: Path, manners: Manners | None = None, faults: Faults | None = None, timeout: float = 20.0) -> dict:
    with serving(Toy(folder, faults), manners) as url:
        return audit(load(folder), Target(url=url, timeout=timeout), BRIEF, lambda phase: None)


@pytest.mark.parametrize(
    ("manners", "words"),
    [
        (Manners(), "token-id prompts, top-20 log-probabilities, batched prompt lists, echo"),
        (Manners(style="content", echo=False, batched=False), "token-id prompts, top-20"),
        (Manners(style="native", echo=False), "/generate"),
        (Manners(ids=False, echo=False), "text prompts, top-20"),
        (Manners(top=5), "top-5"),
        (Manners(top=0), "no log-probabilities"),
    ],
)
def test_every_dialect_finds_a_healthy_engine_right(canary: Canary, manners: Manners, words: str) -> None:
    data = run(canary("mixtral"), manners)
    assert (data["exit"], data["findings"]) == (0, [])
    assert words in data["api_words"]
    assert data["headline"].startswith("all ")


@pytest.mark.parametrize("manners", [Manners(), Manners(top=0)])
def test_a_fault_ends_with_exit_1_and_its_name(canary: Canary, manners: Manners) -> None:
    data = run(canary("mixtral"), manners, Faults(total=lambda layer, y: y * 0.5))
    assert data["exit"] == 1
    assert data["findings"][0]["names"] == ["reduce-missing"]


def test_no_request_asks_for_more_than_20_log_probabilities(canary: Canary) -> None:
    manners = Manners(top=1000)
    run(canary("mixtral"), manners)
    assert 0 < max(body.get("logprobs", 0) for body in manners.seen) <= 20


def test_a_server_that_dies_is_an_invalid_run_and_no_fault(canary: Canary) -> None:
    data = run(canary("mixtral"), Manners(dies_after=30))
    assert data["exit"] == 3
    assert not data["findings"]
    assert "died" in data["headline"]


@pytest.mark.parametrize("drips", [False, True])
def test_a_server_that_hangs_does_not_hang_us(canary: Canary, drips: bool) -> None:
    data = run(canary("mixtral"), Manners(hangs_after=30, drips=drips), timeout=1.0)
    assert data["exit"] == 3
    assert "within 1 s" in data["headline"]


@pytest.mark.parametrize(
    "answer",
    [
        {"choices": [None]},
        {"choices": [{"index": None}, {"index": "1"}]},
        {"choices": [{"logprobs": [1, 2]}]},
        {"choices": [{"text": "", "logprobs": {"tokens": ["a"], "top_logprobs": [{"a": "b"}]}}]},
        {"choices": [{"text": "", "logprobs": {"tokens": ["a"], "top_logprobs": [[1]]}}]},
        {"choices": 3},
        ["choices"],
        "choices",
    ],
)
@pytest.mark.parametrize("style", ["completions", "native"])
def test_answers_of_another_form_are_not_judged(canary: Canary, answer: object, style: str) -> None:
    manners = Manners(style=style, echo=False, answers_so=answer)
    data = run(canary("mixtral"), manners)
    assert data["exit"] == 3, "no way to ask was found, and that is a result that can be written"
    assert "answers no completion request" in data["headline"]
    data = run(canary("mixtral"), replace(manners, answers_so_after=30, seen=[]))
    assert data["exit"] == 2
    assert not data["findings"]


@pytest.mark.parametrize(("status", "code"), [(200, 2), (500, 2), (400, 0)])  # 400: the server does not offer it
def test_a_phase_that_failed_is_not_passed_over(
    canary: Canary, monkeypatch: pytest.MonkeyPatch, status: int, code: int
) -> None:
    answer = Client.complete

    def loses_one(self: Client, api: Api, prompts: list[list[int]], *more: Any, **named: Any) -> list[Completion]:
        if len(prompts) > 20:
            raise Refusal(status, f"{len(prompts) - 1} answers to {len(prompts)} prompts")
        return answer(self, api, prompts, *more, **named)

    monkeypatch.setattr(Client, "complete", loses_one)
    assert run(canary("mixtral"))["exit"] == code


@pytest.mark.parametrize("top", [20, 0])
def test_a_server_that_restarts_on_another_checkpoint_is_an_invalid_run_and_no_fault(canary: Canary, top: int) -> None:
    data = run(canary("mixtral"), Manners(top=top, becomes=Toy(canary("mixtral", seed=3)), becomes_after=60))
    assert data["exit"] == 3
    assert not data["findings"]
    assert "restarted or reloaded during" in data["headline"]
    assert explain_again(json.loads(json.dumps(data)))["headline"] == data["headline"]


def test_data_parallel_ranks_are_asked_for_as_the_server_understands(canary: Canary) -> None:
    effort = replace(BRIEF, dp_ranks=2)
    for manners in (Manners(), Manners(style="native", echo=False)):
        with serving(Toy(canary("mixtral")), manners) as url:
            data = audit(load(canary("mixtral")), Target(url=url, timeout=20), effort, lambda phase: None)
        assert data["exit"] == 0
        fields = {body["routed_dp_rank"] for body in manners.seen if "routed_dp_rank" in body}
        assert (fields, set(manners.ranks)) == ((set(), {"0", "1"}) if manners.style != "native" else ({0, 1}, set()))
        assert {"1 stream on 2 ranks", "3 streams on 2 ranks"} <= data["phases"].keys()
        assert "requests for rank 1" in data["headline"]
        assert any("no answer shows whether the server obeyed" in line for line in data["covers"])


def test_no_server_is_told_at_once(canary: Canary) -> None:
    data = audit(load(canary("mixtral")), Target(url="http://127.0.0.1:9", timeout=2), BRIEF, lambda phase: None)
    assert data["exit"] == 3
    assert "is the server running" in data["headline"]


def test_another_checkpoint_is_not_judged(canary: Canary) -> None:
    with serving(Toy(canary("mixtral"))) as url:
        data = audit(load(canary("mixtral", seed=3)), Target(url=url), BRIEF, lambda phase: None)
    assert data["exit"] == 2
    assert "another checkpoint" in data["headline"] or "does not serve this canary" in data["headline"]


def test_what_was_not_judged_is_said_once(canary: Canary, tmp_path: Path) -> None:
    with serving(Toy(canary("mixtral"))) as url:
        data = audit(load(canary("mixtral", seed=3)), Target(url=url), BRIEF, lambda phase: None)
    (reason,) = data["undecided"]
    console = Console(file=StringIO(), width=10_000)
    print_result(data, console)
    assert console.file.getvalue().splitlines()[1] == f"not judged  {reason}"
    write_html(data, tmp_path / "r.html")
    for text in (console.file.getvalue(), html.unescape((tmp_path / "r.html").read_text())):
        assert text.count(reason) == 1


def test_a_result_survives_its_file_and_is_explained_again(canary: Canary, tmp_path: Path) -> None:
    data = run(canary("mixtral"), faults=Faults(expert=lambda layer, e, y: y * (e != 3)))
    write_json(data, tmp_path / "a.json")
    again = explain_again(read_json(tmp_path / "a.json"))
    for key in ("exit", "headline", "findings", "grid", "matrices"):
        assert json.loads(json.dumps(again[key])) == json.loads(json.dumps(data[key]))


def test_diff_of_a_run_with_itself_is_empty_and_with_a_fault_is_not(canary: Canary) -> None:
    right, wrong = run(canary("mixtral")), run(canary("mixtral"), faults=Faults(total=lambda layer, y: y * 2))
    same = diff(right, right)
    assert not any(same[key] for key in ("only_a", "only_b", "phases", "coefficients"))
    other = diff(right, wrong)
    assert other["only_b"]
    assert other["coefficients"]
    with pytest.raises(UserError, match="different canaries"):
        diff(right, {**right, "digest": "0" * 64})


def test_junit_and_html_say_what_the_result_says(canary: Canary, tmp_path: Path) -> None:
    data = run(canary("mixtral"), faults=Faults(total=lambda layer, y: y * 2 if layer else y))
    write_junit(data, tmp_path / "r.xml")
    suite = ElementTree.parse(tmp_path / "r.xml").getroot()
    failed = {c.get("classname") for c in suite if c.find("failure") is not None}
    assert failed == {"canary.mixtral.layer 1"}
    assert int(suite.get("tests") or 0) == len(list(suite))
    write_html(data, tmp_path / "r.html")
    page = html.unescape((tmp_path / "r.html").read_text())
    assert data["findings"][0]["title"] in page
    assert "http://" not in page.replace(data["url"], "")
    assert page.count("data:image/png;base64,") == 6


@pytest.mark.parametrize("text", ["", "{}", "[1]", "not json"])
def test_files_that_are_no_results_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(UserError, match=r"x\.json"):
        read_json(tmp_path / "x.json")


def test_every_name_an_explanation_can_carry_has_a_page() -> None:
    from truegate.canary.sentences import OWN
    from truegate.law.faults import FAULTS

    page = (Path(__file__).parents[3] / "docs" / "faults.md").read_text()
    missing = [n for n in [*(f.name for f in FAULTS), *OWN] if f"\n## {n}\n" not in page]
    assert not missing
