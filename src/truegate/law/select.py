"""Router logits to expert ids and weights: every routing function as values of `RoutingSpec`'s axes, written once.

Invariant: ids[T, :] are K distinct ids in 0..E+Z-1 for any logits at all, NaN and infinities included (hash layers
return their table's row). `xp` is numpy (float64: the truth) or torch, handed in by the caller: no torch import here.
T tokens, E routed experts, Z identity experts (a suffix E means E + Z), K top-k, G groups of M experts, V vocabulary.
"""

from types import ModuleType
from typing import Any, NamedTuple

import numpy

from truegate.law.spec import Denominator, Groups, GroupScore, RoutingSpec, Score, SelectOn, SharedGate, WeightAt

Array = Any  # numpy.ndarray or torch.Tensor, as `xp` says


class Selection(NamedTuple):
    """The chosen experts of each token, best first, and their weights in the logits' dtype."""

    ids_TK: Array
    weights_TK: Array


def select(
    spec: RoutingSpec,
    logits_TE: Array,
    *,
    bias_E: Array = None,
    token_ids_T: Array = None,
    table_VK: Array = None,
    xp: ModuleType = numpy,
    scaled: bool = True,
) -> Selection:
    """Choose K experts a token and weigh them; every routing function is this one, read with the spec's axes.

        s = score(x)                       softmax over E, or elementwise sigmoid or sqrt(log(1 + exp x))
        c = s | s + b | x                  what is ranked: scores, scores plus selection bias, or logits
        c[e] = fill                        unless e's group is among the `kept` best by max, or by sum of the two best c
        ids = K largest c                  descending; equal c: lowest id first; NaN last
            | table[token id]              hash layers, in the table's order
        u = s[ids]                         never s + b; without a bias c[ids], which differs only where fill was chosen
        w = u | u / (sum u + eps) | u / max(sum u, eps) | softmax(x[ids])
        w = r * w                          unless `scaled` is False

    logits_TE is float32 or float64 and that is the dtype computed in (a wider bias widens it; nothing narrows it).
    bias_E goes with a selection bias, table_VK and token_ids_T with selection by hash. ids_TK is int64. A row with NaN
    logits still gets K distinct legal ids; its weights are what the equation gives, NaN wherever a NaN entered it.
    """
    _check(spec, logits_TE, xp, bias_E, token_ids_T, table_VK)
    ops = _ops(xp)
    scores_TE = None
    if spec.select_on is SelectOn.SCORES:
        scores_TE = _score(spec.score, logits_TE, ops)
        choice_TE = scores_TE if bias_E is None else scores_TE + bias_E
        if spec.groups is not None and spec.groups.kept < spec.groups.count:
            choice_TE = _keep_best_groups(spec.groups, choice_TE, ops)
        if bias_E is None:
            scores_TE = choice_TE  # a dropped expert, chosen where its fill ties a kept zero, weighs the fill
        ids_TK = ops.top(choice_TE, spec.top_k)
    elif spec.select_on is SelectOn.LOGITS:
        ids_TK = ops.top(logits_TE, spec.top_k)
    else:
        ids_TK = ops.int64(table_VK[token_ids_T])
    weights_TK = _weigh(spec, logits_TE, scores_TE, ids_TK, ops)
    if scaled and spec.routed_scale != 1.0:
        weights_TK = weights_TK * spec.routed_scale
    return Selection(ids_TK, weights_TK)


def coefficients(
    spec: RoutingSpec,
    logits_TE: Array,
    *,
    bias_E: Array = None,
    token_ids_T: Array = None,
    table_VK: Array = None,
    shared_gate_T: Array = None,
    at: WeightAt = WeightAt.OUTPUT,
) -> "numpy.ndarray[Any, numpy.dtype[numpy.float64]]":
    """The layer's coefficient matrix by definition: y_T = sum_e C_out[T,e] F_e(C_in[T,e] x_T) + C_out[T,E+Z] G(x_T).

    `at` OUTPUT gives C_out, INPUT gives C_in: w stands in the one that the spec's `weight_at` names; the other holds 1
    at the chosen experts. C_out is 0 and C_in is 1 at every other expert. The last column is the shared expert G, there
    only when the spec has one: g_T = shared_gate_T (already the sigmoid, in 0..1) for a gated one, else 1; in C_in
    always 1. numpy float64 [T, E+Z(+1)]; inputs are widened to float64.
    """
    logits_TE = numpy.asarray(logits_TE, dtype=numpy.float64)
    bias = None if bias_E is None else numpy.asarray(bias_E, dtype=numpy.float64)
    ids_TK, weights_TK = select(spec, logits_TE, bias_E=bias, token_ids_T=token_ids_T, table_VK=table_VK)
    num_tokens = logits_TE.shape[0]
    here = at is spec.weight_at
    background = 0.0 if at is WeightAt.OUTPUT else 1.0
    c = numpy.full((num_tokens, spec.num_choices + (spec.shared is not None)), background)
    rows_TK = numpy.broadcast_to(numpy.arange(num_tokens)[:, None], ids_TK.shape)
    c[rows_TK, ids_TK] = 0.0 if here else 1.0
    if here:
        numpy.add.at(c, (rows_TK, ids_TK), weights_TK)  # a hash table's row may name an expert twice
    if spec.shared is not None and at is WeightAt.OUTPUT:
        gated = spec.shared.gate is SharedGate.SIGMOID
        if gated != (shared_gate_T is not None):
            raise ValueError(f"{spec.family}: shared_gate_T goes with a sigmoid-gated shared expert, and only with it")
        c[:, -1] = numpy.asarray(shared_gate_T, dtype=numpy.float64).reshape(num_tokens) if gated else 1.0
    return c


def _check(spec: RoutingSpec, logits_TE: Array, xp: ModuleType, bias_E: Array, tokens: Array, table: Array) -> None:
    """Refuse logits in few bits or of the wrong width, and inputs the spec does not ask for."""
    if logits_TE.dtype not in (xp.float32, xp.float64):
        raise TypeError(f"router logits are {logits_TE.dtype}, must be float32 or float64: fewer bits reorder experts")
    if logits_TE.ndim != 2 or logits_TE.shape[1] != spec.num_choices:
        raise ValueError(f"{spec.family}: logits are {tuple(logits_TE.shape)}, must be (T, {spec.num_choices})")
    if (bias_E is not None) != spec.has_selection_bias:
        raise ValueError(f"{spec.family}: bias_E goes with has_selection_bias, which is {spec.has_selection_bias}")
    hashed = spec.select_on is SelectOn.HASH
    if (tokens is not None) != hashed or (table is not None) != hashed:
        raise ValueError(f"{spec.family}: token_ids_T and table_VK go with select_on hash, not {spec.select_on.value}")


def _score(score: Score, x: Array, ops: "_Ops") -> Array:
    """s = score(x), elementwise or along the last axis, in x's dtype."""
    if score is Score.SOFTMAX:
        return ops.softmax(x)
    if score is Score.SIGMOID:
        return ops.sigmoid(x)
    xp = ops.xp
    return xp.sqrt(x.clip(0) + xp.log1p(xp.exp(-xp.abs(x))))  # log(1 + exp x) without overflow


def _keep_best_groups(groups: Groups, choice_TE: Array, ops: "_Ops") -> Array:
    """c[e] stays where the rank of e's group is below `kept` (equal group scores: lowest group first), else is fill."""
    num_tokens, num_choices = choice_TE.shape
    choice_TGM = choice_TE.reshape(num_tokens, groups.count, num_choices // groups.count)
    best_TG = ops.top2_sum(choice_TGM) if groups.score is GroupScore.TOP2_SUM else ops.xp.amax(choice_TGM, axis=-1)
    dropped_TG = ops.ascending(ops.ascending(-best_TG)) >= groups.kept  # the second argsort turns an order into ranks
    return ops.fill(choice_TGM, dropped_TG[:, :, None], groups.fill).reshape(num_tokens, num_choices)


def _weigh(spec: RoutingSpec, logits_TE: Array, scores_TE: Array, ids_TK: Array, ops: "_Ops") -> Array:
    """w_TK from the chosen scores and the denominator; elementwise scores are computed for the chosen experts only."""
    if spec.denominator is Denominator.SOFTMAX_TOPK:
        return ops.softmax(ops.take(logits_TE, ids_TK))
    if scores_TE is not None:
        chosen_TK = ops.take(scores_TE, ids_TK)
    elif spec.score is Score.SOFTMAX:
        chosen_TK = ops.take(ops.softmax(logits_TE), ids_TK)
    else:
        chosen_TK = _score(spec.score, ops.take(logits_TE, ids_TK), ops)
    if spec.denominator is Denominator.NONE:
        return chosen_TK
    total_T1 = chosen_TK.sum(axis=-1, keepdims=True)
    if spec.denominator is Denominator.SUM_AT_LEAST:
        return chosen_TK / total_T1.clip(spec.eps)
    with numpy.errstate(invalid="ignore"):  # 0/0 is NaN, as in the model, where eps is 0 and every score underflows
        return chosen_TK / (total_T1 + spec.eps if spec.eps else total_T1)


class _NumpyOps:
    """The operations that numpy and torch spell differently; numpy's side is the definition."""

    xp = numpy

    def ascending(self, c: Array) -> Array:
        return c.argsort(axis=-1, kind="stable")

    def top(self, c_TE: Array, k: int) -> Array:
        return self.ascending(-c_TE)[:, :k]

    def take(self, a_TE: Array, ids_TK: Array) -> Array:
        return a_TE[numpy.arange(len(a_TE))[:, None], ids_TK]

    def int64(self, ids: Array) -> Array:
        return ids.astype(numpy.int64)

    def fill(self, a: Array, mask: Array, value: float) -> Array:
        return numpy.where(mask, value, a)

    def top2_sum(self, c_TGM: Array) -> Array:
        return numpy.sort(c_TGM, axis=-1)[..., -2:].sum(axis=-1)

    def softmax(self, x: Array) -> Array:
        with numpy.errstate(invalid="ignore"):  # an infinite logit gives NaN, as torch gives it
            z = numpy.exp(x - numpy.max(x, axis=-1, keepdims=True))
        return z / z.sum(axis=-1, keepdims=True)

    def sigmoid(self, x: Array) -> Array:
        with numpy.errstate(over="ignore"):  # exp(710) is inf and its reciprocal the right 0
            return 1 / (1 + numpy.exp(-x))


class _TorchOps:
    """The same operations on torch tensors, any device; deterministic, though torch.topk is not on ties."""

    def __init__(self, torch: ModuleType) -> None:
        self.xp = torch

    def ascending(self, c: Array) -> Array:
        return self.xp.argsort(c, dim=-1, stable=True)

    def top(self, c_TE: Array, k: int) -> Array:
        # On a CPU a stable sort of 64 x 256 costs 10 times a topk, and they agree where the K + 1 best strictly fall.
        # Ties and NaN (for which > is false) take the sort; so does a GPU, where looking would stall the host.
        if c_TE.device.type == "cpu":
            best, ids = self.xp.topk(c_TE, min(k + 1, c_TE.shape[1]), dim=-1)
            if (best[:, :-1] > best[:, 1:]).all():
                return ids[:, :k]
        return self.ascending(-c_TE)[:, :k]

    def take(self, a_TE: Array, ids_TK: Array) -> Array:
        return a_TE.gather(-1, ids_TK)

    def int64(self, ids: Array) -> Array:
        return ids.to(self.xp.int64)

    def fill(self, a: Array, mask: Array, value: float) -> Array:
        return a.masked_fill(mask, value)

    def top2_sum(self, c_TGM: Array) -> Array:
        return self.xp.topk(c_TGM, 2, dim=-1).values.sum(dim=-1)

    def softmax(self, x: Array) -> Array:
        return self.xp.softmax(x, dim=-1)

    def sigmoid(self, x: Array) -> Array:
        return self.xp.sigmoid(x)


_Ops = _NumpyOps | _TorchOps
_NUMPY = _NumpyOps()


def _ops(xp: ModuleType) -> _Ops:
    return _NUMPY if xp is numpy else _TorchOps(xp)
