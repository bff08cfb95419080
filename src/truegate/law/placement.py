"""Placement: which physical slot holds which logical expert, and which replicas a logical expert has.

Invariant: every logical expert has a slot, every slot holds one expert, `replicas_EX` names only slots that hold it.
E logical experts, P physical slots (P = E + redundant), R ranks, L = P / R slots a rank, X replica-table width.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from truegate.errors import Refused

Ints = NDArray[np.int64]
MOST_REDUNDANT = 65_536


@dataclass(frozen=True, kw_only=True)
class Placement:
    """logical_P[p] is the expert in slot p; replicas_EX[e, i % count_E[e]] are its slots, the row filled by repetition.

    A rank holds slots rank * L .. rank * L + L - 1. The tables are int64.
    """

    num_ranks: int
    logical_P: Ints
    replicas_EX: Ints
    count_E: Ints

    @property
    def num_experts(self) -> int:
        return len(self.count_E)

    @property
    def num_slots(self) -> int:
        return len(self.logical_P)

    @property
    def slots_per_rank(self) -> int:
        return self.num_slots // self.num_ranks

    @property
    def has_replicas(self) -> bool:
        return self.num_slots > self.num_experts

    @cached_property
    def is_identity(self) -> bool:
        """Expert e is in slot e and nowhere else."""
        return not self.has_replicas and bool((self.logical_P == np.arange(self.num_slots)).all())


def place(*, num_experts: int, num_ranks: int = 1, num_redundant: int = 0) -> Placement:
    """Expert e in slot e, then replicas of experts 0, 1, ... in the redundant slots, all dealt over the ranks.

    With redundant slots, slots are dealt to ranks round-robin: an expert and its replica sit on different ranks.
    """
    if num_redundant < 0:
        raise Refused(f"redundant experts: {num_redundant} is negative; use 0 or more")
    if num_redundant > MOST_REDUNDANT:
        raise Refused(f"redundant experts: {num_redundant} is more than {MOST_REDUNDANT}; use fewer (--redundant)")
    num_slots = num_experts + num_redundant
    if num_ranks < 1 or num_slots % num_ranks:
        raise Refused(
            f"{num_slots} expert slots ({num_experts} experts + {num_redundant} redundant) do not divide over "
            f"{num_ranks} ranks; change --redundant so that the sum is a multiple of --ep, or change --ep"
        )
    logical_P = np.arange(num_slots, dtype=np.int64) % num_experts
    if num_redundant:
        per_rank = num_slots // num_ranks
        logical_P = _apart(logical_P, num_ranks, per_rank)
    return from_slots(logical_P, num_experts=num_experts, num_ranks=num_ranks)


def _apart(logical_P: Ints, num_ranks: int, per_rank: int) -> Ints:
    """Deal slot i to rank i % R, shifted by one each round of E where E % R is 0: replicas sit on other ranks."""
    dealt: list[list[int]] = [[] for _ in range(num_ranks)]
    num_experts = int(logical_P.max()) + 1
    for i, expert in enumerate(logical_P.tolist()):
        first = (i + i // num_experts * (num_experts % num_ranks == 0)) % num_ranks
        rank = next(r % num_ranks for r in range(first, first + num_ranks) if len(dealt[r % num_ranks]) < per_rank)
        dealt[rank].append(expert)
    return np.array([e for slots in dealt for e in slots], dtype=np.int64)


def from_slots(logical_P: Ints, *, num_experts: int, num_ranks: int) -> Placement:
    """Build the replica tables from the slot table, refusing a table that loses an expert."""
    logical_P = np.asarray(logical_P, dtype=np.int64)
    if num_ranks < 1 or len(logical_P) % num_ranks:
        raise Refused(
            f"{len(logical_P)} expert slots do not divide over {num_ranks} ranks; give each rank the same number (--ep)"
        )
    if len(logical_P) and (logical_P.min() < 0 or logical_P.max() >= num_experts):
        raise Refused(f"the placement names experts outside 0..{num_experts - 1}; every slot must hold a routed expert")
    count_E = np.bincount(logical_P, minlength=num_experts).astype(np.int64)
    if (count_E == 0).any():
        lost = np.flatnonzero(count_E == 0).tolist()
        raise Refused(f"the placement holds no slot for experts {lost}; every expert needs one")
    order = np.argsort(logical_P, kind="stable").astype(np.int64)
    starts_E = np.cumsum(count_E) - count_E
    index_EX = np.arange(int(count_E.max()))[None, :] % count_E[:, None]
    return Placement(
        num_ranks=num_ranks, logical_P=logical_P, replicas_EX=order[starts_E[:, None] + index_EX], count_E=count_E
    )
