"""What a fault is: a change of data at one stage between a gate and the sum, and the coefficients it would give.

Invariant: the same function, written over `xp`, plants a fault in a running layer (moe/plant.py) and predicts its
coefficients (`predict`); no code under test has a branch for it. The catalogue is faults.py.
T rows, K routed top-k, J = K + S slots a row, E experts. Kinds are those of docs/routing.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy

from truegate.law.order import Routed, decode, realise
from truegate.law.plan import Plan
from truegate.law.select import select
from truegate.law.spec import RoutingSpec, WeightAt

Array = Any


class Chosen(NamedTuple):
    """What a router had and what it chose: weights_TK before the plan's factor."""

    spec: RoutingSpec
    logits_TE: Array
    bias_E: Array
    ids_TK: Array
    weights_TK: Array
    xp: ModuleType


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One way to be wrong. At most one stage is set; `applies` says for which plans it is a fault at all."""

    name: str
    kind: str
    says: str  # what the explanation prints; {scale} and {inverse} are filled in
    applies: Callable[[Plan], bool] = lambda plan: True
    spec: Callable[[RoutingSpec], RoutingSpec] | None = None  # the router computes another layer's mathematics
    logits: Callable[[Array, ModuleType], Array] | None = None  # the router sees other logits
    bias: Callable[[Array, ModuleType], Array] | None = None  # the router sees another selection bias
    choose: Callable[[Chosen], tuple[Array, Array]] | None = None  # ids_TK, weights_TK after top-k
    lay: Callable[[Plan, Routed, ModuleType], Routed] | None = None  # what the kernel is given
    shared: Callable[[Plan], float] | None = None  # factor on the shared expert
    gain: Callable[[Callable[[Array, Array], Array], Array, Array], Array] | None = None  # act, gate, up -> output
    gate: Callable[[Array, ModuleType], Array] | None = None  # the shared expert's gate_T
    weigh_wrong_side: bool = False  # the weight is at the expert's input where it should be at its output, or back
    total: float | None = None  # factor on the kernel's sum
    rows: Callable[[Array, ModuleType], Array] | None = None  # rows of the kernel's sum change places
    wrap: str | None = None  # more than data: the wrapper of that name in moe/plant.py; coefficients are not predicted

    def sentence(self, plan: Plan) -> str:
        """The explanation, with this layer's numbers."""
        scale = plan.spec.routed_scale
        return self.says.format(scale=f"{scale:g}", inverse=f"{1 / scale:.3f}")


def predict(
    fault: Fault | None, plan: Plan, logits_TE: Array, *, bias_E: Array = None, valid_T: Array = None,
    shared_gate_T: Array = None, gain: "Gain | None" = None,
) -> Array:  # fmt: skip
    """The coefficients, float64 [T, E+Z(+S)], that a layer with this fault gives; None: the healthy one.

    `gain` says what one unit of the instrument's experts puts out, for faults that change the kernel's arithmetic.
    """
    fault = fault or HEALTHY
    ids_TK, weights_TK = faulty_select(fault, plan.spec, logits_TE, bias_E, numpy)
    if fault.gate is not None and shared_gate_T is not None:
        shared_gate_T = fault.gate(shared_gate_T, numpy)
    routed = realise(
        plan, ids_TK, weights_TK * float(plan.scales.router), valid_T=valid_T, shared_gate_T=shared_gate_T
    )  # fmt: skip
    if fault.lay is not None:
        routed = fault.lay(plan, routed, numpy)
    c = decode(plan, routed)
    in_kernel = c.shape[1] if plan.num_shared else plan.spec.num_choices  # columns the kernel computes
    if fault.shared is not None:
        c[:, plan.spec.num_choices :] *= fault.shared(plan)
    at_input = plan.spec.weight_at is WeightAt.INPUT
    if fault.total is not None and not at_input:
        c[:, :in_kernel] *= fault.total
    if fault.rows is not None and gain is None:
        c[:, :in_kernel] = fault.rows(c[:, :in_kernel], numpy)
    if gain is not None:
        identity = slice(plan.spec.num_experts, plan.spec.num_choices)
        kept_TZ = c[:, identity].copy()  # no kernel computes these
        _arithmetic(fault, plan, c, gain, in_kernel)
        c[:, identity] = kept_TZ
    return c


def _arithmetic(fault: Fault, plan: Plan, c: Array, gain: "Gain", in_kernel: int) -> None:
    """What an instrument with this gain reads where the kernel's own arithmetic is wrong; c changes in place."""
    routed = slice(0, plan.spec.num_experts)
    at_input = plan.spec.weight_at is WeightAt.INPUT
    if fault.gain is not None:
        ratio_TC = gain.ratio(fault.gain)[:, :in_kernel]
        if at_input:  # the instrument solves for the weight
            wrong = fault.gain(gain.act, c[:, routed] * gain.gate_TC[:, routed], c[:, routed] * gain.up_TC[:, routed])
            c[:, routed] = gain.solve(wrong, routed)
            c[:, plan.spec.num_experts : in_kernel] *= ratio_TC[:, plan.spec.num_experts :]
        else:
            c[:, :in_kernel] *= ratio_TC
    if fault.total is not None and at_input:
        unit = gain.act(c[:, routed] * gain.gate_TC[:, routed], c[:, routed] * gain.up_TC[:, routed])
        c[:, routed] = gain.solve(fault.total * unit, routed)
        c[:, plan.spec.num_experts : in_kernel] *= fault.total
    if fault.rows is not None:  # a neighbour's output carries the neighbour's amplitude
        kernel = slice(0, in_kernel)
        if at_input:
            moved = gain.act(c[:, kernel] * gain.gate_TC[:, kernel], c[:, kernel] * gain.up_TC[:, kernel])
            c[:, kernel] = gain.solve(fault.rows(moved, numpy), kernel)
        else:
            unit = gain.act(gain.gate_TC[:, kernel], gain.up_TC[:, kernel])
            c[:, kernel] = fault.rows(c[:, kernel] * unit, numpy) / unit
    if fault.weigh_wrong_side:
        if at_input:
            unit = gain.act(gain.gate_TC[:, routed], gain.up_TC[:, routed])
            c[:, routed] = gain.solve(c[:, routed] * unit, routed)
        else:
            kernel = slice(0, in_kernel)
            gate_TC, up_TC = gain.gate_TC[:, kernel], gain.up_TC[:, kernel]
            c[:, kernel] = gain.act(c[:, kernel] * gate_TC, c[:, kernel] * up_TC) / gain.act(gate_TC, up_TC)


class Gain(NamedTuple):
    """The instrument's experts: gate_TC and up_TC of a unit for each row and column, and the activation."""

    act: Callable[[Array, Array], Array]
    gate_TC: Array
    up_TC: Array

    def ratio(self, wrong: Callable[[Callable[[Array, Array], Array], Array, Array], Array]) -> Array:
        """What the wrong arithmetic puts out over what is right, [T, C]."""
        return wrong(self.act, self.gate_TC, self.up_TC) / self.act(self.gate_TC, self.up_TC)

    def solve(self, unit_TC: Array, columns: slice) -> Array:
        """w with act(w gate, w up) = unit for those columns, by bisection on [0, 64]: the left side grows with w."""
        gate_TC, up_TC = self.gate_TC[:, columns], self.up_TC[:, columns]
        low, high = numpy.zeros_like(unit_TC), numpy.full_like(unit_TC, 64.0)
        for _ in range(60):
            middle = (low + high) / 2
            below = self.act(middle * gate_TC, middle * up_TC) < unit_TC
            low, high = numpy.where(below, middle, low), numpy.where(below, high, middle)
        return numpy.where(unit_TC == 0, 0.0, (low + high) / 2)


def faulty_select(
    fault: Fault, spec: RoutingSpec, logits_TE: Array, bias_E: Array, xp: ModuleType, **hash_inputs: Array
) -> tuple[Array, Array]:
    """`select` as a router with this fault would do it; weights before the plan's factor."""
    if fault.logits is not None:
        logits_TE = fault.logits(logits_TE, xp)
    if fault.bias is not None and bias_E is not None:
        bias_E = fault.bias(bias_E, xp)
    wrong = spec if fault.spec is None else fault.spec(spec)
    bias = bias_E if wrong.has_selection_bias else None
    ids_TK, weights_TK = select(wrong, logits_TE, bias_E=bias, xp=xp, scaled=False, **hash_inputs)
    if fault.choose is not None:
        ids_TK, weights_TK = fault.choose(Chosen(spec, logits_TE, bias_E, ids_TK, weights_TK, xp))
    return ids_TK, weights_TK


def round_bf16(x: Array, xp: ModuleType) -> Array:
    """x rounded to bfloat16 and widened again."""
    if xp is numpy:
        import ml_dtypes

        return numpy.asarray(x).astype(ml_dtypes.bfloat16).astype(numpy.asarray(x).dtype)
    return x.to(xp.bfloat16).to(x.dtype)


_TABLES: dict[tuple[int, str, str], tuple[Array, Array]] = {}


def held_beside(ids_TJ: Array, table: Array, xp: ModuleType) -> Array:
    """A placement's table on ids' device, copied once: a captured graph may not copy from the host."""
    key = (id(table), xp.__name__, str(ids_TJ.device))
    if key not in _TABLES:
        _TABLES[key] = (table, xp.asarray(table, device=ids_TJ.device))  # the table is kept, so its id is its own
    return _TABLES[key][1]


HEALTHY = Fault(name="none", kind="", says="as defined")
