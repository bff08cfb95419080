"""What a canary's probes must read, computed in float64 from the model's definition.

Invariant: a reading is C_out[p, i] * unit(kind, C_in[p, i]): the coefficient of expert i, times what one expert writes
for that kind of probe. P rows of a table, E experts, S shared experts told apart, W = E + S.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from truegate.law.select import coefficients
from truegate.law.spec import Activation, RoutingSpec, SharedGate, WeightAt

Matrix = NDArray[np.float64]
Gain = Callable[[Callable[[Matrix, Matrix], Matrix], Matrix, Matrix], Matrix]


class Kind(StrEnum):
    """How a probe token drives the experts it reaches."""

    PLAIN = "plain"  # gate far in its linear range, amplitude 1
    DIM = "dim"  # gate at 1: the activation function shows
    EIGHTH = "eighth"  # amplitude 1/8 and 1/3: a scale shared with other rows of a batch shows
    THIRD = "third"
    LOUD_GATE = "loud_gate"  # beyond the clamp, gate side and up side (clamped activations only)
    LOUD_UP = "loud_up"
    NEAR_LOW = "near_low"  # two experts that differ by 2^-9 in their logits: is the router kept in more than bf16?
    NEAR_HIGH = "near_high"
    DENSE = "dense"  # a layer without experts
    FINGERPRINT = "fingerprint"  # read-outs written by the embedding: is this the right checkpoint?


SMALL = (Kind.DIM, Kind.EIGHTH, Kind.THIRD)  # whose activations are smaller than those of a plain probe
_AMPLITUDE = {Kind.EIGHTH: 1 / 8, Kind.THIRD: 171 / 512, Kind.LOUD_UP: 16.0}  # 171/512: a third, exact in bf16
NEAR = 2.0**-9


@dataclass(frozen=True, kw_only=True)
class Drive:
    """Input of an expert's activation in one canary: gate and up pre-activations, and the sum of its down weights."""

    gate: float  # PLAIN
    dim: float  # added to the gate by the DIM code
    loud: float  # added to the gate by the LOUD_GATE code
    dim_amplitude: float  # with which a DIM probe reads about as much as a PLAIN one
    up: float  # up pre-activation at amplitude 1, without the bias
    up_bias: float
    down: float  # sum of the down weights towards a read-out
    answer_down: float  # the same towards the answer channel, whose gate is 16

    def amplitude(self, kind: Kind) -> float:
        return self.dim_amplitude if kind is Kind.DIM else _AMPLITUDE.get(kind, 1.0)


def drive(spec: RoutingSpec) -> Drive:
    """The gains of this activation: one expert writes `act(gate) * up * down` per unit of amplitude."""
    if spec.activation is Activation.SWIGLU_CLAMP:  # (up + 1) counts: the bias of -1 makes it 0 on other layers
        return Drive(
            gate=4.0, dim=-3.0, dim_amplitude=4.0, loud=12.0, up=1.0, up_bias=-1.0, down=0.25, answer_down=0.125
        )
    return Drive(gate=16.0, dim=-15.0, dim_amplitude=16.0, loud=0.0, up=1 / 16, up_bias=0.0, down=1.0,
                 answer_down=1.0)  # fmt: skip


def activate(activation: Activation, gate: Matrix, clamp: float | None, slope: float) -> Matrix:
    """The gate's factor: g sigmoid(slope g) with g clamped from above, or gelu(g)."""
    if activation is Activation.GELU:
        return gate * 0.5 * (1 + np.vectorize(math.erf)(gate / math.sqrt(2)))
    if activation is Activation.GELU_TANH:
        return gate * 0.5 * (1 + np.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)))
    gate = gate if clamp is None else np.minimum(gate, clamp)
    with np.errstate(over="ignore"):
        return gate / (1 + np.exp(-slope * gate))


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One expert's arithmetic as some engine does it; the default for a spec is its definition."""

    activation: Activation
    clamp: float | None
    up_offset: float  # (up + offset): 1 for the clamped activation
    slope: float  # of the sigmoid: 1 for silu
    gain: Gain | None = None  # (act, gate, up) -> output, where it is not act(gate, up)

    def output(self, spec: RoutingSpec, kind: Kind, c_in: Matrix) -> Matrix:
        """What an expert writes into its read-out for an input multiplied by c_in."""
        d = drive(spec)
        shift = {Kind.DIM: d.dim, Kind.LOUD_GATE: d.loud}.get(kind, 0.0)
        gate = (d.gate + shift) * c_in
        up = d.up * d.amplitude(kind) * c_in + d.up_bias
        return (self.gain(self._act, gate, up) if self.gain else self._act(gate, up)) * d.down

    def _act(self, gate: Matrix, up: Matrix) -> Matrix:
        if self.clamp is not None:
            up = np.clip(up, -self.clamp, self.clamp)
        return activate(self.activation, gate, self.clamp, self.slope) * (up + self.up_offset)

    def answer(self, spec: RoutingSpec, amplitude: float, c_in: float) -> float:
        """What an asked expert writes into the answer channel; its gate is 16 when layer and reader both match."""
        d = drive(spec)
        gate, up = np.array(16.0 * c_in), np.array(amplitude * d.up * c_in + d.up_bias)
        return float(self._act(gate, up) * d.answer_down)


def unit_of(spec: RoutingSpec) -> Unit:
    """The definition's arithmetic."""
    clamped = spec.activation is Activation.SWIGLU_CLAMP
    return Unit(activation=spec.activation, clamp=spec.clamp, up_offset=float(clamped), slope=1.702 if clamped else 1.0)


@dataclass(frozen=True, kw_only=True)
class Layer:
    """One MoE layer of a canary: its spec, its tables, and how many shared experts are told apart."""

    index: int
    spec: RoutingSpec
    logits_PE: Matrix
    bias_E: Matrix | None
    shared_logit_P: Matrix | None  # input of the shared expert's sigmoid gate
    num_shared: int

    @property
    def width(self) -> int:
        return self.spec.num_experts + self.num_shared

    @property
    def shared_gate_P(self) -> Matrix | None:
        return None if self.shared_logit_P is None else 1 / (1 + np.exp(-self.shared_logit_P))

    def spread(self, c: Matrix) -> Matrix:
        """[P, E(+1)] of the law to [P, E + S]: the one shared column stands for every shared expert told apart."""
        if self.spec.shared is None:
            return c
        return np.concatenate([c[:, :-1], np.repeat(c[:, -1:], self.num_shared, axis=1)], axis=1)

    def coefficients(self) -> tuple[Matrix, Matrix]:
        """C_out, C_in [P, W] by definition."""
        gate = self.shared_gate_P if self.spec.shared and self.spec.shared.gate is SharedGate.SIGMOID else None
        out, into = (
            self.spread(coefficients(self.spec, self.logits_PE, bias_E=self.bias_E, shared_gate_T=gate, at=at))
            for at in (WeightAt.OUTPUT, WeightAt.INPUT)
        )
        return out, into


def readings(layer: Layer, c_out: Matrix, c_in: Matrix, rows: NDArray, kinds: list[Kind], unit: Unit) -> Matrix:
    """What probes (table row, kind) must read: R[n, i] = C_out[row, i] * unit(kind, C_in[row, i])."""
    out, names = np.empty((len(rows), layer.width)), np.array(kinds, dtype=object)
    for kind in dict.fromkeys(kinds):
        mine = names == kind
        out[mine] = c_out[rows[mine]] * unit.output(layer.spec, kind, c_in[rows[mine]])
    return out


def expected(layer: Layer, rows: NDArray, kinds: list[Kind]) -> Matrix:
    """`readings` of the definition itself."""
    c_out, c_in = layer.coefficients()
    return readings(layer, c_out, c_in, rows, kinds, unit_of(layer.spec))
