"""The statistics of paired accuracy runs: standard library and numpy, every formula stated.

Pairs: n items; b = A right and B wrong, c = A wrong and B right; d = (c - b) / n (negative: B is worse);
psi = (b + c) / n, the share of items that changed. Invariant: nothing here reads a file, a clock or a global seed.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

NORMAL = NormalDist()
RESAMPLES = 4000


@dataclass(frozen=True)
class Interval:
    """A two-sided confidence interval."""

    low: float
    high: float


def z_value(alpha: float) -> float:
    """Two-sided normal quantile z_{alpha/2}."""
    return NORMAL.inv_cdf(1.0 - alpha / 2.0)


def wilson(successes: float, n: int, alpha: float = 0.05) -> Interval:
    """Wilson's score interval of a share; [0, 1] where n = 0."""
    if n == 0:
        return Interval(0.0, 1.0)
    z = z_value(alpha)
    p = successes / n
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    return Interval(
        max(0.0, centre - half) if successes > 0 else 0.0, min(1.0, centre + half) if successes < n else 1.0
    )


def mean_interval(values: Sequence[float], alpha: float = 0.05) -> Interval:
    """Student interval of a mean: for item means (repeats clustered by item) and for lengths."""
    n = len(values)
    if n < 2:
        return Interval(-math.inf, math.inf)
    centre = math.fsum(values) / n
    half = student_quantile(1 - alpha / 2, n - 1) * standard_error(values)
    return Interval(centre - half, centre + half)


def standard_error(values: Sequence[float]) -> float:
    """sd / sqrt(n), with n - 1 in the variance."""
    n = len(values)
    centre = math.fsum(values) / n
    return math.sqrt(math.fsum((v - centre) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.inf


def student_quantile(p: float, df: int) -> float:
    """Quantile of Student's t by bisection on its distribution function."""
    low, high = -1e3, 1e3
    if df == 1:
        return math.tan(math.pi * (p - 0.5))
    for _ in range(80):
        middle = (low + high) / 2
        if _student_cdf(middle, df) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _student_cdf(t: float, df: int) -> float:
    """Student's distribution function for whole df, by its finite trigonometric sum."""
    angle = math.atan2(t, math.sqrt(df))
    cos2 = math.cos(angle) ** 2
    term, total = (math.cos(angle), math.cos(angle)) if df % 2 else (1.0, 1.0)
    for j in range(3 if df % 2 else 2, df - 1, 2):
        term *= cos2 * (j - 1) / j
        total += term
        if term < 1e-18 * total:
            break
    if df % 2:
        inner = total if df > 1 else 0.0
        return 0.5 + (angle + math.sin(angle) * inner) / math.pi
    return 0.5 + 0.5 * math.sin(angle) * total


def mcnemar(b: int, c: int) -> float:
    """Exact two-sided McNemar test: p = min(1, 2 * sum_{i <= min(b, c)} C(b+c, i) / 2^(b+c))."""
    return min(1.0, _ratio(sum(_binomials(b + c, min(b, c))), b + c - 1))


def mcnemar_mid(b: int, c: int) -> float:
    """Mid-p McNemar: the exact p less the chance C(b+c, b) / 2^(b+c) of the observed split."""
    terms = list(_binomials(b + c, min(b, c)))
    if b == c:
        return 1.0 - _ratio(terms[-1], b + c) if b else 1.0
    return _ratio(2 * sum(terms) - terms[-1], b + c)


def _binomials(m: int, last: int) -> Iterator[int]:
    """C(m, 0), ..., C(m, last), each from the one before."""
    term = 1
    for i in range(last + 1):
        yield term
        term = term * (m - i) // (i + 1)


def _ratio(numerator: int, power: int) -> float:
    """numerator / 2^power without overflow."""
    shift = max(0, numerator.bit_length() - 64)
    return math.ldexp(float(numerator >> shift), shift - power)


def sign_flip(differences: Sequence[int]) -> float:
    """Exact two-sided sign-flip test of sum(differences) = 0, by the full distribution of the 2^m sign choices.

    For differences in {-1, 0, 1} it is exact McNemar; with repeats the differences are whole multiples of 1/(K_A K_B).
    """
    sizes = [abs(int(x)) for x in differences if x]
    reach = sum(sizes)
    chance = np.zeros(2 * reach + 1)
    chance[reach] = 1.0
    for size in sizes:  # each item moves the sum by +size or -size with chance 1/2
        moved = np.zeros_like(chance)
        moved[size:] += 0.5 * chance[: len(chance) - size]
        moved[: len(chance) - size] += 0.5 * chance[size:]
        chance = moved
    observed = abs(sum(int(x) for x in differences))
    return min(1.0, float(chance[: reach - observed + 1].sum() + chance[reach + observed :].sum())) if reach else 1.0


def difference_interval(b: int, c: int, n: int, alpha: float = 0.05) -> Interval:
    """CI of d = (c - b)/n: d' +- z sqrt(psi' - d'^2) / sqrt(n + 2), primes after adding 0.5 to each of four cells."""
    return paired_interval([-1.0] * b + [1.0] * c, n, alpha)


def paired_interval(changes: Sequence[float], n: int, alpha: float = 0.05) -> Interval:
    """CI of the mean of n item differences in [-1, 1], of which `changes` are those that are not 0.

    Two pseudo-items (half a -1, half a +1, one 0) keep it from having no width where nothing changed; for differences
    of -1, 0 and 1 this is 0.5 added to each cell of the paired table.
    """
    size = n + 2
    d = math.fsum(changes) / size
    psi = (math.fsum(x * x for x in changes) + 1) / size
    half = z_value(alpha) * math.sqrt(max(0.0, psi - d * d) / size)
    return Interval(max(-1.0, d - half), min(1.0, d + half))


def unpaired_interval(k1: int, n1: int, k2: int, n2: int, alpha: float = 0.05) -> Interval:
    """Newcombe's interval of p2 - p1 from the two Wilson intervals, for runs on different items."""
    p1, p2 = k1 / n1, k2 / n2
    w1, w2 = wilson(k1, n1, alpha), wilson(k2, n2, alpha)
    d = p2 - p1
    return Interval(
        d - math.hypot(p2 - w2.low, w1.high - p1),
        d + math.hypot(w2.high - p2, p1 - w1.low),
    )


def fisher(k1: int, n1: int, k2: int, n2: int) -> float:
    """Fisher's exact two-sided p for two independent shares."""
    k, n = k1 + k2, n1 + n2
    weights = [math.comb(n1, i) * math.comb(n2, k - i) for i in range(max(0, k - n2), min(n1, k) + 1)]
    observed = math.comb(n1, k1) * math.comb(n2, k2)
    return min(1.0, float(sum(w for w in weights if w <= observed) / math.comb(n, k)))


def discordant_range(k1: int, k2: int, n: int) -> range:
    """Every b that k1/n and k2/n allow: max(0, k1 - k2) .. min(k1, n - k2); then c = b + k2 - k1."""
    return range(max(0, k1 - k2), min(k1, n - k2) + 1)


def paired_bootstrap_ratio(
    a: Sequence[float], b: Sequence[float], *, seed: int, alpha: float = 0.05, resamples: int = RESAMPLES
) -> Interval:
    """Percentile CI of sum(b)/sum(a), resampling pairs."""
    rng = np.random.default_rng(seed)
    left, right = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    n = len(left)
    if n == 0 or left.sum() == 0:
        return Interval(0.0, math.inf)
    ratios = []
    for chunk in _chunks(resamples, n):
        picks = rng.integers(0, n, size=(chunk, n))
        below = left[picks].sum(axis=1)
        ratios.append(np.divide(right[picks].sum(axis=1), below, out=np.full(chunk, np.inf), where=below > 0))
    low, high = np.quantile(np.concatenate(ratios), [alpha / 2, 1 - alpha / 2])
    return Interval(float(low), float(high))


def _chunks(total: int, n: int) -> list[int]:
    """Sizes of resampling blocks that keep a block under about four million picks."""
    size = max(1, min(total, 4_000_000 // n))
    return [min(size, total - start) for start in range(0, total, size)]


def holm(p_values: Sequence[float]) -> list[float]:
    """Holm's adjusted p values, in the given order."""
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted, worst = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def paired_sample_size(delta: float, psi: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Connor: n = (z_{alpha/2} sqrt(psi) + z_beta sqrt(psi - delta^2))^2 / delta^2 pairs."""
    z_a, z_b = z_value(alpha), NORMAL.inv_cdf(power)
    return math.ceil((z_a * math.sqrt(psi) + z_b * math.sqrt(max(0.0, psi - delta * delta))) ** 2 / delta**2)


def unpaired_sample_size(p1: float, p2: float, *, alpha: float = 0.05, power: float = 0.8) -> int:
    """Items per arm for two independent runs: (z_{alpha/2} + z_beta)^2 (p1 q1 + p2 q2) / (p1 - p2)^2."""
    z = z_value(alpha) + NORMAL.inv_cdf(power)
    return math.ceil(z * z * (p1 * (1 - p1) + p2 * (1 - p2)) / (p1 - p2) ** 2)


def repeats_sample_size(
    delta: float, *, between: float, within: tuple[float, float], repeats: tuple[int, int], alpha: float, power: float
) -> int:
    """Miller: n = (z_{alpha/2} + z_beta)^2 (omega^2 + sigma_A^2/K_A + sigma_B^2/K_B) / delta^2 items."""
    z = z_value(alpha) + NORMAL.inv_cdf(power)
    variance = between + within[0] / repeats[0] + within[1] / repeats[1]
    return math.ceil(z * z * variance / delta**2)


def detectable(n: int, psi: float, *, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest difference that n pairs show at that power: Connor's formula solved for delta.

    A difference of delta changes at least a share delta of the items, so psi counts as max(psi, delta).
    """
    low, high = 0.0, 1.0
    if paired_sample_size(high, high, alpha=alpha, power=power) > n:
        return math.inf
    for _ in range(50):
        middle = (low + high) / 2
        if paired_sample_size(middle, max(psi, middle), alpha=alpha, power=power) <= n:
            high = middle
        else:
            low = middle
    return high
