"""A live route kernel broken one constant or one input at a time, inside a layer of kernels; for CPU and GPU alike.

What is not here makes no wrong number in such a layer. PAD, DROP, EDGE_SLOTS: its experts skip every mark, and weigh 0
what is not marked; LAYOUT and PER_RANK: on one rank both layouts are one. `CONSTANTS_OF_THE_EDGE` has those, for a
comparison with the twin. E, K, S and the powers of two are sizes of buffers too; PRECISE says where it runs.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from truegate.kernels.route import Route
from truegate.law.order import Tables
from truegate.law.placement import from_slots
from truegate.law.plan import Choices, Plan
from truegate.law.spec import Denominator, Groups, GroupScore, RoutingSpec, Score, Shared, SharedGate
from truegate.moe.backends import Backends, choose, compile_layer
from truegate.moe.layer import MoELayer

INF = float("inf")
V3 = RoutingSpec(
    family="v3", num_experts=16, top_k=3, score=Score.SIGMOID, has_selection_bias=True, denominator=Denominator.SUM,
    groups=Groups(count=4, kept=2, score=GroupScore.TOP2_SUM, fill=-INF), eps=0.25, routed_scale=2.5,
    shared=Shared(intermediate=16), hidden=32, expert_intermediate=8,
)  # fmt: skip
SOFTMAX = replace(
    V3, family="softmax", score=Score.SOFTMAX, has_selection_bias=False, groups=None, denominator=Denominator.NONE,
    eps=0.0, shared=Shared(intermediate=16, gate=SharedGate.SIGMOID),
)  # fmt: skip
IDENTITY = replace(SOFTMAX, family="identity", num_experts=12, num_identity=4, shared=None)
REPLICAS = replace(SOFTMAX, family="replicas", shared=None)
SPECS = {"v3": V3, "softmax": SOFTMAX, "identity": IDENTITY, "replicas": REPLICAS}

# (layer, constant, what it is broken to)
CONSTANTS: list[tuple[str, str, Any]] = [
    ("v3", "FACTOR", 1.0), ("v3", "SHARED", 0.4), ("v3", "EPS", 0.0), ("v3", "NUM_SLOTS", 15),
    ("v3", "DENOMINATOR", "none"), ("v3", "DENOMINATOR", "sum_at_least"), ("v3", "SCORE", "sqrt_softplus"),
    ("v3", "SELECT", "logits"), ("v3", "GROUPED", False), ("v3", "TOP2", False), ("v3", "KEPT", 1),
    ("v3", "FILL_KEY", 0),  # fill 0.0: better than the kept groups' where the bias makes them negative
    ("v3", "G", 3), ("v3", "M", 3), ("softmax", "FACTOR", 1.0), ("softmax", "SHARED", 0.4),
    ("softmax", "DENOMINATOR", "sum"), ("softmax", "DENOMINATOR", "softmax_topk"), ("softmax", "SCORE", "sigmoid"),
    ("identity", "KERNEL", 2.5), ("identity", "NUM_EXPERTS", 11),
]  # fmt: skip
CONSTANTS_OF_THE_EDGE: list[tuple[str, str, Any]] = [
    ("fused sentinel", "PAD", "drop"), ("fused sentinel", "EDGE_SLOTS", 256), ("fused zero", "PAD", "drop"),
    ("fused zero", "EDGE_SLOTS", 16), ("fused drop -7", "PAD", "zero_weight"), ("fused drop -7", "DROP", -1),
    ("four ranks", "LAYOUT", "global_tail"), ("four ranks", "PER_RANK", 41),
]  # fmt: skip


def _stale(tables: Tables) -> Tables:
    """Yesterday's placement."""
    return Tables(tables.replicas_EX.roll(1, 0), tables.count_E.roll(1, 0))


def _second_replicas_moved(tables: Tables) -> Tables:
    """Only what follows an expert's first replica is another's."""
    moved = torch.cat([tables.replicas_EX[:, :1], tables.replicas_EX[:, 1:].roll(1, 0)], 1)
    return Tables(moved, tables.count_E)


# (layer, name, the changed inputs of a call)
INPUTS: list[tuple[str, str, Callable[[dict], dict]]] = [
    ("v3", "bias of zeros", lambda given: {"bias_E": torch.zeros_like(given["bias_E"])}),
    ("v3", "bias of the neighbour", lambda given: {"bias_E": given["bias_E"].roll(1)}),
    ("v3", "no valid", lambda _: {"valid_T": None}),
    ("softmax", "no valid", lambda _: {"valid_T": None}),
    ("softmax", "open gate", lambda given: {"shared_gate_T": torch.ones_like(given["shared_gate_T"])}),
    ("replicas", "stale tables", lambda given: {"tables": _stale(given["tables"])}),
    ("replicas", "second replicas moved", lambda given: {"tables": _second_replicas_moved(given["tables"])}),
    ("replicas", "no tables", lambda _: {"tables": None}),
    ("replicas", "no valid", lambda _: {"valid_T": None}),
]


class Misled:
    """A live route kernel that is handed other inputs than those it is called with."""

    def __init__(self, route: Route, change: Callable[[dict], dict]):
        self.route, self.change = route, change

    def __call__(self, logits_TE, **given):
        return self.route(logits_TE, **{**given, **self.change(given)})


def plan_of(name: str, backends: Backends) -> Plan:
    """On one rank, shared experts fused, replicas shuffled."""
    spec = SPECS[name]
    slots = np.arange(spec.num_experts + 7 * (name == "replicas")) % spec.num_experts
    if name == "replicas":
        slots = np.random.default_rng(0).permutation(slots)
    placement = from_slots(slots, num_experts=spec.num_experts, num_ranks=1)
    return compile_layer(spec, backends, placement, Choices(fuse_shared=spec.shared is not None))


def layer_of(name: str, *, experts: str = "triton", device: str = "cpu") -> MoELayer:
    """A layer in fp32 whose router is the kernel, and its experts too unless others are named."""
    backends = choose(experts=experts, router="triton")
    return MoELayer(plan_of(name, backends), backends, dtype=torch.float32, device=device)


def break_constant(route: Route, constant: str, value: Any) -> None:
    assert type(route.constants[constant]) is type(value)
    assert route.constants[constant] != value
    route.constants[constant] = value


def mislead(layer: MoELayer, change: Callable[[dict], dict]) -> None:
    assert isinstance(layer.router.route, Route)
    layer.router.route = Misled(layer.router.route, change)
