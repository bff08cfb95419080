"""By how much a router row's choice is decided, under any spec.

P rows, E experts, K top-k.
"""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from truegate.canary.definition import Matrix
from truegate.law.select import select
from truegate.law.spec import GroupScore, RoutingSpec, Score, SelectOn


def groups_of(spec: RoutingSpec) -> tuple[int, int]:
    """(count, kept) of the groups that limit the choice; (1, 1) without."""
    if spec.groups is None or spec.groups.kept == spec.groups.count:
        return 1, 1
    return spec.groups.count, spec.groups.kept


def reachable(spec: RoutingSpec) -> int:
    """Experts that one row can choose from."""
    count, kept = groups_of(spec)
    return kept * (spec.num_experts // count)


def margin(spec: RoutingSpec, bias: Matrix | None, rows_PE: Matrix) -> Matrix:
    """By how much each row's choice is decided: the least gap at the last chosen expert and at the last kept group."""
    scores = select(replace(spec, top_k=spec.num_experts, groups=None, routed_scale=1.0), rows_PE, bias_E=bias)
    choice = np.empty_like(rows_PE)
    if spec.select_on is SelectOn.LOGITS or spec.score is Score.SOFTMAX:
        choice = rows_PE * 0.25  # softmax: a gap of 1/16 between logits is 6 % between scores
    else:
        np.put_along_axis(choice, scores.ids_TK, _scores(spec, rows_PE, scores.ids_TK), axis=1)
        choice = choice + (0 if bias is None else bias)
    gaps = np.full(len(rows_PE), np.inf)
    count, kept = groups_of(spec)
    if count > 1:
        by_group = np.sort(choice.reshape(len(rows_PE), count, -1), axis=2)
        if spec.score is Score.SOFTMAX:
            by_group = np.exp(4 * (by_group - by_group.max()))
        groups = spec.groups
        top = (
            by_group[:, :, -1] if groups is None or groups.score is GroupScore.MAX else by_group[:, :, -2:].sum(axis=2)
        )
        ranked = -np.sort(-top, axis=1)
        gap = ranked[:, kept - 1] - ranked[:, kept]
        gaps = gap if spec.score is not Score.SOFTMAX else gap / ranked[:, kept - 1]
        keep = top >= ranked[:, kept - 1 : kept]
        choice = np.where(np.repeat(keep, spec.num_experts // count, axis=1), choice, -np.inf)
    ranked = -np.sort(-choice, axis=1)
    after = ranked[:, spec.top_k] if spec.top_k < spec.num_experts else -np.inf
    with np.errstate(invalid="ignore"):
        return np.minimum(gaps, ranked[:, spec.top_k - 1] - after)


def _scores(spec: RoutingSpec, rows: Matrix, ids: NDArray[np.int64]) -> Matrix:
    chosen = np.take_along_axis(rows, ids, axis=1)
    if spec.score is Score.SIGMOID:
        return 1 / (1 + np.exp(-chosen))
    return np.sqrt(np.log1p(np.exp(chosen)))
