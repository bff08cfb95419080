"""`select` and `coefficients` against a plain Python reading of the equations, on both array namespaces.

T tokens, E experts (identity experts included), K top-k.
"""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truegate.law.select import coefficients, select
from truegate.law.spec import (
    Denominator,
    Groups,
    GroupScore,
    RoutingSpec,
    Score,
    SelectOn,
    Shared,
    SharedGate,
    WeightAt,
)

INF = float("inf")
GRID = st.integers(-32, 32).map(lambda i: i / 4)  # coarse, so that ties are common


def make(score: Score = Score.SIGMOID, num_experts: int = 8, top_k: int = 2, **axes) -> RoutingSpec:
    return RoutingSpec(
        family="test", num_experts=num_experts, top_k=top_k, score=score, hidden=4, expert_intermediate=4, **axes
    )


@st.composite
def specs(draw) -> RoutingSpec:
    """Any ranked spec: every score, denominator, bias, group rule, and E that is no power of two."""
    score = draw(st.sampled_from(Score))
    select_on = draw(st.sampled_from([SelectOn.SCORES, SelectOn.SCORES, SelectOn.LOGITS]))
    count, size = draw(st.integers(1, 4)), draw(st.integers(2, 5))
    identity = draw(st.sampled_from([0, 0, 1]))
    groups, bias = None, False
    if select_on is SelectOn.SCORES:
        bias = draw(st.booleans())
        if draw(st.booleans()):
            groups = Groups(
                count=count,
                kept=draw(st.integers(1, count)),
                score=draw(st.sampled_from(GroupScore)),
                fill=draw(st.sampled_from([0.0, -INF])),
            )
    reachable = size * (groups.kept if groups else count)
    denominators = [d for d in Denominator if d is not Denominator.SOFTMAX_TOPK or score is Score.SOFTMAX]
    return make(
        score,
        num_experts=count * size - identity,
        num_identity=identity,
        top_k=draw(st.integers(1, reachable)),
        select_on=select_on,
        has_selection_bias=bias,
        groups=groups,
        denominator=draw(st.sampled_from(denominators)),
        eps=draw(st.sampled_from([0.0, 1e-20, 1e-6])),
        routed_scale=draw(st.sampled_from([1.0, 2.5, 0.3])),
    )


@st.composite
def cases(draw, logits=GRID):
    """(spec, x_TE, b_E or None)."""
    spec = draw(specs())
    e = spec.num_choices
    rows = draw(st.lists(st.lists(logits, min_size=e, max_size=e), min_size=1, max_size=4))
    bias = None
    if spec.has_selection_bias:
        grid = st.sampled_from([-2.0, -0.5, 0.0, 0.0, 0.25, 1e4])
        bias = np.array(draw(st.lists(grid, min_size=e, max_size=e)))
    return spec, np.array(rows), bias


def definition(spec: RoutingSpec, x: list[float], b: list[float] | None) -> tuple[list[int], list[float]]:
    """One row by the equations, in Python floats: nothing shared with the code under test."""
    e = range(spec.num_choices)
    if spec.score is Score.SOFTMAX:
        top = max(x)
        total = sum(math.exp(v - top) for v in x)
        s = [math.exp(v - top) / total for v in x]
    elif spec.score is Score.SIGMOID:
        s = [1 / (1 + math.exp(-v)) for v in x]
    else:
        s = [math.sqrt(math.log1p(math.exp(v))) for v in x]
    c = list(x) if spec.select_on is SelectOn.LOGITS else s if b is None else [s[i] + b[i] for i in e]
    if spec.groups is not None:
        size = spec.num_choices // spec.groups.count
        blocks = [sorted(c[g * size : (g + 1) * size], reverse=True) for g in range(spec.groups.count)]
        best = [k[0] if spec.groups.score is GroupScore.MAX else k[0] + k[1] for k in blocks]
        kept = sorted(range(spec.groups.count), key=lambda g: (-best[g], g))[: spec.groups.kept]
        c = [c[i] if i // size in kept else spec.groups.fill for i in e]
        s = c if b is None else s
    ids = sorted(e, key=lambda i: (-c[i], i))[: spec.top_k]
    u = [s[i] for i in ids]
    if spec.denominator is Denominator.SUM:
        u = [v / (sum(u) + spec.eps) for v in u]
    elif spec.denominator is Denominator.SUM_AT_LEAST:
        u = [v / max(sum(u), spec.eps) for v in u]
    elif spec.denominator is Denominator.SOFTMAX_TOPK:
        total = sum(math.exp(x[i] - x[ids[0]]) for i in ids)
        u = [math.exp(x[i] - x[ids[0]]) / total for i in ids]
    return ids, [spec.routed_scale * v for v in u]


def on_torch(spec, x, b, dtype, **more):
    bias = None if b is None else torch.from_numpy(b).to(dtype)
    return select(spec, torch.from_numpy(x).to(dtype), bias_E=bias, xp=torch, **more)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_select_is_the_equations_with_ties_to_the_lowest_id(case):
    spec, x, b = case
    ids_TK, weights_TK = select(spec, x, bias_E=b)
    assert ids_TK.dtype == np.int64
    assert weights_TK.dtype == np.float64
    for row, ids, weights in zip(x, ids_TK, weights_TK, strict=True):
        want_ids, want = definition(spec, row.tolist(), None if b is None else b.tolist())
        assert ids.tolist() == want_ids
        np.testing.assert_allclose(weights, want, rtol=1e-12)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(cases())
def test_numpy_and_torch_agree_in_float64(case):
    spec, x, b = case
    truth, twin = select(spec, x, bias_E=b), on_torch(spec, x, b, torch.float64)
    assert twin.ids_TK.dtype == torch.int64
    assert twin.weights_TK.dtype == torch.float64
    np.testing.assert_array_equal(truth.ids_TK, twin.ids_TK.numpy())
    np.testing.assert_allclose(truth.weights_TK, twin.weights_TK.numpy(), rtol=1e-12)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(cases(logits=st.floats(allow_nan=True, allow_infinity=True, width=32) | st.sampled_from([math.nan, 1e4, -1e4])))
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_any_logits_give_distinct_legal_ids(case):
    spec, x, b = case
    paths = [select(spec, x, bias_E=b).ids_TK]
    paths += [on_torch(spec, x, b, dtype).ids_TK.numpy() for dtype in (torch.float32, torch.float64)]
    for ids_TK in paths:
        assert ids_TK.shape == (len(x), spec.top_k)
        assert ((ids_TK >= 0) & (ids_TK < spec.num_choices)).all()
        assert all(len(set(row)) == spec.top_k for row in ids_TK.tolist())


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_a_row_never_depends_on_the_others(case):
    spec, x, b = case
    poisoned = np.concatenate([np.full_like(x[:1], np.nan), x, np.full_like(x[:1], 1e30)])
    for run in (lambda rows: select(spec, rows, bias_E=b), lambda rows: on_torch(spec, rows, b, torch.float64)):
        alone, among = run(x), run(poisoned)
        np.testing.assert_array_equal(np.asarray(alone.ids_TK), np.asarray(among.ids_TK)[1:-1])
        np.testing.assert_array_equal(np.asarray(alone.weights_TK), np.asarray(among.weights_TK)[1:-1])


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_unscaled_weights_times_the_scale_are_the_scaled_ones(case):
    spec, x, b = case
    raw = select(spec, x, bias_E=b, scaled=False).weights_TK
    np.testing.assert_array_equal(raw * spec.routed_scale, select(spec, x, bias_E=b).weights_TK)


def test_torch_on_float32_stays_float32_and_a_wider_bias_widens():
    spec = make(has_selection_bias=True)
    x, b = torch.randn(3, 8), torch.zeros(8)
    assert select(spec, x, bias_E=b, xp=torch).weights_TK.dtype == torch.float32
    exact = torch.tensor([[0.0] * 8]), torch.tensor([0.0] * 7 + [1e-12], dtype=torch.float64)
    assert select(spec, exact[0], bias_E=exact[1], xp=torch).ids_TK[0, 0] == 7


@pytest.mark.parametrize("num_experts", [8, 60, 384])
def test_torch_breaks_ties_by_lowest_id_where_topk_would_not(num_experts):
    x = torch.zeros(5, num_experts)
    x[1, num_experts // 2 :] = 1.0
    x[2, -3:] = torch.tensor([1.0, 2.0, 1.0])
    ids = select(make(num_experts=num_experts, top_k=4), x, xp=torch).ids_TK.tolist()
    half = num_experts // 2
    assert ids[0] == [0, 1, 2, 3]
    assert ids[1] == [half, half + 1, half + 2, half + 3]
    assert ids[2] == [num_experts - 2, num_experts - 3, num_experts - 1, 0]


def test_logits_rank_where_scores_saturate_into_ties():
    x = np.array([[50.0, 60.0, 55.0, 0.0]])
    by_score = make(num_experts=4, top_k=1)
    by_logit = make(num_experts=4, top_k=1, select_on=SelectOn.LOGITS)
    assert select(by_score, x).ids_TK.tolist() == [[0]]
    assert select(by_logit, x).ids_TK.tolist() == [[1]]


def test_near_ties_that_flip_in_bf16_are_ranked_by_their_float32_values():
    x = torch.tensor([[1.0, 1.002, 1.001, 0.0]])
    assert x.bfloat16()[0, :3].unique().numel() == 1
    assert select(make(num_experts=4, top_k=2), x, xp=torch).ids_TK.tolist() == [[1, 2]]


def test_negative_biased_scores_are_never_beaten_by_a_dropped_group():
    groups = Groups(count=2, kept=1, score=GroupScore.TOP2_SUM, fill=-INF)
    spec = make(num_experts=4, top_k=2, groups=groups, has_selection_bias=True)
    b = np.full(4, -2.0)
    assert select(spec, np.array([[0.0, 0.0, 1.0, 1.0]]), bias_E=b).ids_TK.tolist() == [[2, 3]]


@pytest.mark.parametrize("xp", [np, torch])
def test_a_dropped_expert_chosen_for_its_fill_weighs_the_fill(xp):
    groups = Groups(count=3, kept=2, score=GroupScore.MAX, fill=0.0)
    spec = make(Score.SOFTMAX, 6, 3, groups=groups)
    x = xp.asarray([[-2.0, -2.0, 0.0, -800.0, -1.0, -800.0]], dtype=xp.float64)  # group 0 is dropped; exp(-800) is 0
    ids, weights = select(spec, x, xp=xp)
    assert ids.tolist() == [[2, 4, 0]]
    assert weights[0, 2] == 0.0


def test_one_huge_bias_leaves_the_weights_exact():
    spec = make(num_experts=4, top_k=2, has_selection_bias=True, denominator=Denominator.SUM, eps=1e-20)
    x = np.array([[-20.0, 1.0, 0.0, 0.5]])
    ids, weights = select(spec, x, bias_E=np.array([1e8, 0.0, 0.0, 0.0]))
    s = 1 / (1 + np.exp(-x[0]))
    assert ids.tolist() == [[0, 1]]
    np.testing.assert_allclose(weights[0], s[[0, 1]] / (s[0] + s[1]), rtol=1e-14)


def test_group_score_top2_sum_counts_equal_bests_twice():
    groups = Groups(count=2, kept=1, score=GroupScore.TOP2_SUM, fill=-INF)
    spec = make(num_experts=6, top_k=1, groups=groups)
    x = np.array([[2.0, 2.0, -9.0, 2.5, 0.0, -9.0]])  # 2 + 2 beats 2.5 + 0, though 2.5 is the largest
    assert select(spec, x).ids_TK.tolist() == [[0]]
    assert select(spec, torch.from_numpy(x), xp=torch).ids_TK.tolist() == [[0]]


def test_hash_takes_the_tables_row_in_its_order_and_weighs_by_score():
    table = np.array([[3, 1], [0, 2]], dtype=np.int32)
    spec = make(Score.SQRT_SOFTPLUS, 4, 2, select_on=SelectOn.HASH, denominator=Denominator.SUM, eps=1e-20)
    x = np.array([[0.0, 1.0, 2.0, 3.0], [3.0, 2.0, 1.0, 0.0]])
    tokens = np.array([1, 0])
    ids, weights = select(spec, x, token_ids_T=tokens, table_VK=table)
    s = np.sqrt(np.log1p(np.exp(x)))
    assert ids.dtype == np.int64
    assert ids.tolist() == [[0, 2], [3, 1]]
    u = np.array([s[0, [0, 2]], s[1, [3, 1]]])
    np.testing.assert_allclose(weights, u / u.sum(-1, keepdims=True), rtol=1e-14)
    twin = select(
        spec, torch.from_numpy(x), token_ids_T=torch.from_numpy(tokens), table_VK=torch.from_numpy(table), xp=torch
    )
    assert twin.ids_TK.tolist() == ids.tolist()
    np.testing.assert_allclose(twin.weights_TK.numpy(), weights, rtol=1e-14)


@pytest.mark.parametrize("xp", [np, torch])
def test_no_rows_is_a_selection_of_no_rows(xp):
    groups = Groups(count=2, kept=1, score=GroupScore.TOP2_SUM, fill=-INF)
    spec = make(groups=groups, has_selection_bias=True, denominator=Denominator.SUM)
    ids, weights = select(spec, xp.zeros((0, 8), dtype=xp.float32), bias_E=xp.zeros(8, dtype=xp.float32), xp=xp)
    assert tuple(ids.shape) == tuple(weights.shape) == (0, 2)


def test_inputs_that_the_spec_does_not_ask_for_are_refused():
    x = np.zeros((1, 8))
    with pytest.raises(TypeError, match="bfloat16"):
        select(make(), torch.zeros(1, 8, dtype=torch.bfloat16), xp=torch)
    with pytest.raises(TypeError, match="float16"):
        select(make(), x.astype(np.float16))
    with pytest.raises(ValueError, match=r"\(1, 8\), must be \(T, 9\)"):
        select(make(num_experts=9), x)
    with pytest.raises(ValueError, match="bias_E"):
        select(make(has_selection_bias=True), x)
    with pytest.raises(ValueError, match="bias_E"):
        select(make(), x, bias_E=np.zeros(8))
    with pytest.raises(ValueError, match="table_VK"):
        select(make(select_on=SelectOn.HASH), x)
    with pytest.raises(ValueError, match="table_VK"):
        select(make(), x, table_VK=np.zeros((4, 2), int))
    with pytest.raises(ValueError, match="shared_gate_T"):
        coefficients(make(shared=Shared(intermediate=4, gate=SharedGate.SIGMOID)), x)
    with pytest.raises(ValueError, match="shared_gate_T"):
        coefficients(make(shared=Shared(intermediate=4)), x, shared_gate_T=np.ones(1))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(cases())
def test_coefficients_scatter_the_selection_and_nothing_else(case):
    spec, x, b = case
    c = coefficients(spec, x.astype(np.float32), bias_E=b)
    ids_TK, weights_TK = select(spec, x, bias_E=b)
    assert c.dtype == np.float64
    assert c.shape == x.shape
    np.testing.assert_allclose(np.take_along_axis(c, ids_TK, -1), weights_TK, rtol=1e-15)
    np.put_along_axis(c, ids_TK, 0.0, -1)
    assert not c.any()


def test_renormalised_coefficients_sum_to_the_scale_and_the_shared_column_to_its_gate():
    gate = np.array([0.25, 1.0])
    spec = make(denominator=Denominator.SUM, routed_scale=2.5, shared=Shared(intermediate=8, gate=SharedGate.SIGMOID))
    c = coefficients(spec, np.random.default_rng(0).normal(size=(2, 8)), shared_gate_T=gate)
    np.testing.assert_allclose(c[:, :8].sum(-1), 2.5, rtol=1e-15)
    np.testing.assert_array_equal(c[:, 8], gate)


def test_input_weights_stand_in_c_in_and_leave_c_out_a_choice():
    spec = make(select_on=SelectOn.LOGITS, top_k=1, weight_at=WeightAt.INPUT, shared=Shared(intermediate=4))
    x = np.array([[0.0, 3.0] + [-1.0] * 6])
    out, into = coefficients(spec, x), coefficients(spec, x, at=WeightAt.INPUT)
    assert out.tolist() == [[0, 1, 0, 0, 0, 0, 0, 0, 1]]
    np.testing.assert_allclose(into, [[1, 1 / (1 + math.exp(-3)), 1, 1, 1, 1, 1, 1, 1]], rtol=1e-15)


def test_a_hash_row_naming_an_expert_twice_adds_its_weights():
    spec = make(num_experts=3, top_k=2, select_on=SelectOn.HASH, denominator=Denominator.SUM)
    c = coefficients(spec, np.zeros((1, 3)), token_ids_T=np.array([0]), table_VK=np.array([[2, 2]]))
    assert c.tolist() == [[0.0, 0.0, 1.0]]
