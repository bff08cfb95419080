"""What an engine may have computed instead: each deviation predicts the whole matrix of readings.

Invariant: a hypothesis is one deviation, or one from each of two axes; nothing here has seen a measurement.
P rows of a table, W = E + S experts and shared experts told apart.
"""

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from truegate.canary.definition import Kind, Layer, Matrix, Unit, readings, unit_of
from truegate.canary.margins import margin, reachable
from truegate.law.fault import Fault, faulty_select
from truegate.law.faults import FAULTS
from truegate.law.select import coefficients, select
from truegate.law.spec import Activation, Denominator, GroupScore, RoutingSpec, Score, SelectOn, SharedGate, WeightAt

TIE = 2e-3  # of the selection score: closer than bf16 scores tell apart


@dataclass(frozen=True, kw_only=True)
class Deviation:
    """One thing done otherwise, on one axis; `None` fields leave that part as defined."""

    name: str
    axis: str  # select, weight, scale, shared, unit: two deviations of one axis exclude each other
    spec: RoutingSpec | None = None
    no_bias: bool = False
    weights: Callable[[Layer, RoutingSpec, Matrix | None], tuple[Matrix, Matrix]] | None = None
    out: Callable[[Layer, Matrix], Matrix] | None = None  # C_out [P, W] -> C_out
    unit: Unit | None = None
    only_routed: bool = False  # `unit` is the routed experts' alone; the shared ones are right


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """A deviation, or a pair of them."""

    parts: tuple[Deviation, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(part.name for part in self.parts)

    def coefficients(self, layer: Layer) -> tuple[Matrix, Matrix]:
        """C_out, C_in [P, W] as this engine would have them."""
        spec, bias = layer.spec, layer.bias_E
        for part in self.parts:
            if part.spec is not None:
                spec = _merge(layer.spec, spec, part.spec)
        if any(part.no_bias for part in self.parts):
            bias, spec = None, replace(spec, has_selection_bias=False)
        weigh = next((part.weights for part in self.parts if part.weights), _by_definition)
        c_out, c_in = weigh(layer, spec, bias)
        for part in self.parts:
            if part.out is not None:
                c_out = part.out(layer, c_out)
        return c_out, c_in

    def readings(
        self, layer: Layer, rows: NDArray, kinds: list[Kind], coefficients: tuple[Matrix, Matrix] | None = None
    ) -> Matrix:
        """What probes would read; `coefficients` are this hypothesis's own, where they were computed before."""
        part = next((part for part in self.parts if part.unit), None)
        c_out, c_in = coefficients or self.coefficients(layer)
        healthy = unit_of(layer.spec)
        out = readings(layer, c_out, c_in, rows, kinds, part.unit if part and part.unit else healthy)
        if part is not None and part.only_routed:
            split = layer.spec.num_experts
            out[:, split:] = readings(layer, c_out, c_in, rows, kinds, healthy)[:, split:]
        return out

    def undecided(self, layer: Layer) -> NDArray[np.bool_]:
        """[P]: rows on which this engine's own choice is a tie, so that any outcome fits it."""
        out = np.zeros(len(layer.logits_PE), dtype=bool)
        for part in self.parts:
            if part.spec is not None:
                out |= margin(part.spec, layer.bias_E, layer.logits_PE) < TIE
        return out

    @property
    def where(self) -> str:
        """A limit of the hypothesis that its names do not tell."""
        return " (routed experts only)" if any(part.only_routed for part in self.parts) else ""


@dataclass(frozen=True)
class Candidate:
    """A hypothesis about one layer, which computes its coefficients once."""

    hypothesis: Hypothesis
    layer: Layer

    @property
    def is_single(self) -> bool:
        return len(self.hypothesis.parts) == 1

    @cached_property
    def _coefficients(self) -> tuple[Matrix, Matrix]:
        return self.hypothesis.coefficients(self.layer)

    @cached_property
    def tied(self) -> NDArray[np.bool_]:
        return self.hypothesis.undecided(self.layer)

    def readings(self, rows: NDArray, kinds: list[Kind]) -> Matrix:
        return self.hypothesis.readings(self.layer, rows, kinds, self._coefficients)


def candidates(layer: Layer) -> list[Candidate]:
    """Every hypothesis about a layer, singles first."""
    return [Candidate(h, layer) for h in hypotheses(layer)]


def _merge(base: RoutingSpec, left: RoutingSpec, right: RoutingSpec) -> RoutingSpec:
    """Both changes to the same base: every field that `right` changed, on top of `left`."""
    changed = {f: getattr(right, f) for f in base.__dataclass_fields__ if getattr(right, f) != getattr(base, f)}
    return replace(left, **changed)


def _by_definition(layer: Layer, spec: RoutingSpec, bias: Matrix | None) -> tuple[Matrix, Matrix]:
    gate = layer.shared_gate_P if spec.shared and spec.shared.gate is SharedGate.SIGMOID else None
    out, into = (
        layer.spread(coefficients(spec, layer.logits_PE, bias_E=bias, shared_gate_T=gate, at=at))
        for at in (WeightAt.OUTPUT, WeightAt.INPUT)
    )
    return out, into


def _bias_leak(layer: Layer, spec: RoutingSpec, bias: Matrix | None) -> tuple[Matrix, Matrix]:
    """u = (s + b)[ids] instead of s[ids]."""
    out, into = _by_definition(layer, spec, bias)
    if bias is None:
        return out, into
    ids, scores = select(replace(spec, denominator=Denominator.NONE), layer.logits_PE, bias_E=bias, scaled=False)
    weights = scores + bias[ids]
    if spec.denominator is not Denominator.NONE:
        weights = weights / (weights.sum(axis=1, keepdims=True) + 1e-20)
    np.put_along_axis(out, ids, weights * spec.routed_scale, axis=1)
    return out, into


def _chosen_to(change: Callable[[Matrix], Matrix]) -> Callable[[Layer, Matrix], Matrix]:
    def out(layer: Layer, c: Matrix) -> Matrix:
        c = c.copy()
        c[:, : layer.spec.num_experts] = change(c[:, : layer.spec.num_experts])
        return c

    return out


def _routed(factor: float) -> Callable[[Layer, Matrix], Matrix]:
    return _chosen_to(lambda c: c * factor)


def _shared(change: Callable[[Layer, Matrix, Matrix], Matrix | float]) -> Callable[[Layer, Matrix], Matrix]:
    """Change the shared columns, given (layer, routed [P, E], shared [P, S])."""

    def out(layer: Layer, c: Matrix) -> Matrix:
        c, split = c.copy(), layer.spec.num_experts
        c[:, split:] = change(layer, c[:, :split], c[:, split:])
        return c

    return out


def deviations(layer: Layer) -> Iterator[Deviation]:
    """Every single deviation that this layer's definition allows."""
    yield from _selection(layer.spec)
    yield from _weights(layer.spec)
    yield from _scales(layer.spec)
    yield from _units(layer.spec)
    yield from _catalogued(layer.spec)


def _selection(s: RoutingSpec) -> Iterator[Deviation]:
    grouped = s.groups is not None and s.groups.kept < s.groups.count
    if grouped:
        yield Deviation(name="no-groups", axis="select", spec=replace(s, groups=None))
        if s.groups.score is GroupScore.TOP2_SUM:
            name, other = "group-max", GroupScore.MAX
        else:
            name, other = "group-top2", GroupScore.TOP2_SUM
        if other is GroupScore.MAX or s.num_experts // s.groups.count >= 2:
            yield Deviation(name=name, axis="select", spec=replace(s, groups=replace(s.groups, score=other)))
        if s.groups.fill != 0.0:
            filled = replace(s, groups=replace(s.groups, fill=0.0))
            yield Deviation(name="group-fill-zero", axis="select", spec=filled)
    if s.has_selection_bias:
        yield Deviation(name="bias-ignored", axis="select", no_bias=True)
    if s.top_k > 1:
        yield Deviation(name="top-k-less-one", axis="select", spec=replace(s, top_k=s.top_k - 1))
    if s.top_k < reachable(s):
        yield Deviation(name="top-k-plus-one", axis="select", spec=replace(s, top_k=s.top_k + 1))
    if s.score is Score.SIGMOID:
        yield Deviation(name="softmax-for-sigmoid", axis="score", spec=replace(s, score=Score.SOFTMAX))
    if s.score is Score.SOFTMAX:
        denominator = Denominator.SUM if s.denominator is Denominator.SOFTMAX_TOPK else s.denominator
        other_score = replace(s, score=Score.SIGMOID, denominator=denominator)
        yield Deviation(name="sigmoid-for-softmax", axis="score", spec=other_score)


def _weights(s: RoutingSpec) -> Iterator[Deviation]:
    if s.denominator is Denominator.NONE:
        if s.top_k > 1:
            yield Deviation(name="renormalise-added", axis="weight", spec=replace(s, denominator=Denominator.SUM))
    else:
        raw = replace(s, denominator=Denominator.NONE, select_on=SelectOn.SCORES)
        yield Deviation(name="no-renormalise", axis="weight", spec=raw)
    if s.has_selection_bias:
        yield Deviation(name="bias-leak", axis="weight", weights=_bias_leak)
    if s.weight_at is WeightAt.OUTPUT:
        yield Deviation(name="weight-at-input", axis="weight", spec=replace(s, weight_at=WeightAt.INPUT))
        yield Deviation(name="weight-twice", axis="weight", out=_chosen_to(np.square))
        yield Deviation(name="weights-ignored", axis="weight", out=_chosen_to(lambda c: (c != 0).astype(float)))
    else:
        yield Deviation(name="weight-at-wrong-side", axis="weight", spec=replace(s, weight_at=WeightAt.OUTPUT))
        yield Deviation(name="weights-ignored", axis="weight", weights=_no_weights)


def _no_weights(layer: Layer, spec: RoutingSpec, bias: Matrix | None) -> tuple[Matrix, Matrix]:
    out, into = _by_definition(layer, spec, bias)
    return out, np.ones_like(into)


def _scales(s: RoutingSpec) -> Iterator[Deviation]:
    r = s.routed_scale
    if r != 1.0:
        yield Deviation(name="scale-missing", axis="scale", out=_routed(1 / r))
        yield Deviation(name="scale-twice", axis="scale", out=_routed(r))
        yield Deviation(name="scale-inverse", axis="scale", out=_routed(1 / r**2))
    yield Deviation(name="routed-dropped", axis="scale", out=_routed(0.0))
    if s.shared is None:
        return
    yield Deviation(name="shared-dropped", axis="shared", out=_shared(lambda y, c, g: 0.0))
    yield Deviation(name="shared-doubled", axis="shared", out=_shared(lambda y, c, g: 2 * g))
    if r != 1.0:
        yield Deviation(name="shared-inverse-scale", axis="shared", out=_shared(lambda y, c, g: g / r))
        yield Deviation(name="shared-by-scale", axis="shared", out=_shared(lambda y, c, g: g * r))
    summed = _shared(lambda y, c, g: np.broadcast_to(c.sum(axis=1, keepdims=True) / y.spec.routed_scale, g.shape))
    if s.weight_at is WeightAt.OUTPUT and (s.denominator is Denominator.NONE or s.shared.gate is SharedGate.SIGMOID):
        yield Deviation(name="shared-from-routed-sum", axis="shared", out=summed)
    if s.shared.gate is SharedGate.SIGMOID:
        gated = _shared(lambda y, c, g: c.sum(axis=1, keepdims=True) / y.spec.routed_scale * g)
        yield Deviation(name="shared-from-routed-sum", axis="shared", out=gated)
        yield Deviation(name="shared-gate-missing", axis="shared", out=_shared(lambda y, c, g: 1.0))


def _units(s: RoutingSpec) -> Iterator[Deviation]:
    unit = unit_of(s)
    yield Deviation(name="reduce-missing", axis="unit", out=lambda y, c: c * 0.5)
    yield Deviation(name="reduced-twice", axis="unit", out=lambda y, c: c * 2)
    if s.shared is not None:
        yield Deviation(name="reduce-missing", axis="unit", out=_routed(0.5), only_routed=True)
        yield Deviation(name="reduced-twice", axis="unit", out=_routed(2.0), only_routed=True)
    for fault in FAULTS:
        if fault.gain is None or not fault.applies(_AnyEngine(s)):
            continue
        wrong = replace(unit, gain=fault.gain)
        yield Deviation(name=fault.name, axis="unit", unit=wrong)
        if s.shared is not None:
            yield Deviation(name=fault.name, axis="unit", unit=wrong, only_routed=True)
    if s.activation is Activation.SWIGLU_CLAMP:
        yield Deviation(name="clamp-missing", axis="unit", unit=replace(unit, clamp=None))
        plain = replace(unit, slope=1.0, up_offset=0.0, clamp=None)
        yield Deviation(name="wrong-activation", axis="unit", unit=plain)
        yield Deviation(name="wrong-activation-slope", axis="unit", unit=replace(unit, slope=1.0))


# The margins of a canary's tables hide these on purpose: a healthy bf16 engine may differ by as much.
_UNSEEN = ("bias-bf16", "logits-bf16", "weights-bf16", "ties-highest-id")


@dataclass(frozen=True)
class _AnyEngine:
    """What the catalogue's `applies` reads of a plan, when the plan is somebody else's and unknown."""

    spec: RoutingSpec

    @property
    def num_shared(self) -> int:
        return self.spec.num_shared_slots or 0

    @property
    def placement(self) -> "_AnyEngine":
        return self

    has_replicas = False


def _catalogued(s: RoutingSpec) -> Iterator[Deviation]:
    """Router faults of the catalogue that are not spelled out above; their parts are not combined with a second one."""
    spelled = {d.name for part in (_selection, _weights, _scales) for d in part(s)}
    for fault in FAULTS:
        routes = fault.spec or fault.logits or fault.bias or fault.choose
        if not routes or fault.name in spelled or fault.name in _UNSEEN:
            continue
        if fault.applies(_AnyEngine(s)):
            yield Deviation(name=fault.name, axis="router", weights=_routed_by(fault))


def _routed_by(fault: Fault) -> Callable[[Layer, RoutingSpec, Matrix | None], tuple[Matrix, Matrix]]:
    def weigh(layer: Layer, spec: RoutingSpec, bias: Matrix | None) -> tuple[Matrix, Matrix]:
        out, into = _by_definition(layer, spec, bias)
        ids, weights = faulty_select(fault, spec, layer.logits_PE, bias, np)
        target = out if spec.weight_at is WeightAt.OUTPUT else into
        rows = np.broadcast_to(np.arange(len(ids))[:, None], ids.shape)
        out[:, : spec.num_experts] = 0.0
        into[:, : spec.num_experts] = 1.0
        out[rows, ids] = 1.0
        target[rows, ids] = 0.0
        np.add.at(target, (rows, ids), np.asarray(weights) * spec.routed_scale)
        return out, into

    return weigh


def hypotheses(layer: Layer) -> list[Hypothesis]:
    """All singles first, then all pairs from different axes, in a fixed order."""
    singles = list(deviations(layer))
    pairs = [(a, b) for a, b in itertools.combinations(singles, 2) if _compatible(a, b)]
    return [Hypothesis(parts=(d,)) for d in singles] + [Hypothesis(parts=p) for p in pairs]


def _compatible(a: Deviation, b: Deviation) -> bool:
    if {a.name, b.name} == {"routed-dropped", "shared-dropped"}:
        return False  # nothing at all: rows are lost
    routing = {"select", "score", "weight", "router"}
    return a.axis != b.axis and not ("router" in (a.axis, b.axis) and {a.axis, b.axis} <= routing)
