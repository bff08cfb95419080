"""Verdicts: the report this project starts from, generated here, and the rules that runs must meet to be compared."""

import itertools
import json
import random
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from truegate.errors import InvalidRun, UserError
from truegate.evals import verbs
from truegate.evals.compare import compare_runs, over_tasks
from truegate.evals.folder import CONFIG, ITEMS, Config, write_json
from truegate.evals.gate import Rule, Verdict, compare_counts, mlperf_gate, percent
from truegate.evals.load import Run, load_run, load_runs, make_run
from truegate.evals.noise import noise_of_counts, noise_of_runs
from truegate.evals.report import counts_sentence, verdict_sentence
from truegate.evals.score import Asked, Record, Reply, score
from truegate.evals.stats import Interval, difference_interval, mcnemar
from truegate.evals.summary import accuracy_interval, summarise

CAP = 20_000
LOOP = "Wait, let me check that again. " * 60
CONFIG_FIELDS: dict[str, Any] = {
    "task": "own", "dataset": "d", "prompt": "p", "mode": "chat", "sampling": {"temperature": 0.0}, "max_tokens": CAP,
    "scoring": "answers-1/number", "items": 200, "repeats": 1, "model": "m", "url": "u", "concurrency": 8, 
    "version": "1",
}  # fmt: skip


def record(
    i: int, *, right: bool, tokens: int | None = 100, finish: str = "stop", loops: bool = False, repeat: int = 0
) -> Record:
    text = LOOP if loops else f"Item {i} comes to\n#### {42 if right else 41}"
    asked = Asked(id=f"q{i:04d}", repeat=repeat, prompt_sha="", gold="42", extractor="number")
    return score(asked, Reply(text=text, finish=finish, tokens=tokens))


def make(name: str, records: list[Record], **changes: Any) -> Run:
    return make_run(name, "own", "truegate", records, Config(**CONFIG_FIELDS | changes))


def report_run(name: str, correct: int, total_tokens: int, runaways: int, seed: int) -> Run:
    """200 items with that many right, that many at the cap of 20,000 in a loop, and exactly that many tokens in all."""
    rng = random.Random(seed)
    order = random.Random(7).sample(range(200), 200)  # hard items are hard in every run
    right = set(order[:correct])
    capped = set(order[correct : correct + runaways])
    free = [i for i in range(200) if i not in capped]
    left = total_tokens - runaways * CAP
    lengths = dict.fromkeys(free, left // len(free))
    lengths[free[0]] += left - sum(lengths.values())
    for a, b in itertools.pairwise(free):  # spread them, the sum unchanged
        moved = rng.randrange(0, lengths[a] // 2)
        lengths[a], lengths[b] = lengths[a] - moved, lengths[b] + moved
    records = [
        record(i, right=False, tokens=CAP, finish="length", loops=True)
        if i in capped
        else record(i, right=i in right, tokens=lengths[i])
        for i in range(200)
    ]
    return make(name, records)


UNPATCHED = report_run("unpatched", 125, 1_332_838, 36, 1)
PATCHED = report_run("patched", 161, 742_596, 0, 2)
OFF = report_run("off", 164, 722_068, 0, 3)


@pytest.mark.parametrize(
    ("run", "exact", "tokens"), [(UNPATCHED, 62.5, 6664.19), (PATCHED, 80.5, 3712.98), (OFF, 82.0, 3610.34)]
)
def test_the_reports_figures_are_reproduced(run: Run, exact: float, tokens: float) -> None:
    summary = summarise(run.records)
    assert 100 * summary.accuracy == exact
    assert round(summary.tokens_per_answer, 2) == tokens
    assert summary.tokens_from == "usage"


def test_the_unpatched_run_fails_on_every_count() -> None:
    for baseline in (PATCHED, OFF):
        result = compare_runs(baseline, UNPATCHED, Rule())
        assert (result.accuracy, result.runaway, result.length) == (Verdict.FAIL, Verdict.FAIL, Verdict.FAIL)
        assert result.loops.only_b == result.caps.only_b == 36
        assert result.p < 1e-9
    assert "36" not in verdict_sentence(result, Rule()).split("FAIL")[0]


def test_three_items_of_two_hundred_settle_nothing() -> None:
    result = compare_runs(OFF, PATCHED, Rule())
    assert result.verdict is Verdict.INCONCLUSIVE
    assert (result.worse, result.better, result.p) == (3, 0, 0.25)
    assert result.needed is not None
    assert result.needed > 200
    assert "needs" in verdict_sentence(result, Rule())


def test_the_report_under_mlperfs_gate() -> None:
    verdicts = {}
    for run in (UNPATCHED, PATCHED, OFF):
        summary = summarise(run.records)
        gate = mlperf_gate(
            accuracy=100 * summary.accuracy,
            accuracy_ci=percent(accuracy_interval(run.records)),
            tokens=summary.tokens_per_answer,
            tokens_ci=Interval(*summary.tokens_ci),
            reference=81.3582,
            reference_tokens=3886.2274,
        )
        assert gate.accuracy_bar == pytest.approx(80.5446, abs=1e-4)
        assert gate.tokens_window == pytest.approx((3497.6, 4274.9), abs=0.1)
        verdicts[run.name] = gate.verdict, gate.accuracy_verdict, gate.point_passes
    assert verdicts["unpatched"] == (Verdict.FAIL, Verdict.FAIL, False)
    assert verdicts["patched"] == (Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE, False)  # it misses the bar by 0.04
    assert verdicts["off"][1:] == (Verdict.INCONCLUSIVE, True)


@pytest.mark.parametrize(
    ("a", "b", "verdict", "p_range"),
    [
        ((192, 200), (190, 200), Verdict.INCONCLUSIVE, (0.50, 0.81)),
        ((161, 200), (125, 200), Verdict.FAIL, (3e-11, 9.6e-4)),
        ((164, 200), (161, 200), Verdict.INCONCLUSIVE, (0.25, 0.82)),
        ((125, 200), (161, 200), Verdict.PASS, (3e-11, 9.6e-4)),
        ((200, 200), (200, 200), Verdict.PASS, (1.0, 1.0)),
    ],
)
def test_published_counts_are_judged_by_all_they_allow(a, b, verdict: Verdict, p_range: tuple[float, float]) -> None:
    result = compare_counts(a, b, Rule())
    assert result.verdict is verdict
    assert result.p_range == pytest.approx(p_range, rel=0.05)


def test_the_gsm8k_pair_says_how_many_items_it_would_take() -> None:
    assert "1,568 at ψ = 0.02" in counts_sentence(compare_counts((192, 200), (190, 200), Rule()), Rule())


def test_the_ends_of_the_range_bound_every_split() -> None:
    rng = random.Random(8)
    for _ in range(150):
        n = rng.randrange(5, 60)
        k1, k2 = rng.randrange(n + 1), rng.randrange(n + 1)
        result = compare_counts((k1, n), (k2, n), Rule())
        splits = [(b, b + k2 - k1) for b in range(n + 1) if 0 <= b + k2 - k1 <= n and b <= k1 and b + k2 - k1 <= n - k1]
        p = [mcnemar(b, c) for b, c in splits]
        lows = [difference_interval(b, c, n).low for b, c in splits]
        assert result.p_range == pytest.approx((min(p), max(p)))
        assert result.low_range == pytest.approx((min(lows), max(lows)))


def test_counts_of_different_sizes_are_compared_as_independent_runs() -> None:
    assert compare_counts((960, 1000), (150, 200), Rule()).verdict is Verdict.FAIL
    assert compare_counts((192, 200), (955, 1000), Rule()).verdict is Verdict.INCONCLUSIVE
    assert "unpaired" in counts_sentence(compare_counts((192, 200), (955, 1000), Rule()), Rule())


def test_fail_also_needs_the_exact_test() -> None:
    """5 of 200 fell, none rose: the interval lies below 0, exact McNemar says 0.0625, so nothing is settled."""
    b = make("b", [record(i, right=i >= 5) for i in range(200)])
    result = compare_runs(make("a", [record(i, right=True) for i in range(200)]), b, Rule())
    assert result.difference_ci.high < 0
    assert result.p == 0.0625
    assert result.verdict is Verdict.INCONCLUSIVE


def test_the_same_answers_pass_and_longer_or_looping_ones_do_not() -> None:
    a = make("a", [record(i, right=True) for i in range(200)])
    assert compare_runs(a, a, Rule()).verdict is Verdict.PASS
    longer = make("b", [record(i, right=True, tokens=130) for i in range(200)])
    assert compare_runs(a, longer, Rule()).length is Verdict.FAIL
    spread = make("b", [record(i, right=True, tokens=4000 if i == 3 else 100) for i in range(200)])
    assert compare_runs(a, spread, Rule()).verdict is Verdict.INCONCLUSIVE
    looping = [replace(r, looped=i < 6) for i, r in enumerate(a.records)]
    result = compare_runs(a, make("b", looping), Rule())
    assert (result.accuracy, result.runaway) == (Verdict.PASS, Verdict.FAIL)
    assert result.loops.p == pytest.approx(0.03125)


def test_what_would_settle_it_says_what_was_seen_and_what_is_assumed() -> None:
    a = make("a", [record(i, right=True) for i in range(20)])
    assert verdict_sentence(compare_runs(a, a, Rule()), Rule()).endswith(
        "1 pp needs 3,566 items if 4.5% of them change (0 of 20 did here)."
    )
    most = make("a", [record(i, right=True) for i in range(130)])
    assert "if 1.0% of them change (0 of 130 did" in verdict_sentence(compare_runs(most, most, Rule()), Rule())
    twice = make("a", [record(i, right=True, repeat=k) for k in range(2) for i in range(20)], repeats=2)
    assert "items that vary as these do." in verdict_sentence(compare_runs(twice, twice, Rule()), Rule())


def test_repeats_are_clustered_by_item() -> None:
    def answers(share: float, seed: int) -> list[Record]:
        rng = random.Random(seed)
        return [record(i, right=rng.random() < share, repeat=k) for k in range(4) for i in range(150)]

    result = compare_runs(make("a", answers(0.8, 1), repeats=4), make("b", answers(0.5, 2), repeats=4), Rule())
    assert result.repeats == (4, 4)
    assert result.pairs == 150
    assert result.verdict is Verdict.FAIL
    same = compare_runs(make("a", answers(0.8, 1), repeats=4), make("b", answers(0.8, 3), repeats=4), Rule())
    assert same.verdict is Verdict.INCONCLUSIVE
    assert same.needed is not None
    assert same.needed > 150


def test_holm_over_tasks_takes_the_best_of_many_for_what_it_is() -> None:
    def task(fell: int) -> Any:
        a = make("a", [record(i, right=True) for i in range(300)])
        return compare_runs(a, make("b", [record(i, right=i >= fell) for i in range(300)]), Rule())

    alone = over_tasks([task(6)], Rule())
    assert alone[0].accuracy is Verdict.FAIL
    among = over_tasks([task(6), task(0), task(0), task(0)], Rule())
    assert among[0].accuracy is Verdict.INCONCLUSIVE
    assert among[0].p_holm == pytest.approx(4 * 0.03125)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"dataset": "e"}, "dataset"), ({"prompt": "q"}, "prompt"), ({"sampling": {"temperature": 1.0}}, "sampling"),
        ({"max_tokens": 9}, "max_tokens"), ({"scoring": "answers-2/number"}, "scoring"), ({"mode": "text"}, "mode"),
    ],
)  # fmt: skip
def test_runs_of_different_things_are_refused_unless_forced(change: dict[str, Any], named: str) -> None:
    records = [record(i, right=True) for i in range(200)]
    a, b = make("a", records), make("b", records, **change)
    with pytest.raises(UserError, match=f"not comparable: {named}: "):
        compare_runs(a, b, Rule())
    result = compare_runs(a, b, Rule(), force=True)
    assert any(note.startswith(f"forced though {named}") for note in result.notes)


def test_a_void_run_is_never_compared_and_a_failed_item_is_left_out() -> None:
    def with_errors(count: int) -> Run:
        failed = Reply(error="timeout: no reply within 5 s")
        asked = [Asked(id=f"q{i:04d}", repeat=0, prompt_sha="", gold="42", extractor="number") for i in range(count)]
        return make("b", [score(a, failed) for a in asked] + [record(i, right=True) for i in range(count, 200)])

    a = make("a", [record(i, right=True) for i in range(200)])
    with pytest.raises(InvalidRun, match=r"b: 2 of 200 requests failed \(timeout 2\); the run is void"):
        compare_runs(a, with_errors(2), Rule(), force=True)
    result = compare_runs(a, with_errors(1), Rule())
    assert (result.pairs, result.dropped) == (199, 1)
    assert result.verdict is Verdict.PASS


def test_lengths_are_compared_in_characters_where_a_server_counts_no_tokens() -> None:
    a = make("a", [record(i, right=True) for i in range(200)])
    b = make("b", [record(i, right=True, tokens=None) for i in range(200)])
    result = compare_runs(a, b, Rule())
    assert result.length_unit == "characters"
    assert result.length_ratio == 1.0
    assert any("characters" in note for note in result.notes)


def test_the_noise_floor_of_a_published_series() -> None:
    result = noise_of_counts([(166, 200), (168, 200), (170, 200), (169, 200), (172, 200)], Rule())
    assert result.flips == pytest.approx(2 * 200 * result.sd**2)
    assert result.detectable == pytest.approx(2.8016 * 2**0.5 * result.sd, rel=1e-3)
    series = 2 * 200 * 0.009**2  # 61 runs with sd 0.9 pp: 3.2% flips
    assert series == pytest.approx(0.032, abs=0.001)


def test_runs_that_differ_beyond_chance_are_no_a_a_pair() -> None:
    rng = random.Random(9)
    runs = [make(f"r{k}", [record(i, right=rng.random() < 0.9) for i in range(200)]) for k in range(3)]
    floor = noise_of_runs(runs, Rule(), force=False)
    assert not floor.differ
    assert 0.1 < floor.flips < 0.25
    worse = make("worse", [record(i, right=i > 100) for i in range(200)])
    assert "worse" in noise_of_runs([runs[0], worse], Rule(), force=False).differ[0]


def save(folder: Path, run: Run, **changes: Any) -> Path:
    folder.mkdir(parents=True)
    write_json(folder / CONFIG, CONFIG_FIELDS | changes)
    (folder / ITEMS).write_text("".join(json.dumps(asdict(r)) + "\n" for r in run.records))
    return folder


def test_folders_of_runs_are_compared_task_by_task(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for side, run in (("a", OFF), ("b", UNPATCHED)):
        for task in ("one", "two"):
            save(tmp_path / side / task, run, task=task)
    assert sorted(load_runs(tmp_path / "a")) == ["one", "two"]
    page = tmp_path / "report.html"
    code = verbs.judge_runs(tmp_path / "a", tmp_path / "b", Rule(), force=False, seed=0, form="json", html=page)
    result = json.loads(capsys.readouterr().out)
    assert code == result["exit_code"] == 1
    assert [t["task"] for t in result["tasks"]] == ["one", "two"]
    assert result["tasks"][0]["p_holm"] == pytest.approx(2 * result["tasks"][0]["p"])
    assert verbs.judge_runs(tmp_path / "a", tmp_path / "b", Rule(), force=False, seed=0, form="md", html=None) == 1
    text = capsys.readouterr().out
    assert text.startswith("### Accuracy check: FAIL")
    assert "| Accuracy | 82.0%" in text


def test_the_page_is_whole_in_itself_and_shows_the_loops(tmp_path: Path) -> None:
    nasty = "</pre><script>alert(1)</script>"
    a = save(tmp_path / "a", OFF)
    b = save(tmp_path / "b", UNPATCHED)
    looped = record(0, right=False, loops=True, tokens=CAP, finish="length")
    with (b / ITEMS).open("a") as file:
        file.write(json.dumps(asdict(replace(looped, id="q0000", text=nasty + LOOP, loop_onset=0.02))) + "\n")
    page = tmp_path / "report.html"
    verbs.judge_runs(a, b, Rule(), force=False, seed=0, form="json", html=page)
    html = page.read_text()
    assert html.count("<svg") == 3
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert not re.search(r"(src|href)=|url\(|@import", html)
    assert html.count("<mark>") >= 24


@pytest.mark.parametrize(
    ("content", "error", "message"),
    [
        ("", UserError, "holds no answers"),
        ('{"id": "q1", "tex', UserError, "holds no answers"),
        ('{"a": 1}\n', InvalidRun, "items.jsonl, line 1: not a record"),
        ("[]\n", InvalidRun, "items.jsonl, line 1: not a record"),
        ("\x00\x01\n", InvalidRun, "items.jsonl, line 1: not a record"),
    ],
)
def test_broken_items_are_named(tmp_path: Path, content: str, error: type[Exception], message: str) -> None:
    (tmp_path / ITEMS).write_text(content)
    with pytest.raises(error, match=message):
        load_run(tmp_path)


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = save(tmp_path / "a", OFF)
    with (folder / ITEMS).open("a") as file:
        file.write('{"id": "q9999", "rep')
    assert len(load_run(folder).records) == 200
