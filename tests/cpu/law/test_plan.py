"""The scaling law, exact: every plan that compiles is executed in `Fraction`s on every rank of a simulated world.

Nothing here reads the plan's own product of factors: weights are multiplied one after the other by whoever the contract
says multiplies, outputs travel and are summed as the exchange does it, `Plan.finish` does the rest.
q a rank of world = tp * dp, d a row of data-parallel replica q // tp, e = q // moe_tp and s = q % moe_tp its experts.
"""

import re
from dataclasses import replace
from fractions import Fraction
from functools import cache

import law_cases as cases
import pytest

from truegate.errors import Refused
from truegate.law.contract import SharedLayout
from truegate.law.placement import place
from truegate.law.plan import Choices, Plan, Ranks, compile_plan
from truegate.law.spec import WeightAt

W, G = Fraction(3, 7), Fraction(5, 11)  # a normalised score, a shared gate


class World:
    """One sum a rank: {(row, what, shard, weight on its input): coefficient}; finish acts on all ranks at once."""

    def __init__(self, sums):
        self.sums = sums

    def __mul__(self, factor):
        exact = Fraction(repr(factor))
        return World([{k: v * exact for k, v in s.items()} for s in self.sums])

    def __add__(self, other):
        return World([total([a, b]) for a, b in zip(self.sums, other.sums, strict=True)])


def total(sums):
    out = {}
    for s in sums:
        for key, value in s.items():
            out[key] = out.get(key, 0) + value
    return out


def execute(plan: Plan, case) -> tuple[World, list[str]]:
    """(every rank's output for its own row, the groups that finish summed over)."""
    ranks, moe_tp = plan.ranks, plan.ranks.moe_tp
    world = range(ranks.world)

    def here(q, row, home):
        """What rank q's kernel computes of `row`, whose home expert rank is `home`."""
        e, s = q // moe_tp, q % moe_tp
        ours = 1 if case.router is None else plan.scales.plan  # nobody reaches weights made inside a kernel
        out = slot(case, plan, ("expert", e), row, s, emitted(case) * ours)
        everywhere = plan.shared_layout is SharedLayout.GLOBAL_TAIL and not plan.drops_shared_off_home
        if plan.num_shared and (e == home or everywhere):
            out |= slot(case, plan, "shared", row, s, gate(case) * plan.scales.shared)
        return out

    if not case.dispatch.gathers_rows:  # each rank's copy of its row meets its own shard of every expert
        y = [total(here(p, q // ranks.tp, home=q // moe_tp) for p in world if p % moe_tp == q % moe_tp) for q in world]
    else:
        home = {d: d * ranks.tp // moe_tp if ranks.dp > 1 else 1 % ranks.ep for d in range(ranks.dp)}
        rows = [q // ranks.tp for q in world]
        if ranks.dp > 1:  # gathered, then reduced and scattered over all ranks
            y = [total(here(p, d, home[d]) for p in world) for d in rows]
        else:
            y = [here(q, d, home[d]) for q, d in zip(world, rows, strict=True)]
    beside = None
    if plan.spec.shared is not None and not plan.num_shared:  # cut over the attention replica
        beside = World([{(q // ranks.tp, "shared", q % ranks.tp, None): gate(case)} for q in world])
    summed = []

    def reduce(x, group):
        summed.append(group)
        size = {"world": ranks.world, "moe_tp": moe_tp, "dense_tp": ranks.tp}[group]
        assert size > 1
        return World([total(x.sums[q // size * size : q // size * size + size]) for q in world])

    return plan.finish(World(y), beside, reduce), summed


def emitted(case):
    """A routed weight as the router (or the kernel that routes) gives it: w, or r * w where its contract folds r."""
    folds = case.experts.folds if case.router is None else case.router.folds
    return W * case.spec.scale if case.spec.kind in folds else W


def gate(case):
    return G if case.spec.shared is not None and case.spec.shared.gate == "sigmoid" else Fraction(1)


def slot(case, plan, what, row, shard, weight):
    """One slot's output: weighed by kernel, combine, both or neither, and multiplied by what the kernel multiplies."""
    out = case.spec.scale if case.experts.multiplies == "routed_scale" else Fraction(1)
    weighings = (case.dispatch.weights == "at_combine") + (
        case.experts.weighs == "always" or (case.experts.weighs == "optional" and case.dispatch.weights == "carried")
    )
    if case.spec.weight_at is WeightAt.INPUT:
        return {(row, what, shard, weight**weighings): out}
    return {(row, what, shard, None): out * weight**weighings}


def expected(case, q) -> dict:
    """The definition: every shard of every expert once, at r * w; of the shared expert once, at g."""
    plan, row = case.plan, q // case.plan.ranks.tp
    r_w = case.spec.scale * W
    at_input = case.spec.weight_at is WeightAt.INPUT
    out = {
        (row, ("expert", e), s, r_w if at_input else None): Fraction(1) if at_input else r_w
        for e in range(plan.ranks.ep)
        for s in range(plan.ranks.moe_tp)
    }
    if case.spec.shared is not None:
        shards = plan.ranks.moe_tp if plan.num_shared else plan.ranks.tp
        fused_input = at_input and plan.num_shared
        for s in range(shards):
            out[row, "shared", s, Fraction(1) if fused_input else None] = gate(case)  # on the output, always
    return out


def distinct(compiled):
    """One case of each set of facts that `execute` and `finish` read: the rest of a case is ids, proved elsewhere."""
    seen = {}
    for c in compiled:
        p = c.plan
        facts = (
            c.spec.family, c.router is None, emitted(c), c.experts.multiplies, c.experts.weighs, c.dispatch.weights,
            c.dispatch.gathers_rows, p.scales, p.ranks, p.num_shared, p.shared_layout, p.drops_shared_off_home,
            p.combine.partial_over, p.beside and p.beside.partial_over,
        )  # fmt: skip
        seen.setdefault(facts, c)
    return list(seen.values())


@cache
def executed():
    compiled, _ = cases.everything()
    return [(case, *execute(case.plan, case)) for case in distinct(compiled)]


def test_every_compiled_plan_realises_the_definition_exactly_on_every_rank():
    assert len(executed()) > 500
    for case, out, _ in executed():
        for q, got in enumerate(out.sums):
            assert got == expected(case, q), f"rank {q}: {case.label}"


def test_sums_are_reduced_at_most_once_where_the_ranks_are_the_same():
    for case, _, summed in executed():
        sizes = {"world": case.plan.ranks.world, "moe_tp": case.plan.ranks.moe_tp, "dense_tp": case.plan.ranks.tp}
        of_size = [sizes[group] for group in summed]
        assert len(set(of_size)) == len(of_size), f"{summed}: {case.label}"


def test_every_backend_is_in_a_plan_that_compiles():
    compiled, _ = cases.everything()
    for part, all_of_it in (("router", cases.ROUTERS), ("experts", cases.EXPERTS), ("dispatch", cases.DISPATCHES)):
        used = {getattr(case, part) for case in compiled}
        assert used == set(all_of_it), part


def test_what_must_meet_meets():
    named = {part: {c.name: c for c in all_of_it if c} for part, all_of_it in
             (("router", cases.ROUTERS), ("experts", cases.EXPERTS), ("dispatch", cases.DISPATCHES))}  # fmt: skip
    for line in """
        torch torch local 1 fused | aiter aiter local 1 fused | torch triton local 1 fused
        torch deep_gemm local 1 fused | aiter aiter mori 8 fused | torch deep_gemm deepep_normal 8 fused
        torch deep_gemm deepep_low_latency 8 fused | torch torch alltoall 8 fused | torch torch allgather 8 fused
        torch cutlass_fp8 allgather 8 fused | torch triton allgather 8 fused | aiter deep_gemm mori 8 fused
        torch flashinfer_cutlass allgather 8 beside | torch triton deepep_normal 8 beside
        torch aiter deepep_normal 8 fused | torch flashinfer_cutlass alltoall 8 beside
    """.replace("\n", "|").split("|"):
        if not line.split():
            continue
        router, experts, dispatch, ep, how = line.split()
        choices = Choices(ranks=Ranks(dp=int(ep), ep=int(ep)), fuse_shared=how == "fused")
        case = cases.attempt(
            cases.BIASED, named["router"][router], named["experts"][experts], named["dispatch"][dispatch],
            cases.placed(16, int(ep), 0), choices,
        )  # fmt: skip
        assert case.refusal is None, f"{line}: {case.refusal}"


FLAGS = {
    "--ep", "--tp", "--dp", "--router", "--experts", "--dispatch", "--fuse-shared", "--no-fuse-shared", "--scale-at",
    "--redundant", "--layer", "--replicate-shared",
}  # fmt: skip


def test_every_refusal_names_both_sides_and_a_flag_that_helps():
    _, refused = cases.everything()
    assert len(refused) > 200
    for case in refused:
        text = case.refusal
        flags = set(re.findall(r"--[a-z-]+", text))
        assert flags, text
        assert flags <= FLAGS, text
        assert re.search(r"[;:,] (use|drop|add|raise|lower|name|make|place)\b", text), text
        sides = {"the placement", case.spec.family, case.experts.name, case.dispatch.name} | (
            {case.router.name} if case.router else set()
        )
        named = {side for side in sides if re.search(rf"\b{side}\b", text)}
        # a flag that the user gave is a side too: "--fuse-shared: biased has no ..."
        assert len(named) + bool(re.match(r"--[a-z-]+[ \d]*:", text)) >= 2, text
        assert not re.search(r"  |None|[{}]", text), text
        assert text == text.strip()
        assert "\n" not in text


def test_r_is_the_rational_that_the_config_writes():
    for written, exact in (
        (2.5, Fraction(5, 2)),
        (0.1, Fraction(1, 10)),
        (16.0, Fraction(16)),
        (1e-3, Fraction(1, 1000)),
    ):
        assert replace(cases.BIASED, routed_scale=written).scale == exact


def compiled_with(experts=cases.EXPERTS[0], dispatch=None, router=cases.ROUTERS[0], spec=cases.BIASED, **choices):
    ranks = choices.pop("ranks", Ranks())
    return compile_plan(
        spec, router=router, experts=experts, dispatch=dispatch, choices=Choices(ranks=ranks, **choices),
        placement=place(num_experts=spec.num_experts, num_ranks=ranks.ep),
    )  # fmt: skip


def by_name(part, name):
    return next(c for c in cases.contracts(part) if c.name == name)


def test_finish_refuses_a_lost_or_an_unexpected_shared_output():
    local = by_name("dispatch", "local")
    torch_experts, router = by_name("experts", "torch"), by_name("routers", "torch")
    beside = compiled_with(torch_experts, local, router)
    with pytest.raises(ValueError, match="has a shared expert beside"):
        beside.finish(1.0, None)
    fused = compiled_with(torch_experts, local, router, fuse_shared=True)
    with pytest.raises(ValueError, match="has no shared expert beside"):
        fused.finish(1.0, 1.0)


def test_finish_refuses_to_skip_a_sum_it_has_no_collective_for():
    plan = compiled_with(
        by_name("experts", "torch"), by_name("dispatch", "local"), by_name("routers", "torch"), ranks=Ranks(tp=2)
    )
    with pytest.raises(Refused, match="moe_tp"):
        plan.finish(1.0, 1.0)


def test_shared_weight_prefers_no_later_factor():
    for case, _, _ in executed():
        if case.choices.scale_at == "weights" and case.experts.multiplies == "one":
            assert case.plan.scales.later == 1, case.label
            if not case.choices.replicate_shared:
                assert case.plan.scales.shared == 1, case.label


def test_a_tail_slot_is_computed_once_unless_replication_is_asked_for():
    dispatch, experts, router = (
        by_name("dispatch", "allgather"),
        by_name("experts", "torch"),
        by_name("routers", "torch"),
    )
    for ep in (2, 4, 8, 16):
        ranks = Ranks(dp=ep, ep=ep)
        once = compiled_with(experts, dispatch, router, ranks=ranks, fuse_shared=True)
        assert (once.drops_shared_off_home, once.scales.shared_copies, once.scales.shared) == (True, 1, 1)
        often = compiled_with(experts, dispatch, router, ranks=ranks, fuse_shared=True, replicate_shared=True)
        assert (often.drops_shared_off_home, often.scales.shared_copies) == (False, ep)
        assert often.scales.shared == Fraction(1, ep)
        output = compiled_with(
            experts, dispatch, router, ranks=ranks, fuse_shared=True, replicate_shared=True, scale_at="output"
        )
        assert output.scales.shared == Fraction(2, 5 * ep)


@pytest.mark.parametrize(("tp", "dp", "ep"), [(0, 1, 1), (1, 0, 1), (1, 1, 0), (2, 3, 4), (-1, 1, 1)])
def test_ranks_that_cannot_be_are_refused(tp, dp, ep):
    with pytest.raises(Refused, match="--ep"):
        Ranks(tp=tp, dp=dp, ep=ep)
