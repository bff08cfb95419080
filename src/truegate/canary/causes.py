"""Causes of wrong observations of one layer: a hypothesis, columns, a factor, rows, or a change during a phase.

Invariant: a cause claims only observations that its prediction fits; `None` is an answer.
N observations of one layer, W experts and shared experts.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from truegate.canary.cells import Cells
from truegate.canary.columns import Match, factor, match_columns, wrong_columns
from truegate.canary.definition import SMALL, Layer, Matrix
from truegate.canary.hypotheses import Candidate
from truegate.canary.read import tolerance
from truegate.canary.sentences import sentence

UNNAMED = "unnamed"


@dataclass(frozen=True)
class Cause:
    """Why some observations of a layer are wrong: names (several when they cannot be told apart) and one line."""

    names: tuple[str, ...]
    text: str
    explained: NDArray[np.bool_]  # [N]
    visible: NDArray[np.bool_]  # [N]: where it would show; elsewhere right and wrong read the same
    alternatives: tuple[tuple[str, ...], ...] = ()


def find_cause(
    layer: Layer, cells: Cells, which: NDArray[np.bool_], tries: Sequence[Candidate], *, rows_too: bool = False
) -> Cause | None:
    """The simplest cause that fits all observations in `which`; None when nothing does.

    In order: one deviation; a few columns; two deviations; one factor on the routed or shared columns; all columns.
    """
    part = cells.only(which)
    num_experts = layer.spec.num_experts
    if rows_too and (part.low <= 0).all() and (part.high < part.want).any(axis=1).all():
        explained = which & cells.fits(np.zeros_like(cells.want))
        text = "rows are lost: no expert and no shared expert is added"
        return Cause(("rows-lost",), text, explained, np.ones(len(which), dtype=bool))
    if rows_too and (cause := _by_company(cells, which)) is not None:
        return cause
    if (cause := _fit(layer, cells, part, [t for t in tries if t.is_single])) is not None:
        return cause
    if (cause := _by_slot(layer, cells, which)) is not None:
        return cause
    few = match_columns(part, num_experts)
    if few is not None and len(few.columns) <= max(2, num_experts // 8):
        return _column_cause(cells, few)
    if (cause := _fit(layer, cells, part, [t for t in tries if not t.is_single])) is not None:
        return cause
    if (cause := _by_factor(layer, cells, part)) is not None:
        return cause
    if few is not None:
        return _column_cause(cells, few)
    return _by_rows(layer, cells, which) if rows_too else None


def _fit(layer: Layer, cells: Cells, part: Cells, tries: Sequence[Candidate]) -> Cause | None:
    """The first hypothesis that fits all of `part`, with those that fit as well."""
    fitting: list[tuple[Candidate, Matrix]] = []
    for candidate in tries:
        fits = part.fits(candidate.readings(part.rows, part.kinds))
        if fits.all() or (candidate.tied.mean() < 0.2 and (fits | candidate.tied[part.rows]).all()):
            fitting.append((candidate, candidate.readings(cells.rows, cells.kinds)))
    if not fitting:
        return None
    (best, readings), others = fitting[0], [c.hypothesis for c, _ in fitting[1:]]
    names, parts = best.hypothesis.names, best.hypothesis.parts
    explained = cells.fits(readings) | best.tied[cells.rows]
    alike = dict.fromkeys(h.names for h in others if len(h.parts) == len(parts) and h.names != names)
    text = sentence(names, layer.spec) + best.hypothesis.where
    return Cause(names, text, explained, _differs(cells, readings), tuple(alike))


def _differs(cells: Cells, readings: Matrix) -> NDArray[np.bool_]:
    """[N]: where these readings and the definition are further apart than bf16 is exact."""
    return (np.abs(readings - cells.want) > tolerance(np.maximum(readings, cells.want))).any(axis=1)


def _by_slot(layer: Layer, cells: Cells, which: NDArray[np.bool_]) -> Cause | None:
    """Routed experts read a shared expert's coefficient too much, and that shared expert is missing."""
    wrong, taken = np.flatnonzero(which & ~cells.right()), set()
    fits = np.zeros(len(which), dtype=bool)
    for n in wrong:
        ids = _in_place_of_shared(layer, cells.low[n], cells.high[n], cells.want[n])
        if ids is None:
            return None
        fits[n] = True
        taken.add(ids)
    if not taken:
        return None
    names = ("shared-slot-is-routed",) if len(taken) == 1 else ("shared-slot-rotates",)
    return Cause(names, sentence(names, layer.spec), fits, np.ones(len(which), dtype=bool))


def _in_place_of_shared(layer: Layer, low: Matrix, high: Matrix, want: Matrix) -> tuple[int, ...] | None:
    """The experts that ran in the slots of missing shared ones, in one observation [W]; None: something else."""
    split, off = layer.spec.num_experts, (low > want) | (want > high)
    lost = [j for j in range(split, layer.width) if off[j]]
    if not lost or any(low[j] > 0 for j in lost):
        return None
    extra, unit = np.flatnonzero(off[:split]), want[lost[0]]
    times = [k for j in extra for k in range(1, len(lost) + 1) if low[j] <= want[j] + k * unit <= high[j]]
    return tuple(extra.tolist()) if len(times) == len(extra) and sum(times) == len(lost) else None


def _by_factor(layer: Layer, cells: Cells, part: Cells) -> Cause | None:
    """One factor on every routed coefficient, or on every shared one, or on both."""
    split, width = layer.spec.num_experts, layer.width
    routed, shared = list(range(split)), list(range(split, width))
    bad = set(wrong_columns(part))
    g_routed = factor(part, routed) if bad & set(routed) else 1.0
    g_shared = factor(part, shared) if bad & set(shared) else 1.0
    if g_routed is None or g_shared is None or (g_routed, g_shared) == (1.0, 1.0):
        return None
    scaled = cells.want * np.where(np.arange(width) < split, g_routed, g_shared)
    names, words = [], []
    for name, who, g in (("routed-scaled", "routed experts count", g_routed),
                         ("shared-scaled", "shared expert counts", g_shared)):  # fmt: skip
        if g != 1.0:
            names.append(name)
            words.append(f"{who} {g:.4g} times what they should" if name == "routed-scaled" else
                         f"{who} {g:.4g} times what it should")  # fmt: skip
            if abs(g - round(g)) < 0.02 and round(g) > 2:
                words[-1] += f" (as if each of {round(g)} ranks added its copy)"
    if len(names) == 2 and abs(g_routed - g_shared) < 0.02 * abs(g_routed):
        names, words = ["all-scaled"], [f"routed and shared experts alike count {g_routed:.4g} times what they should"]
    return Cause(tuple(names), "; ".join(words), cells.fits(scaled), _differs(cells, scaled))


def _column_cause(cells: Cells, match: Match) -> Cause:
    """Explains observations whose other columns are all right; shows where one of its columns is chosen."""
    mine = np.zeros(cells.want.shape[1], dtype=bool)
    mine[list(match.columns)] = True
    explained = ((cells.low <= cells.want) & (cells.want <= cells.high))[:, ~mine].all(axis=1)
    return Cause((match.name,), match.text, explained, (cells.want[:, mine] > 1e-6).any(axis=1))


def _by_rows(layer: Layer, cells: Cells, which: NDArray[np.bool_]) -> Cause | None:
    """Whole rows: nothing was added, part of a row, or another row's answer was given."""
    part, everywhere = cells.only(which), np.ones(len(which), dtype=bool)
    split = layer.spec.num_experts
    if split < layer.width and (part.low[:, :split] <= 0).all():
        only_shared = np.where(np.arange(layer.width) < split, 0.0, cells.want)
        fits = cells.fits(only_shared)
        if fits[which].all():
            return Cause(
                ("rows-lost",), "rows lose their routed experts; the shared expert is there", which & fits, everywhere
            )
    if (moved := _other_rows(layer, cells, which)) is not None:
        return moved
    lost = ((part.low <= 0) & (part.want > 1e-6) & (part.high < part.want)).any(axis=1)
    if lost.all() and _only_losses(part):
        gone = np.flatnonzero(((part.low <= 0) & (part.want > part.high)).any(axis=0))
        block = _block(gone, split)
        what = f"experts {block[0]} to {block[1]}" if block else "some chosen experts"
        return Cause(
            ("choices-lost",), f"{what} of these rows are lost, the other choices are right", which.copy(), everywhere
        )
    return None


def _by_company(cells: Cells, which: NDArray[np.bool_]) -> Cause | None:
    """Small activations a little off in company, right when alone: their scale is not their own."""
    small = np.array([s.kind in SMALL for s in cells.sights])
    alone = np.array([s.batch == 1 for s in cells.sights])
    part = cells.only(which)
    if (which & ~small).any() or (which & alone).any() or not (small & alone & cells.right()).any():
        return None
    if (error := _worst(part)) > 0.2:
        return None
    text = f"only small activations are wrong, by up to {error:.1%}: one activation scale is shared by a batch's rows"
    return Cause(("batch-activation-scale",), text, which.copy(), small)


def _only_losses(part: Cells) -> bool:
    """Every wrong cell reads zero."""
    wrong = (part.low > part.want) | (part.want > part.high)
    return bool((part.low[wrong] <= 0).all())


def _block(columns: NDArray[np.int64], num_experts: int) -> tuple[int, int] | None:
    """The smallest aligned power-of-two part of the experts that holds all columns, if it is a proper part."""
    if not len(columns) or columns.max() >= num_experts:
        return None
    for parts in (16, 8, 4, 2):
        size = num_experts // parts
        if size > 1 and num_experts % parts == 0 and columns.min() // size == columns.max() // size:
            start = int(columns.min() // size * size)
            return start, start + size - 1
    return None


def _other_rows(layer: Layer, cells: Cells, which: NDArray[np.bool_]) -> Cause | None:
    """Rows that hold what another probe of any layer should read, or nothing; all of it, or its routed experts."""
    everywhere, split = np.ones(len(which), dtype=bool), layer.spec.num_experts
    for columns in (slice(None), slice(0, split)):
        known = np.concatenate([cells.known, np.zeros((1, layer.width))])[:, columns]
        hits, silent = 0, 0
        for n in np.flatnonzero(which):
            own = cells.want[n, columns]
            if ((cells.low[n, columns] <= own) & (own <= cells.high[n, columns])).all():
                continue  # this part is right
            fits = ((cells.low[n, columns] <= known) & (known <= cells.high[n, columns])).all(axis=1)
            hits += bool(fits[:-1].any())
            silent += bool(fits[-1])
        if hits and hits + silent >= 0.75 * which.sum():
            what = "" if columns == slice(None) else "routed part of the "
            return Cause(("rows-shifted",), f"rows hold the {what}answer of other rows", which.copy(), everywhere)
    if all(_own_weights(cells.low[n, :split], cells.high[n, :split], cells.want[n, :split])
           for n in np.flatnonzero(which)):  # fmt: skip
        return Cause(("stale-routing",), "rows carry their own weights at the experts of other rows: their ids are "
                     "what an earlier batch left behind", which.copy(), everywhere)  # fmt: skip
    return None


def _own_weights(low: Matrix, high: Matrix, want: Matrix) -> bool:
    """Whether the coefficients read are the right ones, at other experts."""
    if ((low <= want) & (want <= high)).all():
        return False
    read = np.flatnonzero(low > 0)
    by_size = read[np.argsort(-low[read])]
    right = -np.sort(-want[want > 1e-6])
    return len(read) == len(right) and bool(((low[by_size] <= right) & (right <= high[by_size])).all())


def _worst(part: Cells) -> float:
    """The largest relative error."""
    on = part.want > 1e-6
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(part.values[on] - part.want[on]) / part.want[on]))


def unnamed(layer: Layer, cells: Cells, which: NDArray[np.bool_]) -> Cause:
    part = cells.only(which)
    bad = wrong_columns(part)
    routed = sum(j < layer.spec.num_experts for j in bad)
    shared = len(bad) - routed
    what = f"{routed} expert{'s' * (routed != 1)}" if routed else ""
    what += (" and " if what and shared else "") + ("the shared expert" if shared else "")
    text = f"coefficients of {what or 'no expert'} are wrong in a way that no known deviation explains"
    return Cause((UNNAMED,), text, which.copy(), np.ones(len(which), dtype=bool))


@dataclass(frozen=True)
class Change:
    """All is right before a phase, and what is asked after it is wrong."""

    phase: str
    begin: int  # times: between the last right check and the first wrong one
    end: int


def find_change(cells: Cells, right: NDArray[np.bool_]) -> Change | None:
    """The phase during which this layer changed for good, as by a rebalance of experts; None where none did."""
    checks = sorted({s.check for s in cells.sights if s.check >= 0})
    fine = {c: all(r for s, r in zip(cells.sights, right, strict=True) if s.check == c) for c in checks}
    good = [c for c in checks if fine[c]]
    bad = [c for c in checks if not fine[c]]
    if not good or not bad or max(good) > min(bad):
        return None
    begin = max(s.time for s in cells.sights if s.check == max(good))
    end = min(s.time for s in cells.sights if s.check == min(bad))
    inside = [s.phase for s in cells.sights if begin < s.time < end]
    if not inside or any(not r for s, r in zip(cells.sights, right, strict=True) if s.time < begin):
        return None
    return Change(inside[-1], begin, end)


def changed_to(
    layer: Layer, cells: Cells, right: NDArray[np.bool_], change: Change, tries: Sequence[Candidate]
) -> Cause:
    """What is wrong after the change, and that it changed."""
    times = np.array([s.time for s in cells.sights])
    after, during = times >= change.end, times > change.begin
    cause = find_cause(layer, cells, after, tries) or find_cause(layer, cells, after & ~right, tries, rows_too=True)
    if cause is None:
        cause = unnamed(layer, cells, after & ~right)
    text = f"{cause.text}; it changed during {change.phase}: all was right before"
    return Cause(cause.names, text, during & ~right, cause.visible, cause.alternatives)
