"""Verdicts: PASS, FAIL or INCONCLUSIVE, and how many items would settle the last. A is the baseline, B the candidate.

accuracy:  PASS if the CI of d lies above -margin; else FAIL if it lies below 0 and the exact paired test has p < alpha;
           else INCONCLUSIVE.
runaways:  (looped or cut at the cap) FAIL if more in B and exact McNemar p < alpha; else PASS.
length:    ratio of mean tokens B/A: FAIL if its CI lies outside the window, PASS if the ratio is inside it,
           else INCONCLUSIVE.
Invariant: a run fails if any of them fails and passes only if all pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

from truegate.errors import EXIT_FAULT, EXIT_OK, EXIT_UNDECIDED, UserError
from truegate.evals.stats import (
    Interval,
    difference_interval,
    discordant_range,
    fisher,
    mcnemar,
    paired_sample_size,
    unpaired_interval,
    unpaired_sample_size,
    wilson,
)

COUNTS_LIMIT = 100_000  # exact tests of more take minutes
MLPERF_ACCURACY = 0.99  # of the reference
MLPERF_LENGTH = (0.9, 1.1)  # of the reference tokens per sample


class Verdict(IntEnum):
    """Ordered from best to worst, so that the verdict of several is their max."""

    PASS = 0
    INCONCLUSIVE = 1
    FAIL = 2

    @property
    def exit_code(self) -> int:
        """0 pass, 1 fail, 2 inconclusive."""
        return {Verdict.PASS: EXIT_OK, Verdict.FAIL: EXIT_FAULT}.get(self, EXIT_UNDECIDED)


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What is tolerated: a fall of `margin` in accuracy, error rate alpha, and a window for the length ratio."""

    margin: float = 0.01
    alpha: float = 0.05
    power: float = 0.8
    length_window: tuple[float, float] = (0.9, 1.1)

    def __post_init__(self) -> None:
        if not 0 < self.margin < 1:
            raise UserError(f"--margin {self.margin:g}: a share between 0 and 1, such as 0.01")
        if not 0 < self.alpha < 0.5:
            raise UserError(f"--alpha {self.alpha:g}: between 0 and 0.5, such as 0.05")
        if not 0.5 <= self.power < 1:
            raise UserError(f"--power {self.power:g}: between 0.5 and 1, such as 0.8")
        if not 0 < self.length_window[0] <= 1 <= self.length_window[1]:
            raise UserError(f"the length window {self.length_window} must hold 1")


def accuracy_verdict(interval: Interval, p: float, rule: Rule) -> Verdict:
    """Non-inferiority of B by the CI of d and the exact paired p."""
    if interval.low > -rule.margin:
        return Verdict.PASS
    return Verdict.FAIL if interval.high < 0 and p < rule.alpha else Verdict.INCONCLUSIVE


def runaway_verdict(more_in_a: int, more_in_b: int, p: float, rule: Rule) -> Verdict:
    """FAIL if B runs away more often than A beyond chance."""
    return Verdict.FAIL if more_in_b > more_in_a and p < rule.alpha else Verdict.PASS


def length_verdict(ratio: float, interval: Interval, rule: Rule) -> Verdict:
    """FAIL if the CI of the length ratio is outside the window, PASS if the ratio itself is inside."""
    low, high = rule.length_window
    if interval.high < low or interval.low > high:
        return Verdict.FAIL
    return Verdict.PASS if low <= ratio <= high else Verdict.INCONCLUSIVE


def items_needed(psi: float, rule: Rule) -> int:
    """Pairs that would show a fall of the margin at that share of changed items (never less than the margin itself)."""
    return paired_sample_size(rule.margin, max(psi, rule.margin), alpha=rule.alpha, power=rule.power)


@dataclass(frozen=True, kw_only=True)
class CountsComparison:
    """What two published counts allow: the ranges over every split (b, c) with these margins, and their verdict."""

    a: tuple[int, int]
    b: tuple[int, int]
    paired: bool
    difference: float
    p_range: tuple[float, float]
    low_range: tuple[float, float]  # of the lower end of the CI of d
    high_range: tuple[float, float]
    psi_range: tuple[float, float] | None
    verdict: Verdict
    needed: tuple[tuple[float, int], ...]  # (psi, items)


def compare_counts(a: tuple[int, int], b: tuple[int, int], rule: Rule) -> CountsComparison:
    """The verdict that k1/n1 (baseline) against k2/n2 allows without per-item data."""
    (k1, n1), (k2, n2) = a, b
    if n1 != n2:
        p, interval = fisher(k1, n1, k2, n2), unpaired_interval(k1, n1, k2, n2, rule.alpha)
        cases = [(p, interval)]
        p1 = min(max(k1 / n1, rule.margin), 1.0)
        needed: tuple[tuple[float, int], ...] = (
            (float("nan"), unpaired_sample_size(p1, p1 - rule.margin, alpha=rule.alpha, power=rule.power)),
        )
        psi_range = None
    else:
        possible = discordant_range(k1, k2, n1)
        # with d fixed, p and the width of the CI grow with b: what holds at both ends holds at every split between
        splits = [(x, x + k2 - k1) for x in (possible[0], possible[-1])]
        cases = [(mcnemar(x, y), difference_interval(x, y, n1, rule.alpha)) for x, y in splits]
        psi = [(x + y) / n1 for x, y in splits]
        psi_range = (min(psi), max(psi))
        shown = sorted({0.02, 0.03, 0.05, round(psi_range[0], 4)})
        needed = tuple(
            (v, items_needed(v, rule)) for v in shown if psi_range[0] <= v <= psi_range[1] and v >= rule.margin
        )
        needed = needed or ((psi_range[0], items_needed(psi_range[0], rule)),)
    verdicts = {accuracy_verdict(interval, p, rule) for p, interval in cases}
    return CountsComparison(
        a=a,
        b=b,
        paired=n1 == n2,
        difference=k2 / n2 - k1 / n1,
        p_range=(min(p for p, _ in cases), max(p for p, _ in cases)),
        low_range=(min(i.low for _, i in cases), max(i.low for _, i in cases)),
        high_range=(min(i.high for _, i in cases), max(i.high for _, i in cases)),
        psi_range=psi_range,
        verdict=verdicts.pop() if len(verdicts) == 1 else Verdict.INCONCLUSIVE,
        needed=needed,
    )


def parse_counts(text: str) -> tuple[int, int]:
    """`192/200` as (192, 200)."""
    left, slash, right = text.partition("/")
    if not slash or not left.strip().isdecimal() or not right.strip().isdecimal():
        raise UserError(f"--counts {text!r}: write CORRECT/ITEMS, such as 192/200")
    k, n = int(left), int(right)
    if not 0 <= k <= n or not 1 <= n <= COUNTS_LIMIT:
        raise UserError(f"--counts {text!r}: needs 0 <= CORRECT <= ITEMS, and 1 to {COUNTS_LIMIT:,} items")
    return k, n


@dataclass(frozen=True, kw_only=True)
class MlperfGate:
    """MLPerf's two conditions, each as a point (as MLPerf counts it) and with its interval; accuracy in percent."""

    accuracy: float
    accuracy_ci: Interval
    accuracy_bar: float
    accuracy_verdict: Verdict
    tokens: float | None
    tokens_ci: Interval | None
    tokens_window: tuple[float, float] | None
    tokens_verdict: Verdict
    point_passes: bool | None

    @property
    def verdict(self) -> Verdict:
        """The worse of the two."""
        return max(self.accuracy_verdict, self.tokens_verdict)


def mlperf_gate(
    *,
    accuracy: float,
    accuracy_ci: Interval,
    tokens: float | None,
    tokens_ci: Interval | None,
    reference: float,
    reference_tokens: float | None,
) -> MlperfGate:
    """exact match >= 0.99 of the reference, tokens per sample within 10 percent of it; accuracies in percent."""
    bar = MLPERF_ACCURACY * reference
    by_accuracy = _against(accuracy_ci, bar, float("inf"))
    window = None
    by_tokens = Verdict.INCONCLUSIVE  # without both figures MLPerf's second condition cannot be judged
    point: bool | None = None if accuracy >= bar else False
    if tokens is not None and tokens_ci is not None and reference_tokens is not None:
        window = (MLPERF_LENGTH[0] * reference_tokens, MLPERF_LENGTH[1] * reference_tokens)
        by_tokens = _against(tokens_ci, *window)
        point = accuracy >= bar and window[0] <= tokens <= window[1]
    return MlperfGate(
        accuracy=accuracy,
        accuracy_ci=accuracy_ci,
        accuracy_bar=bar,
        accuracy_verdict=by_accuracy,
        tokens=tokens,
        tokens_ci=tokens_ci,
        tokens_window=window,
        tokens_verdict=by_tokens,
        point_passes=point,
    )


def _against(interval: Interval, low: float, high: float) -> Verdict:
    if interval.low >= low and interval.high <= high:
        return Verdict.PASS
    return Verdict.FAIL if interval.high < low or interval.low > high else Verdict.INCONCLUSIVE


def percent(interval: Interval) -> Interval:
    """A share's interval in percent."""
    return Interval(100 * interval.low, 100 * interval.high)


def counts_interval(k: int, n: int, alpha: float) -> Interval:
    """Wilson's interval in percent."""
    return percent(wilson(k, n, alpha))


def worst(verdicts: Sequence[Verdict]) -> Verdict:
    """The verdict of several: FAIL if any fails, PASS only if all pass."""
    return max(verdicts)
