"""Faults planted into transformers' own modules, and what the canary says: detected, named, misnamed.

    python benchmarks/canary_faults.py [--family NAME ...] [--seeds 50] [--save FILE]

Every fault of the catalogue that changes a router's result, and faults behind the router, per family, in bf16; the
explanation sees only top-20 log-probabilities. Then healthy models of many seeds: an alarm there is a false one.
`--save` keeps one JSON line an outcome and does not run again what it holds. Needs torch and transformers.
"""

# ruff: noqa: E501  (the table of faults reads better one a line)
import argparse
import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from truegate.canary.archs import ARCHS, Sizes, default_config
from truegate.canary.ask import Effort
from truegate.canary.explain import Verdict, explain
from truegate.canary.hypotheses import _UNSEEN, _AnyEngine
from truegate.canary.inprocess import ask_in_process
from truegate.canary.make import Recipe, make
from truegate.canary.manifest import Manifest
from truegate.law.fault import faulty_select
from truegate.law.faults import FAULTS
from truegate.law.spec import Activation, SharedGate, WeightAt

EFFORT = Effort(name="quick", batches=(3, 8, 13), streams=3, walk=8, long=(), silence=0.0, repeats=1, alone=16)


class Subject:
    """A healthy model with its canary; faults come and go as hooks on its modules."""

    def __init__(self, family: str, folder: Path, seed: int = 0) -> None:
        dense = 1 if "first_k_dense_replace" in default_config(family) else 0
        layers = dense + (2 if family == "deepseek_v3" else 1)  # the second layer has negative biased scores
        sizes = Sizes(hidden=512, intermediate=16, layers=layers, num_experts=8 if family == "mixtral" else 32)
        self.manifest: Manifest = make(default_config(family), folder, Recipe(sizes=sizes, seed=seed))
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.layers = {i: self._block(i) for i in self.manifest.layers}

    def _block(self, index: int) -> Any:
        layer = self.model.model.layers[index]
        return layer.feed_forward if hasattr(layer, "feed_forward") else layer.mlp

    @torch.no_grad()
    def forward(self, sequences: list[list[int]]) -> np.ndarray:
        """Only the last token decides (attention adds nothing): one row a sequence, one batch."""
        tokens = torch.tensor([s[-1] for s in sequences])[:, None]
        return self.model(tokens, use_cache=False).logits[:, -1].float().numpy()

    def verdict(self) -> Verdict:
        return explain(self.manifest, ask_in_process(self.manifest, self.forward, EFFORT))[0]


def router_of(block: Any) -> Any:
    return block.router if hasattr(block, "router") else block.gate


def choices(out: Any) -> tuple[Any, Any, Any]:
    """Logits, weights and ids [T, K] of a router's output; Llama 4's holds weights [T, E], 0 where not chosen."""
    if len(out) == 3:
        return out
    weights, ids = out[0].topk(int((out[0][0] > 0).sum()), dim=1)
    return out[1], weights, ids


def chosen(out: Any, weights: Any, ids: Any) -> Any:
    """A router's output with other choices."""
    if len(out) == 3:
        return (out[0], weights, ids)
    return (torch.zeros_like(out[0]).scatter_add_(1, ids, weights.to(out[0].dtype)), out[1])


@contextmanager
def routing(subject: Subject, name: str) -> Iterator[None]:
    """The catalogue's router fault, on the logits and bias that transformers' own router has."""
    fault = next(f for f in FAULTS if f.name == name)
    handles = []
    for index, block in subject.layers.items():
        spec = subject.manifest.layers[index].spec
        bias = subject.manifest.layers[index].bias_E

        def after(module: Any, args: Any, out: Any, spec: Any = spec, bias: Any = bias) -> Any:
            logits, weights, _ = choices(out)
            ids, new = faulty_select(fault, spec, logits.double().numpy(), bias, np)
            new = torch.tensor(np.ascontiguousarray(new) * spec.routed_scale).to(weights.dtype)
            return chosen(out, new, torch.tensor(np.ascontiguousarray(ids)))

        handles.append(router_of(block).register_forward_hook(after))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def hooked(
    subject: Subject, pick: Callable[[Any], Any], change: Callable[[Any, Any], Any], only: int | None = None
) -> Iterator[None]:
    """`change(output, inputs)` after the picked submodule of every MoE layer (or of one)."""
    handles = []
    for index, block in subject.layers.items():
        if only is None or index == only:
            handles.append(pick(block).register_forward_hook(lambda m, a, y: change(y, a)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def edited(subject: Subject, edit: Callable[[Any], None]) -> Iterator[None]:
    """Parameters of every experts module changed in place, then restored."""
    kept = [
        (b.experts, {n: p.detach().clone() for n, p in b.experts.named_parameters()}) for b in subject.layers.values()
    ]
    try:
        with torch.no_grad():
            for experts, _ in kept:
                edit(experts)
        yield
    finally:
        with torch.no_grad():
            for experts, values in kept:
                for n, p in experts.named_parameters():
                    p.copy_(values[n])


@contextmanager
def remapped(subject: Subject, change: Callable[[Any], Any]) -> Iterator[None]:
    """Ids changed between router and experts."""

    def after(module: Any, args: Any, out: Any) -> Any:
        _, weights, ids = choices(out)
        return chosen(out, weights, change(ids))

    handles = [router_of(b).register_forward_hook(after) for b in subject.layers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _whole(y: Any) -> Any:
    return y[0] if isinstance(y, tuple) else y


def _like(y: Any, new: Any) -> Any:
    return (new, *y[1:]) if isinstance(y, tuple) else new


def _swap_halves(experts: Any) -> None:
    p = experts.gate_up_proj
    if p.shape[-1] == 2 * experts.down_proj.shape[-2] and hasattr(experts, "gate_up_proj_bias"):
        gate, up = p[..., ::2].clone(), p[..., 1::2].clone()
        p[..., ::2], p[..., 1::2] = up, gate
        b = experts.gate_up_proj_bias
        gate, up = b[..., ::2].clone(), b[..., 1::2].clone()
        b[..., ::2], b[..., 1::2] = up, gate
        return
    axis = 1 if p.shape[1] == 2 * experts.down_proj.shape[2] else 2
    p.copy_(torch.cat(p.chunk(2, axis)[::-1], axis).clone())


def _half_width(experts: Any) -> None:
    p = experts.down_proj
    axis = 2 if experts.gate_up_proj.shape[1] == 2 * p.shape[2] else 1
    p.narrow(axis, p.shape[axis] // 2, p.shape[axis] // 2).zero_()


@contextmanager
def _one_scale(subject: Subject, shared: Callable[[Any], Any]) -> Iterator[None]:
    """The shared expert's activations go through e4m3 with one scale for the whole batch."""

    def before(module: Any, args: Any) -> Any:
        scale = args[0].abs().amax().float().clamp_min(1e-6) / 448
        return ((args[0].float() / scale).to(torch.float8_e4m3fn).float() * scale).to(args[0].dtype)

    handles = [shared(b).down_proj.register_forward_pre_hook(before) for b in subject.layers.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _odd_last(y: torch.Tensor) -> torch.Tensor:
    rows = y.reshape(-1, y.shape[-1]).clone()
    if len(rows) > 1 and len(rows) % 8:
        rows[-1] = 0
    return rows.reshape(y.shape)


def _small_batches(y: torch.Tensor) -> torch.Tensor:
    rows = y.reshape(-1, y.shape[-1])
    return (rows * (0.5 if len(rows) < 4 else 1.0)).reshape(y.shape)


def faults_of(subject: Subject) -> list[tuple[str, tuple[str, ...], Any]]:
    """(fault, names that are right for it, context that plants it)."""
    spec = next(iter(subject.manifest.layers.values())).spec
    e, r = spec.num_experts, spec.routed_scale
    found: list[tuple[str, tuple[str, ...], Any]] = []
    for f in FAULTS:
        if (f.spec or f.choose or f.bias or f.logits) and f.name not in _UNSEEN and f.applies(_AnyEngine(spec)):
            found.append((f.name, (f.name,), lambda name=f.name: routing(subject, name)))
    block, shared = (lambda b: b), _shared_of(subject)
    found += [
        ("experts 3 and 5 swapped", ("experts-swapped",), lambda: remapped(subject, lambda i: torch.where(i == 3, 5, torch.where(i == 5, 3, i)))),
        ("expert map rotated", ("experts-rotated",), lambda: remapped(subject, lambda i: (i + e // 8) % e)),
        ("ids off by one", ("experts-rotated", "ids-off-by-one"), lambda: remapped(subject, lambda i: (i + 1) % e)),
        ("expert 3 dropped", ("expert-dropped",), lambda: edited(subject, lambda m: _zero(m, slice(3, 4)))),
        ("rank 1 of 4 missing", ("rank-missing",), lambda: edited(subject, lambda m: _zero(m, slice(e // 4, e // 2)))),
        ("expert 5 x 1.05", ("expert-scaled",), lambda: edited(subject, lambda m: _times(m, 5, 1.05))),
        ("expert 5 x 2", ("expert-doubled",), lambda: edited(subject, lambda m: _times(m, 5, 2.0))),
        ("gate and up swapped", ("gate-up-swapped",), lambda: edited(subject, _swap_halves)),
        ("routed shard missing", ("routed-scaled", "reduce-missing"), lambda: edited(subject, _half_width)),
        ("whole sum halved", ("reduce-missing",), lambda: hooked(subject, block, lambda y, a: _like(y, _whole(y) * 0.5))),
        ("whole sum doubled", ("reduced-twice",), lambda: hooked(subject, block, lambda y, a: _like(y, _whole(y) * 2))),
        ("last row lost off the grid", ("rows-lost",), lambda: hooked(subject, block, lambda y, a: _like(y, _odd_last(_whole(y))))),
        ("small batches halved", ("reduce-missing",), lambda: hooked(subject, block, lambda y, a: _like(y, _small_batches(_whole(y))))),
        ("rows shifted", ("rows-shifted",), lambda: hooked(subject, block, lambda y, a: _like(y, _whole(y).roll(1, 0)))),
    ]  # fmt: skip
    if spec.activation is not Activation.SWIGLU_CLAMP:
        found.append(("gelu", ("wrong-activation",), lambda: _activation(subject, torch.nn.functional.gelu)))
        found.append(("no activation", ("activation-missing",), lambda: _activation(subject, lambda x: x)))
    if shared is not None:
        found += [
            ("one fp8 activation scale a batch", ("batch-activation-scale",), lambda: _one_scale(subject, shared)),
            ("shared dropped", ("shared-dropped",), lambda: hooked(subject, shared, lambda y, a: y * 0)),
            ("shared twice", ("shared-doubled",), lambda: hooked(subject, shared, lambda y, a: y * 2)),
            ("shared x 8", ("shared-scaled",), lambda: hooked(subject, shared, lambda y, a: y * 8)),
        ]
        if r != 1:
            found += [
                ("shared / r", ("shared-inverse-scale",), lambda: hooked(subject, shared, lambda y, a: y / r)),
                ("shared x r", ("shared-by-scale",), lambda: hooked(subject, shared, lambda y, a: y * r)),
                ("last multiply missing", ("scale-missing", "shared-inverse-scale"), lambda: hooked(subject, block, lambda y, a: y / r)),
            ]  # fmt: skip
        if spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID:
            found.append(("shared gate skipped", ("shared-gate-missing",), lambda: _gate_open(subject)))
        if spec.denominator.value == "none" and spec.weight_at is WeightAt.OUTPUT:
            found.append(("shared = sum(routed) / r", ("shared-from-routed-sum",), lambda: _from_sum(subject, shared)))
    if spec.weight_at is WeightAt.INPUT:
        found.append(("weight after the expert", ("weight-at-wrong-side",), lambda: _weight_after(subject)))
    return found


def _shared_of(subject: Subject) -> Callable[[Any], Any] | None:
    first = next(iter(subject.layers.values()))
    for name in ("shared_experts", "shared_expert"):
        if hasattr(first, name):
            return lambda b: getattr(b, name)
    return None


def _zero(experts: Any, which: slice) -> None:
    experts.down_proj[which].zero_()
    if hasattr(experts, "down_proj_bias"):
        experts.down_proj_bias[which].zero_()


def _times(experts: Any, which: int, factor: float) -> None:
    experts.down_proj[which].mul_(factor)


class _Applied(torch.nn.Module):
    """A function as the module that an activation is."""

    def __init__(self, act: Callable[[Any], Any]) -> None:
        super().__init__()
        self._act = act

    def forward(self, x: Any) -> Any:
        return self._act(x)


@contextmanager
def _activation(subject: Subject, act: Callable[[Any], Any]) -> Iterator[None]:
    kept = [(m, m.act_fn) for b in subject.layers.values() for m in b.modules() if hasattr(m, "act_fn")]
    for m, _ in kept:
        m.act_fn = _Applied(act)
    try:
        yield
    finally:
        for m, old in kept:
            m.act_fn = old


@contextmanager
def _gate_open(subject: Subject) -> Iterator[None]:
    with hooked(subject, lambda b: b.shared_expert_gate, lambda y, a: torch.full_like(y, 1e4)):
        yield


@contextmanager
def _from_sum(subject: Subject, shared: Callable[[Any], Any]) -> Iterator[None]:
    """The shared expert's weight is the token's sum of routed weights before the scale."""
    sums: dict[int, Any] = {}
    handles = []
    for index, block in subject.layers.items():
        scale = subject.manifest.layers[index].spec.routed_scale

        def before(module: Any, args: Any, block: Any = block, index: int = index, scale: float = scale) -> None:
            out = router_of(block)(args[0].reshape(-1, args[0].shape[-1]))
            sums[index] = out[1].sum(-1, keepdim=True) / scale

        def after(module: Any, args: Any, y: Any, index: int = index) -> Any:
            return (y.reshape(-1, y.shape[-1]) * sums[index].to(y.dtype)).reshape(y.shape)

        handles += [block.register_forward_pre_hook(before), shared(block).register_forward_hook(after)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def _weight_after(subject: Subject) -> Iterator[None]:
    """Llama 4's experts get unweighted rows, and what they give is weighted."""
    scores: dict[int, Any] = {}
    handles = []
    for index, block in subject.layers.items():

        def ones(module: Any, args: Any, out: Any, index: int = index) -> Any:
            scores[index] = out[0]
            return ((out[0] > 0).to(out[0].dtype), out[1])

        def weigh(module: Any, args: Any, y: Any, index: int = index) -> Any:
            return y * scores[index].transpose(0, 1).reshape(-1, 1)

        handles += [router_of(block).register_forward_hook(ones), block.experts.register_forward_hook(weigh)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def judge(verdict: Verdict, right: tuple[str, ...]) -> str:
    """named, named among ties, detected (but unnamed), MISNAMED or MISSED."""
    if not verdict.findings:
        return "MISSED"
    told = [f.names for f in verdict.findings]
    first = [n for n in told if n != ("unnamed",)]
    ties = [a for f in verdict.findings for a in f.alternatives]
    if all(set(n) <= set(right) or n == tuple(right) for n in told):
        return "named"
    if first and all(set(n) <= set(right) for n in [*first[:1]]) and len(first) < len(told):
        return "named in part"
    if any(set(a) <= set(right) for a in ties):
        return "named among ties"
    return "detected" if not first else "MISNAMED"


class Ledger:
    """Outcomes as JSON lines: what a file holds already is not run again."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.rows: dict[tuple[str, str], dict[str, str]] = {}
        for row in map(json.loads, lines):
            self.rows[row["family"], row["fault"]] = row

    def add(self, family: str, fault: str, outcome: str, said: str) -> None:
        row = {"family": family, "fault": fault, "outcome": outcome, "said": said}
        self.rows[family, fault] = row
        if self.path is not None:
            with self.path.open("a") as out:
                out.write(json.dumps(row) + "\n")

    def has(self, family: str, fault: str) -> bool:
        return (family, fault) in self.rows


def said(verdict: Verdict) -> str:
    return "; ".join(dict.fromkeys(" + ".join(f.names) for f in verdict.findings)) or "right"


def plant_all(family: str, folder: Path, ledger: Ledger) -> None:
    """Every fault of one family that the ledger does not hold."""
    subject = Subject(family, folder)
    for name, right, plant in faults_of(subject):
        if ledger.has(family, name):
            continue
        with plant():
            verdict = subject.verdict()
        ledger.add(family, name, judge(verdict, right), said(verdict))


def healthy(family: str, seed: int, folder: Path, ledger: Ledger) -> None:
    name = f"healthy, seed {seed}"
    if ledger.has(family, name):
        return
    verdict = Subject(family, folder, seed).verdict()
    alarm = verdict.findings or verdict.undecided
    ledger.add(family, name, "FALSE ALARM" if alarm else "right", f"{said(verdict)} {verdict.undecided or ''}".strip())


def tables(ledger: Ledger, families: list[str]) -> Iterator[str]:
    """Per family: planted, named, and every fault that was not; then the totals and the healthy seeds."""
    planted = [r for r in ledger.rows.values() if not r["fault"].startswith("healthy") and r["family"] in families]
    yield "| family | planted | named | else |\n|---|---|---|---|"
    for family in families:
        mine = [r for r in planted if r["family"] == family]
        other = [f"{r['fault']}: {r['outcome']} ({r['said']})" for r in mine if r["outcome"] != "named"]
        named = sum(r["outcome"] == "named" for r in mine)
        yield f"| {family} | {len(mine)} | {named} | {'; '.join(other) or '-'} |"
    outcomes = [r["outcome"] for r in planted]
    counts = ", ".join(f"{outcomes.count(o)} {o}" for o in dict.fromkeys(sorted(outcomes, key=outcomes.count)[::-1]))
    yield f"\n{len(planted)} faults: {counts}"
    seeds = [r for r in ledger.rows.values() if r["fault"].startswith("healthy") and r["family"] in families]
    alarms = [r for r in seeds if r["outcome"] != "right"]
    yield f"{len(seeds)} healthy models: {len(alarms)} false alarms {alarms or ''}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=list(ARCHS), choices=list(ARCHS))
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--save", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    ledger = Ledger(args.save)
    with tempfile.TemporaryDirectory() as scratch:
        for family in args.family:
            plant_all(family, Path(scratch) / family, ledger)
        for seed in range(1, args.seeds + 1):
            healthy(args.family[seed % len(args.family)], seed, Path(scratch) / "healthy", ledger)
    print("\n".join(tables(ledger, args.family)))


if __name__ == "__main__":
    main()
