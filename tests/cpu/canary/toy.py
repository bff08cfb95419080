"""A toy engine: a plain numpy forward over a canary's own checkpoint, with places where it can be made wrong.

Attention is left out (the canary's adds nothing). T rows of one batch, H hidden, E experts, K top-k, I intermediate.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from truegate.canary.definition import activate, unit_of
from truegate.canary.manifest import Manifest, load
from truegate.canary.weights import _names, dense_prefix
from truegate.law.formats import Checkpoint
from truegate.law.names import GateUp, Stacked
from truegate.law.select import select
from truegate.law.spec import RoutingSpec, WeightAt


@dataclass
class Faults:
    """What to do wrong; every hook sees one layer of one batch."""

    route: Callable[[int, RoutingSpec, Any, Any], tuple[Any, Any]] | None = None  # layer, spec, logits, bias
    ids: Callable[[int, Any], Any] | None = None  # chosen ids -> the experts that are computed
    routed: Callable[[int, Any], Any] | None = None  # [T, H]
    shared: Callable[[int, Any, Any], Any] | None = None  # shared [T, H], weights [T, K]
    total: Callable[[int, Any], Any] | None = None
    expert: Callable[[int, int, Any], Any] | None = None  # one expert's output


class Toy:
    """Weights in float32, loaded from the checkpoint by the names that the family gives them."""

    def __init__(self, folder: Path, faults: Faults | None = None) -> None:
        self.manifest: Manifest = load(folder)
        self.faults = faults or Faults()
        self._file = Checkpoint(folder)
        self.calls: list[int] = []
        self.embedding = self._read("model.embed_tokens.weight")
        self.head = self._read("lm_head.weight")
        self.names = _names(self.manifest)
        self.norms = {n: self._read(n) for n in self._file if n.endswith("norm.weight") and "self_attn" not in n}
        self.mlps = {layer: self._mlps(layer) for layer in range(self.manifest.config["num_hidden_layers"])}

    def _read(self, name: str) -> Any:
        return np.asarray(self._file.read(name), dtype=np.float32)

    def _mlps(self, layer: int) -> dict[Any, tuple[Any, ...]]:
        """Expert id, "shared" or "dense" -> gate [I, H], up [I, H], down [H, I], up bias, down bias."""

        def plain(prefix: str) -> tuple[Any, ...]:
            return (*(self._read(f"{prefix}{p}_proj.weight") for p in ("gate", "up", "down")), 0.0, 0.0)

        if layer not in self.names:
            return {"dense": plain(dense_prefix(self.manifest.config, layer))}
        names, out = self.names[layer], {}
        if isinstance(names.experts, Stacked):
            both, down = self._read(names.experts.gate_up), self._read(names.experts.down)
            cut = np.s_[::2], np.s_[1::2]
            if names.experts.order is not GateUp.INTERLEAVED:
                cut = np.s_[: both.shape[2] // 2], np.s_[both.shape[2] // 2 :]
            for e in range(names.num_experts):
                bias = self._read(names.experts.gate_up_bias)[e][cut[1]] if names.experts.gate_up_bias else 0.0
                after = self._read(names.experts.down_bias)[e] if names.experts.down_bias else 0.0
                out[e] = both[e][:, cut[0]].T, both[e][:, cut[1]].T, down[e].T, bias, after
        else:
            for e in range(names.num_experts):
                parts = (names.experts.gate, names.experts.up, names.experts.down)
                out[e] = (*(self._read(p.format(expert=e)) for p in parts), 0.0, 0.0)
        if names.shared is not None:
            out["shared"] = plain(names.shared.gate.removesuffix("gate_proj.weight"))
        return out

    def forward(self, sequences: list[list[int]]) -> Any:
        """Logits [N, V] after each sequence; only the last token counts."""
        self.calls.append(len(sequences))
        x = self.embedding[[s[-1] for s in sequences]]
        for layer in self.mlps:
            h = self._norm(x, f"model.layers.{layer}.post_attention_layernorm.weight")
            x = x + (self._moe(layer, h) if layer in self.names else self._one(layer, "dense", h))
        return self._norm(x, "model.norm.weight") @ self.head.T

    def _norm(self, x: Any, name: str) -> Any:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * self.norms[name]

    def _one(self, layer: int, which: Any, x: Any) -> Any:
        gate, up, down, up_bias, down_bias = self.mlps[layer][which]
        unit = unit_of(next(iter(self.manifest.layers.values())).spec)
        u = x @ up.T + up_bias
        if unit.clamp is not None:
            u = np.clip(u, -unit.clamp, unit.clamp)
        hidden = activate(unit.activation, x @ gate.T, unit.clamp, unit.slope) * (u + unit.up_offset)
        return hidden @ down.T + down_bias

    def _moe(self, layer: int, x: Any) -> Any:
        spec, names, f = self.manifest.layers[layer].spec, self.names[layer], self.faults
        logits = (x @ self._cached(names.router).T).astype(np.float64)
        bias = self._cached(names.selection_bias) if names.selection_bias else None
        if f.route is not None:
            ids, weights = f.route(layer, spec, logits, bias)
        else:
            ids, weights = select(spec, logits, bias_E=bias)
        computed = ids if f.ids is None else f.ids(layer, ids)
        routed = np.zeros_like(x)
        for e in np.unique(computed):
            rows, column = np.nonzero(computed == e)
            w = weights[rows, column, None].astype(np.float32)
            inside = spec.weight_at is WeightAt.INPUT
            y = self._one(layer, int(e), x[rows] * w if inside else x[rows])
            y = y if f.expert is None else f.expert(layer, int(e), y)
            np.add.at(routed, rows, y if inside else y * w)
        routed = routed if f.routed is None else f.routed(layer, routed)
        shared = np.zeros_like(x)
        if "shared" in self.mlps[layer]:
            shared = self._one(layer, "shared", x)
            if names.shared_gate:
                shared = shared / (1 + np.exp(-(x @ self._cached(names.shared_gate).T)))
            shared = shared if f.shared is None else f.shared(layer, shared, weights)
        total = routed + shared
        return total if f.total is None else f.total(layer, total)

    def _cached(self, name: str) -> Any:
        if not hasattr(self, "_kept"):
            self._kept: dict[str, Any] = {}
        return self._kept.setdefault(name, self._kept[name] if name in self._kept else self._read(name))


@dataclass
class Manners:
    """How the toy's HTTP server behaves."""

    ids: bool = True
    top: int = 20
    batched: bool = True
    echo: bool = True
    dies_after: int | None = None
    hangs_after: int | None = None
    drips: bool = False  # a hanging server sends a blank now and then
    nan: bool = False
    answers_so: Any = None  # this JSON instead of an answer, after `answers_so_after` requests
    answers_so_after: int = 0
    becomes: "Toy | None" = None  # another engine after `becomes_after` requests, as after a restart
    becomes_after: int = 0
    ranks: list[str] = field(default_factory=list)  # X-data-parallel-rank of requests that bring one
    style: str = "completions"  # completions | content | native
    seen: list[dict[str, Any]] = field(default_factory=list)


@contextmanager
def serving(toy: Toy, manners: Manners | None = None) -> Iterator[str]:
    """The toy behind a loopback server that speaks OpenAI's completions (or SGLang's /generate)."""
    from toy_server import run_server

    with run_server(toy, manners or Manners()) as url:
        yield url
