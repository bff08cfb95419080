"""Specs, contracts and placements that the law's tests multiply out. E routed experts, R ranks, S shared slots.

Contracts are every file of moe/ plus synthetic ones that demand what no real backend here does.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

from truegate.errors import Refused
from truegate.law.contract import Dispatch, Drop, Experts, Layout, Router, Sentinel, SharedLayout, ZeroWeight
from truegate.law.placement import Placement, place
from truegate.law.plan import Choices, Plan, Ranks, compile_plan
from truegate.law.spec import (
    Activation,
    Denominator,
    Groups,
    GroupScore,
    RoutingSpec,
    Score,
    SelectOn,
    Shared,
    SharedGate,
    WeightAt,
)
from truegate.moe.backends import load, names

F = 512  # expert width: 4 tensor-parallel shards of it still align to 128

BIASED = RoutingSpec(
    family="biased", num_experts=16, top_k=4, score=Score.SIGMOID, has_selection_bias=True,
    groups=Groups(count=4, kept=2, score=GroupScore.TOP2_SUM, fill=float("-inf")), denominator=Denominator.SUM,
    eps=1e-20, routed_scale=2.5, shared=Shared(intermediate=F), hidden=4096, expert_intermediate=F,
)  # fmt: skip
PLAIN = RoutingSpec(
    family="plain", num_experts=16, top_k=3, score=Score.SOFTMAX, hidden=4096, expert_intermediate=F
)  # fmt: skip
GROUPED = replace(
    BIASED, family="grouped", has_selection_bias=False, score=Score.SOFTMAX, denominator=Denominator.NONE,
    groups=Groups(count=4, kept=2, score=GroupScore.MAX, fill=0.0), routed_scale=16.0, eps=0.0,
    shared=Shared(intermediate=2 * F),
)  # fmt: skip
GATED = replace(
    PLAIN, family="gated", denominator=Denominator.SUM, routed_scale=0.3,
    shared=Shared(intermediate=4 * F, gate=SharedGate.SIGMOID),
)  # fmt: skip
INPUT = replace(
    PLAIN, family="input", score=Score.SIGMOID, select_on=SelectOn.LOGITS, top_k=1, weight_at=WeightAt.INPUT,
    routed_scale=1.5, shared=Shared(intermediate=F),
)  # fmt: skip
INPUT_GATED = replace(INPUT, family="input_gated", shared=Shared(intermediate=3 * F, gate=SharedGate.SIGMOID))
INPUT_BIASED = replace(INPUT, family="input_biased", has_expert_bias=True, routed_scale=1.0)
CLAMPED = replace(
    PLAIN, family="clamped", select_on=SelectOn.LOGITS, denominator=Denominator.SOFTMAX_TOPK, has_gate_bias=True,
    has_expert_bias=True, activation=Activation.SWIGLU_CLAMP, clamp=7.0,
)  # fmt: skip
IDENTITY = replace(PLAIN, family="identity", top_k=4, num_identity=8, routed_scale=6.0, shared=Shared(intermediate=F))
HASH = replace(
    PLAIN, family="hash", score=Score.SQRT_SOFTPLUS, select_on=SelectOn.HASH, denominator=Denominator.SUM,
    routed_scale=1.5, shared=Shared(intermediate=3 * F),
)  # fmt: skip
ODD_WIDTH = replace(BIASED, family="odd_width", shared=Shared(intermediate=F + F // 2))
RARE = (INPUT_GATED, INPUT_BIASED, ODD_WIDTH)  # mostly refused: on two of the ranks
FEW = (BIASED, GATED, INPUT)
SPECS = (BIASED, PLAIN, GROUPED, GATED, INPUT, INPUT_GATED, INPUT_BIASED, CLAMPED, IDENTITY, HASH, ODD_WIDTH)

ALL_KINDS = frozenset(spec.kind for spec in SPECS)
ANY_LAYOUT = frozenset(SharedLayout)

FOLDS_ALL = Router(name="folds_all", status="interface", source="test", id_dtype="int32", folds=ALL_KINDS)
MULTIPLIES = Experts(
    name="multiplies", status="interface", source="test", id_dtype="int32", accepts=(Sentinel(),),
    multiplies="routed_scale", shared_layouts=ANY_LAYOUT, weight_at=frozenset(WeightAt),
    layouts=frozenset(Layout), activations=frozenset(Activation), expert_bias=True,
)  # fmt: skip
NEVER_WEIGHS = replace(
    MULTIPLIES, name="never_weighs", weighs="never", multiplies="one", accepts=(Drop(), ZeroWeight())
)
ALWAYS_WEIGHS = replace(MULTIPLIES, name="always_weighs", weighs="always", multiplies="one")
LOGITS_TIMES = replace(MULTIPLIES, name="logits_times", takes_logits=True, folds=ALL_KINDS)
GATHERS_ANY = Dispatch(
    name="gathers_any", status="interface", source="test", id_dtype="int32", accepts=(ZeroWeight(),),
    emits=ZeroWeight(), weights="carried", shared_layouts=ANY_LAYOUT, gathers_rows=True,
)  # fmt: skip
SENDS_TAIL = replace(
    GATHERS_ANY, name="sends_tail", gathers_rows=False, accepts=(Sentinel(),), emits=Drop(-7),
    shared_layouts=frozenset({SharedLayout.NONE, SharedLayout.GLOBAL_TAIL}),
)  # fmt: skip


def contracts(part: str) -> list:
    return [load(part, name).CONTRACT for name in names(part)]


ROUTERS = (*contracts("routers"), FOLDS_ALL, None)
EXPERTS = (*contracts("experts"), MULTIPLIES, NEVER_WEIGHS, ALWAYS_WEIGHS, LOGITS_TIMES)
DISPATCHES = (*contracts("dispatch"), GATHERS_ANY, SENDS_TAIL)
REPEATED = tuple(load("routers", name).CONTRACT for name in ("aiter", "triton"))  # facts of folds_all and of torch
ALIKE = ("cutlass_fp8", "flashinfer_cutlass", "triton")  # the plan reads the same facts of these as of others
# tp, dp, ep and redundant experts
RANKS = (
    (1, 1, 1, 0), (1, 1, 1, 5), (2, 1, 1, 0), (1, 2, 1, 0), (1, 2, 2, 2), (2, 1, 2, 0), (4, 1, 2, 4), (2, 2, 2, 0),
    (2, 2, 4, 8), (1, 4, 2, 0), (4, 2, 4, 0), (3, 1, 3, 2), (1, 8, 8, 0), (1, 16, 16, 16),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the product, with what came of it."""

    spec: RoutingSpec
    router: Router | None
    experts: Experts
    dispatch: Dispatch
    placement: Placement
    choices: Choices
    plan: Plan | None
    refusal: str | None

    @property
    def label(self) -> str:
        router = None if self.router is None else self.router.name
        return f"{self.spec.family} {router} {self.experts.name} {self.dispatch.name} {self.choices}"


@cache
def placed(num_experts: int, num_ranks: int, num_redundant: int) -> Placement:
    return place(num_experts=num_experts, num_ranks=num_ranks, num_redundant=num_redundant)


def options(ranks: Ranks) -> list[Choices]:
    base = [Choices(ranks=ranks, scale_at=at) for at in ("weights", "output")]
    fused = [replace(c, fuse_shared=True) for c in base]
    return [*base, *fused, *(replace(c, replicate_shared=True) for c in fused)]


def attempt(spec, router, experts, dispatch, placement, choices) -> Case:
    plan = refusal = None
    try:
        plan = compile_plan(
            spec, router=router, experts=experts, dispatch=dispatch, placement=placement, choices=choices
        )  # fmt: skip
    except Refused as error:
        refusal = str(error)
    return Case(
        spec=spec, router=router, experts=experts, dispatch=dispatch, placement=placement, choices=choices,
        plan=plan, refusal=refusal,
    )  # fmt: skip


def product(specs=SPECS, ranks=RANKS) -> Iterator[Case]:
    """spec x router x experts x dispatch x ranks and placement x fusion x scale-at x replicate.

    What is always refused is tried a few times only: a kernel that takes logits with a router, one that takes ids with
    none, local over several ranks, RARE specs. Every third of RANKS meets every spec, the others meet FEW.
    """
    for tp, dp, ep, redundant in ranks:
        whole = (tp, dp, ep, redundant) in ranks[::3]
        for spec in specs if whole else FEW:
            if spec in RARE and (tp, dp, ep, redundant) != ranks[0] and ep != 2:
                continue
            placement = placed(spec.num_experts, ep, redundant)
            for choices in options(Ranks(tp=tp, dp=dp, ep=ep)):
                for router in ROUTERS:
                    for experts in EXPERTS:
                        if not whole and (router in REPEATED or experts.name in ALIKE):
                            continue
                        if experts.takes_logits != (router is None) and (tp, dp, ep, redundant) != ranks[0]:
                            continue
                        for dispatch in DISPATCHES:
                            if dispatch.name == "local" and ep > 1 and choices.fuse_shared:
                                continue
                            yield attempt(spec, router, experts, dispatch, placement, choices)


@cache
def everything() -> tuple[tuple[Case, ...], tuple[Case, ...]]:
    """The whole product once: (what compiles, one case of each refusal's text)."""
    compiled, refused = [], {}
    for case in product():
        if case.plan is not None:
            compiled.append(case)
        else:
            refused.setdefault(case.refusal, case)
    return tuple(compiled), tuple(refused.values())
