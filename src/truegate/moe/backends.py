"""Backends by name: the module's name is the flag's value, and its `CONTRACT` is what the plan compiles.

Invariant: nothing here imports torch; a folder's files are the whole list, there is no registry. A module that runs has
`build` too, and one of experts `values` (what a call holds) and `turns` (row counts where its kernels' form changes).
"""

import importlib
import pkgutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType

from truegate.errors import UserError
from truegate.law.placement import Placement
from truegate.law.plan import Choices, Plan, compile_plan
from truegate.law.spec import RoutingSpec

PARTS = ("routers", "experts", "dispatch")


def names(part: str) -> list[str]:
    """The backends of one folder: routers, experts or dispatch."""
    package = importlib.import_module(f"truegate.moe.{part}")
    return sorted(m.name for m in pkgutil.iter_modules(package.__path__) if not m.name.startswith("_"))


def load(part: str, name: str) -> ModuleType:
    """The module of a backend, or a UserError that lists the folder."""
    if name not in names(part):
        flag = {"routers": "--router", "experts": "--experts", "dispatch": "--dispatch"}[part]
        raise UserError(f"{flag} {name}: unknown; there are {', '.join(names(part))}")
    return importlib.import_module(f"truegate.moe.{part}.{name}")


@dataclass(frozen=True, kw_only=True)
class Backends:
    """The three modules of a layer; router is None for experts that take logits."""

    router: ModuleType | None
    experts: ModuleType
    dispatch: ModuleType


def choose(*, experts: str = "torch", dispatch: str = "local", router: str | None = None) -> Backends:
    """Load the named backends; a router not named is the one that goes with the experts, else torch."""
    kernel = load("experts", experts)
    exchange = load("dispatch", dispatch)
    if router is None:
        if kernel.CONTRACT.takes_logits:
            return Backends(router=None, experts=kernel, dispatch=exchange)
        router = router_of(experts)
    return Backends(router=load("routers", router), experts=kernel, dispatch=exchange)


def router_of(experts: str) -> str:
    """The router whose contract goes with these experts, else torch's, which computes everything."""
    return next((name for name in names("routers") if load("routers", name).CONTRACT.goes_with == experts), "torch")


def not_capturable(layers: Iterable[Backends]) -> str | None:
    """The backends of these layers that a CUDA graph cannot hold (they bring numbers to the host), or None."""
    parts = dict.fromkeys(part for layer in layers for part in (layer.experts.CONTRACT, layer.dispatch.CONTRACT))
    return ", ".join(f"--{type(p).__name__.lower()} {p.name}" for p in parts if not p.graph_safe) or None


def compile_layer(spec: RoutingSpec, backends: Backends, placement: Placement, choices: Choices) -> Plan:
    """The plan of one layer through these backends."""
    return compile_plan(
        spec,
        router=None if backends.router is None else backends.router.CONTRACT,
        experts=backends.experts.CONTRACT,
        dispatch=backends.dispatch.CONTRACT,
        placement=placement,
        choices=choices,
    )


def status_lines(parts: Sequence[str] = PARTS) -> list[str]:
    """One line a backend: has it run here, or is its contract our reading of an interface."""
    lines = []
    for part in parts:
        for name in names(part):
            contract = load(part, name).CONTRACT
            state = "runs here" if contract.status == "runs" else f"contract only: {contract.why_not}"
            lines.append(f"{part} {name}: {state}")
    return lines
