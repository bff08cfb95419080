"""From what was measured to what is wrong: a name, where, and since when or under which conditions.

Invariant: a name is given only when its prediction fits every observation it claims; the rest is shown as numbers.
N observations of one layer, W experts and shared experts.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from truegate.canary.causes import Cause, changed_to, find_cause, find_change, unnamed
from truegate.canary.cells import Cells, Measured, measure, phases_in_order
from truegate.canary.definition import Kind, Layer
from truegate.canary.evidence import Evidence
from truegate.canary.hypotheses import candidates
from truegate.canary.manifest import Manifest
from truegate.canary.read import REL_TOLERANCE
from truegate.canary.scope import describe_scope

EVERYWHERE = "in every phase: all answers fit it"
_EXAMPLES = 5


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
    """Causes one after another: what explains the first phase, then what explains the rest."""
    findings: list[Finding] = []
    unexplained, tries = ~right, candidates(layer)
    if (change := find_change(cells, right)) is not None:
        cause = changed_to(layer, cells, right, change, tries)
        findings.append(_finding(layer, cells, cause, unexplained & cause.explained))
        unexplained &= ~cause.explained
    base = _base(cells)
    if (unexplained & base).any():
        cause = find_cause(layer, cells, base, tries)
        if cause is None:  # a fault that only some requests show: fit those
            together = any(s.batch > 1 for s, first in zip(cells.sights, base, strict=True) if first)
            cause = find_cause(layer, cells, base & unexplained, tries, rows_too=together)
        if cause is not None:
            covered = unexplained & cause.explained
            findings.append(_finding(layer, cells, cause, covered))
            unexplained &= ~cause.explained
    for _ in range(3):
        if not unexplained.any():
            break
        cause = find_cause(layer, cells, unexplained, tries, rows_too=True)
        if cause is None:
            cause = unnamed(layer, cells, unexplained)
        covered = unexplained & cause.explained
        if not covered.any():
            cause = unnamed(layer, cells, unexplained)
            covered = unexplained
        findings.append(_finding(layer, cells, cause, covered))
        unexplained = unexplained & ~covered
    return findings


def _base(cells: Cells) -> NDArray[np.bool_]:
    """What the first phase saw: every probe, alone or (with little time) in lists."""
    first = phases_in_order(cells.sights)[0]
    return np.array([s.phase == first for s in cells.sights])


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
    off = [(layer, phase, value) for layer, phase, value in seen.dense if abs(value - 1) > REL_TOLERANCE]
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
        if what.startswith("refused"):  # HTTP 4xx is what a server does not offer; else it failed
            (verdict.notes if what.startswith("refused: HTTP 4") else verdict.undecided).append(f"{phase}: {what}")


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


def error_sizes(seen: Measured) -> dict[str, float]:
    """Relative errors of the coefficients that were read and are right."""
    errors = []
    for cells in seen.layers.values():
        right = cells.right()
        on = (cells.want[right] > 1e-6) & np.isfinite(cells.values[right])
        errors.append(np.abs(cells.values[right] - cells.want[right])[on] / cells.want[right][on])
    every = np.concatenate(errors) if errors else np.zeros(0)
    every = every[every < 0.5]
    return {"max": float(every.max()), "median": float(np.median(every))} if len(every) else {}
