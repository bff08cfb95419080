"""Laws of explaining: every fault planted into a plain engine is found and named, and a healthy engine is right."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from toy import Faults, Toy

from truegate.canary.ask import Effort
from truegate.canary.explain import Verdict, explain
from truegate.canary.hypotheses import _UNSEEN, _AnyEngine
from truegate.canary.inprocess import ask_in_process
from truegate.law.families import specs_of
from truegate.law.fault import faulty_select
from truegate.law.faults import FAULTS

BRIEF = Effort(name="brief", batches=(3, 8), streams=3, walk=16, long=(3,), silence=0.0)
Canary = Callable[..., Path]


def verdict_of(folder: Path, faults: Faults, *, effort: Effort = BRIEF, top: int = 20) -> Verdict:
    toy = Toy(folder, faults)
    return explain(toy.manifest, ask_in_process(toy.manifest, toy.forward, effort, top=top))[0]


def names_of(verdict: Verdict) -> set[tuple[str, ...]]:
    return {f.names for f in verdict.findings}


def routed_by(name: str) -> Faults:
    fault = next(f for f in FAULTS if f.name == name)

    def route(layer: int, spec: Any, logits: Any, bias: Any) -> Any:
        ids, weights = faulty_select(fault, spec, logits, bias, np)
        return ids, weights * spec.routed_scale

    return Faults(route=route)


def router_faults(family: str, config: dict[str, Any]) -> list[str]:
    spec = next(s for s in specs_of(config) if s is not None)
    return [f.name for f in FAULTS if (f.spec or f.choose or f.bias or f.logits) and f.name not in _UNSEEN
            and f.applies(_AnyEngine(spec))]  # fmt: skip


def test_fewer_log_probabilities_show_less_and_no_fault(canary: Canary) -> None:
    verdict = verdict_of(canary("deepseek_v3"), Faults(), top=5)
    assert not verdict.findings
    assert verdict.num_right == verdict.num_cells > 50


@pytest.mark.parametrize("top", [20, 0])
def test_a_healthy_engine_is_right(canary: Canary, family: str, top: int) -> None:
    verdict = verdict_of(canary(family), Faults(), top=top)
    assert not verdict.findings
    assert not verdict.undecided
    assert verdict.num_right == verdict.num_cells > 50


@pytest.mark.parametrize("family", ["deepseek_v3", "deepseek_v2", "qwen2_moe", "llama4"])
def test_every_router_fault_of_the_catalogue_is_named(canary: Canary, family: str) -> None:
    """All at once, so that the checkpoint is read once."""
    folder = canary(family, layers=3)
    toy = Toy(folder)
    wrong = {}
    for name in router_faults(family, toy.manifest.config):
        toy.faults = routed_by(name)
        effort = Effort(name="brief", batches=(), streams=2, walk=64, long=(), silence=0.0)
        verdict = explain(toy.manifest, ask_in_process(toy.manifest, toy.forward, effort))[0]
        told = {n for f in verdict.findings for n in [f.names, *f.alternatives]}
        if not verdict.findings or not all((name,) in [f.names, *f.alternatives] for f in verdict.findings):
            wrong[name] = told
    assert not wrong


def swap(a: int, b: int) -> Callable[[int, Any], Any]:
    return lambda layer, ids: np.where(ids == a, b, np.where(ids == b, a, ids))


R = 2.5  # routed scale of the small DeepSeek-V3
BEHIND_THE_ROUTER = {
    "experts-swapped": Faults(ids=swap(3, 5)),
    "experts-rotated": Faults(ids=lambda layer, ids: (ids + 4) % 16),
    "expert-dropped": Faults(expert=lambda layer, e, y: y * (e != 3)),
    "rank-missing": Faults(expert=lambda layer, e, y: y * (e >= 4)),
    "expert-doubled": Faults(expert=lambda layer, e, y: y * (1 + (e == 3))),
    "expert-scaled": Faults(expert=lambda layer, e, y: y * (1.05 if e == 3 else 1)),
    "reduce-missing": Faults(total=lambda layer, y: y * 0.5),
    "reduced-twice": Faults(total=lambda layer, y: y * 2),
    "shared-dropped": Faults(shared=lambda layer, y, w: y * 0),
    "shared-doubled": Faults(shared=lambda layer, y, w: y * 2),
    "shared-inverse-scale": Faults(shared=lambda layer, y, w: y / R),
    "shared-by-scale": Faults(shared=lambda layer, y, w: y * R),
    "shared-scaled": Faults(shared=lambda layer, y, w: y * 8),
    "routed-scaled": Faults(routed=lambda layer, y: y * 1.3),
}


@pytest.mark.parametrize("name", list(BEHIND_THE_ROUTER))
def test_a_fault_behind_the_router_is_named(canary: Canary, name: str) -> None:
    assert names_of(verdict_of(canary("deepseek_v3"), BEHIND_THE_ROUTER[name])) == {(name,)}


def test_two_faults_at_once_are_named_together(canary: Canary) -> None:
    faults = routed_by("no-renormalise")
    faults.shared = lambda layer, y, w: y * 0
    assert names_of(verdict_of(canary("deepseek_v3"), faults)) == {("no-renormalise", "shared-dropped")}


def test_a_shared_expert_that_follows_the_routed_sum_is_named(canary: Canary) -> None:
    faults = Faults(shared=lambda layer, y, w: y * w.sum(-1, keepdims=True) / 16.0)
    assert names_of(verdict_of(canary("deepseek_v2"), faults)) == {("shared-from-routed-sum",)}


def test_a_missing_multiply_after_the_experts_is_one_sentence(canary: Canary) -> None:
    faults = Faults(routed=lambda layer, y: y / R, shared=lambda layer, y, w: y / R)
    verdict = verdict_of(canary("deepseek_v3"), faults)
    assert "the multiply by 2.5 after the experts is missing" in verdict.findings[0].title


def test_a_fault_of_one_layer_names_that_layer(canary: Canary) -> None:
    faults = Faults(shared=lambda layer, y, w: y / R if layer == 2 else y)
    verdict = verdict_of(canary("deepseek_v3", layers=3), faults)
    assert [f.layers for f in verdict.findings] == [(2,)]
    assert verdict.findings[0].title.startswith("layer 2: shared expert counts 0.400")


def lost_last_row(layer: int, y: Any) -> Any:
    y = y.copy()
    if len(y) > 1 and len(y) % 8:
        y[-1] = 0
    return y


def shared_scale(layer: int, y: Any) -> Any:
    """The sum is quantised with one step for the whole batch: small rows suffer from large ones."""
    step = np.abs(y).max() / 40
    return np.round(y / step) * step if len(y) > 1 else y


def test_a_row_lost_off_the_grid_tells_its_batch_sizes(canary: Canary) -> None:
    effort = Effort(name="brief", batches=(3, 5, 7, 8, 16), streams=8, walk=16, long=(), silence=0.0)
    (finding,) = verdict_of(canary("deepseek_v3"), Faults(total=lost_last_row), effort=effort).findings
    assert finding.names == ("rows-lost",)
    assert "only the last row" in finding.scope
    assert "only off the grid of multiples of 8" in finding.scope


def test_a_fault_of_lone_requests_is_not_blamed_on_batches(canary: Canary) -> None:
    faults = Faults(total=lambda layer, y: y * 0.5 if len(y) == 1 else y)
    (finding,) = verdict_of(canary("deepseek_v3"), faults).findings
    assert finding.names == ("reduce-missing",)
    assert "right in" in finding.scope
    assert "batches of 3, 8" in finding.scope.split("right in")[1]


def test_rows_that_change_places_are_named(canary: Canary) -> None:
    faults = Faults(total=lambda layer, y: np.roll(y, 1, axis=0))
    verdict = verdict_of(canary("qwen3_moe"), faults)
    assert names_of(verdict) == {("rows-shifted",)}


@pytest.mark.parametrize("name", ["shared-slot-is-routed", "shared-slot-rotates"])
def test_a_routed_expert_in_a_shared_slot_is_named(canary: Canary, name: str) -> None:
    toy = Toy(canary("deepseek_v3"))

    def forward(sequences: list[list[int]]) -> Any:
        rows = np.arange(len(sequences))
        taken = np.where(rows % 17 == 0, -1, (rows - 1) % 17) if name == "shared-slot-rotates" else 0 * rows
        experts = {}

        def shared(layer: int, y: Any, w: Any) -> Any:
            out = np.where((taken < 0)[:, None], y, 0)
            for e in set(taken[taken >= 0].tolist()):
                mine = taken == e
                out[mine] += toy._one(layer, e, experts["x"][mine])
            return out

        def one(layer: int, which: Any, x: Any) -> Any:
            if which == "shared":
                experts["x"] = x
            return plain(layer, which, x)

        plain = Toy._one.__get__(toy)
        toy._one = one  # type: ignore[method-assign]
        toy.faults = Faults(shared=shared)
        return toy.forward(sequences)

    verdict = explain(toy.manifest, ask_in_process(toy.manifest, forward, BRIEF))[0]
    assert names_of(verdict) == {(name,)}


def test_what_fits_nothing_is_unnamed_and_shows_numbers(canary: Canary) -> None:
    rng = np.random.RandomState(0)
    noise = 1 + 0.5 * rng.rand(16)
    faults = Faults(route=lambda layer, spec, logits, bias: _noisy(spec, logits, bias, noise))
    verdict = verdict_of(canary("deepseek_v3"), faults)
    assert names_of(verdict) == {("unnamed",)}
    assert verdict.findings[0].examples


def _noisy(spec: Any, logits: Any, bias: Any, noise: Any) -> Any:
    from truegate.law.select import select

    ids, weights = select(spec, logits, bias_E=bias)
    wobble = noise[(ids * 7 + np.argsort(ids, axis=1) * 3) % 16]
    return ids, weights * wobble


@pytest.mark.parametrize("name", ["no-renormalise", "group-max", "top-k-less-one", "scale-missing"])
def test_greedy_answers_alone_name_router_faults(canary: Canary, name: str) -> None:
    verdict = verdict_of(canary("deepseek_v3"), routed_by(name), top=0)
    assert verdict.findings
    assert all((name,) in [f.names, *f.alternatives] for f in verdict.findings)


@pytest.mark.parametrize("name", ["shared-dropped", "expert-dropped", "experts-swapped", "reduced-twice"])
def test_greedy_answers_alone_name_faults_behind_the_router(canary: Canary, name: str) -> None:
    assert names_of(verdict_of(canary("deepseek_v3"), BEHIND_THE_ROUTER[name], top=0)) == {(name,)}


def test_nan_is_a_fault_and_says_so(canary: Canary) -> None:
    verdict = verdict_of(canary("mixtral"), Faults(total=lambda layer, y: y * np.nan))
    assert names_of(verdict) == {("unreadable",)}


def test_experts_that_move_during_a_phase_are_told_with_the_phase(canary: Canary) -> None:
    """As by a rebalance: right until some batch, another map ever after."""
    toy = Toy(canary("deepseek_v3"))
    moved = np.random.RandomState(0).permutation(16)
    effort = Effort(name="brief", batches=(3, 8, 5), streams=3, walk=16, long=(), silence=0.0)

    def forward(sequences: list[list[int]]) -> Any:
        if len(sequences) == 8:
            toy.faults = Faults(ids=lambda layer, ids: moved[ids])
        return toy.forward(sequences)

    verdict = explain(toy.manifest, ask_in_process(toy.manifest, forward, effort))[0]
    assert names_of(verdict) == {("experts-permuted",)}
    assert "it changed during batch 8" in verdict.findings[0].title
    assert "right until batch 3, wrong from batch 8 on" in verdict.findings[0].scope


def test_one_activation_scale_a_batch_is_no_factor_on_an_expert(canary: Canary) -> None:
    """Small rows a little off and the others right is not a factor near 1 on all of them."""
    effort = Effort(name="quick", batches=(3, 8), streams=3, walk=8, long=(), silence=0.0, repeats=1, alone=16)

    def quantised(layer: int, y: Any, weights: Any) -> Any:
        step = np.abs(y).max() / 30
        return np.round(y / step) * step if len(y) > 8 else y

    told = names_of(verdict_of(canary("deepseek_v3"), Faults(shared=quantised), effort=effort))
    assert told == {("batch-activation-scale",)}


def test_a_shared_expert_that_reads_overwritten_rows_is_not_called_a_shift_of_rows(canary: Canary) -> None:
    faults = Faults(shared=lambda layer, y, w: 0.25 * y + 0.01 * np.abs(y) ** 0.5)
    quick = Effort(name="quick", batches=(3,), streams=3, walk=8, long=(), silence=0.0, repeats=1, alone=16)
    assert names_of(verdict_of(canary("deepseek_v3"), faults, effort=quick)) <= {("unnamed",), ("shared-scaled",)}
