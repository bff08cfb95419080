"""Reports in words and tables: one list of rows, written as a terminal table, as Markdown or into the page.

Invariant: a figure that rests on something weak (estimated tokens, a forced comparison) says so beside it.
"""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from truegate.evals.compare import Comparison, Flags
from truegate.evals.gate import CountsComparison, MlperfGate, Rule, Verdict
from truegate.evals.score import with_remedy
from truegate.evals.stats import Interval
from truegate.evals.summary import Summary, finite

OUTCOME_LABELS = {
    "correct": "correct",
    "wrong": "wrong",
    "no_answer": "no answer",
    "truncated": "cut at the cap",
    "looped": "looped",
    "request_error": "request failed",
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of a comparison: a label, A, B, what changed, and a verdict where the line has one."""

    label: str
    a: str
    b: str
    change: str = ""
    verdict: Verdict | None = None


def percent(share: float | None, digits: int = 1) -> str:
    """`80.5%`, or a dash where there is nothing."""
    return "–" if share is None or not math.isfinite(share) else f"{100 * share:.{digits}f}%"  # noqa: RUF001


def points(share: float) -> str:
    """A difference in percentage points, signed."""
    return f"{100 * share:+.1f} pp".replace("-", "−")  # noqa: RUF001


def p_value(p: float) -> str:
    """`p = 0.031`, in scientific form below 0.001; the minus sign keeps it from being broken over two lines."""
    return f"p = {p:.3f}" if p >= 0.001 else f"p = {p:.1e}".replace("-", "−")  # noqa: RUF001


def span(interval: Interval | tuple[float, float], show: Any = percent) -> str:
    """`low to high`."""
    low, high = (interval.low, interval.high) if isinstance(interval, Interval) else interval
    return f"{show(low)} to {show(high)}"


def level(rule: Rule) -> str:
    """The name of the rule's intervals: `95% CI`."""
    return f"{100 * (1 - rule.alpha):g}% CI"


def whole(value: float) -> str:
    """A length: `3,713`, with one decimal below 1,000."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"


def comparison_rows(c: Comparison, rule: Rule) -> list[Row]:
    """The table of one task."""
    tested = f"{points(c.difference)} ({level(rule)} {span(c.difference_ci, points)}), exact {p_value(c.p)}"
    if c.p_holm != c.p:
        tested += f", Holm {p_value(c.p_holm)}"
    a, b = c.a, c.b
    unit = "Tokens" if c.length_unit == "tokens" else "Tokens (estimated)"
    return [
        Row(
            label="Accuracy",
            a=f"{percent(a.accuracy)} ({span(a.accuracy_ci)})",
            b=f"{percent(b.accuracy)} ({span(b.accuracy_ci)})",
            change=tested,
            verdict=c.accuracy,
        ),
        Row(
            label="Runaways (looped or cut)",
            a=percent(c.runaways.a),
            b=percent(c.runaways.b),
            change=_flag_change(c.runaways, c.runaways_holm),
            verdict=c.runaway,
        ),
        Row(
            label=f"{unit} per answer",
            a=whole(a.tokens_per_answer),
            b=whole(b.tokens_per_answer),
            change=f"×{c.length_ratio:.3f} ({level(rule)} {c.length_ci.low:.3f} to {c.length_ci.high:.3f})",  # noqa: RUF001
            verdict=c.length,
        ),
        Row(label="Looped", a=percent(c.loops.a), b=percent(c.loops.b), change=_flag_change(c.loops)),
        Row(label="Cut at the cap", a=percent(c.caps.a), b=percent(c.caps.b), change=_flag_change(c.caps)),
        Row(label="Accuracy among finished", a=percent(a.accuracy_finished), b=percent(b.accuracy_finished)),
        Row(label="Accuracy, strict format", a=percent(a.strict), b=percent(b.strict)),
        Row(label="No answer", a=_count(a, "no_answer"), b=_count(b, "no_answer")),
        Row(label="Tokens spent in loops", a=percent(a.waste_share), b=percent(b.waste_share)),
        Row(label="Request errors", a=_count(a, "request_error"), b=_count(b, "request_error")),
    ]


def _flag_change(flags: Flags, holm: float | None = None) -> str:
    if flags.only_a == flags.only_b == 0:
        return "the same items"
    text = f"items only in A: {flags.only_a}, only in B: {flags.only_b}; exact {p_value(flags.p)}"
    return text + (f", Holm {p_value(holm)}" if holm is not None and holm != flags.p else "")


def _count(summary: Summary, outcome: str) -> str:
    return f"{summary.outcomes[outcome]} of {summary.answers}"


def verdict_sentence(c: Comparison, rule: Rule) -> str:
    """Why the verdict is what it is, and what would settle it."""
    found = (
        f"B differs from A by {points(c.difference)} ({level(rule)} {span(c.difference_ci, points)}) on {c.pairs} pairs"
    )
    margin = f"{100 * rule.margin:g} pp"
    reasons = []
    if c.accuracy is Verdict.FAIL:
        reasons.append(f"{found}: worse beyond chance, exact {p_value(c.p_holm)}")
    if c.runaway is Verdict.FAIL:
        reasons.append(
            f"{percent(c.runaways.b)} of B's answers run away (A: {percent(c.runaways.a)}), "
            f"exact {p_value(c.runaways_holm)}"
        )
    if c.length is Verdict.FAIL:
        reasons.append(
            f"B's answers have {c.length_ratio:.2f} times A's length "
            f"({level(rule)} {c.length_ci.low:.2f} to {c.length_ci.high:.2f}), outside "
            f"{rule.length_window[0]:g} to {rule.length_window[1]:g}"
        )
    if reasons:
        return f"FAIL: {'; '.join(reasons)}."
    if c.verdict is Verdict.PASS:
        return f"PASS: B is not worse than A by {margin} or more. {found}; runaways and length hold."
    if c.accuracy is Verdict.INCONCLUSIVE:
        reasons.append(f"{found}. {_settle(c, rule)}")
    if c.length is Verdict.INCONCLUSIVE:
        low, high = rule.length_window
        reasons.append(
            f"The length ratio {c.length_ratio:.2f} is outside {low:g} to {high:g}, but its {level(rule)}, "
            f"{c.length_ci.low:.2f} to {c.length_ci.high:.2f}, is not."
        )
    return f"INCONCLUSIVE: {' '.join(reasons)}"


def _settle(c: Comparison, rule: Rule) -> str:
    power = f"{100 * rule.power:g}% power"
    can = (
        f"These pairs show a fall of {100 * c.detectable:.1f} pp or more with {power}"
        if math.isfinite(c.detectable)
        else f"No fall can be shown with so few pairs at {power}"
    )
    return f"{can}; {100 * rule.margin:g} pp needs {c.needed or 0:,} items {_if_as_here(c, rule)}."


def _if_as_here(c: Comparison, rule: Rule) -> str:
    """What the number of items needed rests on."""
    if c.repeats != (1, 1):
        return "that vary as these do"
    changed = c.worse + c.better
    return f"if {percent(max(c.psi, rule.margin))} of them change ({changed:,} of {c.pairs:,} did here)"


def counts_sentence(c: CountsComparison, rule: Rule) -> str:
    """The verdict that two published counts allow, in words."""
    (k1, n1), (k2, n2) = c.a, c.b
    lead = f"{c.verdict.name}: {k1}/{n1} → {k2}/{n2} is {points(c.difference)}"
    low, high = c.p_range
    if not c.paired:
        text = f"{lead}, unpaired (the runs differ in size): Fisher's exact {p_value(low)}."
        if c.verdict is Verdict.INCONCLUSIVE:
            text += f" {100 * rule.margin:g} pp needs {c.needed[0][1]:,} items in each run, or far fewer if paired."
        return text
    assert c.psi_range is not None
    text = (
        f"{lead}; without the items, {c.psi_range[0] * n1:.0f} to {c.psi_range[1] * n1:.0f} of the {n1} may "
        f"have changed, so exact McNemar gives p from {low:.2g} to {high:.2g}."
    )
    if c.verdict is Verdict.INCONCLUSIVE:
        needs = "; ".join(f"{n:,} at ψ = {psi:g}" for psi, n in c.needed)
        text += f" To see a fall of {100 * rule.margin:g} pp with {100 * rule.power:g}% power, items needed: {needs}."
    return text


def summary_rows(s: Summary) -> list[tuple[str, str]]:
    """The table of one run."""
    estimated = "" if s.tokens_from == "usage" else " (estimated from characters: the server sent no usage)"
    rows = [
        ("Accuracy", f"{percent(s.accuracy)} (95% CI {span(s.accuracy_ci)}; {s.correct:g} of {s.items})"),
        ("Accuracy, strict format", percent(s.strict)),
        ("Accuracy among finished", percent(s.accuracy_finished)),
        ("Cut at the cap", percent(s.cap_rate)),
        ("Looped", percent(s.loop_rate)),
        ("Suspect (templated, cut)", percent(s.suspect_rate)),
        ("Tokens per answer", f"{s.tokens_per_answer:,.2f}{_plus_minus(s)}{estimated}"),
        ("Tokens spent in loops", percent(s.waste_share)),
        ("Outcomes", ", ".join(f"{OUTCOME_LABELS[k]} {v}" for k, v in s.outcomes.items() if v)),
    ]
    if s.errors:
        rows.append(("Request errors", ", ".join(f"{kind} {count}" for kind, count in s.errors.items())))
    if s.first_error is not None:
        rows.append(("First error", with_remedy(s.first_error)))
    return rows


def _plus_minus(s: Summary) -> str:
    low, high = s.tokens_ci
    return f" (95% CI {low:,.0f} to {high:,.0f})" if math.isfinite(high) else ""


def mlperf_rows(gate: MlperfGate) -> list[tuple[str, str, str, str]]:
    """(condition, measured with interval, demanded, verdict) of an MLPerf gate."""
    ci = gate.accuracy_ci
    rows = [
        (
            "Exact match",
            f"{gate.accuracy:.4f} (95% CI {ci.low:.2f} to {ci.high:.2f})",
            f"at least {gate.accuracy_bar:.4f}",
            gate.accuracy_verdict.name,
        )
    ]
    if gate.tokens is None or gate.tokens_ci is None or gate.tokens_window is None:
        return [*rows, ("Tokens per sample", "not given", "within 10% of the reference", gate.tokens_verdict.name)]
    low, high = gate.tokens_window
    measured = f"{gate.tokens:,.2f} (95% CI {gate.tokens_ci.low:,.0f} to {gate.tokens_ci.high:,.0f})"
    demanded = f"{low:,.1f} to {high:,.1f}"
    return [*rows, ("Tokens per sample", measured, demanded, gate.tokens_verdict.name)]


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table; pipes, line ends and tags in cells are escaped."""

    def line(cells: Sequence[str]) -> str:
        escaped = (cell.replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for cell in cells)
        return "| " + " | ".join(escaped) + " |"

    return "\n".join([line(header), "|" + "---|" * len(header), *(line(row) for row in rows)])


def comparison_markdown(comparisons: Sequence[Comparison], names: tuple[str, str], rule: Rule, verdict: Verdict) -> str:
    """A pull-request comment."""
    parts = [f"### Accuracy check: {verdict.name}", f"A (baseline): `{names[0]}` · B: `{names[1]}`"]
    for c in comparisons:
        rows = [
            (r.label, r.a, r.b, r.change, r.verdict.name if r.verdict is not None else "")
            for r in comparison_rows(c, rule)
        ]
        parts += [f"**{c.task}**: {verdict_sentence(c, rule)}", markdown_table(("", "A", "B", "change", ""), rows)]
        parts += ["\n".join(f"- {note}" for note in c.notes)] if c.notes else []
    return "\n\n".join(parts) + "\n"


def summary_markdown(task: str, name: str, s: Summary) -> str:
    """report.md of one run."""
    void = "\n\n**Void: too many requests failed.**" if s.void else ""
    return f"### {task}: {percent(s.accuracy)}\n\n`{name}`{void}\n\n{markdown_table(('', ''), summary_rows(s))}\n"


def comparison_json(comparisons: Sequence[Comparison], rule: Rule, verdict: Verdict) -> dict[str, Any]:
    """Everything, for machines."""
    tasks = []
    for c in comparisons:
        fields = asdict(c) | {"verdict": c.verdict.name, "sentence": verdict_sentence(c, rule)}
        fields |= {name: getattr(c, name).name for name in ("accuracy", "runaway", "length")}
        tasks.append(finite(fields))
    return {"verdict": verdict.name, "exit_code": verdict.exit_code, "rule": asdict(rule), "tasks": tasks}
