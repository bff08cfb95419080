"""The statistics against exact enumeration and against scipy and statsmodels, where those are installed."""

import itertools
import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truegate.evals import stats
from truegate.evals.gate import Rule, Verdict, accuracy_verdict

COUNTS = st.integers(0, 60)


def enumerated_mcnemar(b: int, c: int) -> float:
    """Share of the 2^(b+c) ways to assign the discordant pairs that are at least as uneven."""
    m = b + c
    ways = sum(abs(2 * sum(signs) - m) >= abs(b - c) for signs in itertools.product((0, 1), repeat=m))
    return ways / 2**m


@pytest.mark.parametrize(("b", "c"), [(0, 0), (1, 0), (3, 3), (5, 1), (0, 9), (9, 4), (2, 11)])
def test_mcnemar_counts_the_assignments_that_are_as_uneven(b: int, c: int) -> None:
    assert stats.mcnemar(b, c) == pytest.approx(enumerated_mcnemar(b, c), rel=1e-12)


@settings(max_examples=60, deadline=None)
@given(b=COUNTS, c=COUNTS, n=st.integers(0, 100))
def test_mcnemar_agrees_with_statsmodels(b: int, c: int, n: int) -> None:
    tables = pytest.importorskip("statsmodels.stats.contingency_tables")
    exact = tables.mcnemar([[n, b], [c, 1]], exact=True).pvalue
    assert stats.mcnemar(b, c) == pytest.approx(exact, rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(b=COUNTS, c=COUNTS)
def test_mid_p_is_the_exact_p_less_the_chance_of_the_observed_split(b: int, c: int) -> None:
    observed = math.comb(b + c, b) / 2 ** (b + c)
    expected = stats.mcnemar(b, c) - observed if b != c else 1 - observed if b else 1.0
    assert stats.mcnemar_mid(b, c) == pytest.approx(expected, rel=1e-9)


def test_mcnemar_of_thousands_of_pairs_neither_overflows_nor_drifts() -> None:
    binom = pytest.importorskip("scipy.stats").binomtest
    for b, c in ((600, 700), (2000, 2200), (5000, 5000), (0, 3000)):
        assert stats.mcnemar(b, c) == pytest.approx(binom(b, b + c).pvalue, rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(-4, 4), max_size=11))
def test_the_sign_flip_test_counts_every_choice_of_signs(differences: list[int]) -> None:
    sizes = [abs(d) for d in differences]
    sums = [
        sum(s * x for s, x in zip(signs, sizes, strict=True)) for signs in itertools.product((-1, 1), repeat=len(sizes))
    ]
    expected = sum(abs(s) >= abs(sum(differences)) for s in sums) / len(sums)
    assert stats.sign_flip(differences) == pytest.approx(expected, rel=1e-9)


@given(b=st.integers(0, 40), c=st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_with_one_answer_an_item_the_sign_flip_test_is_mcnemar(b: int, c: int) -> None:
    assert stats.sign_flip([-1] * b + [1] * c + [0] * 5) == pytest.approx(stats.mcnemar(b, c), rel=1e-9)


@settings(max_examples=60, deadline=None)
@given(n=st.integers(1, 2000), share=st.floats(0, 1), alpha=st.sampled_from([0.01, 0.05, 0.1]))
def test_wilson_agrees_with_statsmodels(n: int, share: float, alpha: float) -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    k = round(share * n)
    low, high = proportion.proportion_confint(k, n, alpha=alpha, method="wilson")
    ours = stats.wilson(k, n, alpha)
    assert ours.low == pytest.approx(low, abs=1e-9)
    assert ours.high == pytest.approx(high, abs=1e-9)


def test_students_quantiles_agree_with_scipy() -> None:
    t = pytest.importorskip("scipy.stats").t
    for df in (1, 2, 3, 4, 7, 30, 199, 1318):
        for p in (0.9, 0.975, 0.995):
            assert stats.student_quantile(p, df) == pytest.approx(t.ppf(p, df), rel=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_fisher_agrees_with_scipy(data: st.DataObject) -> None:
    exact = pytest.importorskip("scipy.stats").fisher_exact
    n1, n2 = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 60))
    k1, k2 = data.draw(st.integers(0, n1)), data.draw(st.integers(0, n2))
    assert stats.fisher(k1, n1, k2, n2) == pytest.approx(exact([[k1, n1 - k1], [k2, n2 - k2]])[1], rel=1e-7)


@settings(max_examples=40, deadline=None)
@given(n1=st.integers(2, 300), n2=st.integers(2, 300), a=st.floats(0, 1), b=st.floats(0, 1))
def test_the_unpaired_interval_is_newcombes(n1: int, n2: int, a: float, b: float) -> None:
    proportion = pytest.importorskip("statsmodels.stats.proportion")
    k1, k2 = round(a * n1), round(b * n2)
    low, high = proportion.confint_proportions_2indep(
        k2, n2, k1, n1, compare="diff", method="newcomb", correction=False
    )
    ours = stats.unpaired_interval(k1, n1, k2, n2)
    assert (ours.low, ours.high) == pytest.approx((low, high), abs=1e-9)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_holm_agrees_with_statsmodels(p_values: list[float]) -> None:
    multi = pytest.importorskip("statsmodels.stats.multitest")
    assert stats.holm(p_values) == pytest.approx(list(multi.multipletests(p_values, method="holm")[1]), abs=1e-12)


def test_the_published_sample_sizes() -> None:
    assert [stats.paired_sample_size(0.01, psi) for psi in (0.02, 0.03, 0.05)] == [1568, 2353, 3923]
    assert stats.unpaired_sample_size(0.96, 0.95) == 6743
    assert stats.detectable(1319, 0.0168) == pytest.approx(0.01, abs=1e-4)
    assert stats.detectable(200, 0.05) == pytest.approx(0.044, abs=1e-3)
    assert stats.detectable(3, 0.5) == math.inf


def test_the_sample_size_has_the_power_it_promises() -> None:
    delta, psi, n = 0.03, 0.08, stats.paired_sample_size(0.03, 0.08)
    rng = np.random.default_rng(1)
    splits = rng.multinomial(n, [(psi + delta) / 2, (psi - delta) / 2, 1 - psi], size=2000)
    seen = np.mean([stats.mcnemar(int(b), int(c)) < 0.05 for b, c, _ in splits])
    assert 0.74 < seen < 0.84  # 0.8 by the normal formula; the exact test is a little stricter


def test_the_interval_of_the_difference_covers_what_it_promises() -> None:
    rng = np.random.default_rng(2)
    for worse, better, n in ((0.01, 0.01, 200), (0.06, 0.02, 200), (0.3, 0.12, 120), (0.02, 0.0, 500)):
        splits = rng.multinomial(n, [worse, better, 1 - worse - better], size=3000)
        intervals = [stats.difference_interval(int(b), int(c), n) for b, c, _ in splits]
        covered = np.mean([i.low <= better - worse <= i.high for i in intervals])
        assert covered > 0.925, (worse, better, n, covered)


def test_the_length_ratio_interval_covers_what_it_promises() -> None:
    rng = np.random.default_rng(3)
    covered = 0
    for seed in range(150):
        base = rng.lognormal(8, 0.6, size=150)
        a, b = base * rng.lognormal(0, 0.3, 150), 1.2 * base * rng.lognormal(0, 0.3, 150)
        interval = stats.paired_bootstrap_ratio(list(a), list(b), seed=seed, resamples=600)
        covered += interval.low <= 1.2 <= interval.high
    assert 0.88 < covered / 150 <= 1


def test_a_a_pairs_fail_no_more_often_than_alpha() -> None:
    """2,000 pairs of runs that differ by nothing but chance, at several sizes and flip rates."""
    rng = random.Random(4)
    rule = Rule()
    fails = passes = 0
    for _ in range(2000):
        n, psi = rng.choice((100, 200, 500, 1319)), rng.choice((0.01, 0.03, 0.1, 0.3))
        changed = sum(rng.random() < psi for _ in range(n))
        worse = sum(rng.random() < 0.5 for _ in range(changed))
        interval = stats.difference_interval(worse, changed - worse, n, rule.alpha)
        verdict = accuracy_verdict(interval, stats.mcnemar(worse, changed - worse), rule)
        fails += verdict is Verdict.FAIL
        passes += verdict is Verdict.PASS
    assert fails / 2000 <= rule.alpha
    assert passes > 0


def test_millers_size_is_connors_when_items_are_asked_once() -> None:
    n = stats.repeats_sample_size(0.01, between=0.03, within=(0.0, 0.0), repeats=(1, 1), alpha=0.05, power=0.8)
    assert n == pytest.approx(stats.paired_sample_size(0.01, 0.03), rel=0.01)
    more = {"between": 0.01, "within": (0.09, 0.09), "alpha": 0.05, "power": 0.8}
    assert stats.repeats_sample_size(0.01, repeats=(8, 8), **more) < stats.repeats_sample_size(
        0.01, repeats=(1, 1), **more
    )
