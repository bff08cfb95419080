"""The self-test: a layer measured through its own router, exchange and experts, and a sentence for what is wrong.

Invariant: a verdict is about what ran: these row counts and layouts, to this tolerance; never a proof of a kernel.
"""

import time
from dataclasses import dataclass, replace

import numpy as np
import torch

from truegate.law.explain import Explanation, explain, misfit
from truegate.law.select import select
from truegate.moe.backends import not_capturable
from truegate.moe.basis import CURVED, Instrument, Measured, Step, tokens
from truegate.moe.captured import CapturedLayer
from truegate.moe.layer import MoELayer
from truegate.moe.recorder import Recorder

SIZES = (1, 2, 3, 5, 8, 9, 17, 33)  # on and off every grid of captured batch sizes
CAPTURED_SIZES = (1, 3, 5, 9, 17, 33)  # row counts that pad a captured graph
CROWD = 300  # equal rows: every chosen expert gets more than 256
MIXED = 96  # rows of the measurements whose choices near-ties decide
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}
INEXACT = 1e-5
POISONS = (float("nan"), 1e30)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One measurement's outcome. worst is a relative error, or the number of wrong values where that is what counts."""

    name: str
    what: str
    worst: float
    ok: bool
    fault: str | None = None
    says: str = ""
    also: tuple[str, ...] = ()  # faults that look exactly like it here


@dataclass(frozen=True, kw_only=True)
class Report:
    """Every check of a layer, with the time it took; `sentence` is the first thing wrong, or what a pass covers."""

    checks: tuple[Check, ...]
    seconds: float
    dtype: str

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def fault(self) -> str | None:
        """The catalogue's name for what is wrong, where it has one."""
        return next((c.fault for c in self.checks if not c.ok and c.fault is not None), None)

    @property
    def also(self) -> tuple[str, ...]:
        """Other names that the same numbers bear."""
        return next((c.also for c in self.checks if not c.ok and c.fault is not None), ())

    @property
    def sentence(self) -> str:
        wrong = [c for c in self.checks if not c.ok]
        if wrong:
            named = next((c for c in wrong if c.fault is not None), wrong[0])
            return named.says
        return f"every measured coefficient is right: {', '.join(c.name for c in self.checks)} ({self.dtype})"


def self_test(layer: MoELayer, *, seed: int = 0) -> Report:
    """Measure a layer; its weights are overwritten, so load the checkpoint afterwards."""
    started = time.perf_counter()
    dtype = layer.w_down.dtype
    readings = _readings(layer, seed)
    checks = _coefficients(layer, readings)
    instrument = Instrument(layer, seed=seed)
    beside = [*_padding(instrument), *_repeat(instrument), _report(instrument)]
    if not all(check.ok for check in checks):
        # wrong coefficients explain wrong reports and loads; only what an earlier call left behind explains them
        beside = [check if check.what == "state" else replace(check, fault=None) for check in beside]
    name = str(dtype).removeprefix("torch.")
    return Report(checks=(*checks, *beside), seconds=time.perf_counter() - started, dtype=name)


def _tolerance(instrument: Instrument) -> float:
    """Relative error that rounding alone explains; sums of inexact units round at every step."""
    tolerance = TOLERANCE[instrument.layer.w_down.dtype]
    if instrument.spec.num_identity:
        tolerance *= 2  # x is multiplied and added: two more roundings
    return tolerance if instrument.exact else max(tolerance, INEXACT)


def _readings(layer: MoELayer, seed: int) -> list[tuple[str, float, Measured]]:
    """(name, tolerance, reading): every row count, a crowded expert, close choices, ties, the activation's curve."""
    plain = Instrument(layer, seed=seed)
    tolerance = _tolerance(plain)
    found = [(f"{n} rows", tolerance, plain.measure(plain.rows(n, seed=seed))) for n in SIZES]
    if layer.w_down.is_cuda and not_capturable([layer.backends]) is None:
        captured = CapturedLayer(layer)
        for n in CAPTURED_SIZES:
            reading = plain.measure(plain.rows(n, seed=seed), run=captured)
            found.append((f"{n} rows captured", tolerance, reading))
    crowd_TD = plain.rows(1, seed=seed + 1).expand(CROWD, -1).contiguous()
    found.append((f"{CROWD} equal rows", tolerance, plain.measure(crowd_TD)))
    for around in (3.0, -3.0) if layer.selection_bias is not None else (0.0,):
        plain.route(seed=seed + 2, bias_around=around)
        name = f"close choices, bias around {around:+g}" if around else "close choices"
        found.append((name, tolerance, plain.measure(plain.rows(MIXED, seed=seed))))
    if layer.selection_bias is not None:
        plain.route(seed=seed + 2, bias_alone=True)
        found.append(("biases that bf16 makes equal", tolerance, plain.measure(plain.rows(SIZES[-1], seed=seed))))
    plain.route(seed=seed + 3, twins=True)
    found.append(("ties", tolerance, plain.measure(plain.rows(MIXED, seed=seed))))
    curved = Instrument(layer, seed=seed + 4, amplitude=CURVED)
    found.append(("activation", _tolerance(curved), curved.measure(curved.rows(7, seed=seed))))
    return found


def _coefficients(layer: MoELayer, readings: list[tuple[str, float, Measured]]) -> list[Check]:
    """One check a reading; what is wrong is explained from all of them together."""
    wrong = any(reading.error > tolerance for _, tolerance, reading in readings)
    explained = Explanation(None, "")
    if wrong:
        fit = max(TOLERANCE[layer.w_down.dtype] * 2, INEXACT)
        explained = explain(layer.plan, [reading for _, _, reading in readings], tolerance=fit)
    checks = []
    for name, tolerance, reading in readings:
        ok = reading.error <= tolerance
        fault, says, also = (None, "", ()) if ok else explained
        checks.append(
            Check(name=name, what="coefficients", worst=reading.error, ok=ok, fault=fault, says=says, also=also)
        )  # fmt: skip
    return checks


def _padding(instrument: Instrument) -> list[Check]:
    """Padded rows mid-batch, last, almost all: valid rows bitwise unchanged by them, none computed or counted."""
    checks = []
    layer, clean_TD = instrument.layer, instrument.rows(13, seed=5)
    for name, padded in {"mid-batch": [4, 5, 9], "last": [11, 12], "all but one": [*range(5), *range(6, 13)]}.items():
        valid_T = torch.ones(13, dtype=torch.bool, device=clean_TD.device)
        valid_T[padded] = False
        zeros_TD = torch.where(valid_T[:, None], clean_TD, 0)
        measured = instrument.measure(zeros_TD, valid_T=valid_T)
        right_TD = _run(layer, zeros_TD, valid_T)
        changed = 0
        for poison in POISONS:
            poison = min(poison, torch.finfo(clean_TD.dtype).max)  # NaN stays NaN
            y_TD = _run(layer, torch.where(valid_T[:, None], clean_TD, poison), valid_T)
            changed += int((y_TD[valid_T] != right_TD[valid_T]).sum())
        computed = int((_kernel(layer, clean_TD, valid_T)[~valid_T] != 0).any(-1).sum())
        counted = _miscounted(instrument, clean_TD, valid_T)
        fault = _padding_fault(computed, counted)
        ok = measured.error <= _tolerance(instrument) and not changed and not computed and not any(counted)
        says = (
            f"{len(padded)} padded rows {name}: {changed} values of valid rows change with what padded rows hold, "
            f"{computed} padded rows are computed, load is wrong by {sum(map(abs, counted))}"
        )
        worst = max(measured.error, float(changed + computed + sum(map(abs, counted))))
        checks.append(Check(name=f"padding {name}", what="padding", worst=worst, ok=ok, fault=fault, says=says))
    return checks


def _padding_fault(computed: int, counted: list[int]) -> str | None:
    """Which of the catalogue's padding faults shows like this."""
    if not any(counted):
        return None
    if not any(counted[:-1]):
        return "pad-aliases-last"
    return "pad-live" if computed else "pad-counted"


def _run(layer: MoELayer, x_TD: torch.Tensor, valid_T: torch.Tensor | None) -> torch.Tensor:
    return layer(x_TD.clone(), Step(tokens(x_TD), valid_T, valid_T is None))


def _kernel(layer: MoELayer, x_TD: torch.Tensor, valid_T: torch.Tensor) -> torch.Tensor:
    """The experts' sum alone, without a shared expert beside it."""
    gate_T = layer.gate_of_shared(x_TD)
    routed = layer.router(layer.gate(x_TD), gate=gate_T, token_ids=tokens(x_TD), valid=valid_T)
    sent = layer.dispatch.send(x_TD.clone(), routed)
    return layer.dispatch.combine(layer.experts(sent), sent)


def _miscounted(instrument: Instrument, x_TD: torch.Tensor, valid_T: torch.Tensor) -> list[int]:
    """Counted load minus the definition's, per logical expert."""
    layer = instrument.layer
    logits_TE = layer.gate(x_TD)
    routed = layer.router(logits_TE, gate=layer.gate_of_shared(x_TD), valid=valid_T, count=True)
    ids_TK = select(instrument.spec, logits_TE.double().cpu().numpy(), bias_E=instrument.bias_E).ids_TK
    ids_N = ids_TK[valid_T.cpu().numpy()].reshape(-1)
    right_E = np.bincount(ids_N[ids_N < instrument.spec.num_experts], minlength=instrument.spec.num_experts)
    return (routed.load_E.cpu().numpy() - right_E).tolist()


def _repeat(instrument: Instrument) -> list[Check]:
    """The same rows before and after another batch, and the rows themselves: bitwise unchanged."""
    layer, x_TD = instrument.layer, instrument.rows(6, seed=7)
    first_TD = _run(layer, x_TD, None)
    _run(layer, instrument.rows(5, seed=8), None)
    again_TD = _run(layer, x_TD, None)
    wrong = int((first_TD != again_TD).sum())
    says = f"the same rows give {wrong} other values after another batch has run"
    repeat = Check(
        name="repeat",
        what="state",
        worst=float(wrong),
        ok=not wrong,
        fault="stale-routing" if wrong else None,
        says=says,
    )
    held_TD = x_TD.clone()
    layer(held_TD, Step(tokens(x_TD), None, True))
    wrong = int((held_TD != x_TD).sum())
    says = f"the layer changes {wrong} values of its own input"
    fault = "input-overwritten" if wrong else None
    return [repeat, Check(name="input kept", what="state", worst=float(wrong), ok=not wrong, fault=fault, says=says)]


def _report(instrument: Instrument) -> Check:
    """The routing report: logical ids and weights of the experts that ran."""
    layer, x_TD = instrument.layer, instrument.rows(24, seed=9)
    recorder = Recorder()
    layer(x_TD, Step(tokens(x_TD), None, True, recorder))
    ids_TLK, weights_TLK = recorder.stacked()
    logits_TE = layer.gate(x_TD).double().cpu().numpy()
    right = select(instrument.spec, logits_TE, bias_E=instrument.bias_E)
    size = (24, instrument.spec.num_choices)
    reported, defined = np.zeros(size), np.zeros(size)
    ids_TK = ids_TLK[:, 0].cpu().numpy()
    rows_T1 = np.arange(24)[:, None]
    inside = ids_TK < instrument.spec.num_choices
    np.add.at(
        reported, (rows_T1, np.where(inside, ids_TK, 0)), np.where(inside, weights_TLK[:, 0].double().cpu().numpy(), 0)
    )
    np.add.at(defined, (rows_T1, right.ids_TK), right.weights_TK)
    worst = misfit(reported, defined, instrument.decided(logits_TE))
    ok = worst <= INEXACT
    fault = "report-physical" if not ok and layer.plan.placement.has_replicas else None
    return Check(
        name="routing report", what="report", worst=worst, ok=ok, fault=fault,
        says="the report of routed experts names other experts or weights than the layer's definition",
    )  # fmt: skip
