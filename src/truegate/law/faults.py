"""The catalogue of faults, once, for tests, `--fault`, the canary and docs: name, kind, and what it says.

Invariant: names are stable; each is a fault for at least one family and none is a fault of the definition itself.
Kinds are those of docs/routing.md. T rows, K routed top-k, J = K + S slots a row, E experts.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy

from truegate.errors import UserError
from truegate.law.fault import Chosen, Fault, held_beside, round_bf16
from truegate.law.order import Routed
from truegate.law.plan import Plan
from truegate.law.select import select
from truegate.law.spec import Denominator, GroupScore, RoutingSpec, Score, SelectOn, SharedGate, WeightAt

Array = Any


# What a fault needs in order to be one.
def _scaled(plan: Plan) -> bool:
    return plan.spec.routed_scale != 1


def _normalised(plan: Plan) -> bool:
    return plan.spec.denominator is not Denominator.NONE and plan.spec.top_k > 1


def _plain(plan: Plan) -> bool:
    return plan.spec.denominator is Denominator.NONE and plan.spec.top_k > 1


def _biased(plan: Plan) -> bool:
    return plan.spec.has_selection_bias


def _chosen_by_bias(plan: Plan) -> bool:
    """Some expert is left out, so that the bias decides which."""
    return _biased(plan) and plan.spec.top_k < plan.spec.num_choices


def _grouped(plan: Plan) -> bool:
    return plan.spec.groups is not None and plan.spec.groups.kept < plan.spec.groups.count


def _grouped_by(score: GroupScore) -> Callable[[Plan], bool]:
    """Groups of one expert are ranked by it either way."""
    return lambda p: bool(_grouped(p) and (g := p.spec.groups) and g.score is score and p.spec.num_choices > g.count)


def _has_shared(plan: Plan) -> bool:
    return plan.spec.shared is not None


def _linear_shared(plan: Plan) -> bool:
    """A factor on the shared weight is one on its output: not where a fused slot is weighed at its input."""
    return _has_shared(plan) and not (plan.num_shared and plan.spec.weight_at is WeightAt.INPUT)


def _beside(plan: Plan) -> bool:
    return plan.spec.shared is not None and plan.num_shared == 0


def _gated(plan: Plan) -> bool:
    return plan.spec.shared is not None and plan.spec.shared.gate is SharedGate.SIGMOID


def _fused(plan: Plan) -> bool:
    return plan.num_shared > 0 and plan.spec.weight_at is WeightAt.OUTPUT


def _stride_differs(plan: Plan) -> bool:
    """Numbering slots by E names another expert somewhere."""
    logical_P = plan.placement.logical_P
    slots_P = numpy.arange(len(logical_P)) % plan.placement.num_experts
    return bool((logical_P[slots_P] != logical_P).any())


def _replicated(plan: Plan) -> bool:
    return plan.placement.has_replicas


def _adds_replicas(plan: Plan) -> bool:
    """Two replicas that both run add up to twice the weight: where it multiplies the output."""
    return _replicated(plan) and plan.spec.weight_at is WeightAt.OUTPUT


def _ranked(plan: Plan) -> bool:
    return plan.spec.select_on is not SelectOn.HASH


def _many(plan: Plan) -> bool:
    return plan.spec.top_k > 1 and _ranked(plan)


def _score(score: Score) -> Callable[[Plan], bool]:
    return lambda plan: plan.spec.score is score and _ranked(plan)


def _groups(**change: Any) -> Callable[[RoutingSpec], RoutingSpec]:
    def changed(spec: RoutingSpec) -> RoutingSpec:
        assert spec.groups is not None
        return replace(spec, groups=replace(spec.groups, **change))

    return changed


def _not_softmax(denominator: Denominator) -> Denominator:
    return Denominator.SUM if denominator is Denominator.SOFTMAX_TOPK else denominator


def _reachable(plan: Plan) -> int:
    """Experts that a row can choose from."""
    groups = plan.spec.groups
    return plan.spec.num_choices if groups is None else groups.kept * (plan.spec.num_choices // groups.count)


def _spare_group(plan: Plan) -> bool:
    """One group fewer still holds k experts."""
    groups = plan.spec.groups
    return groups is not None and (groups.kept - 1) * (plan.spec.num_choices // groups.count) >= plan.spec.top_k


def _weights(factor: Callable[[Chosen], Array]) -> Callable[[Chosen], tuple[Array, Array]]:
    return lambda c: (c.ids_TK, factor(c))


def _leak(c: Chosen) -> Array:
    """w from s + b where it should be from s."""
    biased = c.xp.asarray(c.bias_E)[c.ids_TK]
    s_TK = select(replace(c.spec, denominator=Denominator.NONE), c.logits_TE, bias_E=c.bias_E, xp=c.xp, scaled=False)[1]
    leaked_TK = s_TK + biased
    if c.spec.denominator is Denominator.NONE:
        return leaked_TK
    return leaked_TK / (leaked_TK.sum(-1)[:, None] + c.spec.eps)


def _repeat_best(c: Chosen) -> tuple[Array, Array]:
    """The second-best found by value: on the best's value both slots name the best."""
    ids = c.xp.concatenate([c.ids_TK[:, :1], c.ids_TK[:, :1], c.ids_TK[:, 2:]], -1)
    return ids, c.weights_TK


def _slots(change: Callable[[Plan, Array, ModuleType], Array]) -> Callable[[Plan, Routed, ModuleType], Routed]:
    """Change the routed slots' ids only; shared slots and invalid ones stay."""

    def lay(plan: Plan, routed: Routed, xp: ModuleType) -> Routed:
        ids, size = routed.ids_TJ, plan.placement.slots_per_rank
        touched = (ids >= 0) & (ids < size)
        return replace(routed, ids_TJ=xp.where(touched, change(plan, ids, xp), ids))

    return lay


def _weigh(change: Callable[[Plan, Routed, ModuleType], Array]) -> Callable[[Plan, Routed, ModuleType], Routed]:
    return lambda plan, routed, xp: replace(routed, weights_TJ=change(plan, routed, xp))


def _swap(a: int, b: int) -> Callable[[Plan, Array, ModuleType], Array]:
    return lambda plan, ids, xp: xp.where(ids == a, b, xp.where(ids == b, a, ids))


def _is_shared(plan: Plan, routed: Routed) -> Array:
    return routed.ids_TJ >= plan.placement.slots_per_rank


def _rotate_shared(plan: Plan, routed: Routed, xp: ModuleType) -> Routed:
    """The shared slot's id walks with the row instead of standing still."""
    rows_T1 = xp.arange(routed.ids_TJ.shape[0], device=routed.ids_TJ.device)[:, None]
    walked = (routed.ids_TJ + rows_T1) % plan.slots_per_rank
    return replace(routed, ids_TJ=xp.where(_is_shared(plan, routed), walked, routed.ids_TJ))


def _drop_where(drop: Callable[[Plan, Routed, ModuleType], Array]) -> Callable[[Plan, Routed, ModuleType], Routed]:
    return _weigh(lambda plan, routed, xp: xp.where(drop(plan, routed, xp), 0.0, routed.weights_TJ))


def _columns(routed: Routed, xp: ModuleType) -> Array:
    return xp.arange(routed.ids_TJ.shape[1], device=routed.ids_TJ.device)[None, :]


def _rows(routed: Routed, xp: ModuleType) -> Array:
    return xp.arange(routed.ids_TJ.shape[0], device=routed.ids_TJ.device)[:, None]


def _beyond_256(plan: Plan, routed: Routed, xp: ModuleType) -> Array:
    """Slots that are the 257th or later row of their expert."""
    ids_TJ = routed.ids_TJ
    one_hot_TJP = ids_TJ[:, :, None] == xp.arange(plan.slots_per_rank, device=ids_TJ.device)
    rank_TP = one_hot_TJP.any(1).cumsum(0)
    return (one_hot_TJP & (rank_TP > 256)[:, None, :]).any(-1)


def _second_if(low: int, high: int) -> Callable[[Plan, Routed, ModuleType], Array]:
    """The last routed slot of every row, in batches of `low` to `high` rows."""

    def drop(plan: Plan, routed: Routed, xp: ModuleType) -> Array:
        inside = low <= routed.ids_TJ.shape[0] <= high
        return (_columns(routed, xp) == plan.spec.top_k - 1) & inside & (_rows(routed, xp) >= 0)

    return drop


def _odd_rows(plan: Plan, routed: Routed, xp: ModuleType) -> Array:
    """The last row, in batches that are no multiple of 8 (a grid of captured sizes)."""
    num_rows = routed.ids_TJ.shape[0]
    return (_rows(routed, xp) == num_rows - 1) & (num_rows % 8 != 0) & (_columns(routed, xp) >= 0)


def _uniform(c: Chosen) -> Array:
    return c.xp.ones_like(c.weights_TK) / c.weights_TK.shape[1]


def _shared_in_sum(c: Chosen) -> Array:
    """The shared slot's 1 stands in the renormalising sum."""
    return c.weights_TK / (1 + c.weights_TK.sum(-1)[:, None])


def _routed_sum(plan: Plan, routed: Routed, xp: ModuleType) -> Array:
    shared = _is_shared(plan, routed)
    total = xp.where(shared, 0.0, routed.weights_TJ).sum(-1)[:, None] / float(plan.scales.routed_scale)
    return xp.where(shared, total * xp.ones_like(routed.weights_TJ), routed.weights_TJ)


def _routed_in_place(plan: Plan, routed: Routed, xp: ModuleType) -> Routed:
    return replace(routed, ids_TJ=xp.where(_is_shared(plan, routed), 0, routed.ids_TJ))


def _both_replicas(plan: Plan, routed: Routed, xp: ModuleType) -> Routed:
    """Every slot's logical expert is computed by its other replica as well."""
    ids_TJ, placement = routed.ids_TJ, plan.placement
    ok_TJ = (ids_TJ >= 0) & (ids_TJ < placement.slots_per_rank)
    logical_TJ = held_beside(ids_TJ, placement.logical_P, xp)[xp.where(ok_TJ, ids_TJ, 0)]
    replicas_TJX = held_beside(ids_TJ, placement.replicas_EX, xp)[logical_TJ]
    other_TJ = xp.where(replicas_TJX[..., 0] == ids_TJ, replicas_TJX[..., 1], replicas_TJX[..., 0])
    twice_TJ = ok_TJ & (other_TJ != ids_TJ)
    weights_TJ = xp.where(twice_TJ, routed.weights_TJ, 0.0)
    return replace(
        routed,
        ids_TJ=xp.concatenate([ids_TJ, xp.where(twice_TJ, other_TJ, -1)], -1),
        weights_TJ=xp.concatenate([routed.weights_TJ, weights_TJ], -1),
    )


def _gelu(gate: Array, up: Array) -> Array:
    z = gate / math.sqrt(2.0)
    erf = z.erf() if hasattr(z, "erf") else numpy.vectorize(math.erf)(z)
    return 0.5 * gate * (1 + erf) * up


def _select_highest_tie(c: Chosen) -> tuple[Array, Array]:
    """Selection with equal scores resolved to the highest id: expert numbers reversed, selected, reversed back."""
    flip = c.xp.flip
    last = c.spec.num_choices - 1
    bias = None if c.bias_E is None else flip(c.xp.asarray(c.bias_E), (0,))
    ids, weights = select(c.spec, flip(c.logits_TE, (1,)), bias_E=bias, xp=c.xp, scaled=False)
    return last - ids, weights


FAULTS: tuple[Fault, ...] = (
    # SCALE
    Fault(name="scale-missing", kind="SCALE", applies=_scaled,
          choose=_weights(lambda c: c.weights_TK / c.spec.routed_scale),
          says="routed experts count 1/{scale}: the routed scale is never applied"),
    Fault(name="scale-twice", kind="SCALE", applies=_scaled,
          choose=_weights(lambda c: c.weights_TK * c.spec.routed_scale),
          says="routed experts count {scale} times too much: the routed scale is applied twice"),
    Fault(name="scale-inverse", kind="SCALE", applies=_scaled,
          choose=_weights(lambda c: c.weights_TK / c.spec.routed_scale**2),
          says="routed experts are divided by the routed scale {scale} where they should be multiplied"),
    Fault(name="scale-first-choice-only", kind="SCALE", applies=lambda p: _scaled(p) and p.spec.top_k > 1,
          choose=lambda c: (c.ids_TK, c.xp.concatenate(
              [c.weights_TK[:, :1], c.weights_TK[:, 1:] / c.spec.routed_scale], -1)),
          says="only the best choice carries the routed scale {scale}; the others count 1/{scale}"),
    # SCORE
    Fault(name="no-renormalise", kind="SCORE", applies=_normalised,
          spec=lambda s: replace(s, denominator=Denominator.NONE, eps=0.0),
          says="the chosen weights are not renormalised: their sum varies by token"),
    Fault(name="renormalise-added", kind="SCORE", applies=_plain,
          spec=lambda s: replace(s, denominator=Denominator.SUM),
          says="the chosen weights are renormalised, and the model's are not"),
    Fault(name="softmax-for-sigmoid", kind="SCORE", applies=_score(Score.SIGMOID),
          spec=lambda s: replace(s, score=Score.SOFTMAX), says="scores are softmax, and should be sigmoid"),
    Fault(name="sigmoid-for-softmax", kind="SCORE", applies=_score(Score.SOFTMAX),
          spec=lambda s: replace(s, score=Score.SIGMOID, denominator=_not_softmax(s.denominator)),
          says="scores are sigmoid, and should be softmax"),
    Fault(name="weights-uniform", kind="SCORE", applies=_many, choose=_weights(_uniform),
          says="every chosen expert has the same weight 1/k"),
    Fault(name="weights-reversed", kind="SCORE", applies=_many,
          choose=_weights(lambda c: c.xp.flip(c.weights_TK, (1,))),
          says="the right experts carry each other's weights: ids and weights are sorted differently"),
    Fault(name="weight-at-wrong-side", kind="SCORE", applies=lambda p: p.spec.weight_at is WeightAt.INPUT,
          weigh_wrong_side=True, says="the weight multiplies the expert's output, and should multiply its input"),
    Fault(name="weight-at-input", kind="SCORE", applies=lambda p: p.spec.weight_at is WeightAt.OUTPUT,
          weigh_wrong_side=True, says="the weight multiplies the expert's input, and should multiply its output"),
    # BIAS
    Fault(name="bias-leak", kind="BIAS", applies=_biased, choose=_weights(_leak),
          says="the selection bias enters the weights: they are s + b, and should be s"),
    Fault(name="bias-ignored", kind="BIAS", applies=_chosen_by_bias,
          spec=lambda s: replace(s, has_selection_bias=False), says="experts are chosen without the selection bias"),
    Fault(name="bias-negated", kind="BIAS", applies=_chosen_by_bias, bias=lambda b, xp: -b,
          says="the selection bias is subtracted, and should be added"),
    # PREC
    Fault(name="bias-bf16", kind="PREC", applies=_chosen_by_bias, bias=round_bf16,
          says="the selection bias is rounded to bf16: experts whose scores are close change places"),
    Fault(name="logits-bf16", kind="PREC", applies=_ranked, logits=round_bf16,
          says="the router logits are rounded to bf16: experts whose scores are close change places"),
    Fault(name="weights-bf16", kind="PREC", applies=_many, choose=_weights(lambda c: round_bf16(c.weights_TK, c.xp)),
          says="the routed weights are rounded to bf16 before they are used"),
    # SELECT
    Fault(name="group-max", kind="SELECT", applies=_grouped_by(GroupScore.TOP2_SUM), spec=_groups(score=GroupScore.MAX),
          says="groups are ranked by their best expert, and should be by the sum of their two best"),
    Fault(name="group-top2", kind="SELECT", applies=_grouped_by(GroupScore.MAX),
          spec=_groups(score=GroupScore.TOP2_SUM),
          says="groups are ranked by the sum of their two best experts, and should be by their best"),
    Fault(name="no-groups", kind="SELECT", applies=_grouped, spec=lambda s: replace(s, groups=None),
          says="experts are chosen from all groups, and should be from the best ones only"),
    Fault(name="group-fill-zero", kind="SELECT", applies=lambda p: _grouped(p) and _biased(p), spec=_groups(fill=0.0),
          says="experts of dropped groups score 0, not -inf: they win where biased scores are negative"),
    Fault(name="one-group-less", kind="SELECT", applies=lambda p: _grouped(p) and _spare_group(p),
          spec=lambda s: _groups(kept=s.groups.kept - 1)(s) if s.groups else s,
          says="one group too few is kept"),
    Fault(name="one-group-more", kind="SELECT", applies=_grouped,
          spec=lambda s: _groups(kept=s.groups.kept + 1)(s) if s.groups else s,
          says="one group too many is kept"),
    Fault(name="top-k-less-one", kind="SELECT", applies=_many, spec=lambda s: replace(s, top_k=s.top_k - 1),
          says="one expert too few is chosen"),
    Fault(name="top-k-plus-one", kind="SELECT", applies=lambda p: _ranked(p) and p.spec.top_k < _reachable(p),
          spec=lambda s: replace(s, top_k=s.top_k + 1), says="one expert too many is chosen"),
    Fault(name="best-repeated", kind="SELECT", applies=_many, choose=_repeat_best,
          says="the best expert is chosen twice, in place of the second best"),
    Fault(name="ties-highest-id", kind="SELECT", applies=_ranked, choose=_select_highest_tie,
          says="equal scores go to the highest id, and should go to the lowest"),
    # REDUCE
    Fault(name="reduced-twice", kind="REDUCE", total=2.0,
          says="the experts' sum is counted twice: it is reduced twice"),
    Fault(name="reduce-missing", kind="REDUCE", total=0.5,
          says="half of the experts' sum is missing: a shard or a rank is not added"),
    # SHARED
    Fault(name="shared-inverse-scale", kind="SHARED", applies=lambda p: _linear_shared(p) and _scaled(p),
          shared=lambda p: 1 / p.spec.routed_scale,
          says="shared expert counts {inverse}, should be 1.000 = 1/routed_scaling_factor: "
               "the router folded the scale and nobody multiplies afterwards"),
    Fault(name="shared-by-scale", kind="SHARED", applies=lambda p: _linear_shared(p) and _scaled(p),
          shared=lambda p: p.spec.routed_scale,
          says="shared expert counts {scale}, should be 1.000: the last multiply covers it too"),
    Fault(name="shared-doubled", kind="SHARED", applies=_linear_shared, shared=lambda p: 2.0,
          says="shared expert counts twice: it is added by two parts, or by each of two ranks"),
    Fault(name="shared-dropped", kind="SHARED", applies=_linear_shared, shared=lambda p: 0.0,
          says="shared expert is missing"),
    Fault(name="shared-gate-missing", kind="SHARED", applies=_gated, gate=lambda g, xp: xp.ones_like(g),
          says="the shared expert's sigmoid gate is not applied: it counts 1 for every token"),
    Fault(name="shared-slot-rotates", kind="SHARED", applies=_fused, lay=_rotate_shared,
          says="the fused shared slot's id moves from row to row"),
    Fault(name="shared-slot-is-routed", kind="SHARED", applies=_fused, lay=_routed_in_place,
          says="a routed expert runs in the fused shared slot's place"),
    Fault(name="shared-from-routed-sum", kind="SHARED", applies=lambda p: _fused(p) and _plain(p),
          lay=_weigh(_routed_sum),
          says="shared expert counts sum(routed)/scale of each token, should be 1: it was renormalised with them"),
    Fault(name="shared-in-sum", kind="SHARED", applies=lambda p: _has_shared(p) and _normalised(p),
          choose=_weights(_shared_in_sum),
          says="the shared expert's weight stands in the sum that the routed weights are divided by"),
    # IDS
    Fault(name="pad-live", kind="IDS", wrap="pad-live",
          says="padded rows keep live expert ids: they are computed, and counted as load"),
    Fault(name="pad-aliases-last", kind="IDS", wrap="pad-last",
          says="padded rows' -1 is looked up and names the last expert: they are computed, and counted there"),
    Fault(name="ids-off-by-one", kind="IDS", lay=_slots(lambda p, ids, xp: (ids + 1) % p.placement.slots_per_rank),
          says="every expert id is one too high"),
    # MAP
    Fault(name="experts-swapped", kind="MAP", lay=_slots(_swap(0, 1)), applies=lambda p: p.spec.num_experts > 2,
          says="two experts stand in each other's place"),
    Fault(name="experts-rotated", kind="MAP", applies=lambda p: p.spec.num_experts >= 4,
          lay=_slots(lambda p, ids, xp: (ids + p.placement.slots_per_rank // 4) % p.placement.slots_per_rank),
          says="experts are shifted by a quarter: each rank computes with another rank's experts"),
    Fault(name="expert-dropped", kind="MAP", lay=_drop_where(lambda p, r, xp: r.ids_TJ == 0),
          says="one expert's output is lost"),
    Fault(name="expert-doubled", kind="MAP",
          lay=_weigh(lambda p, r, xp: xp.where(r.ids_TJ == 0, 2.0 * r.weights_TJ, r.weights_TJ)),
          says="one expert counts twice"),
    Fault(name="expert-scaled", kind="LOAD",
          lay=_weigh(lambda p, r, xp: xp.where(r.ids_TJ == 0, 1.05 * r.weights_TJ, r.weights_TJ)),
          says="one expert's output is off by a factor: a scale was read wrongly"),
    Fault(name="replica-counted-twice", kind="MAP", applies=_adds_replicas, lay=_both_replicas,
          says="an expert with two replicas is computed by both"),
    Fault(name="stride-without-redundant", kind="MAP", applies=_stride_differs,
          lay=_slots(lambda p, ids, xp: ids % p.spec.num_experts),
          says="slots are numbered as if there were no redundant experts"),
    # LOAD and ACT: the kernel's arithmetic
    Fault(name="gate-up-swapped", kind="LOAD", gain=lambda act, gate, up: act(up, gate),
          says="gate and up projections are swapped"),
    Fault(name="wrong-activation", kind="ACT", gain=lambda act, gate, up: _gelu(gate, up),
          applies=lambda p: p.spec.activation.value == "silu", says="the activation is GELU, and should be SiLU"),
    Fault(name="activation-missing", kind="ACT", gain=lambda act, gate, up: gate * up,
          applies=lambda p: p.spec.clamp is None, says="the gate is not passed through its activation"),
    Fault(name="gate-half-read", kind="KERNEL", gain=lambda act, gate, up: act(gate / 2, up),
          says="the gate's inner product skips half of the hidden dimension"),
    # KERNEL and STATE: what depends on the batch
    Fault(name="rows-2-to-8", kind="KERNEL", applies=_many, lay=_drop_where(_second_if(2, 8)),
          says="the last choice is lost in batches of 2 to 8 rows"),
    Fault(name="rows-above-256", kind="KERNEL", lay=_drop_where(_beyond_256),
          says="rows after the 256th of one expert are lost"),
    Fault(name="last-row-lost", kind="KERNEL", lay=_drop_where(_odd_rows),
          says="the last row is lost when the batch is no multiple of 8"),
    Fault(name="rows-shifted", kind="STATE", rows=lambda y, xp: xp.roll(y, 1, 0),
          says="rows get the outputs of their neighbours"),
    Fault(name="stale-routing", kind="STATE", wrap="stale",
          says="a row is routed by what an earlier batch left behind"),
    Fault(name="input-overwritten", kind="STATE", wrap="overwrite", applies=_beside,
          says="the experts overwrite the rows that the shared expert still has to read"),
    # OBS
    Fault(name="pad-counted", kind="OBS", wrap="count-pads", says="padded rows are counted as load"),
    Fault(name="report-physical", kind="OBS", applies=_replicated, wrap="report-physical",
          says="the routing report names physical slots, and should name logical experts"),
)  # fmt: skip


def named(name: str) -> Fault:
    """The fault of that name, or a UserError that lists them."""
    for fault in FAULTS:
        if fault.name == name:
            return fault
    raise UserError(f"fault {name!r} is unknown; there are {', '.join(f.name for f in FAULTS)}")
