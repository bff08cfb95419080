"""Contracts: what a router, an expert kernel or an exchange demands and promises, as data.

Invariant: a contract states facts about one backend; every decision that needs two of them is made in plan.py.
L routed slots a rank, S shared slots, E routed experts, K routed top-k.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from truegate.law.spec import Activation, RoutingSpec, WeightAt


@dataclass(frozen=True)
class Drop:
    """An invalid slot is marked by this id, and whoever reads it skips the slot."""

    value: int = -1

    def __str__(self) -> str:
        return f"Drop({self.value})"


@dataclass(frozen=True)
class Sentinel:
    """An invalid slot carries the id just past the reader's last slot (its sink); nothing is computed for it."""

    def __str__(self) -> str:
        return "Sentinel(num_slots)"


@dataclass(frozen=True)
class ZeroWeight:
    """An invalid slot carries some legal id and weight 0: it is computed and counts for nothing."""

    def __str__(self) -> str:
        return "ZeroWeight(0)"


Pad = Drop | Sentinel | ZeroWeight


class SharedLayout(StrEnum):
    """Where fused shared slots sit in the id space."""

    NONE = "none"
    GLOBAL_TAIL = "global_tail"  # ids P..P+S-1, the same on every rank
    PER_RANK = "per_rank"  # rank r's shared slot j is r * (L + S) + L + j


class Layout(StrEnum):
    """How rows reach the expert kernel."""

    ROWS = "rows"  # one row a token, with its J ids
    BATCHED = "batched"  # one block of rows an expert, with a count


Status = Literal["runs", "interface"]
"""runs: has run in this repository. interface: our reading of somebody's interface; it has not run here."""


@dataclass(frozen=True, kw_only=True)
class Router:
    """From logits to K routed ids and weights."""

    name: str
    status: Status
    source: str
    id_dtype: str
    kinds: frozenset[str] | None = None  # `RoutingSpec.kind`s it computes; None: all
    folds: frozenset[str] = frozenset()  # kinds whose weights it has already multiplied by the routed scale
    goes_with: str | None = None  # the experts whose default router this is
    max_experts: int | None = None  # identity experts included
    max_groups: int | None = None
    max_top_k: int | None = None
    why_not: str | None = None  # why it cannot run here

    def factor_in(self, spec: RoutingSpec) -> bool:
        """Whether the routed scale is already in the weights this router emits for `spec`."""
        return spec.kind in self.folds


@dataclass(frozen=True, kw_only=True)
class Experts:
    """The expert kernel: from rows with local ids and weights to weighted (or raw) expert outputs."""

    name: str
    status: Status
    source: str
    id_dtype: str
    weight_dtype: str = "float32"
    accepts: tuple[Pad, ...]  # what an invalid slot may look like, best first
    takes_logits: bool = False  # routes inside the kernel: no exchange can come before it
    folds: frozenset[str] = frozenset()  # for kernels that take logits: kinds they compute and scale themselves
    multiplies: Literal["one", "routed_scale"] = "one"  # factor on the output that cannot be switched off
    weighs: Literal["always", "optional", "never"] = "optional"  # whether the kernel multiplies by the weights it gets
    weight_at: frozenset[WeightAt] = frozenset({WeightAt.OUTPUT})
    shared_layouts: frozenset[SharedLayout] = frozenset({SharedLayout.NONE})
    layouts: frozenset[Layout] = frozenset({Layout.ROWS})
    activations: frozenset[Activation] = frozenset({Activation.SILU})
    expert_bias: bool = False
    formats: frozenset[str] = frozenset({"bf16"})
    max_top_k: int | None = None
    max_slots: int | None = None  # per rank
    max_tokens: int | None = None
    alignment: int = 1  # F per shard must be a multiple
    graph_safe: bool = True
    why_not: str | None = None


@dataclass(frozen=True, kw_only=True)
class Dispatch:
    """The exchange: carries rows to the ranks that hold their experts, and results back."""

    name: str
    status: Status
    source: str
    id_dtype: str | None  # None: whatever the experts take (nothing is sent)
    accepts: (
        tuple[Pad, ...] | None
    )  # what padded rows may look like going in, best first; None: whatever the experts take
    emits: Pad | None  # what it marks slots with that belong to another rank; None: it emits none
    weights: Literal["carried", "at_combine"]  # carried to the kernel, or kept home and multiplied at combine
    layout: Layout = Layout.ROWS
    shared_layouts: frozenset[SharedLayout] = frozenset({SharedLayout.NONE})
    spans_ranks: bool = True  # False: experts must all be here
    gathers_rows: bool = False  # every rank sees every row: replicas must be agreed on, tail slots are replicated
    payload: frozenset[str] = frozenset({"bf16"})
    combine_dtype: str = "bf16"
    max_tokens_per_rank: int | None = None
    max_top_k: int | None = None
    hidden_sizes: frozenset[int] | None = None  # sizes it is built for; None: any
    graph_safe: bool = True
    why_not: str | None = None
