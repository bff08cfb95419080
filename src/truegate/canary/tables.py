"""Router tables: which experts each probe reaches, drawn so that every expert is reached and every rule shows.

Invariants: every expert is chosen by at least `rounds` probes of every layer (an exact cover, groups respected); every
choice is decided by a margin that bf16 scores cannot overturn; every table entry is exact in bf16.
P rows, E experts, K top-k, G groups of M experts.
"""

import itertools
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from truegate.canary.definition import Kind, Layer, Matrix, expected
from truegate.canary.hypotheses import TIE, Hypothesis, deviations
from truegate.canary.margins import groups_of, margin, reachable
from truegate.errors import UserError
from truegate.law.select import select
from truegate.law.spec import RoutingSpec, Score, SharedGate

STEP = 1 / 16  # table entries are multiples of this within +-4, or of 1/32 where more than 128 experts need room
_MARGIN = 0.012  # of the selection score, between the last chosen and the first not chosen; bf16 rounds to 0.004
_APART = 0.06  # readings of two hypotheses differ by this much, relative to the larger, or they are not told apart
HUGE_BIAS = 32768.0


@dataclass(frozen=True, kw_only=True)
class Table:
    """One layer's router table: rows 0..P-1 are probes; the last row, times +-1, makes a near tie of the one before."""

    rows_PE: Matrix
    bias_E: Matrix | None
    shared_logit_P: Matrix | None
    near_E: Matrix | None  # logits of the near-tie probe; None where the layer has no contest to decide
    near_pair: tuple[int, int] | None  # the two experts that are 2^-9 apart
    margins_P: Matrix


def profiles(spec: RoutingSpec) -> list[str]:
    """Bias profiles, cycled over a canary's layers."""
    if not spec.has_selection_bias:
        return ["none"]
    room = spec.top_k > 1 and spec.num_experts >= 16
    return ["small", "negative", *(["huge"] if room else [])]


def draw_table(spec: RoutingSpec, num_shared: int, profile: str, rounds: int, rng: np.random.RandomState) -> Table:
    """A layer's table: cover rows first, then rows that tell the hypotheses from the definition and from each other."""
    bias_E = _bias(spec, profile, rng)
    cover = [_realise(spec, bias_E, wanted, rng) for wanted in _cover_sets(spec, bias_E, rounds, rng)]
    layer = Layer(index=0, spec=spec, logits_PE=np.array(cover), bias_E=bias_E, num_shared=num_shared,
                  shared_logit_P=_shared_logits(spec, len(cover)))  # fmt: skip
    rows = np.array(cover + _telling_rows(layer, rng))
    near = _near_tie(spec, bias_E, rows, rng)
    margins = margin(spec, bias_E, rows)
    return Table(rows_PE=rows, bias_E=bias_E, shared_logit_P=_shared_logits(spec, len(rows)),
                 near_E=None if near is None else near[0], near_pair=None if near is None else near[1],
                 margins_P=margins)  # fmt: skip


def _bias(spec: RoutingSpec, profile: str, rng: np.random.RandomState) -> Matrix | None:
    """Selection bias in multiples of 1/64, exact in bf16; `huge` lifts one expert above everything."""
    if profile == "none":
        return None
    centre = -1.0 if profile == "negative" else 0.0
    bias = centre + rng.randint(-12, 13, spec.num_experts) / 64
    if profile == "huge":
        bias[rng.randint(spec.num_experts)] = HUGE_BIAS
    return bias


def _shared_logits(spec: RoutingSpec, num_rows: int) -> Matrix | None:
    if spec.shared is None or spec.shared.gate is not SharedGate.SIGMOID:
        return None
    return np.array([(-1.0, 0.5, 1.0, 2.0)[row % 4] for row in range(num_rows)])


def _cover_sets(
    spec: RoutingSpec, bias: Matrix | None, rounds: int, rng: np.random.RandomState
) -> list[NDArray[np.int64]]:
    """Sets of K experts within the kept groups such that every expert is in at least `rounds` of them."""
    count, kept = groups_of(spec)
    size, k = spec.num_experts // count, spec.top_k
    always = [] if bias is None else [int(e) for e in np.flatnonzero(bias == HUGE_BIAS)]
    seen = np.zeros(spec.num_experts, dtype=int)
    sets: list[NDArray[np.int64]] = []
    while seen.min() < rounds:
        if len(sets) > 40 * rounds * (spec.num_experts // k + 1):
            raise UserError(f"{spec.family}: no cover of {spec.num_experts} experts by top-{k} was found")
        lacking = seen + rng.rand(spec.num_experts) * 0.5
        by_group = np.sort(lacking.reshape(count, size), axis=1)[:, : max(1, k // kept)].sum(axis=1)
        order = sorted(range(count), key=lambda g: (not any(e // size == g for e in always), by_group[g]))[:kept]
        chosen = list(always)
        share = _shares(k - len(always), kept, size - bool(always))
        for g, part in zip(sorted(order, key=by_group.__getitem__), share, strict=True):
            group = np.arange(g * size, (g + 1) * size)
            chosen += [e for e in group[np.argsort(lacking[group], kind="stable")] if e not in always][:part]
        wanted = np.array(sorted(chosen))
        seen[wanted] += 1
        sets.append(wanted)
    return sets


def _shares(k: int, kept: int, size: int) -> list[int]:
    """K split over the kept groups as evenly as it goes, no group above its size."""
    if k < kept:  # some kept groups stay without a chosen expert
        return [1] * k + [0] * (kept - k)
    base, extra = divmod(k, kept)
    share = [base + (g < extra) for g in range(kept)]
    if max(share) > size:
        raise UserError(f"top-{k} does not fit {kept} groups of {size}")
    return share


def _chosen(spec: RoutingSpec, bias: Matrix | None, rows: Matrix) -> NDArray[np.int64]:
    return np.sort(select(spec, rows, bias_E=bias).ids_TK, axis=1)


def _realise(spec: RoutingSpec, bias: Matrix | None, wanted: NDArray[np.int64], rng: np.random.RandomState) -> Matrix:
    """Logits for which exactly `wanted` is chosen, by a margin; drawn until they are."""
    step = STEP if spec.num_experts <= 128 else STEP / 2
    for attempt in range(400):
        row = _draw(spec, bias, wanted, rng, step, tight=attempt % 2 == 1)
        right = (_chosen(spec, bias, row[None])[0] == wanted).all() and margin(spec, bias, row[None])[0] >= _MARGIN
        if right and (attempt >= 100 or _decided_beyond(spec, bias, row[None])[0]):
            return row
    raise UserError(f"{spec.family}: no router row chooses experts {wanted.tolist()}; give another --seed")


def _decided_beyond(spec: RoutingSpec, bias: Matrix | None, rows: Matrix) -> NDArray[np.bool_]:
    """[P]: whether the choice of one expert more would be no tie either, so that such an engine is predictable."""
    if spec.top_k + 1 >= reachable(spec):
        return np.ones(len(rows), dtype=bool)
    return margin(replace(spec, top_k=spec.top_k + 1), bias, rows) >= TIE


def _draw(
    spec: RoutingSpec, bias: Matrix | None, wanted: NDArray[np.int64], rng: np.random.RandomState, step: float,
    tight: bool,
) -> Matrix:  # fmt: skip
    """Chosen experts high, others low, in the quantity that the family ranks."""
    high = np.zeros(spec.num_experts, dtype=bool)
    high[wanted] = True
    if spec.score is not Score.SIGMOID or bias is None:
        low_top = -1.0 if tight else 0.75
        row = np.where(high, rng.uniform(1.0, 3.5, spec.num_experts), rng.uniform(-4.0, low_top, spec.num_experts))
        return np.round(row / step) * step
    ordinary = np.where(np.abs(bias) > 100, 0.0, bias)
    middle = 0.5 + float(np.median(ordinary))  # c is ranked: sigmoid(x) + b; the threshold sits amid its range
    spread = 0.45 if not tight else 0.3
    target = np.where(high, middle + rng.uniform(0.02, spread, len(row := ordinary)),
                      middle - rng.uniform(0.02, spread, len(row)))  # fmt: skip
    score = np.clip(target - ordinary, 0.02, 0.98)
    logits = np.log(score / (1 - score))
    logits = np.where(np.abs(bias) > 100, rng.uniform(-3.5, -2.0, len(row)), logits)
    return np.round(np.clip(logits, -4, 4) / step) * step


def _telling_rows(layer: Layer, rng: np.random.RandomState, pool: int = 240) -> list[Matrix]:
    """Rows of a random pool: one of negative logits only, then until all deviations show in 3 and differ in one."""
    spec, bias = layer.spec, layer.bias_E
    step = STEP if spec.num_experts <= 128 else STEP / 2
    candidates = [_candidate(spec, index, rng, step) for index in range(pool)]
    rows = np.array(candidates)
    rows = rows[(margin(spec, bias, rows) >= _MARGIN) & _decided_beyond(spec, bias, rows)]
    if not len(rows):
        return []
    gate = _shared_logits(spec, len(layer.logits_PE) + len(rows))
    both = replace(layer, logits_PE=np.concatenate([layer.logits_PE, rows]), shared_logit_P=gate)
    kinds = [Kind.PLAIN] * len(both.logits_PE)
    everywhere = np.arange(len(kinds))
    seen = [expected(both, everywhere, kinds)]
    seen += [Hypothesis(parts=(d,)).readings(both, everywhere, kinds) for d in deviations(both)]
    tells = {}
    for a, b in itertools.combinations(range(len(seen)), 2):
        size = np.maximum(np.abs(seen[a]), np.abs(seen[b]))
        tells[a, b] = (np.abs(seen[a] - seen[b]) > _APART * size + 1e-3).any(axis=1)
    need = {pair: min(3 if pair[0] == 0 else 1, int(told.sum())) for pair, told in tells.items()}
    have = {pair: int(told[: len(layer.logits_PE)].sum()) for pair, told in tells.items()}
    picked = np.flatnonzero((rows < 0).all(axis=1))[:1].tolist()
    for pair, told in tells.items():
        have[pair] += int(told[len(layer.logits_PE) :][picked].sum())
    while any(have[p] < need[p] for p in need) or len(picked) < 4:
        open_pairs = [p for p in need if have[p] < need[p]]
        gain = np.sum([tells[p] for p in open_pairs], axis=0) if open_pairs else rng.rand(len(kinds))
        gain = np.array(gain, dtype=float)[len(layer.logits_PE) :]
        gain[picked] = -1
        best = int(gain.argmax())
        if gain[best] <= 0 or len(picked) >= 16:
            break
        picked.append(best)
        for pair, told in tells.items():
            have[pair] += int(told[len(layer.logits_PE) + best])
    return [rows[i] for i in picked]


def _candidate(spec: RoutingSpec, index: int, rng: np.random.RandomState, step: float) -> Matrix:
    """A row without a plan: spread, all negative, two levels close together, or groups led by one strong expert."""
    e, style = spec.num_experts, index % 4
    if style == 1:
        row = rng.uniform(-4.0, -0.5, e)
    elif style == 2:
        row = np.where(rng.rand(e) < 0.3, rng.uniform(0.5, 1.5, e), rng.uniform(-1.5, 0.5, e))
    elif style == 3:
        count, _ = groups_of(spec)
        row = rng.uniform(-2.5, 1.0, e)
        lead = rng.randint(0, e // count, count) + np.arange(count) * (e // count)
        row[lead] = rng.uniform(0.5, 4.0, count)
    else:
        row = rng.uniform(-4.0, 4.0, e)
    return np.round(row / step) * step


def _near_tie(
    spec: RoutingSpec, bias: Matrix | None, rows_PE: Matrix, rng: np.random.RandomState
) -> tuple[Matrix, tuple[int, int]] | None:
    """A row in which the last place is contested by two experts of equal logit 2, everybody else clear of it."""
    if spec.top_k >= spec.num_experts:
        return None
    chosen = _chosen(spec, bias, rows_PE)
    for row, ids in zip(rows_PE, chosen, strict=True):
        plain = [int(e) for e in ids if bias is None or abs(bias[e]) < 100]
        for last, rival in itertools.product(plain, range(spec.num_experts)):
            if rival in ids or (bias is not None and bias[rival] != bias[last]) or not _same_group(spec, last, rival):
                continue
            trial = row.copy()
            others = [e for e in plain if e != last]
            trial[others] = np.maximum(trial[others], 2.5)
            trial[[last, rival]] = 2.0
            won = _both_win(spec, bias, trial, last, rival)
            if won:
                return trial, (min(last, rival), max(last, rival))
    return None


def _same_group(spec: RoutingSpec, a: int, b: int) -> bool:
    size = spec.num_experts // groups_of(spec)[0]
    return a // size == b // size


def _both_win(spec: RoutingSpec, bias: Matrix | None, row: Matrix, a: int, b: int) -> bool:
    """Whether the better one of a and b is chosen and the other is not, whichever is better; the rest stays put."""
    lifted = np.array([row, row])
    lifted[0, a] += STEP
    lifted[1, b] += STEP
    first, second = (set(ids.tolist()) for ids in _chosen(spec, bias, lifted))
    decided = bool((margin(spec, bias, lifted) >= _MARGIN / 2).all())
    return first - {a} == second - {b} and a in first and b not in first and b in second and decided
