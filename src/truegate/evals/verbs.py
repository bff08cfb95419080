"""What the verbs print: load, judge, show. Results go to stdout, verdicts come back as exit codes."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from truegate.errors import InvalidRun, UserError
from truegate.evals import report
from truegate.evals.compare import Comparison, compare_runs, over_tasks
from truegate.evals.gate import (
    MlperfGate,
    Rule,
    Verdict,
    compare_counts,
    counts_interval,
    mlperf_gate,
    parse_counts,
    percent,
    worst,
)
from truegate.evals.load import Run, first_row, load_run, load_runs
from truegate.evals.loops import find_loop
from truegate.evals.noise import noise_of_counts, noise_of_runs
from truegate.evals.page import comparison_page
from truegate.evals.score import Record
from truegate.evals.start import RunOutcome
from truegate.evals.stats import Interval, detectable, paired_sample_size, unpaired_sample_size
from truegate.evals.summary import accuracy_interval, finite, summarise
from truegate.evals.tasks import read_jsonl

COLOURS = {Verdict.PASS: "green", Verdict.FAIL: "red", Verdict.INCONCLUSIVE: "yellow"}


def print_summary(outcome: RunOutcome, *, as_json: bool) -> None:
    """The table of a run, or its JSON."""
    s = outcome.summary
    if as_json:
        _json({"folder": str(outcome.folder), "task": outcome.task, "void": s.void, **asdict(s)})
        return
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for label, value in report.summary_rows(s):
        table.add_row(Text(label, style="bold"), Text(value))
    out = _console()
    out.print(table)
    out.print(Text(f"{outcome.asked} asked in {outcome.seconds:.1f} s; report: {outcome.folder / 'report.html'}"))
    if s.void:
        out.print(Text("VOID: more than 0.5% of the requests failed; these figures mean nothing", style="bold red"))


def judge_runs(a: Path, b: Path, rule: Rule, *, force: bool, seed: int, form: str, html: Path | None) -> int:
    """Compare the tasks that two paths share; print; return the exit code."""
    left, right = load_runs(a), load_runs(b)
    tasks = [task for task in left if task in right]
    if len(left) == len(right) == 1:
        pairs = [(next(iter(left.values())), next(iter(right.values())))]  # the names of dumps may differ
    elif tasks:
        pairs = [(left[task], right[task]) for task in tasks]
    else:
        raise UserError(f"{a} holds {', '.join(left)} and {b} holds {', '.join(right)}: no task in common")
    comparisons = over_tasks([compare_runs(x, y, rule, force=force, seed=seed) for x, y in pairs], rule)
    verdict = worst([c.verdict for c in comparisons])
    if html is not None:
        _write(html, comparison_page(comparisons, pairs, (str(a), str(b)), rule))
    if form == "json":
        _json(report.comparison_json(comparisons, rule, verdict))
    elif form == "md":
        print(report.comparison_markdown(comparisons, (str(a), str(b)), rule, verdict), end="")
    else:
        alone = sorted(left.keys() ^ right.keys()) if len(pairs) > 1 or len(left) != len(right) else []
        _print_comparisons(comparisons, rule, verdict, alone)
    return verdict.exit_code


def _print_comparisons(comparisons: Sequence[Comparison], rule: Rule, verdict: Verdict, alone: list[str]) -> None:
    out = _console()
    for c in comparisons:
        table = Table(title=f"{c.task}: {c.pairs} pairs", title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("", "A (baseline)", "B", "change", ""):
            table.add_column(name, overflow="fold")
        for row in report.comparison_rows(c, rule):
            mark = Text("") if row.verdict is None else Text(row.verdict.name, style=COLOURS[row.verdict])
            table.add_row(Text(row.label, style="bold"), Text(row.a), Text(row.b), Text(row.change), mark)
        out.print(table)
        for note in c.notes:
            out.print(Text(f"  {note}", style="dim"))
        out.print(Text(report.verdict_sentence(c, rule), style=COLOURS[c.verdict]))
    for task in alone:
        out.print(Text(f"note: {task} is in one of the two only and was not compared", style="dim"))
    if len(comparisons) > 1:
        out.print(Text(f"{verdict.name} over {len(comparisons)} tasks (Holm)", style=f"bold {COLOURS[verdict]}"))


def judge_counts(a: str, b: str, rule: Rule, form: str) -> int:
    """Compare two published counts; print; return the exit code."""
    result = compare_counts(parse_counts(a), parse_counts(b), rule)
    sentence = report.counts_sentence(result, rule)
    if form == "json":
        _json(asdict(result) | {"verdict": result.verdict.name, "sentence": sentence})
    else:
        _console().print(Text(sentence, style=COLOURS[result.verdict] if form == "table" else ""), soft_wrap=True)
    return result.verdict.exit_code


def judge_mlperf(
    names: list[str], counts: bool, rule: Rule, reference: float | None, reference_tokens: float | None, form: str
) -> int:
    """Judge each run against a published reference; print; return the exit code of the worst."""
    if reference is None or not 0 < reference <= 100:
        raise UserError("--gate mlperf needs --reference: the exact match of the reference in percent, such as 81.3582")
    if reference_tokens is not None and not reference_tokens > 0:
        raise UserError("--reference-tokens must be above 0")
    if not counts and reference_tokens is None:
        raise UserError("--gate mlperf needs --reference-tokens: tokens per sample of the reference, such as 3886.2274")
    gates = {n: _gate_of(n, counts, rule, reference, reference_tokens) for n in names}
    verdict = worst([gate.verdict for gate in gates.values()])
    if form == "json":
        rows = {n: asdict(g) | {"verdict": g.verdict.name} for n, g in gates.items()}
        for fields in rows.values():
            fields |= {key: Verdict(fields[key]).name for key in ("accuracy_verdict", "tokens_verdict")}
        _json({"verdict": verdict.name, "exit_code": verdict.exit_code, "runs": rows})
        return verdict.exit_code
    header = ("", "measured", "demanded", "")
    for name, gate in gates.items():
        point = {True: "met", False: "missed", None: "not judged"}[gate.point_passes]
        line = f"{gate.verdict.name}: {name}; as MLPerf counts it, without uncertainty: {point}"
        if form == "md":
            print(f"**{line}**\n\n{report.markdown_table(header, report.mlperf_rows(gate))}\n")
            continue
        table = Table(box=None, padding=(0, 2, 0, 0))
        for column in header:
            table.add_column(column)
        for row in report.mlperf_rows(gate):
            table.add_row(*map(Text, row))
        _console().print(table)
        _console().print(Text(line, style=COLOURS[gate.verdict]), soft_wrap=True)
    return verdict.exit_code


def _gate_of(name: str, counts: bool, rule: Rule, reference: float, reference_tokens: float | None) -> MlperfGate:
    if counts:
        k, n = parse_counts(name)
        return mlperf_gate(
            accuracy=100 * k / n,
            accuracy_ci=counts_interval(k, n, rule.alpha),
            tokens=None,
            tokens_ci=None,
            reference=reference,
            reference_tokens=reference_tokens,
        )
    loaded = load_run(Path(name))
    summary = summarise(loaded.records)
    if summary.void:
        raise InvalidRun(f"{name}: too many requests failed; the run is void")
    measured = summary.tokens_from == "usage"
    return mlperf_gate(
        accuracy=100 * summary.accuracy,
        accuracy_ci=percent(accuracy_interval(loaded.records, rule.alpha)),
        tokens=summary.tokens_per_answer if measured else None,
        tokens_ci=Interval(*summary.tokens_ci) if measured else None,
        reference=reference,
        reference_tokens=reference_tokens,
    )


def print_power(*, p: float, delta: float, psi: float | None, n: int | None, rule: Rule, as_json: bool) -> None:
    """Items needed for a fall of delta, and what n items can show."""
    if not 0 < delta < p <= 1:
        raise UserError(f"--p {p:g} --delta {delta:g}: needs 0 < delta < p <= 1")
    if psi is not None and not delta <= psi <= 1:
        raise UserError(f"--psi {psi:g}: at least --delta ({delta:g}), since a fall of delta changes that many items")
    if n is not None and n < 1:
        raise UserError(f"--n {n}: must be at least 1")
    shares = [psi] if psi is not None else [v for v in (delta, 0.02, 0.03, 0.05, 0.1) if v >= delta]
    shares = list(dict.fromkeys(shares))
    rows = [
        {
            "psi": share,
            "items": paired_sample_size(delta, share, alpha=rule.alpha, power=rule.power),
            "detectable": detectable(n, share, alpha=rule.alpha, power=rule.power) if n else None,
        }
        for share in shares
    ]
    unpaired = unpaired_sample_size(p, p - delta, alpha=rule.alpha, power=rule.power)
    if as_json:
        for row in rows:  # a fall is at most the share that changes
            row["detectable"] = d if (d := row["detectable"]) and d <= (row["psi"] or 0) else None
        _json({"p": p, "delta": delta, "paired": rows, "unpaired_per_run": unpaired, "n": n})
        return
    out = _console()
    out.print(
        f"To see {100 * p:g}% fall to {100 * (p - delta):g}% ({100 * rule.power:g}% power, alpha {rule.alpha:g}):"
    )
    for row in rows:
        line = (
            f"  the same items in both runs, {100 * float(row['psi'] or 0):g}% of them changing: {row['items']:,} items"
        )
        if n and row["detectable"] is not None:
            line += f"; {_shown_by(n, float(row['detectable']), float(row['psi'] or 0))}"
        out.print(line, soft_wrap=True)
    out.print(f"  different items in each run: {unpaired:,} items in each", soft_wrap=True)


def _shown_by(n: int, least: float, psi: float) -> str:
    """What n items show where a share psi of them changes: a fall is at most that share."""
    if not math.isfinite(least):
        return f"{n:,} items are too few to show any fall"
    if least > psi:
        return f"{n:,} items are too few to show any: that takes a fall of {100 * least:.1f} pp"
    return f"{n:,} items show {100 * least:.1f} pp or more"


def print_noise(names: list[str], *, counts: bool, rule: Rule, force: bool, as_json: bool) -> bool:
    """Print the A/A floor; return whether two of the runs differ beyond chance."""
    if counts:
        result = noise_of_counts([parse_counts(name) for name in names], rule)
    else:
        result = noise_of_runs([load_run(Path(name)) for name in names], rule, force=force)
    if as_json:
        _json(asdict(result))
        return bool(result.differ)
    shares = [report.percent(a) for a in result.accuracies]
    seen = ", ".join(shares) if len(shares) <= 8 else f"{min(shares)} to {max(shares)}"
    derived = "" if result.flips_measured else " (from the spread of the accuracies)"
    out = _console()
    out.print(
        f"{result.runs} runs of {result.items} items: accuracy {seen}, sd {100 * result.sd:.2f} pp", soft_wrap=True
    )
    out.print(f"verdict flips between two runs: {100 * result.flips:.1f}% of items{derived}", soft_wrap=True)
    if result.same_text is not None:
        out.print(f"answers that are the same to the letter: {100 * result.same_text:.1f}%", soft_wrap=True)
    floor = f"{100 * result.detectable:.1f} pp or more" if result.detectable <= 1 else "nothing: too few items"
    out.print(f"noise floor: two single runs show {floor} ({100 * rule.power:g}% power)", soft_wrap=True)
    for line in result.differ:
        out.print(Text(f"not an A/A pair: {line}", style="red"), soft_wrap=True)
    return bool(result.differ)


def print_loops(path: Path, *, field: str | None, max_rate: float, show: int, as_json: bool) -> bool:
    """List looped answers; return whether their share is above max_rate."""
    if not 0 <= max_rate <= 1:
        raise UserError(f"--max-rate {max_rate:g}: a share between 0 and 1")
    rows = _plain_loops(path, field) if _is_plain(path, field) else _run_loops(path)
    looped = [row for row in rows if row["looped"]]
    suspects = sum(row["suspect"] for row in rows)
    rate = len(looped) / len(rows)
    if as_json:
        _json({"answers": len(rows), "looped": len(looped), "suspect": suspects, "rate": rate, "rows": looped})
        return rate > max_rate
    out = _console()
    table = Table(box=None, padding=(0, 2, 0, 0))
    for name in ("id", "LoopScore", "period", "starts at", "ends with"):
        table.add_column(name, overflow="fold")
    for row in looped[:show]:
        period = "nearly" if row["period"] is None else str(row["period"])
        cells = (row["id"], f"{row['score']:.2f}", period, report.percent(row["onset"], 0), repr(row["end"]))
        table.add_row(*(Text(str(cell)) for cell in cells))
    if looped:
        out.print(table)
    more = f" ({len(looped) - show} more not listed)" if len(looped) > show else ""
    out.print(
        f"{len(looped)} of {len(rows)} answers end in a loop ({100 * rate:.1f}%){more}; {suspects} suspects",
        soft_wrap=True,
    )
    return rate > max_rate


def _is_plain(path: Path, field: str | None) -> bool:
    """Whether the file is a JSONL that is no dump we know."""
    if not path.is_file() or path.suffix in (".eval", ".json"):
        if field is not None:
            raise UserError("--field belongs to a JSONL file of another kind")
        return False
    if field is not None:
        return True
    row = first_row(path)
    known = ({"doc_id", "resps"}, {"generation", "expected_answer"}, {"prompt_sha", "outcome"})
    return not any(names <= row.keys() for names in known)


TEXT_FIELDS = ("text", "output", "response", "completion", "generation", "content", "answer", "generated_text")


def _plain_loops(path: Path, field: str | None) -> list[dict[str, Any]]:
    rows = []
    for line, row in enumerate(read_jsonl(path), 1):
        name = field or next((f for f in TEXT_FIELDS if isinstance(row.get(f), str)), None)
        text = row.get(name) if name else None
        if not isinstance(text, str):
            raise UserError(
                f"{path}, line {line}: no text in {field or 'any of ' + ', '.join(TEXT_FIELDS)}: give --field"
            )
        loop = find_loop(text)
        capped = row.get("finish_reason", row.get("finish")) == "length"
        suspect = loop.templated and capped and not loop.looped
        shown = {"id": str(row.get("id", line)), "looped": loop.looped, "suspect": suspect, "score": loop.score}
        rows.append(shown | {"period": loop.period if loop.exact else None, "onset": loop.onset, "end": text[-40:]})
    return rows


def _run_loops(path: Path) -> list[dict[str, Any]]:
    rows = []
    for task in load_runs(path).values():
        ends = {r.key: (r.reasoning + r.text)[-40:] for r in task.looped}
        for r in task.records:
            shown = {"id": _label(task, r), "looped": r.looped, "suspect": r.suspect, "score": r.loop_score}
            rows.append(shown | {"period": r.loop_period, "onset": r.loop_onset, "end": ends.get(r.key, "")})
    return rows


def _label(run: Run, record: Record) -> str:
    return record.id if all(r.repeat == 0 for r in run.records) else f"{record.id} repeat {record.repeat}"


def _console() -> Console:
    """Stdout; wide where it is not a terminal, so that a log holds whole lines."""
    console = Console(highlight=False, markup=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=160)


def _json(value: Any) -> None:
    print(json.dumps(finite(value), indent=2, ensure_ascii=True, default=str))


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror}") from None
