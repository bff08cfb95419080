"""From a coefficient matrix that is wrong to a sentence: which fault of the catalogue gives exactly this matrix.

Invariant: a fault is named only if its prediction fits every reading within the tolerance; what fits none is shown as
numbers, not forced into a name.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from truegate.law.fault import Gain, predict
from truegate.law.faults import FAULTS
from truegate.law.plan import Plan

Array = Any


class Reading(Protocol):
    """One measurement: C read and C defined, [T, E+Z+S] float64, and what it takes to predict another C."""

    @property
    def coefficients(self) -> Array: ...
    @property
    def expected(self) -> Array: ...
    @property
    def judged_T(self) -> Array: ...
    @property
    def logits_TE(self) -> Array: ...
    @property
    def gate_T(self) -> Array: ...
    @property
    def gain(self) -> Gain: ...
    @property
    def bias_E(self) -> Array: ...
    @property
    def valid_T(self) -> Array: ...


class Explanation(NamedTuple):
    """fault is a name of the catalogue, or None where nothing in it fits; text is one sentence either way.

    also names the other faults that give exactly the same matrix here: what was measured cannot tell them apart.
    """

    fault: str | None
    text: str
    also: tuple[str, ...] = ()


def misfit(read: Array, predicted: Array, judged_T: Array) -> float:
    """max |read - predicted| over the row's largest coefficient, worst judged row."""
    if not judged_T.any():
        return 0.0
    read, predicted = read[judged_T], predicted[judged_T]
    if not (np.isfinite(read).all() and np.isfinite(predicted).all()):
        return float("inf")
    size_T = np.maximum(np.abs(read).max(-1), np.abs(predicted).max(-1)).clip(1e-30)
    return float((np.abs(read - predicted).max(-1) / size_T).max())


def explain(plan: Plan, readings: Sequence[Reading], *, tolerance: float) -> Explanation:
    """Name the fault whose prediction fits every reading; the first of the catalogue where several do."""
    candidates = [fault for fault in FAULTS if fault.wrap is None and fault.applies(plan)]
    fitting = [fault for fault in candidates if all(_fits(fault, plan, r, tolerance) for r in readings)]
    if not fitting:
        return Explanation(None, describe(plan, readings, tolerance=tolerance))
    first, *others = fitting
    also = tuple(fault.name for fault in others)
    text = first.sentence(plan) + (f" (or {', '.join(also)}: the same coefficients here)" if also else "")
    return Explanation(first.name, text, also)


def _fits(fault: Any, plan: Plan, reading: Reading, tolerance: float) -> bool:
    with np.errstate(all="ignore"):
        predicted = predict(
            fault, plan, reading.logits_TE, bias_E=reading.bias_E, valid_T=reading.valid_T,
            shared_gate_T=reading.gate_T, gain=reading.gain,
        )  # fmt: skip
    return misfit(reading.coefficients, predicted, reading.judged_T) <= tolerance


def describe(plan: Plan, readings: Sequence[Reading], *, tolerance: float) -> str:
    """The numbers of an unnamed deviation: which rows, which columns, by which factors."""
    parts = []
    for reading in readings:
        read, right = reading.coefficients, reading.expected
        wrong_TC = np.abs(read - right) > tolerance * np.abs(right).max(-1, keepdims=True).clip(1e-30)
        wrong_TC = (wrong_TC | ~np.isfinite(read)) & reading.judged_T[:, None]
        if wrong_TC.any():
            parts.append(_describe_one(plan, read, right, wrong_TC, int(reading.judged_T.sum())))
    return parts[0] if parts else "coefficients are as defined"


def _describe_one(plan: Plan, read: Array, right: Array, wrong_TC: Array, num_judged: int) -> str:
    rows, columns = np.flatnonzero(wrong_TC.any(-1)), np.flatnonzero(wrong_TC.any(0))
    first = plan.spec.num_choices
    names = [f"shared {c - first}" if c >= first else f"expert {c}" for c in columns[:4].tolist()]
    more = f" and {len(columns) - 4} more" if len(columns) > 4 else ""
    t, c = np.argwhere(wrong_TC)[0]
    return (
        f"unnamed: {len(rows)} of {num_judged} rows wrong ({', '.join(names)}{more}); "
        f"row {t}, {names[0] if c == columns[0] else f'column {c}'}: read {read[t, c]:.6g}, should be {right[t, c]:.6g}"
    )
