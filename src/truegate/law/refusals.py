"""What cannot meet: every reason why a spec, backends, a placement and choices have no plan.

Invariant: a refusal names both sides and a remedy, a flag of `truegate plan` or another backend.
"""

from collections.abc import Iterable
from typing import Any

from truegate.law.choices import Choices
from truegate.law.contract import Dispatch, Experts, Pad, Router, SharedLayout, ZeroWeight
from truegate.law.placement import Placement
from truegate.law.spec import RoutingSpec, SharedGate, WeightAt

FUSED = {SharedLayout.GLOBAL_TAIL, SharedLayout.PER_RANK}


def refusals(
    spec: RoutingSpec, router: Router | None, experts: Experts, dispatch: Dispatch, placement: Placement,
    choices: Choices,
) -> list[str]:  # fmt: skip
    """Every reason why these parts cannot meet, each naming both sides and the remedy."""
    return [
        *_rank_refusals(spec, experts, dispatch, placement, choices),
        *_limit_refusals(spec, router, experts, dispatch, placement),
        *(_logits_refusals(spec, experts, dispatch, placement) if router is None else []),
        *([] if router is None else _router_refusals(spec, router, experts)),
        *_kernel_refusals(spec, experts, choices),
        *_weighing_refusals(spec, experts, dispatch),
        *_shared_refusals(spec, experts, dispatch, choices),
    ]


def _rank_refusals(
    spec: RoutingSpec, experts: Experts, dispatch: Dispatch, placement: Placement, choices: Choices
) -> list[str]:
    """Sizes against ranks."""
    found, ranks = [], choices.ranks
    if placement.num_experts != spec.num_experts:
        found.append(
            f"the placement holds {placement.num_experts} experts, {spec.family} has {spec.num_experts}; "
            "place this layer's own (--layer)"
        )
    if placement.num_ranks != ranks.ep:
        found.append(f"the placement is for {placement.num_ranks} ranks, --ep is {ranks.ep}; make them equal")
    if ranks.ep > 1 and not dispatch.spans_ranks:
        found.append(
            f"dispatch {dispatch.name} stays on one rank, experts {experts.name} are spread over --ep {ranks.ep}; "
            "use --dispatch allgather, or --ep 1"
        )
    width, rest = divmod(spec.expert_intermediate, ranks.moe_tp)
    if rest or width % experts.alignment:
        found.append(
            f"experts {experts.name} needs shards that are multiples of {experts.alignment}; {spec.family}'s expert "
            f"width {spec.expert_intermediate} over {ranks.moe_tp} tensor-parallel shards is not; raise --ep, lower "
            "--tp, or use --experts torch"
        )
    if spec.shared is not None and not choices.fuse_shared and spec.shared.intermediate % ranks.tp:
        found.append(
            f"--tp {ranks.tp}: {spec.family}'s shared expert is {spec.shared.intermediate} wide, which does not cut "
            "into as many shards; lower --tp"
        )
    return found


def _limit_refusals(
    spec: RoutingSpec, router: Router | None, experts: Experts, dispatch: Dispatch, placement: Placement
) -> list[str]:
    """Limits that contracts state."""
    found = []
    parts: Iterable[tuple[str, Any]] = (("router", router), ("experts", experts), ("dispatch", dispatch))
    for flag, part in parts:
        limit = None if part is None else part.max_top_k
        if limit is not None and spec.top_k > limit:
            found.append(
                f"{flag} {part.name} handles top-k up to {limit}, {spec.family} has {spec.top_k}; use another --{flag}"
            )
    if experts.max_slots is not None and placement.slots_per_rank > experts.max_slots:
        found.append(
            f"experts {experts.name} holds up to {experts.max_slots} slots a rank, the placement puts "
            f"{placement.slots_per_rank} there; raise --ep"
        )
    if dispatch.hidden_sizes is not None and spec.hidden not in dispatch.hidden_sizes:
        sizes = ", ".join(map(str, sorted(dispatch.hidden_sizes)))
        found.append(
            f"dispatch {dispatch.name} is built for hidden sizes {sizes}; {spec.family} has {spec.hidden}; "
            "use another --dispatch"
        )
    return found


def _logits_refusals(spec: RoutingSpec, experts: Experts, dispatch: Dispatch, placement: Placement) -> list[str]:
    """Kernels that route for themselves: nothing of ours stands between logits and ids."""
    if not experts.takes_logits:
        return [f"experts {experts.name} takes routed ids, which {spec.family}'s gate does not give; name a --router"]
    found = []
    if dispatch.spans_ranks and not dispatch.gathers_rows:
        found.append(
            f"experts {experts.name} routes inside the kernel, dispatch {dispatch.name} needs ids before it sends; "
            "use --dispatch local or allgather, or --experts that take routed ids"
        )
    if not placement.is_identity:
        found.append(
            f"experts {experts.name} routes inside the kernel, the placement holds replicas or moved experts that it "
            "knows nothing of; use --redundant 0"
        )
    if spec.num_identity:
        found.append(
            f"experts {experts.name} routes inside the kernel and knows no identity experts, {spec.family} has "
            f"{spec.num_identity}; use --experts torch"
        )
    if spec.kind not in experts.folds:
        kinds = ", ".join(sorted(experts.folds))
        found.append(
            f"experts {experts.name} routes {kinds} inside the kernel; {spec.family} is {spec.kind}; "
            "use --experts torch"
        )
    return found


def _router_refusals(spec: RoutingSpec, router: Router, experts: Experts) -> list[str]:
    found = []
    if experts.takes_logits:
        found.append(
            f"experts {experts.name} routes inside the kernel; router {router.name} has nothing to feed: drop --router"
        )
    if router.kinds is not None and spec.kind not in router.kinds:
        found.append(f"router {router.name} does not compute {spec.kind} ({spec.family}); use --router torch")
    groups = 1 if spec.groups is None else spec.groups.count
    for what, size, limit in (("experts", spec.num_choices, router.max_experts), ("groups", groups, router.max_groups)):
        if limit is not None and size > limit:
            found.append(
                f"router {router.name} handles up to {limit} {what}, {spec.family} has {size}; use --router torch"
            )
    return found


def _kernel_refusals(spec: RoutingSpec, experts: Experts, choices: Choices) -> list[str]:
    """What the kernel cannot compute or read, and options outside their values."""
    found = []
    if choices.scale_at not in ("weights", "output"):
        found.append(f"--scale-at {choices.scale_at}: must be weights or output")
    if spec.activation not in experts.activations:
        found.append(
            f"experts {experts.name} has no {spec.activation.value} activation, which {spec.family} needs; "
            "use --experts torch"
        )
    if spec.has_expert_bias and not experts.expert_bias:
        found.append(f"experts {experts.name} adds no expert biases, which {spec.family} has; use --experts torch")
    if choices.weight_format is not None and choices.weight_format not in experts.formats:
        found.append(
            f"experts {experts.name} reads {', '.join(sorted(experts.formats))}; the checkpoint is "
            f"{choices.weight_format}; use other --experts"
        )
    return found


def _weighing_refusals(spec: RoutingSpec, experts: Experts, dispatch: Dispatch) -> list[str]:
    """Who multiplies by the weights, where, and in which layout rows arrive."""
    found = []
    at_input = spec.weight_at is WeightAt.INPUT
    if spec.weight_at not in experts.weight_at:
        found.append(f"experts {experts.name} weighs the output, {spec.family} weighs the input; use --experts torch")
    if at_input and dispatch.weights == "at_combine":
        found.append(
            f"dispatch {dispatch.name} weighs at combine, {spec.family} weighs the input; use --dispatch allgather"
        )
    by_weight = any(isinstance(pad, ZeroWeight) for pad in pads_of(experts, dispatch))
    if at_input and spec.has_expert_bias and by_weight:
        found.append(
            f"dispatch {dispatch.name} to experts {experts.name} marks invalid slots by weight 0, but {spec.family} "
            "weighs the input and adds expert biases, so they would count; use --dispatch allgather --experts torch"
        )
    if dispatch.weights == "at_combine" and experts.weighs == "always":
        found.append(
            f"dispatch {dispatch.name} multiplies by the weights at combine, experts {experts.name} always does too: "
            "the weights would count twice; use --dispatch deepep_normal, or --experts whose weighing can be "
            "switched off"
        )
    if dispatch.weights == "carried" and experts.weighs == "never":
        found.append(
            f"dispatch {dispatch.name} combines without weights and experts {experts.name} never applies them: the "
            "weights would be lost; use --dispatch deepep_low_latency, or --experts that weigh"
        )
    if dispatch.layout not in experts.layouts:
        found.append(
            f"dispatch {dispatch.name} delivers {dispatch.layout.value}, experts {experts.name} takes "
            f"{', '.join(sorted(x.value for x in experts.layouts))}; use another --dispatch or other --experts"
        )
    return found


def pads_of(experts: Experts, dispatch: Dispatch) -> tuple[Pad, Pad]:
    """What invalid slots look like on the two edges: (router -> dispatch, dispatch -> experts)."""
    first = (dispatch.accepts or experts.accepts)[0]
    arriving = dispatch.emits or first
    return first, arriving if arriving in experts.accepts else experts.accepts[0]


def _shared_refusals(spec: RoutingSpec, experts: Experts, dispatch: Dispatch, choices: Choices) -> list[str]:
    if not choices.fuse_shared:
        if choices.replicate_shared:
            return [f"--replicate-shared: {spec.family}'s shared expert is in no slot; add --fuse-shared, or drop it"]
        return []
    found = []
    common = experts.shared_layouts & dispatch.shared_layouts & FUSED
    if spec.shared is None:
        found.append(f"--fuse-shared: {spec.family} has no shared expert; use --no-fuse-shared")
    elif spec.num_shared_slots is None:
        found.append(
            f"--fuse-shared: {spec.family}'s shared expert is {spec.shared.intermediate} wide, not a multiple of its "
            f"routed experts' {spec.expert_intermediate}; use --no-fuse-shared"
        )
    elif not common:
        found.append(
            f"--fuse-shared: experts {experts.name} holds shared slots as {_names(experts)}, dispatch "
            f"{dispatch.name} as {_names(dispatch)}; use --no-fuse-shared"
        )
    elif experts.takes_logits:
        found.append(
            f"--fuse-shared: experts {experts.name} routes inside the kernel, where {spec.family}'s shared slot has no "
            "weight of ours; use --no-fuse-shared"
        )
    elif spec.weight_at is WeightAt.INPUT and spec.shared.gate is SharedGate.SIGMOID:
        found.append(
            f"--fuse-shared: {spec.family}'s shared gate weighs the output, experts {experts.name} would weigh its "
            "input; use --no-fuse-shared"
        )
    elif dispatch.spans_ranks and not dispatch.gathers_rows and SharedLayout.PER_RANK not in common:
        found.append(
            f"--fuse-shared: dispatch {dispatch.name} sends rows to the ranks of their ids, a tail slot as experts "
            f"{experts.name} has it is on no one rank; use --no-fuse-shared"
        )
    if choices.replicate_shared and not (dispatch.gathers_rows and SharedLayout.GLOBAL_TAIL in common):
        found.append(
            f"--replicate-shared: dispatch {dispatch.name} brings {spec.family}'s rows to one shared slot of experts "
            f"{experts.name} only; drop the flag, or use --dispatch allgather"
        )
    return found


def _names(part: Experts | Dispatch) -> str:
    return " or ".join(sorted(x.value for x in part.shared_layouts))
