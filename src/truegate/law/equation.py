"""A spec written as equations, for people: what `truegate plan` and docs print."""

from truegate.law.spec import Activation, Denominator, GroupScore, RoutingSpec, Score, SelectOn, SharedGate, WeightAt

_SCORES = {
    Score.SOFTMAX: "s = softmax(x)",
    Score.SIGMOID: "s = sigmoid(x)",
    Score.SQRT_SOFTPLUS: "s = sqrt(softplus(x))",
}


def equation(spec: RoutingSpec) -> list[str]:
    """The layer's definition, one step a line, in the order the steps happen; logits and scores in fp32."""
    lines = [f"x = W h{' + c' if spec.has_gate_bias else ''}   [{spec.num_choices}]", _SCORES[spec.score]]
    ranked = {SelectOn.SCORES: "s", SelectOn.LOGITS: "x", SelectOn.HASH: ""}[spec.select_on]
    if spec.has_selection_bias:
        lines.append("c = s + b")
        ranked = "c"
    if spec.groups is not None and spec.groups.kept < spec.groups.count:
        g = spec.groups
        how = "max" if g.score is GroupScore.MAX else "sum of the two best"
        lines.append(
            f"groups: the {g.kept} of {g.count} with the largest {how} of {ranked}; elsewhere {ranked} = {g.fill:g}"
        )
    if spec.select_on is SelectOn.HASH:
        lines.append(f"ids = table[token id]   ({spec.top_k} of {spec.num_choices})")
    else:
        lines.append(f"ids = top {spec.top_k} of {spec.num_choices} by {ranked}; equal values: lowest id")
    lines.append(_weights(spec))
    lines.append(_sum(spec))
    return lines


def _weights(spec: RoutingSpec) -> str:
    chosen = {
        Denominator.NONE: "s[ids]",
        Denominator.SUM: f"s[ids] / (sum s[ids]{f' + {spec.eps:g}' if spec.eps else ''})",
        Denominator.SUM_AT_LEAST: f"s[ids] / max(sum s[ids], {spec.eps:g})",
        Denominator.SOFTMAX_TOPK: "softmax(x[ids])",
    }[spec.denominator]
    return f"w = {chosen}"


def _sum(spec: RoutingSpec) -> str:
    w = "w[j]" if spec.routed_scale == 1 else f"{spec.routed_scale:g} w[j]"
    routed = f"sum_j F_ids[j]({w} h)" if spec.weight_at is WeightAt.INPUT else f"sum_j {w} F_ids[j](h)"
    identity = f"   (ids {spec.num_experts}.. are the identity: F(h) = h)" if spec.num_identity else ""
    shared = ""
    if spec.shared is not None:
        gate = "sigmoid(h . g) " if spec.shared.gate is SharedGate.SIGMOID else ""
        shared = f" + {gate}G(h)   G: width {spec.shared.intermediate}"
    act = {Activation.SWIGLU_CLAMP: f"swiglu clamped at {spec.clamp}"}.get(spec.activation, spec.activation.value)
    return f"y = {routed}{shared}   F: width {spec.expert_intermediate}, {act}{identity}"
