"""Basis-vector experts: weights that turn a real MoE layer into an instrument that reads its own coefficient matrix.

Invariant: every input and weight written here is exact in bf16 and every logit exact in fp32, so that what is read
differs from the definition only by what the layer does. Channel 0 of x is 1 and no expert writes it; channel 1 of x is
the row's amplitude; column c (expert, then shared slot) is written to channel 1 + c - first of the window being read.
T rows, D hidden, E experts, Z identity experts, S shared columns, C columns E + S, F expert width.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from truegate.errors import UserError
from truegate.law.fault import Gain
from truegate.law.order import decode, realise
from truegate.law.select import select
from truegate.law.spec import Activation, SelectOn, WeightAt
from truegate.moe.experts.torch import activate
from truegate.moe.layer import MoELayer

Floats = NDArray[np.float64]

SATURATED = 32.0  # silu(32) is 32 in fp32, so that sums of equal units are exact
CURVED = 2.0  # silu(2) and gelu(2) differ by 11 percent: reads the activation itself
GATE_READS = 64  # channels that a router row reads: sums of 64 sixteenths stay exact in fp32
MARGIN = 2e-5  # selections that this much noise on the logits can change are not judged


class Step(NamedTuple):
    """What `MoELayer.forward` needs of a Batch."""

    token_ids_T: Any
    valid_T: Any
    all_valid: bool
    recorder: Any = None


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One measurement: coefficients read and defined, [T, E+Z+S] float64, on the rows that could be judged."""

    coefficients: Floats
    expected: Floats
    judged_T: NDArray[np.bool_]  # valid, large enough to be read, and no near-tie decides the selection
    logits_TE: Floats
    gate_T: Floats | None
    gain: Gain
    bias_E: Floats | None
    valid_T: NDArray[np.bool_] | None
    y_TD: torch.Tensor

    @property
    def error(self) -> float:
        """max |C - C*| over the row's largest |C*|, worst judged row; inf where C is not finite."""
        if not self.judged_T.any():
            return 0.0
        read, right = self.coefficients[self.judged_T], self.expected[self.judged_T]
        if not np.isfinite(read).all():
            return float("inf")
        return float((np.abs(read - right).max(-1) / np.abs(right).max(-1).clip(1e-30)).max())


class Instrument:
    """Basis weights written into a layer's own buffers; `measure` runs the layer and reads C. The weights are lost.

    amplitude is the gate's value: SATURATED, or CURVED to read the activation. One instrument a layer at a time.
    """

    def __init__(self, layer: MoELayer, *, seed: int = 0, amplitude: float = SATURATED):
        self.layer, self.spec, self.plan = layer, layer.spec, layer.plan
        spec = self.spec
        if spec.hidden < 3:
            raise UserError(f"a layer of hidden size {spec.hidden} has no room for a read-out; it needs 3 channels")
        if spec.select_on is SelectOn.HASH:
            raise UserError("a layer that selects by hash is measured through its table, which is not built yet")
        if spec.num_identity and spec.weight_at is WeightAt.INPUT:
            raise UserError("identity experts beside weights at the input cannot be told apart in the read-out")
        self.exact = amplitude == SATURATED and spec.clamp is None
        self.amplitude = min(amplitude, spec.clamp) if spec.clamp is not None else amplitude
        self.num_columns = spec.num_experts + self.num_shared
        self._window = (-1, 0)
        self.route(seed=seed)
        self._write_projections()

    @property
    def num_shared(self) -> int:
        return max(self.plan.num_shared, int(self.spec.shared is not None))

    def route(
        self, *, seed: int = 0, bias_around: float = 0.0, twins: bool = False, bias_alone: bool = False
    ) -> "Instrument":
        """Write the router anew.

        bias_around moves the selection bias: +3 puts biased scores where bf16 is coarse, -3 makes them all negative.
        twins gives runs of experts equal scores, in runs that top-k must cut, so that ties decide.
        bias_alone gives all experts equal scores, and biases that rise with the id and that bf16 makes equal: rounded,
        they leave the choice to the lowest ids, where the highest are right.
        """
        spec, layer, rng = self.spec, self.layer, np.random.default_rng(seed)
        step = next(n for n in range(2, spec.top_k + 2) if spec.top_k % n) if twins else 1
        step = spec.num_choices if bias_alone else step
        self.twin_E = np.arange(spec.num_choices) // step * step
        weight_ED = np.zeros((spec.num_choices, spec.hidden))
        code = np.arange(2, spec.hidden)
        reads = min(GATE_READS, len(code))
        for e in range(spec.num_choices):
            weight_ED[e, rng.choice(code, reads, replace=False)] = rng.integers(-16, 17, reads) / 16
        self.weight_ED = weight_ED = weight_ED[self.twin_E]
        self.bias_E = None
        with torch.no_grad():
            layer.gate_weight.copy_(torch.from_numpy(weight_ED))
            if layer.gate_bias is not None:
                layer.gate_bias.zero_()
            if layer.selection_bias is not None:
                self.bias_E = bias_around + rng.integers(-512, 513, spec.num_choices)[self.twin_E] / 1024
                if bias_alone:  # below 3 + 1/128, which is half of bf16's next step
                    self.bias_E = 3.0 + np.arange(spec.num_choices) * 1024 // spec.num_choices / 2**17
                layer.selection_bias.copy_(torch.from_numpy(self.bias_E))
            self.shared_row_D = None
            if layer.shared_gate is not None:
                self.shared_row_D = np.zeros(spec.hidden)
                self.shared_row_D[rng.choice(code, min(8, len(code)), replace=False)] = 0.5
                layer.shared_gate.copy_(torch.from_numpy(self.shared_row_D)[None])
        return self

    def _write_projections(self) -> None:
        """gate = amplitude * x[0], up = u_c * x[1] with u_c different for neighbours; down is written per window."""
        spec, layer = self.spec, self.layer
        # a mixed-up pair of projections shows as a wrong gain
        self.up_C = (16 + np.arange(self.num_columns) % 13) / self._up_scale()
        for column in range(self.num_columns):
            units = self._units(column)
            gate, up = torch.zeros(2, 1, spec.hidden, device=layer.w_down.device)
            gate[0, 0] = self.amplitude
            up[0, 1] = float(self.up_C[column])
            self._store(column, gate=gate.expand(units, -1), up=up.expand(units, -1))
        with torch.no_grad():
            if layer.gate_up_bias is not None:
                layer.gate_up_bias.zero_()
                if spec.activation is Activation.SWIGLU_CLAMP:
                    width = layer.w_down.shape[2]
                    layer.gate_up_bias[:, width:] = -1.0  # (up + 1) is then u_c * x[1]
                layer.down_bias.zero_()

    def _up_scale(self) -> int:
        """16 to 28 over this are the gains: small where it does not matter, else as large as a dtype needs."""
        spec, half = self.spec, self.layer.w_down.dtype is torch.float16
        if spec.activation is Activation.SWIGLU_CLAMP:
            return 16  # up - 1 must stay exact in bf16
        if spec.num_identity:
            return 8 if half else 1  # x stands in the same channels: its rounding must not drown the unit
        return 16 if half and spec.weight_at is WeightAt.OUTPUT else 256  # small weights must stay normal numbers

    def _units(self, column: int) -> int:
        """Units of a column's expert on this rank."""
        spec = self.spec
        width = self.layer.w_down.shape[2]
        if column < spec.num_experts or self.plan.num_shared:
            return width
        assert spec.shared is not None
        return spec.shared.intermediate

    def _mass(self, column: int) -> float:
        """What the down weights of a whole expert sum to: a power of two below 2, over all its shards."""
        width = self._units(column)
        if column < self.spec.num_experts or self.plan.num_shared:
            width *= self.plan.ranks.moe_tp
        return width * 2.0 ** -np.ceil(np.log2(width))

    def _store(self, column: int, **parts: torch.Tensor) -> None:
        """Write projections of one column through the layer's own loading paths."""
        layer, first = self.layer, self.spec.num_experts
        if column < first:
            layer.load_expert(column, **parts)
        elif self.plan.num_shared == 0:
            layer.load_shared(**parts)
        else:
            layer.load_shared_slot(column - first, **parts)

    def _write_window(self, first: int, size: int) -> None:
        if (first, size) == self._window:
            return
        self._window = (first, size)
        for column in range(self.num_columns):
            units = self._units(column)
            down = torch.zeros(self.spec.hidden, 1, device=self.layer.w_down.device)
            if first <= column < first + size:
                down[1 + column - first] = self._mass(column) / (units * self._shards(column))
            self._store(column, down=down.expand(-1, units))

    def _shards(self, column: int) -> int:
        return self.plan.ranks.moe_tp if column < self.spec.num_experts or self.plan.num_shared else 1

    def rows(self, num_rows: int, *, seed: int = 0) -> torch.Tensor:
        """x_TD in the layer's dtype: 1, an amplitude of 1, 1/2 or 1/4, then multiples of 1/8 up to 1."""
        rng = np.random.default_rng((seed, num_rows))
        x_TD = rng.integers(-8, 9, (num_rows, self.spec.hidden)) / 8
        x_TD[:, 0] = 1.0
        x_TD[:, 1] = 2.0 ** -rng.integers(0, 3, num_rows)
        return torch.from_numpy(x_TD).to(self.layer.w_down.dtype).to(self.layer.w_down.device)

    def measure(
        self, x_TD: torch.Tensor, *, valid_T: torch.Tensor | None = None, run: Any = None, recorder: Any = None
    ) -> Measured:
        """Run the layer (or `run`, a callable (x_TD, Step) -> y_TD around it) and read C, window by window.

        Rows that valid_T marks as padding may hold anything; they are neither judged nor read.
        """
        run = run or self.layer
        clean_TD = _clean(x_TD, valid_T)
        logits_TE = clean_TD @ self.weight_ED.T
        gate_T = None if self.shared_row_D is None else 1 / (1 + np.exp(-clean_TD @ self.shared_row_D))
        read_TC = np.zeros((len(clean_TD), self.num_columns))
        identity_T = np.zeros(len(clean_TD)) if self.spec.num_identity else None
        window = self.spec.hidden - 1
        y_TD = x_TD
        for first in range(0, self.num_columns, window):
            size = min(window, self.num_columns - first)
            self._write_window(first, size)
            step = Step(tokens(x_TD), valid_T, valid_T is None, recorder)
            y_TD = run(x_TD, step)
            out_TD = y_TD.detach().double().cpu().numpy()
            if identity_T is not None:  # x itself stands in every channel; no expert writes channel 0
                identity_T = out_TD[:, 0]
                out_TD = out_TD - identity_T[:, None] * clean_TD
            read_TC[:, first : first + size] = out_TD[:, 1 : 1 + size]
            recorder = None
        gain = self._gain(clean_TD)
        valid = None if valid_T is None else valid_T.cpu().numpy()
        expected = self.defined(logits_TE, gate_T, valid)
        measured = self._invert(read_TC, identity_T, gain)
        judged_T = self.decided(logits_TE) & self._readable(expected, gain)
        return Measured(
            coefficients=measured, expected=expected, judged_T=judged_T if valid is None else judged_T & valid,
            logits_TE=logits_TE, gate_T=gate_T, gain=gain, bias_E=self.bias_E, valid_T=valid, y_TD=y_TD,
        )  # fmt: skip

    def defined(self, logits_TE: Floats, gate_T: Floats | None, valid_T: Any = None) -> Floats:
        """The definition's C, laid out as `decode` lays it out."""
        ids_TK, weights_TK = select(self.spec, logits_TE, bias_E=self.bias_E, scaled=False)
        emitted_TK = weights_TK * float(self.plan.scales.router)
        return decode(self.plan, realise(self.plan, ids_TK, emitted_TK, valid_T=valid_T, shared_gate_T=gate_T))

    def decided(self, logits_TE: Floats) -> NDArray[np.bool_]:
        """Rows whose choice survives noise of MARGIN on the logits: the others are ties that any engine may break."""
        rng = np.random.default_rng(1)
        chosen = self._chosen(logits_TE)
        stable_T = np.ones(len(logits_TE), dtype=bool)
        for _ in range(4):
            noisy = (
                logits_TE + MARGIN * (1 + np.abs(logits_TE)) * rng.choice([-1.0, 1.0], logits_TE.shape)[:, self.twin_E]
            )
            stable_T &= (self._chosen(noisy) == chosen).all(-1)
        return stable_T

    def _readable(self, expected_TC: Floats, gain: Gain) -> NDArray[np.bool_]:
        """Rows whose largest output (at INPUT: smallest) is well above the subnormal numbers, where fp16 is coarse."""
        least, experts = 8 * torch.finfo(self.layer.w_down.dtype).tiny, self.spec.num_experts
        if self.spec.weight_at is WeightAt.INPUT:  # the output falls with the square of a small weight
            weights_TE = expected_TC[:, :experts]
            out_TE = self._act(weights_TE * gain.gate_TC[:, :experts], weights_TE * gain.up_TC[:, :experts])
            return np.asarray(((np.abs(out_TE) >= least) | (weights_TE == 0)).all(-1))
        out_TC = expected_TC * self._act(gain.gate_TC, gain.up_TC)
        identity = slice(experts, self.spec.num_choices)  # these have no unit
        out_TC[:, identity] = expected_TC[:, identity]
        return np.asarray(np.abs(out_TC).max(-1) >= least)

    def _chosen(self, logits_TE: Floats) -> Any:
        return np.sort(select(self.spec, logits_TE, bias_E=self.bias_E).ids_TK, axis=-1)

    def _gain(self, clean_TD: Floats) -> Gain:
        experts, rows = self.spec.num_experts, np.ones((len(clean_TD), 1))
        identity_TZ = np.broadcast_to(rows, (len(clean_TD), self.spec.num_identity))  # these columns have no unit
        up_TC = clean_TD[:, 1:2] * self.up_C[None, :]
        up_TC = np.concatenate([up_TC[:, :experts], identity_TZ, up_TC[:, experts:]], -1)
        return Gain(act=self._act, gate_TC=np.full_like(up_TC, self.amplitude), up_TC=up_TC)

    def _act(self, gate: Any, up: Any) -> Any:
        """The unit's output in float64, the layer's biases included."""
        tensors = (torch.as_tensor(np.ascontiguousarray(a)) for a in np.broadcast_arrays(gate, up))
        gate_t, up_t = (t.double() for t in tensors)
        if self.spec.activation is Activation.SWIGLU_CLAMP:
            up_t = up_t - 1.0 if self.layer.gate_up_bias is not None else up_t
        return activate(self.spec, gate_t.clone(), up_t).numpy()  # the definition's, not the kernel's own

    def _invert(self, read_TC: Floats, identity_T: Floats | None, gain: Gain) -> Floats:
        """Outputs to coefficients [T, E+Z+S]: divide by the unit's gain, or solve for a weight at the input."""
        spec = self.spec
        mass_C = np.array([self._mass(c) for c in range(self.num_columns)])
        experts = spec.num_experts
        identity_TZ = np.zeros((len(read_TC), spec.num_identity))
        unit_TC = read_TC / mass_C
        unit_TC = np.concatenate([unit_TC[:, :experts], identity_TZ, unit_TC[:, experts:]], -1)
        with np.errstate(invalid="ignore", divide="ignore"):
            c = unit_TC / self._act(gain.gate_TC, gain.up_TC)
        if spec.weight_at is WeightAt.INPUT:
            c[:, :experts] = gain.solve(unit_TC[:, :experts], slice(0, experts))
        if identity_T is not None:
            c[:, experts] = identity_T
        return c


def _clean(x_TD: torch.Tensor, valid_T: torch.Tensor | None) -> Floats:
    """x in float64, padded rows replaced by zeros."""
    if valid_T is not None:
        x_TD = torch.where(valid_T[:, None], x_TD, 0)
    return x_TD.detach().double().cpu().numpy()


def tokens(x_TD: torch.Tensor) -> torch.Tensor:
    """Token ids for x's rows, all 0: int64 [T]."""
    return torch.zeros(len(x_TD), dtype=torch.int64, device=x_TD.device)


def measure(layer: MoELayer, *, num_rows: int = 64, seed: int = 0, amplitude: float = SATURATED) -> Measured:
    """C of a layer at `num_rows` random rows: exact to 1e-6 in fp32 and 1 percent in bf16 on a right layer.

    The layer's weights are overwritten.
    """
    instrument = Instrument(layer, seed=seed, amplitude=amplitude)
    return instrument.measure(instrument.rows(num_rows, seed=seed))
