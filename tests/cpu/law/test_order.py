"""The order law: ids and weights laid out by a plan, read back, and executed rank by rank, are the definition's matrix.

T rows, E experts, P = E + redundant slots, R ranks, L = P / R, S fused shared slots, J = K + S. valid_T marks padding.
"""

from dataclasses import replace
from functools import cache

import law_cases as cases
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from truegate.law.contract import Drop, Sentinel, SharedLayout, ZeroWeight
from truegate.law.order import Routed, Tables, decode, realise, to_local
from truegate.law.placement import from_slots, place
from truegate.law.plan import Choices, Ranks, compile_plan
from truegate.law.select import coefficients, select
from truegate.law.spec import Shared, SharedGate, WeightAt

EXACT = {"rtol": 0, "atol": 1e-12}
POISON_IDS = np.array([-99999, -1, 2**40, 10**6, 255, 16, -(2**60)])
POISON_WEIGHTS = np.array([np.nan, 1e30, -np.inf, np.inf, -1e30])


def inputs(spec, num_rows, seed=0):
    """Logits, bias, hash table and shared gate for `spec`, as keyword arguments of select and coefficients."""
    rng = np.random.default_rng(seed)
    hashed = spec.select_on == "hash"
    table = np.stack([rng.permutation(spec.num_experts)[: spec.top_k] for _ in range(11)])
    more = {
        "bias_E": 0.3 * rng.normal(size=spec.num_choices) if spec.has_selection_bias else None,
        "token_ids_T": rng.integers(0, 11, num_rows) if hashed else None,
        "table_VK": table if hashed else None,
    }
    gated = spec.shared is not None and spec.shared.gate is SharedGate.SIGMOID
    return rng.normal(size=(num_rows, spec.num_choices)), more, rng.random(num_rows) if gated else None


def emitted_factor(case):
    folds = case.experts.folds if case.router is None else case.router.folds
    return float(case.spec.scale) if case.spec.kind in folds else 1.0


def definition(case, logits, more, gate):
    """C[T, E+Z+S] in decode's columns: identity experts summed in column E, the shared expert once a slot."""
    spec, num_shared = case.spec, case.plan.num_shared
    out = coefficients(spec, logits, **more, shared_gate_T=gate, at=WeightAt.OUTPUT)
    if spec.weight_at is WeightAt.INPUT:  # decode gives the weight wherever it multiplies
        routed = coefficients(spec, logits, **more, shared_gate_T=gate, at=WeightAt.INPUT)
        chosen = out[:, : spec.num_choices] != 0
        out[:, : spec.num_choices] = np.where(chosen, routed[:, : spec.num_choices], 0.0)
    if spec.num_identity:
        out[:, spec.num_experts] = out[:, spec.num_experts : spec.num_choices].sum(-1)
        out[:, spec.num_experts + 1 : spec.num_choices] = 0
    shared = out[:, spec.num_choices :]
    return np.concatenate([out[:, : spec.num_choices], *[shared] * max(num_shared, 1)], -1)


MASKS = {
    "unmasked": None, "all": np.ones(6, bool), "none": np.zeros(6, bool), "mid": np.array([1, 0, 1, 0, 0, 1], bool),
}  # fmt: skip


def distinct(compiled):
    """One case of each set of facts that the order law reads."""
    seen = {}
    for c in compiled:
        p = c.plan
        facts = (
            c.spec.family, emitted_factor(c), p.scales, p.shared_layout, p.num_shared, p.drops_shared_off_home,
            p.placement.num_slots, p.placement.num_ranks, p.send, p.receive.pad, p.receive.num_slots,
        )  # fmt: skip
        seen.setdefault((*facts[:-3], p.send.pad, p.send.num_slots, p.send.id_dtype, *facts[-2:]), c)
    return list(seen.values())


@cache
def all_cases():
    compiled, _ = cases.everything()
    return distinct(compiled)


@cache
def chosen(spec):
    """(logits, inputs, gate, ids, normalised weights) of six rows, home rank 0..5 modulo R."""
    logits, more, gate = inputs(spec, 6)
    return logits, more, gate, *select(spec, logits, **more, scaled=False)


def test_decode_of_realise_is_the_definition_for_every_combination_that_compiles():
    assert len(all_cases()) > 1000
    for i, case in enumerate(all_cases()):
        logits, more, gate, ids, weights = chosen(case.spec)
        want = definition(case, logits, more, gate)
        emitted = weights * emitted_factor(case)
        home = np.arange(6) % case.plan.placement.num_ranks
        for name in ("unmasked", ("mid", "none", "mid", "all")[i % 4]):
            valid = MASKS[name]
            routed = realise(case.plan, ids, emitted, valid_T=valid, shared_gate_T=gate, home_T=home)
            c = want if valid is None else np.where(valid[:, None], want, 0.0)
            np.testing.assert_allclose(decode(case.plan, routed), c, **EXACT, err_msg=f"{name}: {case.label}")


def execute(case, routed, gate, home, valid):
    """C by running the plan: basis experts on every rank, each local slot weighed and multiplied, outputs summed.

    Knows ids only as (rank, local slot) -> what was loaded there; knows nothing of how ids were computed.
    """
    plan, spec = case.plan, case.spec
    num_rows, per_rank = len(routed.ids_TJ), plan.placement.slots_per_rank
    columns = spec.num_choices + max(plan.num_shared, int(spec.shared is not None))
    kernel = float(spec.scale) if case.experts.multiplies == "routed_scale" else 1.0
    y = np.zeros((num_rows, columns))
    computed = np.zeros((num_rows, columns), int)
    for rank in range(plan.placement.num_ranks):
        loaded = plan.placement.logical_P[rank * per_rank : (rank + 1) * per_rank].tolist()
        loaded += [spec.num_choices + j for j in range(plan.num_shared)]
        ids, weights = to_local(plan, routed.ids_TJ, routed.weights_TJ, rank=rank, home_T=home)
        assert np.dtype(ids.dtype) == np.dtype(plan.receive.id_dtype)
        for t, j in np.ndindex(*ids.shape):
            slot = int(ids[t, j])
            if slot == {Drop(-1): -1, Sentinel(): len(loaded)}.get(plan.receive.pad):
                continue
            assert 0 <= slot < len(loaded), f"rank {rank} is given slot {slot}: {case.label}"
            y[t, loaded[slot]] += weights[t, j] * kernel
            computed[t, loaded[slot]] += weights[t, j] != 0
    if routed.identity_T is not None:
        y[:, spec.num_experts] += routed.identity_T
    beside = None
    if plan.beside is not None:
        beside = np.zeros_like(y)
        beside[:, -1] = 1.0 if gate is None else gate
        if valid is not None:
            beside[~valid] = 0  # nobody reads it
    out = plan.finish(y, beside, reduce=lambda x, group: x)
    return out, computed


def test_executing_the_plan_rank_by_rank_gives_the_definition_and_computes_each_slot_once():
    for i, case in enumerate(all_cases()):
        if i % 7 and case.plan.placement.num_ranks in (1, 2):
            continue  # the same few layouts many times over
        logits, more, gate, ids, weights = chosen(case.spec)
        valid = [MASKS["unmasked"], MASKS["mid"], MASKS["none"]][i % 3]
        home = np.arange(6)[::-1] % case.plan.placement.num_ranks
        routed = realise(
            case.plan, ids, weights * emitted_factor(case), valid_T=valid, shared_gate_T=gate, home_T=home
        )  # fmt: skip
        got, computed = execute(case, routed, gate, home, valid)
        want = definition(case, logits, more, gate)
        want = want if valid is None else np.where(valid[:, None], want, 0.0)
        np.testing.assert_allclose(got, want, **EXACT, err_msg=case.label)
        copies = np.ones(got.shape[1], int)
        copies[case.spec.num_choices :] = case.plan.scales.shared_copies if case.plan.num_shared else 0
        live = np.ones(6, bool) if valid is None else valid
        times = np.where(want != 0, copies, 0)
        if case.spec.num_identity:
            times[:, case.spec.num_experts] = 0
        assert (computed[live] == times[live]).all(), case.label
        assert not computed[~live].any(), case.label


def test_numpy_and_torch_agree_exactly():
    for case in all_cases()[::13]:
        _, _, gate, ids, weights = chosen(case.spec)
        home = np.arange(6) % case.plan.placement.num_ranks
        for valid in (None, MASKS["mid"]):
            args = (ids, weights * emitted_factor(case))
            more = {"valid_T": valid, "shared_gate_T": gate, "home_T": home}
            a = realise(case.plan, *args, **more, count=True)
            t = {k: None if v is None else torch.tensor(v) for k, v in more.items()}
            b = realise(case.plan, *map(torch.tensor, args), **t, count=True, xp=torch)
            for field in ("ids_TJ", "weights_TJ", "identity_T", "load_E", "load_P", "logical_TK", "chosen_TK"):
                x, y = getattr(a, field), getattr(b, field)
                assert (x is None) == (y is None), field
                if x is not None:
                    assert str(y.dtype) == f"torch.{x.dtype}", field
                    np.testing.assert_array_equal(x, y.numpy(), err_msg=f"{field}: {case.label}")
            for rank in range(case.plan.placement.num_ranks):
                x = to_local(case.plan, a.ids_TJ, a.weights_TJ, rank=rank, home_T=home)
                y = to_local(case.plan, b.ids_TJ, b.weights_TJ, rank=rank, home_T=t["home_T"], xp=torch)
                assert str(y[0].dtype) == f"torch.{x[0].dtype}"
                np.testing.assert_array_equal(x[0], y[0].numpy(), err_msg=case.label)
                np.testing.assert_array_equal(x[1], y[1].numpy(), err_msg=case.label)


# One plan of every layout: enumeration of its id space.
def layout_plan(*, experts=16, ranks=4, redundant=0, num_shared=1, layout="per_rank", replicate=False, scale=2.5):
    shared = Shared(intermediate=num_shared * cases.F) if num_shared else None
    spec = replace(cases.BIASED, num_experts=experts, routed_scale=scale, groups=None, shared=shared)
    dispatch = {"per_rank": "mori", "global_tail": "allgather"}[layout]
    placement = place(num_experts=experts, num_ranks=ranks, num_redundant=redundant)
    choices = Choices(
        ranks=Ranks(dp=ranks, ep=ranks), fuse_shared=num_shared > 0, replicate_shared=replicate and num_shared > 0
    )
    return compile_plan(
        spec, router=cases.load("routers", "torch").CONTRACT, experts=cases.load("experts", "torch").CONTRACT,
        dispatch=cases.load("dispatch", dispatch).CONTRACT, placement=placement, choices=choices,
    )  # fmt: skip


LAYOUTS = [
    {"experts": e, "ranks": r, "redundant": x, "num_shared": s, "layout": layout}
    for e, r, x in (
        (16, 1, 0),
        (16, 4, 0),
        (16, 4, 8),
        (12, 3, 3),
        (16, 16, 0),
        (16, 16, 16),
        (256, 8, 0),
        (256, 8, 32),
    )
    for s in (0, 1, 2, 3, 4)
    for layout in ("per_rank", "global_tail")
]


def one_hot(plan, ids):
    """decode of one slot a row, at weight 1."""
    ids = np.asarray(ids).reshape(-1, 1)
    return decode(plan, Routed(ids_TJ=ids, weights_TJ=np.ones(ids.shape)))


@pytest.mark.parametrize("kwargs", LAYOUTS, ids=lambda k: "-".join(map(str, k.values())))
def test_the_id_space_is_a_bijection_with_slots(kwargs):
    plan = layout_plan(**kwargs)
    p, num_shared, ranks = plan.placement, plan.num_shared, plan.placement.num_ranks
    per_rank = p.num_slots // ranks
    c = one_hot(plan, range(plan.send.num_slots))
    assert ((c != 0).sum(1) == 1).all()  # every id in range is one expert or one shared slot
    owner = c.argmax(1)
    experts = np.arange(plan.spec.num_experts)
    laid = realise(plan, experts[:, None], np.ones((len(experts), 1)), home_T=experts % ranks).ids_TJ
    np.testing.assert_array_equal(owner[laid[:, 0]], experts)  # realise goes the way back
    # the equations of the layout, enumerated slot by slot
    if kwargs["layout"] == "per_rank":
        assert plan.send.num_slots == p.num_slots + num_shared * ranks
        for slot in range(p.num_slots):
            assert owner[slot + slot // per_rank * num_shared] == p.logical_P[slot]
        for rank in range(ranks):
            for j in range(num_shared):
                assert owner[rank * (per_rank + num_shared) + per_rank + j] == plan.spec.num_experts + j
    else:
        assert plan.send.num_slots == p.num_slots + num_shared
        assert owner[: p.num_slots].tolist() == p.logical_P.tolist()
        assert owner[p.num_slots :].tolist() == [plan.spec.num_experts + j for j in range(num_shared)]
    for outside in (-1, plan.send.num_slots, plan.send.num_slots + 5, -99999):
        if plan.send.pad != Drop(outside):
            with pytest.raises(ValueError, match="outside"):
                one_hot(plan, [outside])


@pytest.mark.parametrize("kwargs", LAYOUTS, ids=lambda k: "-".join(map(str, k.values())))
def test_local_slots_of_all_ranks_partition_the_ids(kwargs):
    plan = layout_plan(**kwargs)
    ranks, per_rank, width = plan.placement.num_ranks, plan.placement.slots_per_rank, plan.slots_per_rank
    ids = np.arange(plan.send.num_slots)[:, None]
    home = np.arange(len(ids)) % ranks
    seen = {}
    for rank in range(ranks):
        local, weights = to_local(plan, ids, np.ones(ids.shape), rank=rank, home_T=home)
        for i in np.flatnonzero(weights[:, 0]):
            slot = int(local[i, 0])
            assert 0 <= slot < width
            seen.setdefault(int(i), []).append((rank, slot))
    assert sorted(seen) == list(range(plan.send.num_slots))
    assert all(len(places) == 1 for places in seen.values())  # computed exactly once
    flat = [seen[i][0] for i in range(plan.send.num_slots)]
    if plan.shared_layout is SharedLayout.GLOBAL_TAIL:
        for i in range(plan.placement.num_slots):
            assert flat[i] == (i // per_rank, i % per_rank)
        for j in range(plan.num_shared):
            i = plan.placement.num_slots + j
            assert flat[i] == (home[i], per_rank + j)
    else:
        assert flat == [(rank, slot) for rank in range(ranks) for slot in range(width)]


@pytest.mark.parametrize("num_shared", [1, 3])
def test_a_replicated_tail_slot_is_computed_on_every_rank_at_one_over_ranks(num_shared):
    plan = layout_plan(ranks=4, num_shared=num_shared, layout="global_tail", replicate=True)
    ids = np.array([[5, *range(16, 16 + num_shared)]])
    places = [to_local(plan, ids, np.ones(ids.shape), rank=rank, home_T=np.array([2])) for rank in range(4)]
    assert [(w[0] != 0).astype(int).tolist() for _, w in places] == [
        [int(rank == 1)] + [1] * num_shared for rank in range(4)
    ]
    assert all(local[0, 1:].tolist() == [4 + j for j in range(num_shared)] for local, _ in places)
    assert float(plan.scales.shared) == 0.25


def test_replicas_are_chosen_by_global_row_alike_on_every_rank_and_in_turn():
    plan = layout_plan(ranks=4, redundant=8, num_shared=0)
    ids = np.arange(16)[None, :4].repeat(12, 0)
    whole = realise(plan, ids, np.ones(ids.shape)).ids_TJ
    parts = [realise(plan, ids[i : i + 3], np.ones((3, 4)), first_row=i).ids_TJ for i in range(0, 12, 3)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    for k in range(4):
        slots, counts = np.unique(whole[:, k], return_counts=True)
        assert slots.tolist() == np.flatnonzero(plan.placement.logical_P == k).tolist()
        assert counts.tolist() == [6, 6]


def test_tables_updated_in_place_move_the_ids():
    plan = layout_plan(ranks=4, num_shared=1)
    moved = from_slots(np.roll(np.arange(16), 5), num_experts=16, num_ranks=4)
    ids = np.arange(16)[:, None].repeat(4, 1)
    got = realise(plan, ids, np.ones(ids.shape), tables=Tables(moved.replicas_EX, moved.count_E))
    after = replace(plan, placement=moved)
    np.testing.assert_array_equal(decode(after, got)[:, :16], 4 * 2.5 * np.eye(16))


PAD_PLANS = {
    "drop": ("torch", "local"), "zero": ("aiter", "local"), "sentinel": ("multiplies", "local"),
    "zero-exchange": ("torch", "mori"), "drop-exchange": ("torch", "alltoall"), "gathers": ("aiter", "allgather"),
}  # fmt: skip


def pad_plan(name, spec, *, fuse, placement):
    experts, dispatch = PAD_PLANS[name]
    kernel = cases.MULTIPLIES if experts == "multiplies" else cases.load("experts", experts).CONTRACT
    kernel = replace(kernel, weight_at=frozenset(WeightAt), activations=frozenset([spec.activation]), expert_bias=True)
    ranks = placement.num_ranks
    return compile_plan(
        spec, router=cases.FOLDS_ALL, experts=kernel, dispatch=cases.load("dispatch", dispatch).CONTRACT,
        placement=placement, choices=Choices(ranks=Ranks(dp=ranks, ep=ranks), fuse_shared=fuse),
    )  # fmt: skip


@st.composite
def scenes(draw):
    """A plan over a random placement, a batch with random padding, and its router's choice."""
    name = draw(st.sampled_from(sorted(PAD_PLANS)))
    spec = draw(st.sampled_from([cases.BIASED, cases.PLAIN, cases.GROUPED, cases.GATED, cases.IDENTITY]))
    ranks = 1 if name in ("drop", "zero", "sentinel") else draw(st.sampled_from([2, 4, 8]))
    extra = draw(st.sampled_from([0, 8, 16]))
    rest = draw(st.lists(st.integers(0, 15), min_size=extra, max_size=extra))
    table = np.array(draw(st.permutations([*range(16), *rest])))
    placement = from_slots(table, num_experts=16, num_ranks=ranks)
    plan = pad_plan(name, spec, fuse=spec.shared is not None and draw(st.booleans()), placement=placement)
    num_rows = draw(st.integers(1, 9))
    valid = np.array(draw(st.lists(st.booleans(), min_size=num_rows, max_size=num_rows)))
    seed = draw(st.integers(0, 2**32 - 1))
    return plan, valid, seed


def scene_args(plan, num_rows, seed):
    logits, more, gate = inputs(plan.spec, num_rows, seed)
    ids, weights = select(plan.spec, logits, **more)
    return logits, more, gate, ids, weights, np.arange(num_rows) % plan.placement.num_ranks


@given(scene=scenes())
@settings(max_examples=150, deadline=None)
def test_padding_is_neutral_whatever_padded_rows_hold(scene):
    plan, valid, seed = scene
    _, _, gate, ids, weights, home = scene_args(plan, len(valid), seed)
    clean = realise(plan, ids, weights, valid_T=valid, shared_gate_T=gate, home_T=home, count=True)
    rng = np.random.default_rng(seed)
    dead = ~valid
    ids, weights = ids.copy(), weights.copy()
    ids[dead] = rng.choice(POISON_IDS, ids[dead].shape)
    weights[dead] = rng.choice(POISON_WEIGHTS, weights[dead].shape)
    if gate is not None:
        gate = np.where(valid, gate, np.nan)
    poisoned = realise(plan, ids, weights, valid_T=valid, shared_gate_T=gate, home_T=home, count=True)
    for field in ("ids_TJ", "weights_TJ", "identity_T", "load_E", "load_P"):
        np.testing.assert_array_equal(getattr(poisoned, field), getattr(clean, field), err_msg=field)
    unmasked = realise(plan, *scene_args(plan, len(valid), seed)[3:5], shared_gate_T=gate, home_T=home)
    np.testing.assert_array_equal(poisoned.ids_TJ[valid], unmasked.ids_TJ[valid])
    np.testing.assert_array_equal(poisoned.weights_TJ[valid], unmasked.weights_TJ[valid])
    assert (poisoned.weights_TJ[dead] == 0).all()


@given(scene=scenes())
@settings(max_examples=100, deadline=None)
def test_invalid_slots_look_as_the_reader_of_each_edge_wants(scene):
    plan, valid, seed = scene
    _, _, gate, ids, weights, home = scene_args(plan, len(valid), seed)
    routed = realise(plan, ids, weights, valid_T=valid, shared_gate_T=gate, home_T=home)
    assert str(routed.ids_TJ.dtype) == plan.send.id_dtype
    check_pads(plan.send, routed.ids_TJ[~valid], routed.weights_TJ[~valid])
    for rank in range(plan.placement.num_ranks):
        local, local_weights = to_local(plan, routed.ids_TJ, routed.weights_TJ, rank=rank, home_T=home)
        check_pads(plan.receive, local[~valid], local_weights[~valid])
        check_pads(plan.receive, local[local_weights == 0], local_weights[local_weights == 0])


def check_pads(edge, ids, weights):
    assert (weights == 0).all()
    if isinstance(edge.pad, Drop):
        assert (ids == edge.pad.value).all()
    elif isinstance(edge.pad, Sentinel):
        assert (ids == edge.num_slots).all()
    else:
        assert ((ids >= 0) & (ids < edge.num_slots)).all()


@given(scene=scenes())
@settings(max_examples=100, deadline=None)
def test_padded_rows_are_never_load(scene):
    plan, valid, seed = scene
    _, _, gate, ids, weights, home = scene_args(plan, len(valid), seed)
    routed = realise(plan, ids, weights, valid_T=valid, shared_gate_T=gate, home_T=home, count=True)
    counted = np.bincount(ids[valid].reshape(-1), minlength=plan.spec.num_choices)[: plan.spec.num_experts]
    np.testing.assert_array_equal(routed.load_E, counted)
    np.testing.assert_array_equal(  # each expert's rows are on its own slots
        np.bincount(plan.placement.logical_P, weights=routed.load_P, minlength=16), counted
    )
    assert routed.load_E.dtype == routed.load_P.dtype == np.int64


@pytest.mark.parametrize("num_rows", [1, 7, 64])
def test_zero_weight_pads_are_spread_over_slots(num_rows):
    placement = place(num_experts=16)
    plan = pad_plan("zero", cases.BIASED, fuse=True, placement=placement)
    ids, weights = np.zeros((num_rows, 4), np.int64), np.ones((num_rows, 4))
    routed = realise(plan, ids, weights, valid_T=np.zeros(num_rows, bool))
    assert routed.ids_TJ.tolist() == [[(row * 5 + j) % 17 for j in range(5)] for row in range(num_rows)]
    counts = np.bincount(routed.ids_TJ.reshape(-1), minlength=17)
    assert counts.max() - counts.min() <= 1


def test_a_live_padded_row_shows_when_read_back():
    plan = layout_plan(ranks=1, num_shared=1)
    ids, weights = np.array([[1, 2, 3, 4]]), np.ones((1, 4))
    routed = realise(plan, ids, weights, valid_T=np.array([False]))
    assert not decode(plan, routed).any()
    live = replace(routed, ids_TJ=np.array([[1, 2, 3, 4, 16]]), weights_TJ=np.ones((1, 5)))
    assert decode(plan, live).sum() == 5


def test_an_illegal_id_of_weight_zero_is_an_error_where_weight_zero_is_the_mark():
    plan = pad_plan("zero", cases.PLAIN, fuse=False, placement=place(num_experts=16))
    routed = realise(plan, np.array([[1, 2, 3]]), np.ones((1, 3)), valid_T=np.array([False]))
    with pytest.raises(ValueError, match="outside"):
        decode(plan, replace(routed, ids_TJ=np.array([[1, 2, -1]])))


@pytest.mark.parametrize("spec", [cases.GATED, cases.BIASED, cases.PLAIN], ids=lambda s: s.family)
@pytest.mark.parametrize("fuse", [True, False])
def test_a_shared_gate_is_given_exactly_where_the_definition_has_one(spec, fuse):
    if spec.shared is None and fuse:
        return
    plan = pad_plan("drop", spec, fuse=fuse, placement=place(num_experts=16))
    ids, weights = np.arange(spec.top_k)[None], np.ones((1, spec.top_k))
    wrong = None if spec is cases.GATED else np.array([0.5])
    with pytest.raises(ValueError, match="shared_gate_T"):
        realise(plan, ids, weights, shared_gate_T=wrong)


def test_pads_are_the_three_that_contracts_know():
    compiled, _ = cases.everything()
    assert {type(case.plan.receive.pad) for case in compiled} == {Drop, Sentinel, ZeroWeight}
