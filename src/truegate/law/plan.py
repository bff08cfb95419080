"""Plan: one layer's spec, backends and placement compiled into who multiplies what and what an invalid slot looks like.

Invariant: routed coefficients come out as p * a * b * n = r and shared ones as w_shared * b * m = g; `compile_plan`
proves it with `Fraction` or refuses, naming both sides and the remedy. Nobody writes a plan by hand.
R expert-parallel ranks, P physical slots, L = P / R, S fused shared slots, K routed top-k, J = K + S.
"""

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from truegate.errors import Refused
from truegate.law.contract import Dispatch, Experts, Pad, Router, SharedLayout
from truegate.law.placement import Placement
from truegate.law.spec import RoutingSpec, SharedGate, WeightAt


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """world = tp * dp; tp is per attention replica; ep divides world; moe_tp = world / ep shards cut each expert."""

    tp: int = 1
    dp: int = 1
    ep: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def moe_tp(self) -> int:
        return self.world // self.ep

    def __post_init__(self) -> None:
        if min(self.tp, self.dp, self.ep) < 1:
            raise Refused(f"tp {self.tp}, dp {self.dp}, ep {self.ep}: each must be at least 1")
        if self.world % self.ep:
            raise Refused(f"ep {self.ep} does not divide the {self.world} ranks (tp {self.tp} x dp {self.dp})")


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a user may choose about a plan; the rest follows."""

    ranks: Ranks = Ranks()
    fuse_shared: bool = False
    scale_at: str = "weights"  # or "output": multiply the sum by r once, after combine
    replicate_shared: bool = False  # compute a gathered row's shared slot on every rank instead of its home only
    weight_format: str | None = None  # checked against the kernel when known


@dataclass(frozen=True, kw_only=True)
class Scales:
    """The scaling law's numbers, exact. g is 1 here; a sigmoid shared gate multiplies per token."""

    routed_scale: Fraction  # r
    router: Fraction  # p: already in the weights the router emits
    plan: Fraction  # a = r / (p b n): multiplied into them here
    kernel: Fraction  # b_kernel: multiplied by the kernel regardless
    finish: Fraction  # b_finish: multiplied once, after combine
    routed_copies: Fraction  # n: must be 1
    shared_copies: Fraction  # m
    shared: Fraction  # w_shared = g / (b m)

    @property
    def later(self) -> Fraction:
        """b: everything that multiplies after the shared slots were appended."""
        return self.kernel * self.finish

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
    def edges(self) -> tuple[IdEdge | SumEdge, ...]:
        beside = () if self.beside is None else (self.beside,)
        return (self.send, self.receive, self.combine, *beside)

    def finish(self, y_TD: Any, shared_TD: Any, reduce: Callable[[Any, str], Any] | None = None) -> Any:
        """out = b_finish * y + shared, every partial sum reduced once: partial sums over one group are added first.

        reduce(tensor, group) sums over a named group of ranks; needed exactly when an edge is partial.
        """
        if self.scales.finish != 1:
            y_TD = y_TD * float(self.scales.finish)
        over, beside = self.combine.partial_over, self.beside
        if shared_TD is None:
            return y_TD if over is None else _reduced(reduce, y_TD, over)
        assert beside is not None  # a fused shared expert has no output of its own
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
    choices: Choices = Choices(),
) -> Plan:
    """Compile one layer, or refuse with both names and the remedy.

    router is None exactly for kernels that take logits. All scalars are `Fraction`s.
    """
    for refusal in _refusals(spec, router, experts, dispatch, placement, choices):
        raise Refused(refusal)
    shared_layout, num_shared = _shared(spec, experts, dispatch, choices)
    drops = bool(num_shared and dispatch.gathers_rows and not choices.replicate_shared)
    scales = _scales(spec, router, experts, dispatch, choices, num_shared, drops)
    send, receive = _id_edges(router, experts, dispatch, placement, num_shared)
    combine, beside = _sum_edges(spec, experts, dispatch, choices, num_shared)
    return Plan(
        spec=spec, router=router, experts=experts, dispatch=dispatch, placement=placement, ranks=choices.ranks,
        scales=scales, shared_layout=shared_layout, num_shared=num_shared, drops_shared_off_home=drops,
        agreed_replicas=dispatch.gathers_rows or choices.ranks.tp > 1, send=send, receive=receive, combine=combine,
        beside=beside,
    )  # fmt: skip


def _scales(
    spec: RoutingSpec, router: Router | None, experts: Experts, dispatch: Dispatch, choices: Choices, num_shared: int,
    drops: bool,
) -> Scales:  # fmt: skip
    r = spec.scale
    folded = experts.takes_logits if router is None else router.factor_in(spec)
    p = r if folded else Fraction(1)
    kernel = r if experts.multiplies == "routed_scale" else Fraction(1)
    finish = r if choices.scale_at == "output" else Fraction(1)
    ranks = choices.ranks
    # every routed expert is cut into moe_tp shards, computed by the moe_tp ranks of its owner, each summed once
    n = Fraction(ranks.moe_tp, ranks.moe_tp)
    computing = ranks.moe_tp
    if num_shared and dispatch.gathers_rows and not drops:
        computing *= ranks.ep  # every rank holds the tail slot and computes it for every gathered row
    m = Fraction(computing, ranks.moe_tp)
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
    _prove(spec, scales, fused=num_shared > 0)
    return scales


def _prove(spec: RoutingSpec, s: Scales, *, fused: bool) -> None:
    """The two identities of the scaling law, exactly; and what has no consistent plan is refused."""
    if s.routed_copies != 1:
        raise Refused(f"{spec.family}: {s.routed_copies} copies of each routed output would be summed; must be 1")
    if s.router * s.plan * s.later * s.routed_copies != s.routed_scale:
        raise AssertionError(f"routed coefficient {s.folded * s.later} is not the scale {s.routed_scale}")
    if fused and s.shared * s.later * s.shared_copies != 1:
        raise AssertionError(f"shared coefficient {s.shared * s.later * s.shared_copies} is not 1")
    if spec.weight_at is WeightAt.INPUT and (s.later != 1 or (fused and s.shared != 1)):
        raise Refused(
            f"{spec.family} weighs the expert's input; a factor of {s.later} on its output is not the same: "
            "use --scale-at weights and an expert kernel that multiplies nothing"
        )


def _shared(spec: RoutingSpec, experts: Experts, dispatch: Dispatch, choices: Choices) -> tuple[SharedLayout, int]:
    """Where the fused shared slots sit, per rank if the exchange can, and how many there are."""
    if not choices.fuse_shared or spec.shared is None:
        return SharedLayout.NONE, 0
    common = experts.shared_layouts & dispatch.shared_layouts - {SharedLayout.NONE}
    slots = spec.num_shared_slots
    assert slots is not None  # refused before
    layout = SharedLayout.PER_RANK if SharedLayout.PER_RANK in common and dispatch.spans_ranks else None
    return layout or next(x for x in (SharedLayout.GLOBAL_TAIL, SharedLayout.PER_RANK) if x in common), slots


def _id_edges(
    router: Router | None, experts: Experts, dispatch: Dispatch, placement: Placement, num_shared: int
) -> tuple[IdEdge, IdEdge]:
    """router -> dispatch and dispatch -> experts: id space, dtype and the padding rule of each."""
    source = f"router {router.name}" if router else "gate logits"
    exchange, kernel = f"dispatch {dispatch.name}", f"experts {experts.name}"
    per_rank = placement.slots_per_rank + num_shared
    first = (dispatch.accepts or experts.accepts)[0]
    note = "logits of padded rows are set to 0 and their outputs dropped" if router is None else ""
    send = IdEdge(
        source=source, target=exchange, pad=first, id_space="physical", id_dtype=dispatch.id_dtype or experts.id_dtype,
        weight_dtype=experts.weight_dtype, num_slots=per_rank * placement.num_ranks, note=note,
    )  # fmt: skip
    arriving = dispatch.emits or first
    meets = arriving in experts.accepts
    receive = IdEdge(
        source=exchange, target=kernel, pad=arriving if meets else experts.accepts[0],
        converted_from=None if meets else arriving, id_space="local", id_dtype=experts.id_dtype,
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
        group = "moe_tp" if ranks.moe_tp > 1 else None
    elif ranks.dp > 1:
        group = None  # the exchange's reduce-scatter is the one reduction
    else:
        group = "world" if ranks.world > 1 else None  # rows are replicated: one all-reduce, in finish
    combine = SumEdge(source=f"experts {experts.name} via {dispatch.name}", target="finish", partial_over=group)
    if spec.shared is None or num_shared:
        return combine, None
    gate = " after its sigmoid gate" if spec.shared.gate is SharedGate.SIGMOID else ""
    over = "dense_tp" if ranks.tp > 1 else None
    if group == "world" and ranks.tp == ranks.world:
        over = "world"  # the same ranks: add first, reduce once
    return combine, SumEdge(source="shared expert", target="finish", partial_over=over, note=f"added once{gate}")


def _refusals(
    spec: RoutingSpec, router: Router | None, experts: Experts, dispatch: Dispatch, placement: Placement,
    choices: Choices,
) -> list[str]:  # fmt: skip
    """Every reason why these parts cannot meet, each naming both sides and the remedy."""
    return [
        *_size_refusals(spec, experts, dispatch, placement, choices),
        *_router_refusals(spec, router, experts, dispatch, placement),
        *_kernel_refusals(spec, experts, dispatch),
        *_shared_refusals(spec, experts, dispatch, choices),
    ]


def _size_refusals(
    spec: RoutingSpec, experts: Experts, dispatch: Dispatch, placement: Placement, choices: Choices
) -> list[str]:
    found, ranks = [], choices.ranks
    if choices.scale_at not in ("weights", "output"):
        found.append(f"--scale-at {choices.scale_at}: must be weights or output")
    if placement.num_experts != spec.num_experts:
        found.append(f"the placement holds {placement.num_experts} experts, {spec.family} has {spec.num_experts}")
    if placement.num_ranks != ranks.ep:
        found.append(f"the placement is for {placement.num_ranks} ranks, --ep is {ranks.ep}")
    if ranks.ep > 1 and not dispatch.spans_ranks:
        found.append(f"dispatch {dispatch.name} stays on one rank, --ep is {ranks.ep}; use --dispatch allgather")
    width, rest = divmod(spec.expert_intermediate, ranks.moe_tp)
    if rest or width % experts.alignment:
        found.append(
            f"experts {experts.name} needs shards that are multiples of {experts.alignment}; expert width "
            f"{spec.expert_intermediate} over {ranks.moe_tp} tensor-parallel shards is not; raise --ep or lower --tp"
        )
    for part in (experts, dispatch):
        limit = part.max_top_k
        if limit is not None and spec.top_k > limit:
            found.append(
                f"{part.name} handles top-k up to {limit}, {spec.family} has {spec.top_k}; use another backend"
            )
    if experts.max_slots is not None and placement.slots_per_rank > experts.max_slots:
        found.append(
            f"experts {experts.name} holds up to {experts.max_slots} slots a rank, the placement puts "
            f"{placement.slots_per_rank} there; raise --ep"
        )
    if dispatch.hidden_sizes is not None and spec.hidden not in dispatch.hidden_sizes:
        sizes = ", ".join(map(str, sorted(dispatch.hidden_sizes)))
        found.append(f"dispatch {dispatch.name} is built for hidden sizes {sizes}; {spec.family} has {spec.hidden}")
    return found


def _router_refusals(
    spec: RoutingSpec, router: Router | None, experts: Experts, dispatch: Dispatch, placement: Placement
) -> list[str]:
    if router is None:
        found = []
        if not experts.takes_logits:
            found.append(f"experts {experts.name} takes routed ids; name a router")
        if dispatch.spans_ranks and not dispatch.gathers_rows:
            found.append(
                f"experts {experts.name} routes inside the kernel, dispatch {dispatch.name} needs ids before it sends; "
                "use --dispatch local or allgather, or experts that take routed ids"
            )
        if placement.has_replicas:
            found.append(f"experts {experts.name} routes inside the kernel and knows no replicas; use --redundant 0")
        if spec.kind not in experts.folds:
            kinds = ", ".join(sorted(experts.folds))
            found.append(f"experts {experts.name} routes {kinds} inside the kernel; {spec.family} is {spec.kind}")
        return found
    if experts.takes_logits:
        return [
            f"experts {experts.name} routes inside the kernel; router {router.name} has nothing to feed: drop --router"
        ]
    found = []
    if router.kinds is not None and spec.kind not in router.kinds:
        found.append(f"router {router.name} does not compute {spec.kind} ({spec.family}); use --router torch")
    if router.max_top_k is not None and spec.top_k > router.max_top_k:
        found.append(f"router {router.name} handles top-k up to {router.max_top_k}, {spec.family} has {spec.top_k}")
    return found


def _kernel_refusals(spec: RoutingSpec, experts: Experts, dispatch: Dispatch) -> list[str]:
    found = []
    if spec.activation not in experts.activations:
        found.append(f"experts {experts.name} has no {spec.activation.value} activation, which {spec.family} needs")
    if spec.has_expert_bias and not experts.expert_bias:
        found.append(f"experts {experts.name} adds no expert biases, which {spec.family} has; use --experts torch")
    if spec.weight_at not in experts.weight_at:
        found.append(f"experts {experts.name} weighs the output, {spec.family} weighs the input; use --experts torch")
    if spec.weight_at is WeightAt.INPUT and dispatch.weights == "at_combine":
        found.append(
            f"dispatch {dispatch.name} weighs at combine, {spec.family} weighs the input; use another exchange"
        )
    if dispatch.weights == "at_combine" and experts.weighs == "always":
        found.append(
            f"dispatch {dispatch.name} multiplies by the weights at combine, experts {experts.name} always does too: "
            "the weights would count twice; use deepep_normal, or experts whose weighing can be switched off"
        )
    if dispatch.weights == "carried" and experts.weighs == "never":
        found.append(
            f"dispatch {dispatch.name} combines without weights and experts {experts.name} never applies them: the "
            "weights would be lost; use deepep_low_latency, or experts that weigh"
        )
    if dispatch.layout not in experts.layouts:
        found.append(
            f"dispatch {dispatch.name} delivers {dispatch.layout.value}, experts {experts.name} takes "
            f"{', '.join(sorted(x.value for x in experts.layouts))}; use another --dispatch or --experts"
        )
    return found


def _shared_refusals(spec: RoutingSpec, experts: Experts, dispatch: Dispatch, choices: Choices) -> list[str]:
    found = []
    formats = sorted(experts.formats)
    if choices.weight_format is not None and choices.weight_format not in experts.formats:
        found.append(f"experts {experts.name} reads {', '.join(formats)}; the checkpoint is {choices.weight_format}")
    if not choices.fuse_shared:
        return found
    if spec.shared is None:
        found.append(f"--fuse-shared: {spec.family} has no shared expert; drop the flag")
    elif spec.num_shared_slots is None:
        found.append(
            f"--fuse-shared: the shared expert is {spec.shared.intermediate} wide, not a multiple of the routed "
            f"experts' {spec.expert_intermediate}; use --no-fuse-shared"
        )
    elif not experts.shared_layouts & dispatch.shared_layouts - {SharedLayout.NONE}:
        found.append(
            f"--fuse-shared: experts {experts.name} holds shared slots as {_names(experts)}, dispatch "
            f"{dispatch.name} as {_names(dispatch)}; use --no-fuse-shared"
        )
    return found


def _names(part: Experts | Dispatch) -> str:
    return " or ".join(sorted(x.value for x in part.shared_layouts))
