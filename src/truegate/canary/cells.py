"""What was measured, as bounds: every coefficient that an answer shows lies in low..high.

Invariant: a matrix of readings R fits the evidence when low <= R <= high everywhere; log-probabilities give narrow
bounds on a whole row, a greedy answer gives the interval of its rung on one cell and leaves the others open.
N observations of one layer, W experts and shared experts.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from truegate.canary.definition import Kind, Matrix, unit_of
from truegate.canary.evidence import Evidence
from truegate.canary.manifest import Manifest
from truegate.canary.read import ABS_TOLERANCE, REL_TOLERANCE, Unreadable, read, read_rung


@dataclass(frozen=True)
class Sight:
    """Conditions of one observation, and the table row and kind it shows."""

    phase: str
    row: int  # of the table
    kind: Kind
    batch: int
    place: int  # row in the batch
    position: int
    time: int
    check: int  # between phases: after how many; -1 in a phase


@dataclass
class Cells:
    """The evidence on one layer."""

    sights: list[Sight]
    low: Matrix  # [N, W]
    high: Matrix
    values: Matrix  # [N, W], NaN where unknown; for showing
    want: Matrix  # [N, W], the definition
    known: Matrix  # [M, W]: what any probe of any layer should read

    @property
    def rows(self) -> NDArray[np.int64]:
        return np.array([s.row for s in self.sights], dtype=np.int64)

    @property
    def kinds(self) -> list[Kind]:
        return [s.kind for s in self.sights]

    def fits(self, readings: Matrix) -> NDArray[np.bool_]:
        """[N]: which observations these readings explain."""
        return ((self.low <= readings) & (readings <= self.high)).all(axis=1)

    def right(self) -> NDArray[np.bool_]:
        return self.fits(self.want)

    def only(self, mask: NDArray[np.bool_]) -> "Cells":
        keep = np.flatnonzero(mask)
        return Cells(
            [self.sights[i] for i in keep],
            self.low[keep],
            self.high[keep],
            self.values[keep],
            self.want[keep],
            self.known,
        )


@dataclass
class Trouble:
    """An answer without coefficients."""

    phase: str
    layer: int
    what: str
    refused: bool  # by HTTP, which is no evidence about routing


@dataclass
class Measured:
    """Everything read from one run."""

    layers: dict[int, Cells]
    dense: list[tuple[int, str, float]] = field(default_factory=list)  # (layer, phase, reading), 1 when right
    biases: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    near: dict[int, dict[Kind, bool | None]] = field(default_factory=dict)
    tolerance: float = REL_TOLERANCE
    troubles: list[Trouble] = field(default_factory=list)


def measure(manifest: Manifest, evidence: Evidence) -> Measured:
    """Read every observation and answer."""
    out = Measured(layers={})
    rows: dict[int, list[tuple[Sight, Matrix, Matrix, Matrix, Matrix]]] = {i: [] for i in manifest.layers}
    width = manifest.width
    for time, seen in enumerate(evidence.observations):
        probe = manifest.probes[seen.probe]
        if probe.kind is Kind.FINGERPRINT:
            continue
        if seen.error is not None:
            out.troubles.append(Trouble(seen.phase, probe.layer, seen.error, refused=True))
            continue
        reading = read(manifest, seen.probe, seen.top)
        if reading.values is None or reading.slack is None or reading.listed is None:
            what = str((reading.problem or Unreadable.NAN).value)
            out.troubles.append(Trouble(seen.phase, probe.layer, what, refused=not seen.top))
            continue
        out.scales.append(reading.scale)
        if probe.kind is Kind.DENSE:
            out.dense.append((probe.layer, seen.phase, float(reading.values[-1])))
            continue
        if probe.kind in (Kind.NEAR_LOW, Kind.NEAR_HIGH):
            won = _near_won(manifest, probe.layer, probe.kind, reading.values)
            out.near.setdefault(probe.layer, {}).setdefault(probe.kind, won)
            continue
        if manifest.has_bias_read_out and reading.bias is not None:
            out.biases.append(reading.bias)
        values, slack, listed = reading.values[:width], reading.slack[:width], reading.listed[:width]
        sight = Sight(seen.phase, probe.row, probe.kind, seen.batch, seen.row, seen.position, time, seen.check)
        want = manifest.expected[seen.probe][:width]
        rows[probe.layer].append((sight, np.where(listed, 0.0, -np.inf), slack, values, want))
    out.tolerance = _tolerance(rows)
    for found in rows.values():
        for n, (sight, low, slack, values, want) in enumerate(found):
            room = out.tolerance / (1 - out.tolerance) * np.abs(values) + ABS_TOLERANCE
            found[n] = (sight, low + values - room, values + room + slack, values, want)
    _add_answers(manifest, evidence, rows, out)
    known = np.array([m[:width] for i, m in manifest.expected.items() if manifest.probes[i].layer in manifest.layers])
    for layer, found in rows.items():
        columns = [np.array([r[k] for r in found]).reshape(len(found), width) for k in (1, 2, 3, 4)]
        out.layers[layer] = Cells([r[0] for r in found], *columns, known)
    return out


def _tolerance(rows: Mapping[int, Sequence[tuple[Sight, Matrix, Matrix, Matrix, Matrix]]]) -> float:
    """3 %, or up to 4 % for an engine whose arithmetic is coarse: four times its median error, faults left out."""
    errors = [np.abs(values - want)[want > 1e-6] / want[want > 1e-6]
              for found in rows.values() for _, _, _, values, want in found]  # fmt: skip
    every = np.concatenate(errors) if errors else np.zeros(0)
    small = every[every < 2 * REL_TOLERANCE]
    typical = float(np.median(small)) if len(small) else 0.0
    return min(max(REL_TOLERANCE, 4 * typical), 4 / 3 * REL_TOLERANCE)


def _add_answers(
    manifest: Manifest, evidence: Evidence, rows: dict[int, list[tuple[Sight, Matrix, Matrix, Matrix, Matrix]]],
    out: Measured,
) -> None:  # fmt: skip
    """Greedy answers: one bounded cell each, in units of what a PLAIN probe would read."""
    width = manifest.width
    coefficients = {i: layer.coefficients() for i, layer in manifest.layers.items()}
    for time, seen in enumerate(evidence.answers):
        q = manifest.questions[seen.question]
        layer = manifest.layers[q.layer]
        c_out, c_in = coefficients[q.layer]
        unit = unit_of(layer.spec)
        into = c_in[q.row, q.slot]
        plain = float(unit.output(layer.spec, Kind.PLAIN, np.array([into]))[0])
        gain = unit.answer(layer.spec, q.amplitude, into) / plain
        answer = None if seen.token is None else read_rung(manifest, q, seen.token, gain)
        if answer is None:
            what = "the greedy answer to a question is no rung of the ladder"
            out.troubles.append(Trouble(seen.phase, q.layer, what, refused=False))
            continue
        low, high = np.full(width, -math.inf), np.full(width, math.inf)
        value = np.full(width, math.nan)
        room = 0.1 * (answer.high - answer.low) if math.isfinite(answer.high - answer.low) else 0.0
        low[q.slot], high[q.slot] = answer.low - room, answer.high + room
        want = c_out[q.row] * unit.output(layer.spec, Kind.PLAIN, c_in[q.row])
        value[q.slot] = want[q.slot] if answer.right else _middle(answer.low, answer.high)
        sight = Sight(seen.phase, q.row, Kind.PLAIN, seen.batch, 0, seen.position, time, -1)
        rows[q.layer].append((sight, low, high, value, want))


def _middle(low: float, high: float) -> float:
    if math.isinf(low):
        return high
    return low if math.isinf(high) else (low + high) / 2


def _near_won(manifest: Manifest, layer: int, kind: Kind, values: Matrix) -> bool | None:
    """Whether the expert that is better by 2^-9 was chosen; None when both or neither were."""
    table = next(t for t in manifest.data["tables"] if t["layer"] == layer)
    low, high = table["near_pair"]
    better, worse = (high, low) if kind is Kind.NEAR_HIGH else (low, high)
    if (values[better] > ABS_TOLERANCE) == (values[worse] > ABS_TOLERANCE):
        return None
    return bool(values[better] > values[worse])


def phases_in_order(sights: Sequence[Sight]) -> list[str]:
    """Phases as they were asked; what was asked between them comes last."""
    return list(dict.fromkeys(s.phase for s in sorted(sights, key=lambda s: s.check >= 0)))
