"""Plan: one layer's spec, backends and placement compiled into who multiplies what and what an invalid slot looks like.

Invariant: routed coefficients come out as p * a * b * n = r and shared ones as w_shared * b * m = g; `compile_plan`
proves it with `Fraction` or refuses, naming both sides and the remedy. Nobody writes a plan by hand.
R expert-parallel ranks, P physical slots, L = P / R, S fused shared slots, K routed top-k, J = K + S.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from math import gcd
from typing import Any, NamedTuple

from truegate.errors import Refused
from truegate.law.choices import Choices, Ranks
from truegate.law.contract import Dispatch, Experts, Pad, Router, SharedLayout
from truegate.law.placement import Placement
from truegate.law.refusals import pads_of, refusals
from truegate.law.spec import RoutingSpec, SharedGate, WeightAt

__all__ = ["Choices", "IdEdge", "Plan", "Ranks", "Scales", "SumEdge", "compile_plan"]

DEFAULTS = Choices()


class Factors(NamedTuple):
    """`Scales` as floats, for the step loop: comparing and converting a `Fraction` costs as much as an operation."""

    plan: float
    kernel: float
    finish: float
    shared: float
    later: float


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scaling law's numbers, exact. g is 1 here; a sigmoid shared gate multiplies per token."""

    routed_scale: Fraction  # r
    router: Fraction  # p: already in the weights the router emits
    plan: Fraction  # a = r / (p b): multiplied into them here
    kernel: Fraction  # b_kernel: multiplied by the kernel regardless
    finish: Fraction  # b_finish: multiplied once, after combine
    routed_copies: Fraction  # n: must be 1
    shared_copies: Fraction  # m
    shared: Fraction  # w_shared = g / (b m)

    @property
    def later(self) -> Fraction:
        """b: everything that multiplies after the shared slots were appended."""
        return self.kernel * self.finish

    @cached_property
    def factors(self) -> "Factors":
        """What is multiplied by while serving."""
        return Factors(*map(float, (self.plan, self.kernel, self.finish, self.shared, self.later)))

    @property
    def folded(self) -> Fraction:
        """p * a: what the routed weights carry when the experts see them."""
        return self.router * self.plan


@dataclass(frozen=True, kw_only=True)
class IdEdge:
    """Routed ids and weights on their way, and the rule for invalid slots there, applied last and unconditionally."""

    source: str
    target: str
    pad: Pad  # what an invalid slot looks like on this edge
    converted_from: Pad | None = None  # what the source emits, where that is not what the target takes
    id_space: str  # "physical": numbered over all ranks; "local": over one rank's slots
    id_dtype: str
    weight_dtype: str
    num_slots: int  # ids on this edge are in 0..num_slots-1
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class SumEdge:
    """An output on its way into the layer's sum."""

    source: str
    target: str
    partial_over: str | None  # the group of ranks whose outputs must still be summed; None: whole
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A compiled layer. `order.realise` and `order.decode` act on it; `finish` owns the last multiply and reduction."""

    spec: RoutingSpec
    router: Router | None  # None: the kernel takes logits
    experts: Experts
    dispatch: Dispatch
    placement: Placement
    ranks: Ranks
    scales: Scales
    shared_layout: SharedLayout
    num_shared: int  # S: fused shared slots; 0 where the shared expert runs beside the experts or does not exist
    drops_shared_off_home: bool
    agreed_replicas: bool  # replica choice is a function of (global row, logical id), the same on every rank
    send: IdEdge  # router -> dispatch
    receive: IdEdge  # dispatch -> experts
    combine: SumEdge  # experts -> finish
    beside: SumEdge | None  # unfused shared expert -> finish

    @property
    def slots_per_rank(self) -> int:
        """Slots of one rank's expert kernel: its routed slots, then the fused shared ones."""
        return self.placement.slots_per_rank + self.num_shared

    @property
    def slots_per_row(self) -> int:
        """Ids of a row as the experts get them: the routed top-k, then the fused shared slots."""
        return self.spec.top_k + self.num_shared

    @property
    def edges(self) -> tuple[IdEdge | SumEdge, ...]:
        beside = () if self.beside is None else (self.beside,)
        return (self.send, self.receive, self.combine, *beside)

    def finish(self, y_TD: Any, shared_TD: Any, reduce: Callable[[Any, str], Any] | None = None) -> Any:
        """out = b_finish * y + shared, every partial sum reduced once: partial sums over one group are added first.

        reduce(tensor, group) sums over a named group of ranks; needed exactly when an edge is partial.
        """
        if self.scales.factors.finish != 1:
            y_TD = y_TD * self.scales.factors.finish
        over, beside = self.combine.partial_over, self.beside
        if (shared_TD is None) != (beside is None):
            lost = "has a shared expert beside its experts" if beside else "has no shared expert beside its experts"
            raise ValueError(f"{self.spec.family}: this plan {lost}; finish was given {shared_TD is not None}")
        if beside is None:
            return y_TD if over is None else _reduced(reduce, y_TD, over)
        if over == beside.partial_over:
            total_TD = y_TD + shared_TD
            return total_TD if over is None else _reduced(reduce, total_TD, over)
        y_TD = y_TD if over is None else _reduced(reduce, y_TD, over)
        shared_TD = shared_TD if beside.partial_over is None else _reduced(reduce, shared_TD, beside.partial_over)
        return y_TD + shared_TD


def _reduced(reduce: Callable[[Any, str], Any] | None, x_TD: Any, group: str) -> Any:
    if reduce is None:
        raise Refused(f"this plan sums over the ranks of {group} and was given no collective to do it with")
    return reduce(x_TD, group)


def compile_plan(
    spec: RoutingSpec,
    *,
    router: Router | None,
    experts: Experts,
    dispatch: Dispatch,
    placement: Placement,
    choices: Choices = DEFAULTS,
) -> Plan:
    """Compile one layer, or refuse with both names and the remedy.

    router is None exactly for kernels that take logits. All scalars are `Fraction`s.
    """
    for refusal in refusals(spec, router, experts, dispatch, placement, choices):
        raise Refused(refusal)
    shared_layout, num_shared = _shared(spec, experts, dispatch, choices)
    gathered_tail = shared_layout is SharedLayout.GLOBAL_TAIL and dispatch.gathers_rows
    drops = gathered_tail and not choices.replicate_shared
    replicas = choices.ranks.ep if gathered_tail and not drops else 1
    scales = _scales(spec, router, experts, dispatch, choices, num_shared, replicas)
    send, receive = _id_edges(router, experts, dispatch, placement, shared_layout, num_shared)
    combine, beside = _sum_edges(spec, experts, dispatch, choices, num_shared)
    if spec.num_identity and combine.partial_over is not None:
        raise Refused(
            f"{spec.family} has identity experts and dispatch {dispatch.name} leaves sums partial over "
            f"{combine.partial_over}: each of its ranks would add x; use --tp 1"
        )
    return Plan(
        spec=spec, router=router, experts=experts, dispatch=dispatch, placement=placement, ranks=choices.ranks,
        scales=scales, shared_layout=shared_layout, num_shared=num_shared, drops_shared_off_home=drops,
        agreed_replicas=dispatch.gathers_rows or choices.ranks.tp > 1, send=send, receive=receive, combine=combine,
        beside=beside,
    )  # fmt: skip


def _scales(
    spec: RoutingSpec, router: Router | None, experts: Experts, dispatch: Dispatch, choices: Choices, num_shared: int,
    replicas: int,
) -> Scales:  # fmt: skip
    """The scaling law; replicas is how many expert-parallel ranks compute a row's shared slot."""
    r = spec.scale
    folded = experts.takes_logits if router is None else router.factor_in(spec)
    p = r if folded else Fraction(1)
    kernel = r if experts.multiplies == "routed_scale" else Fraction(1)
    finish = r if choices.scale_at == "output" else Fraction(1)
    ranks = choices.ranks
    # an expert is cut into moe_tp shards; those summed for a row are all where rows are gathered, else the ones on
    # ranks of the row's own attention replica: no other rank holds it
    summed = ranks.moe_tp if dispatch.gathers_rows else gcd(ranks.tp, ranks.moe_tp)
    n = Fraction(summed, ranks.moe_tp)
    m = n * replicas
    b = kernel * finish
    if num_shared == 0:
        # beside the experts: added after the last multiply, so nothing later touches it
        shared = Fraction(1)
        m = Fraction(1)
    else:
        shared = 1 / (b * m)
    scales = Scales(
        routed_scale=r, router=p, plan=r / (p * b), kernel=kernel, finish=finish, routed_copies=n, shared_copies=m,
        shared=shared,
    )  # fmt: skip
    if n != 1:
        raise Refused(
            f"dispatch {dispatch.name} leaves rows on their data-parallel replica, experts {experts.name} are cut over "
            f"ranks of several (tp {ranks.tp}, dp {ranks.dp}, ep {ranks.ep}): {n} of each output would be summed; "
            f"use --ep {ranks.world}, or --dispatch allgather"
        )
    if router is None and scales.plan != 1:
        raise Refused(
            f"experts {experts.name} routes inside the kernel, where nobody can apply the factor {scales.plan} that "
            f"{spec.family}'s weights would need; use --scale-at weights, or --experts that take routed ids"
        )
    _prove(spec, experts, scales, fused=num_shared > 0)
    return scales


def _prove(spec: RoutingSpec, experts: Experts, s: Scales, *, fused: bool) -> None:
    """The two identities of the scaling law, exactly; and what has no consistent plan is refused."""
    if s.router * s.plan * s.later * s.routed_copies != s.routed_scale:
        raise AssertionError(f"routed coefficient {s.folded * s.later} is not the scale {s.routed_scale}")
    if fused and s.shared * s.later * s.shared_copies != 1:
        raise AssertionError(f"shared coefficient {s.shared * s.later * s.shared_copies} is not 1")
    if spec.weight_at is WeightAt.INPUT and (s.later != 1 or (fused and s.shared != 1)):
        raise Refused(
            f"{spec.family} weighs the expert's input; experts {experts.name} or the plan would multiply its output by "
            f"{s.later} and its {s.shared_copies} shared copies by {s.shared}, which is not the same: use --scale-at "
            "weights without --replicate-shared, and --experts torch"
        )


def _shared(spec: RoutingSpec, experts: Experts, dispatch: Dispatch, choices: Choices) -> tuple[SharedLayout, int]:
    """Where the fused shared slots sit and how many: per rank if the exchange can, at the tail to be replicated."""
    if not choices.fuse_shared or spec.shared is None:
        return SharedLayout.NONE, 0
    common = experts.shared_layouts & dispatch.shared_layouts - {SharedLayout.NONE}
    slots = spec.num_shared_slots
    assert slots is not None  # refused before
    order = [SharedLayout.GLOBAL_TAIL, SharedLayout.PER_RANK]
    if dispatch.spans_ranks and not choices.replicate_shared:
        order.reverse()
    return next(x for x in order if x in common), slots


def _id_edges(
    router: Router | None, experts: Experts, dispatch: Dispatch, placement: Placement, layout: SharedLayout,
    num_shared: int,
) -> tuple[IdEdge, IdEdge]:  # fmt: skip
    """router -> dispatch and dispatch -> experts: id space, dtype and the padding rule of each."""
    source = f"router {router.name}" if router else "gate logits"
    exchange, kernel = f"dispatch {dispatch.name}", f"experts {experts.name}"
    per_rank = placement.slots_per_rank + num_shared
    shared_ids = num_shared if layout is SharedLayout.GLOBAL_TAIL else num_shared * placement.num_ranks
    first, at_kernel = pads_of(experts, dispatch)
    note = "logits of padded rows are set to 0 and their outputs dropped" if router is None else ""
    send = IdEdge(
        source=source, target=exchange, pad=first, id_space="physical", id_dtype=dispatch.id_dtype or experts.id_dtype,
        weight_dtype=experts.weight_dtype, num_slots=placement.num_slots + shared_ids, note=note,
    )  # fmt: skip
    arriving = dispatch.emits or first
    receive = IdEdge(
        source=exchange, target=kernel, pad=at_kernel,
        converted_from=None if at_kernel == arriving else arriving, id_space="local", id_dtype=experts.id_dtype,
        weight_dtype=experts.weight_dtype, num_slots=per_rank,
        note="" if dispatch.weights == "carried" else "weights stay home; combine multiplies",
    )  # fmt: skip
    return send, receive


def _sum_edges(
    spec: RoutingSpec, experts: Experts, dispatch: Dispatch, choices: Choices, num_shared: int
) -> tuple[SumEdge, SumEdge | None]:
    """experts -> finish and shared -> finish: whole, or a partial sum over which group; reduced at most once."""
    ranks = choices.ranks
    if not dispatch.gathers_rows:
        group, size = "moe_tp", ranks.moe_tp
    elif ranks.dp > 1:
        group, size = "", 1  # the exchange's reduce-scatter is the one reduction
    else:
        group, size = "world", ranks.world  # rows are replicated: one all-reduce, in finish
    combine = SumEdge(
        source=f"experts {experts.name} via {dispatch.name}", target="finish", partial_over=group if size > 1 else None
    )
    if spec.shared is None or num_shared:
        return combine, None
    gate = " after its sigmoid gate" if spec.shared.gate is SharedGate.SIGMOID else ""
    # both groups are runs of neighbouring ranks: of one size they are the same, so finish adds first and reduces once
    over = None if ranks.tp == 1 else group if size == ranks.tp else "dense_tp"
    return combine, SumEdge(source="shared expert", target="finish", partial_over=over, note=f"added once{gate}")
