"""The manifest of a canary (canary.json): tables, probes, questions, expected readings, fingerprint.

Invariant: `digest` covers everything else in the file, and four fingerprint tokens of the checkpoint spell it, so a
manifest cannot be read against another checkpoint. E experts, S shared experts told apart, W = E + S.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from truegate.canary.definition import Kind, Layer, Matrix, expected, unit_of
from truegate.canary.layout import RUNGS, Channels, Vocabulary, channels
from truegate.errors import UserError
from truegate.law.families import specs_of
from truegate.law.spec import RoutingSpec

FORMAT = 1
FINGERPRINTS = 4
FILE = "canary.json"


@dataclass(frozen=True, kw_only=True)
class Probe:
    """A token that shows one layer's coefficients for one row of its table; its id is `first_probe` + index."""

    index: int
    kind: Kind
    layer: int  # -1 for a fingerprint
    row: int


@dataclass(frozen=True, kw_only=True)
class Question:
    """A token that asks for the relative deviation of one coefficient; greedy decoding answers with a rung."""

    index: int
    layer: int
    row: int
    slot: int
    amplitude: float
    offset: float  # minus the expected answer, as the checkpoint's dtype holds it


@dataclass(frozen=True)
class Manifest:
    """One canary, as its maker wrote it."""

    data: Mapping[str, Any]

    @cached_property
    def config(self) -> dict[str, Any]:
        return dict(self.data["config"])

    @cached_property
    def layers(self) -> dict[int, Layer]:
        """MoE layers by index."""
        specs = specs_of(self.config)
        return {
            t["layer"]: Layer(
                index=t["layer"],
                spec=_need(specs[t["layer"]], t["layer"]),
                logits_PE=np.array(t["rows"]),
                bias_E=None if t["bias"] is None else np.array(t["bias"]),
                shared_logit_P=None if t["shared_logits"] is None else np.array(t["shared_logits"]),
                num_shared=self.data["num_shared"],
            )
            for t in self.data["tables"]
        }

    @cached_property
    def dense_layers(self) -> list[int]:
        return [i for i in range(self.config["num_hidden_layers"]) if i not in self.layers]

    @cached_property
    def probes(self) -> list[Probe]:
        return [
            Probe(index=i, kind=Kind(k), layer=layer, row=row) for i, (k, layer, row) in enumerate(self.data["probes"])
        ]

    @cached_property
    def questions(self) -> list[Question]:
        return [
            Question(index=i, layer=layer, row=row, slot=slot, amplitude=amplitude, offset=offset)
            for i, (layer, row, slot, amplitude, offset) in enumerate(self.data["questions"])
        ]

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(num_experts=self.num_experts, num_shared=self.data["num_shared"],
                          num_probes=len(self.data["probes"]), num_questions=len(self.data["questions"]))  # fmt: skip

    @property
    def num_experts(self) -> int:
        return next(iter(self.layers.values())).spec.num_experts

    @property
    def width(self) -> int:
        """W: experts and shared experts."""
        return self.num_experts + self.data["num_shared"]

    @property
    def read_scale(self) -> float:
        """Logit of a read-out per unit of coefficient."""
        return self.data["read_scale"]

    @property
    def has_bias_read_out(self) -> bool:
        return next(iter(self.layers.values())).spec.has_expert_bias

    @cached_property
    def channels(self) -> Channels:
        return channels(hidden=self.config["hidden_size"], rows=self.data["num_rows"] + 2,
                        layers=self.config["num_hidden_layers"], num_slots=self.width,
                        addresses=self.addresses)  # fmt: skip

    @property
    def addresses(self) -> int:
        return math.isqrt(len(self.data["probes"]) - 1) + 1

    def address(self, probe: int) -> tuple[int, int]:
        return divmod(probe, self.addresses)

    def successor(self, probe: int) -> int:
        """The probe that greedy decoding gives after this one: all probes form one cycle."""
        return self._next[probe]

    def predecessor(self, probe: int) -> int:
        return self._previous[probe]

    @cached_property
    def _previous(self) -> dict[int, int]:
        return {b: a for a, b in self._next.items()}

    @cached_property
    def _next(self) -> dict[int, int]:
        cycle = self.data["cycle"]
        return dict(zip(cycle, [*cycle[1:], cycle[0]], strict=True))

    def token(self, probe: int) -> int:
        return self.vocabulary.first_probe + probe

    @cached_property
    def expected(self) -> dict[int, Matrix]:
        """Probe index -> readings [W + 1]: experts, shared experts, dense MLP; recomputed from the definition."""
        return readings_by_definition(self.layers, self.probes, self.width, self.data["fingerprint"])

    @cached_property
    def expected_bias(self) -> float:
        """Reading of the experts' output biases: 1/16 per layer, since the routed weights of a token sum to 1."""
        return len(self.layers) / 16 if self.has_bias_read_out else 0.0

    def expected_deviation(self, question: Question, coefficient: float, c_in: float) -> float:
        """D: what the answer channel holds for a coefficient, 0 when it is right."""
        layer = self.layers[question.layer]
        answer = unit_of(layer.spec).answer(layer.spec, question.amplitude, c_in)
        return coefficient * answer + question.offset

    @property
    def num_coefficients(self) -> int:
        """Non-zero expected readings over all MoE layers and probes."""
        counted = [p for p in self.probes if p.layer in self.layers and not p.kind.startswith("near")]
        return int(sum((self.expected[p.index][: self.width] != 0).sum() for p in counted))


def readings_by_definition(
    layers: Mapping[int, Layer], probes: list[Probe], width: int, fingerprint: list[list[float]]
) -> dict[int, Matrix]:
    """Expected readings [W + 1] of every probe but the near ties, whose outcome is information."""
    out: dict[int, Matrix] = {}
    for index, layer in layers.items():
        mine = [p for p in probes if p.layer == index and not p.kind.startswith("near")]
        matrix = expected(layer, np.array([p.row for p in mine]), [p.kind for p in mine])
        out |= {p.index: np.append(row, 0.0) for p, row in zip(mine, matrix, strict=True)}
    for p in probes:
        if p.kind is Kind.DENSE:
            out[p.index] = np.append(np.zeros(width), 1.0)
        elif p.kind is Kind.FINGERPRINT:
            out[p.index] = np.append(np.resize(fingerprint[p.row], width + 1)[:width] * (np.arange(width) < 8), 0.0)
    return out


def _need(spec: RoutingSpec | None, layer: int) -> RoutingSpec:
    if spec is None:
        raise UserError(f"{FILE}: layer {layer} has a table but config makes it dense; the file was edited")
    return spec


def digest(data: Mapping[str, Any]) -> str:
    """sha256 of the canonical JSON of everything but the digest and what it fixes."""
    rest = {k: v for k, v in data.items() if k not in ("digest", "fingerprint")}
    return hashlib.sha256(json.dumps(rest, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def fingerprint_of(digest_hex: str) -> list[list[float]]:
    """4 x 8 values in 1/8..2, sixteenths of the digest's nibbles: what the fingerprint tokens read in columns 0..7."""
    nibbles = [int(c, 16) for c in digest_hex[: 8 * FINGERPRINTS]]
    return [[(1 + n) / 8 for n in nibbles[8 * i : 8 * i + 8]] for i in range(FINGERPRINTS)]


def load(folder: Path) -> Manifest:
    """Read and check a canary's manifest."""
    path = folder / FILE if folder.is_dir() else folder
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"canary {path}: {error.strerror}; make one with `truegate canary make --out DIR`") from None
    except ValueError as error:
        raise UserError(f"canary {path}: not JSON ({error}); make it again") from None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UserError(f"canary {path}: format {data.get('format') if isinstance(data, dict) else None} is not "
                        f"{FORMAT}; make it again with this version")  # fmt: skip
    if data["digest"] != digest(data) or data["fingerprint"] != fingerprint_of(data["digest"]):
        raise UserError(f"canary {path}: its content does not match its digest; it was edited, make it again")
    manifest = Manifest(data)
    for probe, stored in data["expected"].items():
        now = manifest.expected[int(probe)]
        for slot, value in stored:
            if abs(now[slot] - value) > 1e-9 * max(1.0, abs(value)):
                raise UserError(
                    f"canary {path}: written by truegate {data['generator']}, whose definition of {data['family']} "
                    f"differs from this version's (probe {probe}, column {slot}); make it again"
                )
    return manifest


def ladder_answer(deviation: float) -> int:
    """Index of the rung nearest to a deviation."""
    return int(np.abs(np.array(RUNGS) - deviation).argmin())
