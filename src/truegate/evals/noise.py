"""The A/A noise floor: what runs of the same server and the same questions differ by, when nothing has changed.

phi = share of items whose verdict flips between two runs, averaged over pairs of runs. For the run sd s of accuracies
on the same n questions phi = 2 n s^2, so both give the smallest difference two single runs can show:
(z_{alpha/2} + z_beta) sqrt(phi / n) = 2.8 sqrt(2) s.
Invariant: a pair of runs that differs beyond chance is no A/A pair and is named.
"""

import itertools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from truegate.errors import UserError
from truegate.evals.compare import check_comparable
from truegate.evals.gate import Rule
from truegate.evals.load import Run
from truegate.evals.stats import NORMAL, holm, mcnemar, z_value


@dataclass(frozen=True, kw_only=True)
class Noise:
    """The noise floor of some runs."""

    runs: int
    items: int
    accuracies: tuple[float, ...]
    sd: float  # of the accuracies
    flips: float  # phi
    flips_measured: bool  # from items, not derived from the sd
    same_text: float | None  # share of answers that are the same to the letter, over pairs of runs
    detectable: float
    differ: tuple[str, ...]  # pairs that differ beyond chance, after Holm


def noise_of_counts(counts: Sequence[tuple[int, int]], rule: Rule) -> Noise:
    """The floor from accuracies alone: needs the same n in every run."""
    sizes = {n for _, n in counts}
    if len(counts) < 2 or len(sizes) != 1:
        raise UserError("noise needs at least two runs of the same number of items")
    n = sizes.pop()
    shares = [k / n for k, _ in counts]
    sd = statistics.stdev(shares)
    phi = min(1.0, 2 * n * sd * sd)
    return Noise(
        runs=len(counts),
        items=n,
        accuracies=tuple(shares),
        sd=sd,
        flips=phi,
        flips_measured=False,
        same_text=None,
        detectable=_floor(phi, n, rule),
        differ=(),
    )


def noise_of_runs(runs: Sequence[Run], rule: Rule, *, force: bool) -> Noise:
    """The floor from runs of the same items."""
    if len(runs) < 2:
        raise UserError("noise needs at least two runs")
    for run in runs[1:]:
        check_comparable(runs[0], run, force=force)
    tables = [{r.key: r for r in run.records if r.error is None} for run in runs]
    keys = [key for key in tables[0] if all(key in table for table in tables)]
    if not keys:
        raise UserError("the runs have no answered item in common")
    n = len(keys)
    names, flips, same, p_values = [], [], [], []
    for i, j in itertools.combinations(range(len(runs)), 2):
        pairs = [(tables[i][key], tables[j][key]) for key in keys]
        fell = sum(x.correct and not y.correct for x, y in pairs)
        rose = sum(y.correct and not x.correct for x, y in pairs)
        flips.append((fell + rose) / n)
        same.append(sum(x.text_sha == y.text_sha for x, y in pairs) / n)
        names.append(f"{runs[i].name} and {runs[j].name}: {fell} items fell, {rose} rose")
        p_values.append(mcnemar(fell, rose))
    shares = [sum(table[key].correct for key in keys) / n for table in tables]
    phi = statistics.fmean(flips)
    adjusted = holm(p_values)
    return Noise(
        runs=len(runs),
        items=n,
        accuracies=tuple(shares),
        sd=statistics.stdev(shares),
        flips=phi,
        flips_measured=True,
        same_text=statistics.fmean(same),
        detectable=_floor(phi, n, rule),
        differ=tuple(f"{name}, p = {p:.2g}" for name, p in zip(names, adjusted, strict=True) if p < rule.alpha),
    )


def _floor(phi: float, n: int, rule: Rule) -> float:
    phi = max(phi, 1 / n)  # where nothing flipped, one item might have
    return (z_value(rule.alpha) + NORMAL.inv_cdf(rule.power)) * math.sqrt(phi / n)
