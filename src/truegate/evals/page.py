"""The report as one self-contained HTML page: no script, no network, no outside file.

Invariant: answers are untrusted text; the template escapes everything but our own SVG.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from truegate.evals.compare import Comparison
from truegate.evals.gate import Rule, worst
from truegate.evals.load import Run
from truegate.evals.plots import accuracy_plot, length_plot, outcome_plot
from truegate.evals.report import comparison_rows, summary_rows, verdict_sentence
from truegate.evals.score import Record
from truegate.evals.summary import Summary

SHOWN = 12  # looped answers of a run that the page shows
BEFORE, LOOP_START, LOOP_END = 500, 700, 160  # characters of each that it shows


@dataclass(frozen=True, kw_only=True)
class Looped:
    """A looped answer cut for reading: text before the loop, the loop's start, how much is left out, its end."""

    run: str
    id: str
    facts: str
    before: str
    start: str
    left_out: int
    end: str


def comparison_page(
    comparisons: Sequence[Comparison], runs: Sequence[tuple[Run, Run]], names: tuple[str, str], rule: Rule
) -> str:
    """The page of a comparison, one section a task; `names` are A and B as they were given."""
    sections = []
    for c, (a, b) in zip(comparisons, runs, strict=True):
        sections.append(
            _section(c.task, [("A", a, c.a), ("B", b, c.b)])
            | {"sentence": verdict_sentence(c, rule), "verdict": c.verdict.name, "rows": comparison_rows(c, rule)}
            | {"notes": c.notes}
        )
    verdict = worst([c.verdict for c in comparisons]).name
    named = [("A, baseline", names[0]), ("B", names[1])]
    return _render(title=f"Accuracy check: {verdict}", verdict=verdict, names=named, sections=sections)


def run_page(run: Run, summary: Summary) -> str:
    """The page of one run."""
    section = _section(run.task, [("run", run, summary)]) | {"facts": summary_rows(summary), "notes": ()}
    return _render(title=f"{run.task}: {100 * summary.accuracy:.1f}%", names=[("run", run.name)], sections=[section])


def _section(task: str, runs: Sequence[tuple[str, Run, Summary]]) -> dict[str, Any]:
    named = [(label, summary) for label, _, summary in runs]
    lengths = [(label, [r.tokens or 0 for r in run.records if r.error is None]) for label, run, _ in runs]
    exact = all(s.tokens_from == "usage" for _, s in named)
    return {
        "task": task,
        "accuracy": accuracy_plot(named),
        "outcomes": outcome_plot(named),
        "lengths": length_plot(lengths, "tokens" if exact else "tokens (estimated)"),
        "looped": [_looped(label, record) for label, run, _ in runs for record in run.looped[:SHOWN]],
        "looped_total": sum(r.looped for _, run, _ in runs for r in run.records),
    }


def _looped(label: str, record: Record) -> Looped:
    whole = record.reasoning + record.text
    onset = round((record.loop_onset or 0.0) * len(whole))
    loop = whole[onset:]
    start, end = loop[:LOOP_START], loop[max(LOOP_START, len(loop) - LOOP_END) :]
    kind = f"period {record.loop_period} characters" if record.loop_period else "nearly the same text again and again"
    copies = f", {len(loop) / record.loop_period:,.0f} copies" if record.loop_period else ""
    facts = (
        f"{kind}{copies}; starts after {onset:,} of {len(whole):,} characters; "
        f"about {record.waste:,.0f} of {record.tokens or 0:,} tokens wasted; finish {record.finish or 'unknown'}"
    )
    return Looped(
        run=label,
        id=record.id,
        facts=facts,
        before=("… " if onset > BEFORE else "") + whole[max(0, onset - BEFORE) : onset],
        start=start,
        left_out=len(loop) - len(start) - len(end),
        end=end,
    )


def _render(**values: Any) -> str:
    from jinja2 import Environment, StrictUndefined

    source = resources.files("truegate.evals").joinpath("templates/report.html").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page = environment.from_string(source).render(**({"verdict": ""} | values))
    return page.encode("utf-8", "replace").decode()
