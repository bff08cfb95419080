"""Placement: slot tables are surjections onto the experts, replica tables their inverse, by enumeration."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from truegate.errors import Refused
from truegate.law.placement import from_slots, place

GRID = [
    (num_experts, ranks, redundant)
    for num_experts in (1, 2, 7, 8, 60, 64, 256)
    for ranks in (1, 2, 3, 8, 16, 32, 64)
    for redundant in (0, 1, 2, 4, 8, 32, 64)
    if (num_experts + redundant) % ranks == 0
]


def slots_of(placement, expert):
    return np.flatnonzero(placement.logical_P == expert).tolist()


@pytest.mark.parametrize(("num_experts", "ranks", "redundant"), GRID)
def test_replica_tables_invert_the_slot_table(num_experts, ranks, redundant):
    p = place(num_experts=num_experts, num_ranks=ranks, num_redundant=redundant)
    assert (p.num_slots, p.num_ranks, p.slots_per_rank * ranks) == (num_experts + redundant, ranks, p.num_slots)
    assert p.logical_P.dtype == p.replicas_EX.dtype == p.count_E.dtype == np.int64
    assert p.count_E.sum() == p.num_slots
    assert p.count_E.max() - p.count_E.min() <= 1
    for expert in range(num_experts):
        slots, count = slots_of(p, expert), p.count_E[expert]
        row = p.replicas_EX[expert].tolist()
        assert row[:count] == slots
        assert row == [slots[i % count] for i in range(len(row))]  # filled by repetition: any column is a replica
    assert p.has_replicas == (redundant > 0)
    if redundant == 0:
        assert p.logical_P.tolist() == list(range(num_experts))
        assert p.is_identity
    else:
        assert not p.is_identity


@pytest.mark.parametrize(("num_experts", "ranks", "redundant"), [g for g in GRID if 0 < g[2] <= g[0] and g[1] > 1])
def test_an_expert_and_its_replica_sit_on_different_ranks(num_experts, ranks, redundant):
    p = place(num_experts=num_experts, num_ranks=ranks, num_redundant=redundant)
    for expert in range(redundant):
        homes = [slot // p.slots_per_rank for slot in slots_of(p, expert)]
        assert len(set(homes)) == len(homes) == 2, f"expert {expert} twice on one rank: {homes}"


@given(data=st.data(), num_experts=st.integers(1, 24), ranks=st.integers(1, 6), extra=st.integers(0, 12))
@settings(max_examples=60, deadline=None)
def test_any_surjective_slot_table_is_a_placement(data, num_experts, ranks, extra):
    total = -(-(num_experts + extra) // ranks) * ranks
    rest = data.draw(
        st.lists(st.integers(0, num_experts - 1), min_size=total - num_experts, max_size=total - num_experts)
    )
    table = np.array(data.draw(st.permutations([*range(num_experts), *rest])))
    p = from_slots(table, num_experts=num_experts, num_ranks=ranks)
    assert [p.replicas_EX[e, : p.count_E[e]].tolist() for e in range(num_experts)] == [
        slots_of(p, e) for e in range(num_experts)
    ]
    assert (p.logical_P[p.replicas_EX] == np.arange(num_experts)[:, None]).all()
    assert p.is_identity == (table.tolist() == list(range(num_experts)))


@given(num_experts=st.integers(1, 300), ranks=st.integers(1, 64), redundant=st.integers(0, 64))
@settings(max_examples=60, deadline=None)
def test_slots_that_do_not_divide_over_ranks_are_refused(num_experts, ranks, redundant):
    if (num_experts + redundant) % ranks:
        with pytest.raises(Refused, match=r"--redundant .* --ep"):
            place(num_experts=num_experts, num_ranks=ranks, num_redundant=redundant)
    else:
        place(num_experts=num_experts, num_ranks=ranks, num_redundant=redundant)


@pytest.mark.parametrize(
    ("table", "num_experts", "ranks", "says"),
    [
        ([0, 1, 1], 3, 1, r"no slot for experts \[2\]"),
        ([0, 1, 3], 3, 1, "outside 0..2"),
        ([0, 1, -1], 3, 1, "outside 0..2"),
        ([0, 1, 2], 3, 2, "--ep"),
        ([0, 1, 2], 3, 0, "--ep"),
    ],
)
def test_a_slot_table_that_is_no_placement_is_refused(table, num_experts, ranks, says):
    with pytest.raises(Refused, match=says):
        from_slots(np.array(table), num_experts=num_experts, num_ranks=ranks)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(Refused, match="negative"):
        place(num_experts=8, num_redundant=-1)
    with pytest.raises(Refused, match="--ep"):
        place(num_experts=8, num_ranks=0)
