"""The order law: what happens to routed ids and weights between top-k and the expert kernel, and how to read it back.

Invariant: select -> make invalid rows' ids legal -> count -> map to physical -> append shared slots -> lay out ->
padding rule of the edge, last and unconditional -> cast; `decode` of the result is the definition's matrix.
T rows, K routed top-k, S fused shared slots, J = K + S, E experts, Z identity experts, P physical slots, L = P / R.
"""

from dataclasses import dataclass
from types import ModuleType
from typing import Any, NamedTuple

import numpy

from truegate.law.contract import Drop, Pad, Sentinel, SharedLayout, ZeroWeight
from truegate.law.plan import Plan
from truegate.law.spec import SharedGate

Array = Any  # numpy.ndarray or torch.Tensor, as `xp` says


@dataclass(frozen=True, kw_only=True)
class Routed:
    """What the exchange and the experts are given: ids_TJ in the edge's id space and weights_TJ to multiply by.

    valid_T is None where every row is valid. identity_T is what combine multiplies x by (identity experts), or None.
    load_E and load_P count valid rows per logical expert and per routed physical slot, where counting was asked for.
    logical_TK and chosen_TK are the router's choice before it was laid out (weights times a), for whoever records it.
    """

    ids_TJ: Array
    weights_TJ: Array
    valid_T: Array = None
    identity_T: Array = None
    shared_gate_T: Array = None  # kept for an unfused shared expert; fused ones carry it in weights_TJ
    load_E: Array = None
    load_P: Array = None
    logical_TK: Array = None
    chosen_TK: Array = None


class Tables(NamedTuple):
    """A placement's tables as `xp` arrays on the rows' device, updated in place when the placement changes."""

    replicas_EX: Array
    count_E: Array


def realise(
    plan: Plan,
    ids_TK: Array,
    weights_TK: Array,
    *,
    valid_T: Array = None,
    shared_gate_T: Array = None,
    home_T: Array = None,
    first_row: int = 0,
    tables: Tables | None = None,
    count: bool = False,
    xp: ModuleType = numpy,
) -> Routed:
    """Turn a router's choice into what the first edge of the plan carries.

        routed:  slot = replica(ids), weight = a * weights
        shared:  slot = tail or home rank's, weight = g * w_shared

    ids_TK int64 logical, weights_TK as the router emits them (times p), valid_T bool or None (all), home_T int64 rank
    of each row (None: rank 0), first_row the global number of row 0 for agreed replica choice. Returns ids in the
    edge's id dtype and, on torch, weights in its weight dtype where that has fewer bits than float32; a sigmoid-gated
    shared expert needs shared_gate_T, and nothing else takes it.
    """
    spec, placement = plan.spec, plan.placement
    gated = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
    if gated != (shared_gate_T is not None):
        raise ValueError(f"{spec.family}: shared_gate_T goes with a sigmoid-gated shared expert, and only with it")
    factors = plan.scales.factors
    if factors.plan != 1:
        weights_TK = weights_TK * factors.plan
    logical_TK, chosen_TK, ok_TK = ids_TK, weights_TK, None
    if valid_T is not None:
        # whatever a padded row holds (NaN logits, ids of another step), it must not reach a table below
        ok_TK = xp.broadcast_to(valid_T[:, None], ids_TK.shape)
        ids_TK = xp.where(ok_TK, ids_TK, _spread(ids_TK, spec.num_choices, xp))
    identity_T = None
    if spec.num_identity:
        is_identity_TK = ids_TK >= spec.num_experts
        live_TK = is_identity_TK if ok_TK is None else is_identity_TK & ok_TK
        # the kernel's factor never meets x itself, so it is put in here; combine adds before the last multiply
        identity_T = xp.where(live_TK, weights_TK, 0.0).sum(-1) * factors.kernel
        ok_TK = ~is_identity_TK if ok_TK is None else ok_TK & ~is_identity_TK
        ids_TK = xp.where(is_identity_TK, _spread(ids_TK, spec.num_experts, xp), ids_TK)
    load_E = _count(ids_TK, ok_TK, spec.num_experts, xp) if count else None
    slots_TK = _replica(plan, ids_TK, first_row, tables, xp)
    load_P = _count(slots_TK, ok_TK, placement.num_slots, xp) if count else None
    ids_TJ, weights_TJ, ok_TJ = _append_shared(plan, slots_TK, weights_TK, ok_TK, valid_T, shared_gate_T, home_T, xp)
    if ok_TJ is not None:
        ids_TJ, weights_TJ = mark_invalid(plan.send.pad, ids_TJ, weights_TJ, ok_TJ, plan.send.num_slots, xp)
    ids_TJ = _cast(ids_TJ, plan.send.id_dtype, xp)
    if xp is not numpy and plan.send.weight_dtype != "float32":  # numpy's is the definition, in float64
        weights_TJ = _cast(weights_TJ, plan.send.weight_dtype, xp)
    return Routed(
        ids_TJ=ids_TJ, weights_TJ=weights_TJ, valid_T=valid_T, identity_T=identity_T,
        shared_gate_T=shared_gate_T if plan.num_shared == 0 else None, load_E=load_E, load_P=load_P,
        logical_TK=logical_TK, chosen_TK=chosen_TK,
    )  # fmt: skip


def _count(ids_TK: Array, ok_TK: Array, size: int, xp: ModuleType) -> Array:
    """Rows per id, valid ones only; int64."""
    live_TK = xp.ones_like(ids_TK) if ok_TK is None else ok_TK
    counts = xp.bincount(ids_TK.reshape(-1), xp.asarray(live_TK, dtype=xp.float64).reshape(-1), size)
    return xp.asarray(counts, dtype=xp.int64)


def _cast(values_TJ: Array, dtype: str, xp: ModuleType) -> Array:
    wanted = getattr(xp, dtype)
    return values_TJ if values_TJ.dtype == wanted else xp.asarray(values_TJ, dtype=wanted)


def _spread(ids_TK: Array, size: int, xp: ModuleType) -> Array:
    """Legal ids of ids' shape, (row * K + k) % size: K distinct ones a row, no id more often than it must be."""
    num_rows, width = ids_TK.shape
    return xp.arange(num_rows * width, dtype=xp.int64, device=ids_TK.device).reshape(num_rows, width) % size


def _replica(plan: Plan, ids_TK: Array, first_row: int, tables: Tables | None, xp: ModuleType) -> Array:
    """slot = replicas[e, (row + e) % count[e]]: the same on every rank that knows the row's global number."""
    placement = plan.placement
    if tables is None:
        if placement.is_identity:
            return ids_TK
        replicas = xp.asarray(placement.replicas_EX, device=ids_TK.device)
        tables = Tables(replicas, xp.asarray(placement.count_E, device=ids_TK.device))
    rows_T1 = xp.arange(len(ids_TK), dtype=xp.int64, device=ids_TK.device)[:, None] + first_row
    which_TK = (rows_T1 + ids_TK) % tables.count_E[ids_TK]
    return tables.replicas_EX[ids_TK, which_TK]


def _append_shared(
    plan: Plan, slots_TK: Array, weights_TK: Array, ok_TK: Array, valid_T: Array, shared_gate_T: Array, home_T: Array,
    xp: ModuleType,
) -> tuple[Array, Array, Array]:  # fmt: skip
    """Append S shared slots after the replica map and number all slots as the plan's layout does."""
    per_rank, num_shared = plan.placement.slots_per_rank, plan.num_shared
    if num_shared == 0:
        return slots_TK, weights_TK, ok_TK
    num_rows = slots_TK.shape[0]
    j_TS = xp.broadcast_to(
        xp.arange(num_shared, dtype=xp.int64, device=slots_TK.device)[None, :], (num_rows, num_shared)
    )
    if plan.shared_layout is SharedLayout.PER_RANK:
        slots_TK = slots_TK + slots_TK // per_rank * num_shared
        home_T1 = xp.zeros_like(slots_TK[:, :1]) if home_T is None else home_T[:, None]
        shared_TS = home_T1 * (per_rank + num_shared) + per_rank + j_TS
    else:
        shared_TS = plan.placement.num_slots + j_TS
    gate_T1 = xp.ones_like(weights_TK[:, :1]) if shared_gate_T is None else shared_gate_T.reshape(num_rows, 1)
    shared_weights_TS = xp.broadcast_to(gate_T1 * plan.scales.factors.shared, (num_rows, num_shared))
    if ok_TK is not None:
        row_ok_T1 = xp.ones_like(ok_TK[:, :1]) if valid_T is None else valid_T[:, None]
        ok_TK = xp.concatenate([ok_TK, xp.broadcast_to(row_ok_T1, (num_rows, num_shared))], -1)
    ids_TJ = xp.concatenate([slots_TK, shared_TS], -1)
    return ids_TJ, xp.concatenate([weights_TK, shared_weights_TS], -1), ok_TK


def mark_invalid(
    pad: Pad, ids_TJ: Array, weights_TJ: Array, ok_TJ: Array, num_slots: int, xp: ModuleType
) -> tuple[Array, Array]:
    """Make invalid slots look as the reader of the edge wants them; their weight is 0 in every case.

    Drop: the dropping id. Sentinel: num_slots. ZeroWeight: legal ids spread as (row * J + j) % num_slots, because
    piling them on slot 0 would overload its rank.
    """
    weights_TJ = xp.where(ok_TJ, weights_TJ, 0.0)
    if isinstance(pad, Drop):
        return xp.where(ok_TJ, ids_TJ, pad.value), weights_TJ
    if isinstance(pad, Sentinel):
        return xp.where(ok_TJ, ids_TJ, num_slots), weights_TJ
    return xp.where(ok_TJ, ids_TJ, _spread(ids_TJ, num_slots, xp)), weights_TJ


def is_invalid(pad: Pad, ids_TJ: Array, weights_TJ: Array, num_slots: int) -> Array:
    """The slots that `pad` marks as invalid on an edge with ids 0..num_slots-1."""
    if isinstance(pad, Drop):
        return ids_TJ == pad.value
    if isinstance(pad, Sentinel):
        return ids_TJ == num_slots
    return weights_TJ == 0


def to_local(
    plan: Plan, ids_TJ: Array, weights_TJ: Array, *, rank: int, home_T: Array = None, xp: ModuleType = numpy
) -> tuple[Array, Array]:
    """The second edge for an exchange that shows a rank every slot: global ids to this rank's, the rest marked invalid.

    A tail shared slot belongs to every rank that computes it: its row's home only, or all where the plan replicates it.
    """
    width, routed = plan.slots_per_rank, plan.placement.slots_per_rank
    ids_TJ = xp.asarray(ids_TJ, dtype=xp.int64)
    ok_TJ = ~is_invalid(plan.send.pad, ids_TJ, weights_TJ, plan.send.num_slots)
    if plan.shared_layout is SharedLayout.GLOBAL_TAIL:
        tail_TJ = ids_TJ - plan.placement.num_slots
        is_shared_TJ = tail_TJ >= 0
        local_TJ = xp.where(is_shared_TJ, routed + tail_TJ, ids_TJ - rank * routed)
        mine_TJ = (local_TJ >= 0) & (local_TJ < routed)
        home_T1 = xp.zeros_like(ids_TJ[:, :1]) if home_T is None else home_T[:, None]
        here_TJ = is_shared_TJ & (home_T1 == rank) if plan.drops_shared_off_home else is_shared_TJ
        mine_TJ = xp.where(is_shared_TJ, here_TJ, mine_TJ)
    else:
        local_TJ = ids_TJ - rank * width
        mine_TJ = (local_TJ >= 0) & (local_TJ < width)
    local_TJ, weights_TJ = mark_invalid(plan.receive.pad, local_TJ, weights_TJ, ok_TJ & mine_TJ, width, xp)
    return _cast(local_TJ, plan.receive.id_dtype, xp), weights_TJ


def decode(plan: Plan, routed: Routed) -> "numpy.ndarray[Any, numpy.dtype[numpy.float64]]":
    """C[T, E+Z(+S)] that `routed` will realise through the plan's kernel, copies and last multiply; numpy float64.

    C[t, e] = b * n * sum of weights of slots holding e;  C[t, E+Z+s] = b * m * weight of shared slot s (unfused: one).
    The identity coefficient stands in column E (their sum: identity experts cannot be told apart by what they compute).
    Padded rows are read as the others, so a live one shows; only an unfused shared expert, whose output there nobody
    reads, counts 0. Raises ValueError on an id outside the edge's space: at weight 0 too where that is the only mark.
    """
    spec, scales = plan.spec, plan.scales
    ids_TJ = numpy.asarray(routed.ids_TJ).astype(numpy.int64)
    weights_TJ = numpy.asarray(routed.weights_TJ).astype(numpy.float64)
    invalid_TJ = is_invalid(plan.send.pad, ids_TJ, weights_TJ, plan.send.num_slots)
    outside_TJ = (ids_TJ < 0) | (ids_TJ >= plan.send.num_slots)
    if not isinstance(plan.send.pad, ZeroWeight):
        outside_TJ &= ~invalid_TJ
    if outside_TJ.any():
        raise ValueError(f"ids {sorted(set(ids_TJ[outside_TJ].tolist()))[:8]} are outside 0..{plan.send.num_slots - 1}")
    expert_TJ, shared_TJ = _owner(plan, numpy.where(invalid_TJ, 0, ids_TJ))
    num_columns = spec.num_choices + max(plan.num_shared, int(spec.shared is not None))
    c = numpy.zeros((len(ids_TJ), num_columns))
    rows_TJ = numpy.broadcast_to(numpy.arange(len(ids_TJ))[:, None], ids_TJ.shape)
    later = float(scales.later)
    is_shared_TJ = shared_TJ >= 0
    column_TJ = numpy.where(is_shared_TJ, spec.num_choices + shared_TJ, expert_TJ)
    copies_TJ = numpy.where(is_shared_TJ, float(scales.shared_copies), float(scales.routed_copies))
    numpy.add.at(c, (rows_TJ, column_TJ), numpy.where(invalid_TJ, 0.0, weights_TJ * copies_TJ * later))
    if routed.identity_T is not None:
        c[:, spec.num_experts] = numpy.asarray(routed.identity_T) * float(scales.finish)
    if spec.shared is not None and plan.num_shared == 0:
        gate = (
            1.0
            if routed.shared_gate_T is None
            else numpy.asarray(routed.shared_gate_T, dtype=numpy.float64).reshape(-1)
        )
        valid = True if routed.valid_T is None else numpy.asarray(routed.valid_T)
        c[:, spec.num_choices] = numpy.where(valid, gate, 0.0) * float(scales.shared)
    return c


def _owner(plan: Plan, ids_TJ: Array) -> tuple[Array, Array]:
    """Inverse of the layout: (logical expert or 0, shared slot or -1) of every id."""
    routed, num_shared, num_slots = plan.placement.slots_per_rank, plan.num_shared, plan.placement.num_slots
    if plan.shared_layout is SharedLayout.PER_RANK:
        rank_TJ, local_TJ = ids_TJ // (routed + num_shared), ids_TJ % (routed + num_shared)
        shared_TJ = numpy.where(local_TJ >= routed, local_TJ - routed, -1)
        slot_TJ = rank_TJ * routed + numpy.minimum(local_TJ, routed - 1)
    else:
        shared_TJ = numpy.where(ids_TJ >= num_slots, ids_TJ - num_slots, -1)
        slot_TJ = numpy.minimum(ids_TJ, num_slots - 1)
    return numpy.where(shared_TJ >= 0, 0, plan.placement.logical_P[slot_TJ]), shared_TJ
