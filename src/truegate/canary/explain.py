"""From what was measured to what is wrong: a name, where, and since when or under which conditions.

Invariant: a name is given only when its prediction fits every observation it claims; the rest is shown as numbers.
N observations of one layer, W experts and shared experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truegate.canary.ask import Evidence
from truegate.canary.cells import Cells, Measured, measure, phases_in_order
from truegate.canary.columns import Match, factor, match_columns, wrong_columns
from truegate.canary.definition import Kind, Layer, Matrix
from truegate.canary.hypotheses import Candidate, candidates
from truegate.canary.manifest import Manifest
from truegate.canary.read import tolerance
from truegate.canary.scope import describe_scope
from truegate.canary.sentences import sentence

UNNAMED = "unnamed"
EVERYWHERE = "in every phase: all answers fit it"
_EXAMPLES = 5


@dataclass(frozen=True)
class Cause:
    """Why some observations of a layer are wrong: names (several when they cannot be told apart) and one line."""

    names: tuple[str, ...]
    text: str
    explained: NDArray[np.bool_]  # [N]
    visible: NDArray[np.bool_]  # [N]: where it would show; elsewhere right and wrong read the same
    alternatives: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is wrong, in one or several layers."""

    names: tuple[str, ...]
    text: str
    layers: tuple[int, ...]
    scope: str
    phases: dict[str, tuple[int, int]]  # phase -> wrong, asked
    examples: tuple[dict[str, Any], ...] = ()
    alternatives: tuple[tuple[str, ...], ...] = ()

    @property
    def title(self) -> str:
        where = f"layer{'s' * (len(self.layers) > 1)} {_ranges(self.layers)}: " if self.layers else ""
        return where + self.text


@dataclass(kw_only=True)
class Verdict:
    """What a run says: right, a fault, or not judged, with the reasons."""

    findings: list[Finding] = field(default_factory=list)
    undecided: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    grid: dict[int, dict[str, tuple[int, int]]] = field(default_factory=dict)  # layer -> phase -> wrong, asked
    sizes: dict[str, dict[int, tuple[int, int]]] = field(default_factory=dict)  # phase -> batch size -> wrong, asked
    num_right: int = 0
    num_cells: int = 0
    lost: str | None = None


def explain(manifest: Manifest, evidence: Evidence) -> tuple[Verdict, Measured]:
    """Judge every observation against the definition, then find what explains the wrong ones."""
    seen = measure(manifest, evidence)
    verdict = Verdict(lost=evidence.lost)
    found: list[Finding] = []
    for index, cells in seen.layers.items():
        right = cells.right()
        verdict.grid[index] = _grid(cells, right)
        counted = (cells.want != 0) & np.isfinite(cells.values)
        verdict.num_cells += int(counted.sum())
        verdict.num_right += int(counted[right].sum())
        if not right.all():
            found += _explain_layer(manifest.layers[index], cells, right)
    verdict.sizes = _by_size(seen)
    verdict.findings = _merge(found)
    _other_findings(manifest, evidence, seen, verdict)
    if not evidence.observations and not evidence.answers and evidence.lost is None:
        verdict.undecided.append("nothing was answered")
    return verdict, seen


def _grid(cells: Cells, right: NDArray[np.bool_]) -> dict[str, tuple[int, int]]:
    out = {}
    for phase in phases_in_order(cells.sights):
        mine = np.array([s.phase == phase for s in cells.sights])
        out[phase] = (int((mine & ~right).sum()), int(mine.sum()))
    return out


def _by_size(seen: Measured) -> dict[str, dict[int, tuple[int, int]]]:
    """Wrong and asked answers by phase and by rows asked for together, over all layers."""
    sights = [(s, r) for c in seen.layers.values() for s, r in zip(c.sights, c.right(), strict=True)]
    out: dict[str, dict[int, tuple[int, int]]] = {p: {} for p in phases_in_order([s for s, _ in sights])}
    for s, is_right in sorted(sights, key=lambda x: x[0].batch):
        wrong, asked = out[s.phase].get(s.batch, (0, 0))
        out[s.phase][s.batch] = wrong + (not is_right), asked + 1
    return out


def _explain_layer(layer: Layer, cells: Cells, right: NDArray[np.bool_]) -> list[Finding]:
    """Causes one after another: what explains the lone requests first, then what explains the rest."""
    findings: list[Finding] = []
    unexplained, tries = ~right, candidates(layer)
    if (change := _change(cells, right)) is not None:
        cause = _changed_to(layer, cells, right, change, tries)
        findings.append(_finding(layer, cells, cause, unexplained & cause.explained))
        unexplained &= ~cause.explained
    base = _base(cells)
    if (unexplained & base).any():
        cause = find_cause(layer, cells, base, tries)
        if cause is None:  # a fault that only some lone requests show: fit those
            cause = find_cause(layer, cells, base & unexplained, tries)
        if cause is not None:
            covered = unexplained & cause.explained
            findings.append(_finding(layer, cells, cause, covered))
            unexplained &= ~cause.explained
    for _ in range(3):
        if not unexplained.any():
            break
        cause = find_cause(layer, cells, unexplained, tries, rows_too=True)
        if cause is None:
            cause = _unnamed(layer, cells, unexplained)
        covered = unexplained & cause.explained
        if not covered.any():
            cause = _unnamed(layer, cells, unexplained)
            covered = unexplained
        findings.append(_finding(layer, cells, cause, covered))
        unexplained = unexplained & ~covered
    return findings


def _base(cells: Cells) -> NDArray[np.bool_]:
    """The lone requests of the first phase."""
    first = phases_in_order(cells.sights)[0]
    return np.array([s.phase == first for s in cells.sights])


@dataclass(frozen=True)
class Change:
    """All is right before a phase, and what is asked after it is wrong."""

    phase: str
    begin: int  # times: between the last right check and the first wrong one
    end: int


def _change(cells: Cells, right: NDArray[np.bool_]) -> Change | None:
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


def _changed_to(
    layer: Layer, cells: Cells, right: NDArray[np.bool_], change: Change, tries: Sequence[Candidate]
) -> Cause:
    """What is wrong after the change, and that it changed."""
    times = np.array([s.time for s in cells.sights])
    after, during = times >= change.end, times > change.begin
    cause = find_cause(layer, cells, after, tries) or find_cause(layer, cells, after & ~right, tries, rows_too=True)
    if cause is None:
        cause = _unnamed(layer, cells, after & ~right)
    text = f"{cause.text}; it changed during {change.phase}: all was right before"
    return Cause(cause.names, text, during & ~right, cause.visible, cause.alternatives)


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
    small = np.array([s.kind in (Kind.DIM, Kind.EIGHTH, Kind.THIRD) for s in cells.sights])
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
    """Rows that hold what another probe of any layer should read, or nothing."""
    known = np.concatenate([cells.known, np.zeros((1, layer.width))])
    hits, silent = 0, 0
    for n in np.flatnonzero(which):
        fits = ((cells.low[n] <= known) & (known <= cells.high[n])).all(axis=1)
        hits += bool(fits[:-1].any())
        silent += bool(fits[-1])
    if not hits or hits + silent < 0.75 * which.sum():
        return None
    return Cause(("rows-shifted",), "rows hold the answer of other rows", which.copy(), np.ones(len(which), dtype=bool))


def _worst(part: Cells) -> float:
    """The largest relative error."""
    on = part.want > 1e-6
    with np.errstate(invalid="ignore"):
        return float(np.nanmax(np.abs(part.values[on] - part.want[on]) / part.want[on]))


def _unnamed(layer: Layer, cells: Cells, which: NDArray[np.bool_]) -> Cause:
    part = cells.only(which)
    bad = wrong_columns(part)
    routed = sum(j < layer.spec.num_experts for j in bad)
    shared = len(bad) - routed
    what = f"{routed} expert{'s' * (routed != 1)}" if routed else ""
    what += (" and " if what and shared else "") + ("the shared expert" if shared else "")
    text = f"coefficients of {what or 'no expert'} are wrong in a way that no known deviation explains"
    return Cause((UNNAMED,), text, which.copy(), np.ones(len(which), dtype=bool))


def _finding(layer: Layer, cells: Cells, cause: Cause, wrong: NDArray[np.bool_]) -> Finding:
    if cause.explained.all():
        scope = EVERYWHERE
    else:
        shown = np.flatnonzero(cause.visible | wrong)
        scope = describe_scope([cells.sights[i] for i in shown], wrong[shown], cells.right()[shown])
    return Finding(names=cause.names, text=cause.text, layers=(layer.index,), phases=_grid(cells, ~wrong), scope=scope,
                   alternatives=cause.alternatives, examples=tuple(_examples(layer, cells, wrong)))  # fmt: skip


def _examples(layer: Layer, cells: Cells, wrong: NDArray[np.bool_]) -> Iterable[dict[str, Any]]:
    """The largest errors, one an observation."""
    error = np.nan_to_num(np.abs(cells.values - cells.want))
    outside = (cells.low > cells.want) | (cells.want > cells.high)
    error = np.where(outside, error, 0)
    between = [s.check >= 0 for s in cells.sights]  # shown last: a phase says more
    order = np.lexsort((between, -error.max(axis=1).round(6)))
    for n in [n for n in order if wrong[n]][:_EXAMPLES]:
        slot, s = int(error[n].argmax()), cells.sights[n]
        yield {"layer": layer.index, "row": s.row, "kind": s.kind.value, "phase": s.phase, "batch": s.batch,
               "place": s.place, "position": s.position, "column": column_name(slot, layer.spec.num_experts),
               "expected": float(cells.want[n, slot]), "measured": float(cells.values[n, slot])}  # fmt: skip


def column_name(slot: int, num_experts: int) -> str:
    return f"expert {slot}" if slot < num_experts else f"shared expert {slot - num_experts}"


def _merge(found: list[Finding]) -> list[Finding]:
    """The same cause with the same scope in several layers is one finding."""
    out: dict[tuple[Any, ...], Finding] = {}
    for f in found:
        key = (f.names, f.text, f.scope if f.scope == EVERYWHERE else _shape(f))
        if key in out:
            old = out[key]
            phases = {p: (old.phases.get(p, (0, 0))[0] + w, old.phases.get(p, (0, 0))[1] + n)
                      for p, (w, n) in f.phases.items()}  # fmt: skip
            out[key] = Finding(names=f.names, text=f.text, layers=(*old.layers, *f.layers), scope=old.scope,
                               phases=phases, alternatives=old.alternatives,
                               examples=(*old.examples, *f.examples)[: 2 * _EXAMPLES])  # fmt: skip
        else:
            out[key] = f
    return list(out.values())


def _shape(f: Finding) -> tuple[str, ...]:
    """Phases in which the finding shows."""
    return tuple(p for p, (wrong, _) in f.phases.items() if wrong)


def _other_findings(manifest: Manifest, evidence: Evidence, seen: Measured, verdict: Verdict) -> None:
    """Dense layers, expert biases, unreadable answers, the router's precision, and what was not reached."""
    off = [(layer, phase, value) for layer, phase, value in seen.dense if abs(value - 1) > 0.02]
    if off:
        layers = tuple(sorted({layer for layer, _, _ in off}))
        verdict.findings.append(Finding(
            names=("dense-layer",), layers=layers, scope=f"{len(off)} of {len(seen.dense)} answers", phases={},
            text=f"a dense MLP reads {off[0][2]:.4g}, should be 1"))  # fmt: skip
    if seen.biases and abs((got := float(np.median(seen.biases))) - manifest.expected_bias) > 0.004:
        text = (f"the experts' output biases count {got / manifest.expected_bias:.4g} times what they should, summed "
                f"over all layers")  # fmt: skip
        if verdict.findings:  # biases carry the routed weights: where those are wrong, so are they
            verdict.notes.append(text)
        else:
            verdict.findings.append(Finding(names=("expert-bias",), layers=(), scope=f"{len(seen.biases)} answers",
                                            phases={}, text=text))  # fmt: skip
    _unreadable(seen, verdict)
    _precision_note(manifest, seen, verdict)
    scale = float(np.median(seen.scales)) if seen.scales else 1.0
    if abs(scale - 1) > 0.02:
        verdict.notes.append(f"log-probabilities are those of logits times {scale:.3f}: a temperature or a logit scale")
    for phase, count in evidence.wandered.items():
        verdict.notes.append(
            f"{phase}: {count} walk{'s' * (count > 1)} left the expected path; what came after is unread"
        )
    for phase, what in evidence.phases.items():
        if what.startswith("refused"):
            verdict.notes.append(f"{phase}: {what}")


def _unreadable(seen: Measured, verdict: Verdict) -> None:
    """NaN in answers is a fault; refusals are no evidence."""
    refused = [t for t in seen.troubles if t.refused]
    broken = [t for t in seen.troubles if not t.refused]
    if broken:
        phases = dict.fromkeys(t.phase for t in broken)
        verdict.findings.append(Finding(
            names=("unreadable",), layers=tuple(sorted({t.layer for t in broken if t.layer >= 0})),
            text=f"{len(broken)} answers carry no coefficients: {broken[0].what}",
            scope=f"in {', '.join(phases)}", phases={}))  # fmt: skip
    total = sum(n for phases in verdict.grid.values() for _, n in phases.values())
    if refused:
        line = f"{len(refused)} requests were refused or came back empty ({refused[0].what[:160]})"
        if len(refused) > 0.02 * (total + len(refused)):
            verdict.undecided.append(line)
        else:
            verdict.notes.append(line)


def _precision_note(manifest: Manifest, seen: Measured, verdict: Verdict) -> None:
    """Whether router logits keep more than bf16: information, not a fault."""
    outcomes = [seen.near[i].get(kind) for i in seen.near for kind in (Kind.NEAR_LOW, Kind.NEAR_HIGH)]
    if not outcomes:
        return
    if all(outcomes):
        verdict.notes.append("router logits keep more than bf16 (2^-9 apart at 2.0 is told apart)")
    elif not verdict.findings:
        verdict.notes.append("router logits are rounded to bf16 or coarser: experts 2^-9 apart at 2.0 are not told "
                             "apart (a choice of the engine; rankings of close experts change)")  # fmt: skip


def _ranges(numbers: Sequence[int]) -> str:
    """1..3, 7"""
    out: list[str] = []
    ordered = sorted(set(numbers))
    start = 0
    for i in range(1, len(ordered) + 1):
        if i == len(ordered) or ordered[i] != ordered[i - 1] + 1:
            first, last = ordered[start], ordered[i - 1]
            out.append(f"{first}" if first == last else f"{first}..{last}" if last > first + 1 else f"{first}, {last}")
            start = i
    return ", ".join(out)
