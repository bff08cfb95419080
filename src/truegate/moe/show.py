"""A compiled plan for people and for programs: what `truegate plan` prints. No torch.

Invariant: it reads the plan and states; it computes no factor of its own.
"""

from dataclasses import asdict
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from truegate.errors import UserError
from truegate.law.equation import equation
from truegate.law.families import specs_of
from truegate.law.order import Routed, decode, realise, to_local
from truegate.law.placement import place
from truegate.law.plan import Choices, IdEdge, Plan, Ranks
from truegate.law.select import select
from truegate.law.spec import SelectOn, SharedGate
from truegate.moe.backends import choose, compile_layer


def plan_of(
    config: str | Path, *, ranks: Ranks, layer: int | None, experts: str, dispatch: str | None, router: str | None,
    redundant: int, fuse_shared: bool, scale_at: str, replicate_shared: bool,
) -> tuple[int, Plan]:  # fmt: skip
    """(layer, plan) of one MoE layer of a Hugging Face config; the first one unless `layer` names another."""
    specs = specs_of(config)
    moe_layers = [i for i, spec in enumerate(specs) if spec is not None]
    if not moe_layers:
        raise UserError(f"{config}: every layer is dense; there is nothing to plan")
    layer = moe_layers[0] if layer is None else layer
    if not 0 <= layer < len(specs):
        raise UserError(f"--layer {layer}: this model has layers 0..{len(specs) - 1}")
    spec = specs[layer]
    if spec is None:
        raise UserError(f"--layer {layer} is dense; MoE layers are {_runs(moe_layers)}")
    dispatch = dispatch or ("allgather" if ranks.ep > 1 else "local")
    backends = choose(experts=experts, dispatch=dispatch, router=router)
    placement = place(num_experts=spec.num_experts, num_ranks=ranks.ep, num_redundant=redundant)
    choices = Choices(
        ranks=ranks, fuse_shared=fuse_shared, scale_at=scale_at, replicate_shared=replicate_shared
    )  # fmt: skip
    return layer, compile_layer(spec, backends, placement, choices)


def _runs(numbers: list[int]) -> str:
    """1, 2, 3, 7 as "1..3, 7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}..{b}" for a, b in parts)


def as_json(layer: int, plan: Plan) -> dict[str, Any]:
    """The plan's numbers; factors are floats. folded_factor * later_factor is always the routed scale."""
    s = plan.scales
    return {
        "layer": layer,
        "family": plan.spec.family,
        "router": None if plan.router is None else plan.router.name,
        "experts": plan.experts.name,
        "dispatch": plan.dispatch.name,
        "routed_scale": float(s.routed_scale),
        "router_factor": float(s.router),
        "plan_factor": float(s.plan),
        "folded_factor": float(s.folded),
        "kernel_factor": float(s.kernel),
        "finish_factor": float(s.finish),
        "later_factor": float(s.later),
        "shared_weight": None if plan.spec.shared is None else float(s.shared),
        "shared_copies": float(s.shared_copies),
        "shared_fused": plan.num_shared > 0,
        "shared_layout": plan.shared_layout.value,
        "shared_slots": plan.num_shared,
        "slots_per_rank": plan.slots_per_rank,
        "ranks": asdict(plan.ranks),
        "edges": [_edge_json(edge) for edge in plan.edges],
        "example": example(plan),
    }


def _edge_json(edge: Any) -> dict[str, Any]:
    plain = {name: getattr(edge, name) for name in edge.__dataclass_fields__}
    return {k: str(v) if k in ("pad", "converted_from") and v is not None else v for k, v in plain.items()}


def example(plan: Plan) -> dict[str, Any]:
    """One row of seeded random logits on its way: logical ids, then slots, then each rank's local ids."""
    spec = plan.spec
    rng = np.random.default_rng(0)
    logits_TE = rng.normal(size=(1, spec.num_choices))
    bias_E = 0.1 * rng.normal(size=spec.num_choices) if spec.has_selection_bias else None
    hashed = spec.select_on is SelectOn.HASH
    table_VK = np.arange(spec.top_k)[None, :] if hashed else None
    token_ids_T = np.zeros(1, dtype=np.int64) if hashed else None
    ids_TK, weights_TK = select(
        spec, logits_TE, bias_E=bias_E, token_ids_T=token_ids_T, table_VK=table_VK, scaled=False
    )  # fmt: skip
    home = plan.placement.num_ranks - 1
    emitted_TK = weights_TK * float(plan.scales.router)
    gated = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
    gate_T = np.array([0.5]) if gated else None
    routed = realise(plan, ids_TK, emitted_TK, home_T=np.array([home]), shared_gate_T=gate_T)
    return {
        "home_rank": home,
        "logical_ids": ids_TK[0].tolist(),
        "physical_ids": routed.ids_TJ[0].tolist(),
        "weights": _rounded(routed.weights_TJ[0]),
        "local_ids": _local(plan, routed, home),
        "coefficients": _rounded(decode(plan, routed)[0][ids_TK[0]]),
    }


def _local(plan: Plan, routed: Routed, home: int) -> dict[str, list[int]]:
    """Rank -> the row's local ids there, for ranks that compute any of it."""
    found = {}
    for rank in range(plan.placement.num_ranks):
        ids_TJ, weights_TJ = to_local(plan, routed.ids_TJ, routed.weights_TJ, rank=rank, home_T=np.array([home]))
        here = ids_TJ[0][weights_TJ[0] != 0].tolist()
        if here:
            found[str(rank)] = here
    return found


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{v:.6g}") for v in values]


def as_text(layer: int, plan: Plan) -> list[str]:
    """The same as lines to read."""
    spec, shown = plan.spec, example(plan)
    router = "inside the kernel" if plan.router is None else f"router {plan.router.name}"
    lines = [
        f"layer {layer} ({spec.family}, {spec.kind}): {router}, experts {plan.experts.name}, "
        f"dispatch {plan.dispatch.name}; tp {plan.ranks.tp}, dp {plan.ranks.dp}, ep {plan.ranks.ep}",
        "", "definition", *("  " + line for line in equation(spec)),
        "", "who multiplies what", *("  " + line for line in ledger(plan)),
        "", "what passes, and what an invalid slot looks like there", *("  " + _edge_text(e) for e in plan.edges),
        "", f"slots: {plan.slots_per_rank} a rank = {plan.placement.slots_per_rank} routed + {plan.num_shared} shared"
        f" ({plan.shared_layout.value}), {plan.placement.num_ranks} rank(s), "
        f"{plan.placement.num_slots - plan.placement.num_experts} redundant",
        "", f"an example row at home on rank {shown['home_rank']}",
        f"  logical   {shown['logical_ids']}",
        f"  physical  {shown['physical_ids']}",
        f"  weights   {shown['weights']}",
        *(f"  on rank {rank}: local ids {ids}" for rank, ids in shown["local_ids"].items()),
    ]  # fmt: skip
    return lines + _status(plan)


def ledger(plan: Plan) -> list[str]:
    """Each factor of a routed and of a shared coefficient, who applies it, and the product."""
    s, r = plan.scales, plan.scales.routed_scale
    router = "kernel" if plan.router is None else f"router {plan.router.name}"
    where = "the expert's input" if plan.spec.weight_at.value == "input" else "the expert's output"
    lines = [
        f"routed scale r = {_n(r)}; weights multiply {where}",
        f"{router:24} {_n(s.router):>6}   {'has folded r already' if s.router != 1 else 'folds nothing'}",
        f"{'plan, into the weights':24} {_n(s.plan):>6}   r / (p * b)",
        f"{'kernel ' + plan.experts.name:24} {_n(s.kernel):>6}   on everything it outputs",
        f"{'finish, after combine':24} {_n(s.finish):>6}   on the sum"
        + (", unfused shared excepted" * (plan.beside is not None)),
        f"routed coefficient = w * {_n(s.folded)} * {_n(s.later)} = {_n(s.folded * s.later)} w",
    ]
    if plan.spec.shared is None:
        return lines
    gated = plan.spec.shared.gate is SharedGate.SIGMOID
    g = "sigmoid(h . g)" if gated else "1"
    if plan.num_shared == 0:
        return [*lines, f"shared expert runs beside the experts and is added after the last multiply: coefficient {g}"]
    times = f"{g} * " if gated else ""
    total = s.shared * s.later * s.shared_copies
    return [
        *lines,
        f"shared slot weight = {g} / (b * m) = {g} / ({_n(s.later)} * {_n(s.shared_copies)})"
        + ("" if gated else f" = {_n(s.shared)}"),
        f"shared coefficient = {times}{_n(s.shared)} * {_n(s.later)} * {_n(s.shared_copies)} copies summed = "
        + (f"{times}{_n(total)}" if gated else _n(total)),
    ]


def _n(x: Fraction) -> str:
    return f"{float(x):g}"


def _edge_text(edge: Any) -> str:
    if isinstance(edge, IdEdge):
        converted = f", converted from {edge.converted_from}" if edge.converted_from is not None else ""
        note = f"; {edge.note}" if edge.note else ""
        return (
            f"{edge.source} -> {edge.target}: {edge.id_space} ids 0..{edge.num_slots - 1} as {edge.id_dtype}, "
            f"invalid = {edge.pad}{converted}{note}"
        )
    whole = "whole" if edge.partial_over is None else f"partial, summed once over {edge.partial_over}"
    return f"{edge.source} -> {edge.target}: {whole}" + (f"; {edge.note}" if edge.note else "")


def _status(plan: Plan) -> list[str]:
    """Which parts have never run here: their contracts are our reading of an interface."""
    parts = [p for p in (plan.router, plan.experts, plan.dispatch) if p is not None and p.status != "runs"]
    notes = [
        f"note: {type(p).__name__.lower()} {p.name} is a contract only, and has not run: {p.why_not}" for p in parts
    ]
    return ["", *notes] if parts else []
