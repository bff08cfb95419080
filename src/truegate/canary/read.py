"""From an answer's log-probabilities back to coefficients.

Invariant: only differences of log-probabilities are used, so neither the softmax nor its temperature matters.
With s the scale of the head (1 when right) and Z the reference token of logit 1/4:

    s = (lp[next] - lp[Z]) / 29.75        value_i = ((lp[i] - lp[Z]) / s + 1/4) / read_scale

W experts and shared experts; column W is the dense MLP.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from truegate.canary.definition import Matrix
from truegate.canary.layout import RUNGS, rung_interval
from truegate.canary.manifest import Manifest, Question

_NEXT_LOGIT = 30.0
_REFERENCE_LOGIT = 0.25
REL_TOLERANCE = (
    0.03  # bf16 reads within 0.8 % as a rule, 2.4 % where an engine truncates; planted faults move 4 % and more
)
ABS_TOLERANCE = 5e-4


class Unreadable(StrEnum):
    """Why an answer carries no coefficients."""

    NAN = "NaN or infinite log-probabilities"
    NO_REFERENCE = "neither the next probe nor the reference token is among the top log-probabilities"
    SCALE = "the head's scale is not 1: the final norm, the head or a logit transform differs"


@dataclass(frozen=True)
class Reading:
    """One probe's answer: values and how far off they may be, or why there are none."""

    values: Matrix | None  # [W + 1]
    slack: Matrix | None  # [W + 1]: 0 where listed, else the largest value that an unlisted token can hide
    listed: NDArray[np.bool_] | None = None  # [W + 1]; an unlisted value may also be negative
    scale: float = 1.0
    bias: float | None = None
    problem: Unreadable | None = None


def read(manifest: Manifest, probe: int, top: Mapping[int, float]) -> Reading:
    """Coefficients from the top log-probabilities {token id: value} after `probe`."""
    v = manifest.vocabulary
    if not top or not all(math.isfinite(x) for x in top.values()):
        return Reading(None, None, problem=Unreadable.NAN if top else Unreadable.NO_REFERENCE)
    after, zero = top.get(manifest.token(manifest.successor(probe))), top.get(v.reference)
    if after is None and zero is None:
        return Reading(None, None, problem=Unreadable.NO_REFERENCE)
    scale = 1.0
    if after is not None and zero is not None:
        scale = (after - zero) / (_NEXT_LOGIT - _REFERENCE_LOGIT)
        if not 0.5 < scale < 2:
            return Reading(None, None, scale=scale, problem=Unreadable.SCALE)
    origin, logit = (zero, _REFERENCE_LOGIT) if zero is not None else (after, _NEXT_LOGIT)
    assert origin is not None

    def value(lp: float) -> float:
        return ((lp - origin) / scale + logit) / manifest.read_scale

    hidden_below = max(0.0, value(min(top.values())))
    listed = np.zeros(v.num_read_outs, dtype=bool)
    values, slack = np.zeros(v.num_read_outs), np.full(v.num_read_outs, hidden_below)
    for token, lp in top.items():
        column = token - v.first_read_out
        if 0 <= column < v.num_read_outs:
            values[column], slack[column], listed[column] = value(lp), 0.0, True
    bias = value(top[v.bias]) if v.bias in top and manifest.has_bias_read_out else None
    return Reading(values, slack, listed, scale=scale, bias=bias)


def tolerance(want: Matrix) -> Matrix:
    """How far a healthy bf16 engine may read from the definition."""
    return REL_TOLERANCE * np.abs(want) + ABS_TOLERANCE


@dataclass(frozen=True)
class Answer:
    """A question's greedy answer as an interval of the asked coefficient's reading."""

    low: float
    high: float
    right: bool


def read_rung(manifest: Manifest, question: Question, token: int, per_unit: float) -> Answer | None:
    """The interval of coefficients that the rung allows; `per_unit` is the answer channel's gain. None: no rung."""
    index = token - manifest.vocabulary.first_rung
    if not 0 <= index < len(RUNGS):
        return None
    low, high = rung_interval(index)
    return Answer((low - question.offset) / per_unit, (high - question.offset) / per_unit, right=RUNGS[index] == 0.0)
