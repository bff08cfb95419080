"""Two runs of the same questions, pair by pair. A is the baseline; d < 0 means that B is worse.

Invariant: runs that differ in data set, prompt, mode, sampling, cap or scoring are refused, unless forced; then the
differences are part of the result.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from truegate.errors import InvalidRun, UserError
from truegate.evals.folder import COMPARED
from truegate.evals.gate import (
    Rule,
    Verdict,
    accuracy_verdict,
    items_needed,
    length_verdict,
    runaway_verdict,
)
from truegate.evals.load import Run
from truegate.evals.score import Record
from truegate.evals.stats import (
    Interval,
    detectable,
    holm,
    mcnemar,
    mcnemar_mid,
    paired_bootstrap_ratio,
    paired_interval,
    repeats_sample_size,
    sign_flip,
)
from truegate.evals.summary import Summary, by_item, summarise, tokens_source


@dataclass(frozen=True, kw_only=True)
class Flags:
    """A yes/no property compared pair by pair: shares in A and B, discordant counts, exact McNemar."""

    a: float
    b: float
    only_a: int
    only_b: int
    p: float


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Everything `compare` reports of one task."""

    task: str
    a: Summary
    b: Summary
    pairs: int  # items answered in both runs
    dropped: int  # items with a failed request in either run, or asked in one only
    repeats: tuple[int, int]
    worse: int  # items whose mean score fell: b of the formulas when each is asked once
    better: int
    psi: float  # share of items that changed, with 0.5 added to each cell of the table
    difference: float
    difference_ci: Interval
    p: float
    p_holm: float
    p_mid: float | None  # only where every item was asked once
    loops: Flags
    caps: Flags
    runaways: Flags
    runaways_holm: float
    length_ratio: float
    length_ci: Interval
    length_unit: str
    accuracy: Verdict
    runaway: Verdict
    length: Verdict
    needed: int | None  # pairs that would show a fall of the margin
    detectable: float  # the smallest fall these pairs show at the rule's power
    notes: tuple[str, ...]

    @property
    def verdict(self) -> Verdict:
        """FAIL if any of the three fails, PASS only if all pass."""
        return max(self.accuracy, self.runaway, self.length)


def check_comparable(a: Run, b: Run, *, force: bool) -> tuple[str, ...]:
    """Notes on what differs; refuses what cannot be compared unless forced, and void runs always."""
    for run in (a, b):
        summary = summarise(run.records)
        if summary.void:
            failed = ", ".join(f"{kind} {count}" for kind, count in summary.errors.items())
            raise InvalidRun(
                f"{run.name}: {sum(summary.errors.values())} of {summary.answers} requests failed ({failed}); "
                "the run is void (run it again with the same --save and --retry-errors)"
            )
    notes = []
    if a.config and b.config:
        differ = a.config.differences(b.config, COMPARED)
        if differ and not force:
            raise UserError(f"the runs are not comparable: {'; '.join(differ)} (--force compares them all the same)")
        notes += [f"forced though {line}" for line in differ]
        notes += [f"note: {line}" for line in a.config.differences(b.config, ("concurrency", "model"))]
        for run in (a, b):
            if run.config and len(run.records) < run.config.items * run.config.repeats:
                expected = run.config.items * run.config.repeats
                notes.append(f"note: {run.name} is unfinished, {len(run.records)} of {expected} answers")
    else:
        notes.append("note: prompts and sampling of another harness's dump are not known and were not compared")
        golds = _different_golds(a, b)
        if golds and not force:
            raise UserError(f"the runs are not comparable: {golds} (--force compares them all the same)")
        notes += [f"forced though {golds}"] if golds else []
    return tuple(notes)


def _different_golds(a: Run, b: Run) -> str:
    golds = {r.id: r.gold for r in a.records}
    wrong = [r.id for r in b.records if r.id in golds and golds[r.id] != r.gold]
    return f"{len(set(wrong))} items have other gold answers, such as {wrong[0]!r}" if wrong else ""


def compare_runs(a: Run, b: Run, rule: Rule, *, force: bool = False, seed: int = 0) -> Comparison:
    """The comparison of one task, before Holm's correction over several."""
    notes = list(check_comparable(a, b, force=force))
    left, right, dropped = _pairs(a.records, b.records)
    if not left:
        raise UserError(f"{a.name} and {b.name} have no answered item in common")
    repeats = _repeats(left), _repeats(right)
    once = repeats == (1, 1)
    differences = [_share(y, "correct") - _share(x, "correct") for x, y in zip(left, right, strict=True)]
    worse, better = sum(d < 0 for d in differences), sum(d > 0 for d in differences)
    n = len(left)
    p = _paired_p(left, right, "correct")
    interval = paired_interval([d for d in differences if d], n, rule.alpha)
    unit, lengths_a, lengths_b = _lengths(left, right)
    ratio = sum(lengths_b) / sum(lengths_a) if sum(lengths_a) else math.inf
    length_ci = paired_bootstrap_ratio(lengths_a, lengths_b, seed=seed, alpha=rule.alpha)
    runaways = _flags(left, right, "runaway")
    psi = (worse + better + 1) / (n + 2)
    accuracy = accuracy_verdict(interval, p, rule)
    if unit != "tokens":
        notes.append("note: a server gave no token counts; lengths are compared in characters")
    if dropped:
        notes.append(f"note: {dropped} items without an answer in both runs were left out")
    return Comparison(
        task=a.task,
        a=summarise(a.records),
        b=summarise(b.records),
        pairs=n,
        dropped=dropped,
        repeats=repeats,
        worse=worse,
        better=better,
        psi=psi,
        difference=math.fsum(differences) / n,
        difference_ci=interval,
        p=p,
        p_holm=p,
        p_mid=mcnemar_mid(worse, better) if once else None,
        loops=_flags(left, right, "looped"),
        caps=_flags(left, right, "capped"),
        runaways=runaways,
        runaways_holm=runaways.p,
        length_ratio=ratio,
        length_ci=length_ci,
        length_unit=unit,
        accuracy=accuracy,
        runaway=runaway_verdict(runaways.only_a, runaways.only_b, runaways.p, rule),
        length=length_verdict(ratio, length_ci, rule),
        needed=_needed(left, right, differences, psi, once, rule) if accuracy is Verdict.INCONCLUSIVE else None,
        detectable=detectable(n, psi, alpha=rule.alpha, power=rule.power),
        notes=tuple(notes),
    )


def over_tasks(comparisons: Sequence[Comparison], rule: Rule) -> list[Comparison]:
    """The same comparisons with Holm's correction over tasks, for accuracy and for runaways."""
    by_accuracy = holm([c.p for c in comparisons])
    by_runaway = holm([c.runaways.p for c in comparisons])
    return [
        replace(
            c,
            p_holm=p,
            runaways_holm=q,
            accuracy=accuracy_verdict(c.difference_ci, p, rule),
            runaway=runaway_verdict(c.runaways.only_a, c.runaways.only_b, q, rule),
        )
        for c, p, q in zip(comparisons, by_accuracy, by_runaway, strict=True)
    ]


Groups = list[list[Record]]


def _pairs(a: Sequence[Record], b: Sequence[Record]) -> tuple[Groups, Groups, int]:
    """Items answered without error in both runs, in A's order, and how many items were left out."""
    left, right = by_item(a), by_item(b)
    good = [key for key in left if key in right and all(r.error is None for r in left[key] + right[key])]
    return [left[key] for key in good], [right[key] for key in good], len(left.keys() | right.keys()) - len(good)


def _repeats(groups: Groups) -> int:
    return max(len(group) for group in groups)


def _share(group: list[Record], name: str) -> float:
    return sum(bool(getattr(r, name)) for r in group) / len(group)


def _paired_p(left: Groups, right: Groups, name: str) -> float:
    """Exact sign-flip p of the item differences in a flag; exact McNemar where every item was asked once."""
    scale = math.lcm(*{len(g) for g in left}, *{len(g) for g in right})
    scaled = [round(scale * (_share(y, name) - _share(x, name))) for x, y in zip(left, right, strict=True)]
    if all(abs(d) in (0, scale) for d in scaled):
        return mcnemar(sum(d < 0 for d in scaled), sum(d > 0 for d in scaled))
    return sign_flip(scaled)


def _flags(left: Groups, right: Groups, name: str) -> Flags:
    """A flag compared: items where it became rarer (only_a) or more frequent (only_b) in B, with the exact paired p."""
    a, b = [_share(g, name) for g in left], [_share(g, name) for g in right]
    return Flags(
        a=sum(a) / len(a),
        b=sum(b) / len(b),
        only_a=sum(y < x for x, y in zip(a, b, strict=True)),
        only_b=sum(y > x for x, y in zip(a, b, strict=True)),
        p=_paired_p(left, right, name),
    )


def _lengths(left: Groups, right: Groups) -> tuple[str, list[float], list[float]]:
    """Mean length of each item in both runs: tokens where every reply has the server's count, else characters."""
    usage = {tokens_source(r for group in side for r in group) for side in (left, right)} == {"usage"}
    means = [
        [sum((r.tokens or 0) if usage else r.characters for r in group) / len(group) for group in side]
        for side in (left, right)
    ]
    return ("tokens" if usage else "characters"), means[0], means[1]


def _needed(left: Groups, right: Groups, differences: list[float], psi: float, once: bool, rule: Rule) -> int:
    if once:
        return items_needed(psi, rule)
    within = [sum(_variance(g) for g in side) / len(side) for side in (left, right)]
    repeats = _repeats(left), _repeats(right)
    n = len(differences)  # the variance of the differences, with the two pseudo-items of their interval
    mean = math.fsum(differences) / (n + 2)
    observed = (math.fsum(d * d for d in differences) + 1) / (n + 2) - mean * mean
    between = max(0.0, observed - within[0] / repeats[0] - within[1] / repeats[1])
    return repeats_sample_size(
        rule.margin, between=between, within=(within[0], within[1]), repeats=repeats, alpha=rule.alpha, power=rule.power
    )


def _variance(group: list[Record]) -> float:
    """Unbiased variance of an item's repeats; 0 where it was asked once."""
    return _spread([float(r.correct) for r in group]) if len(group) > 1 else 0.0


def _spread(values: list[float]) -> float:
    mean = math.fsum(values) / len(values)
    return math.fsum((v - mean) ** 2 for v in values) / (len(values) - 1) if len(values) > 1 else 0.0
