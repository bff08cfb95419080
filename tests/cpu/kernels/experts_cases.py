"""Layers and rows that the expert kernels are swept over, with everything poisoned that must not be read."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace

import torch

from truegate.kernels.experts import experts
from truegate.kernels.ref.experts import experts as twin
from truegate.kernels.sizes import Sizes
from truegate.kernels.tuning import Config, Product
from truegate.law.spec import Activation

NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Layer:
    """Weights of P experts; those in `unused` hold NaN."""

    gate_up: torch.Tensor
    down: torch.Tensor
    biases: tuple[torch.Tensor | None, torch.Tensor | None]
    sizes: Sizes
    unused: tuple[int, ...]


def layer(num_slots, hidden, width, *, dtype=torch.float32, device="cpu", activation=Activation.SILU, at_input=False,
          bias=False, unused=(), sparse=False) -> Layer:  # fmt: skip
    g = torch.Generator().manual_seed(num_slots)

    def draw(*shape):
        made = torch.randn(shape, generator=g) / shape[-1] ** 0.5
        made[list(unused)] = NAN
        return made.to(dtype).to(device)

    clamp = 0.7 if activation is Activation.SWIGLU_CLAMP else None
    sizes = Sizes(
        num_slots=num_slots, hidden=hidden, width=width, activation=activation, clamp=clamp, at_input=at_input,
        sparse=sparse,
    )  # fmt: skip
    gate_up, down = draw(num_slots, 2 * width, hidden), draw(num_slots, hidden, width)
    biases = (draw(num_slots, 2 * width), draw(num_slots, hidden)) if bias else (None, None)
    return Layer(gate_up=gate_up, down=down, biases=biases, sizes=sizes, unused=tuple(unused))


def rows(one: Layer, num_rows: int, slots: int, *, seed: int = 0, drop: float = 0.25, crowd: bool = False):
    """(x_TD, ids_TJ int32, weights_TJ): dropped slots have weight NaN, rows with nothing left hold NaN."""
    g = torch.Generator().manual_seed(seed)
    used = [e for e in range(one.sizes.num_slots) if e not in one.unused]
    pick = torch.rand((num_rows, len(used)), generator=g).argsort(1)[:, :slots] if slots <= len(used) else None
    if pick is None or crowd:
        pick = torch.randint(1 if crowd else len(used), (num_rows, slots), generator=g)
    ids = torch.tensor(used, dtype=torch.int32)[pick]
    dropped = torch.rand(ids.shape, generator=g) < drop
    invalid = torch.where(torch.rand(ids.shape, generator=g) < 0.5, -1, one.sizes.num_slots + 3)
    ids = torch.where(dropped, invalid, ids).to(torch.int32)
    weights = torch.where(dropped, NAN, torch.rand(ids.shape, generator=g))
    x = torch.randn((num_rows, one.sizes.hidden), generator=g)
    x[dropped.all(1)] = NAN
    device = one.down.device
    return x.to(one.down.dtype).to(device), ids.to(device), weights.to(device)


def reference(one: Layer, x, ids, weights) -> torch.Tensor:
    """y_TD in fp64 through the twins."""
    return twin(x, one.gate_up, one.down, one.biases, ids, weights, one.sizes)


@contextmanager
def poisoned_memory() -> Iterator[None]:
    """What torch allocates begins as NaN, integers as their largest, so that whoever reads it unwritten shows."""
    fills, deterministic = torch.utils.deterministic, torch.are_deterministic_algorithms_enabled()
    before, warns = fills.fill_uninitialized_memory, torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    fills.fill_uninitialized_memory = True
    try:
        yield
    finally:
        fills.fill_uninitialized_memory = before
        torch.use_deterministic_algorithms(deterministic, warn_only=warns)


def run(one: Layer, config: Config, x, ids, weights, *, poison: bool = True) -> torch.Tensor:
    """y_TD. Without poison nothing stands between the launches, as when serving: on a GPU they then overlap."""
    with poisoned_memory() if poison else nullcontext():
        return experts(x, one.gate_up, one.down, one.biases, ids, weights, one.sizes, config)


def tiling(path, block_m, n, k, *, stages=2, warps=4, **more) -> Config:
    product = Product(block_n=n, block_k=k, stages=stages, warps=warps, **more)
    return Config(path=path, block_m=block_m, gate_up=product, down=replace(product, block_n=n))


def worst(got: torch.Tensor, want: torch.Tensor) -> float:
    """Largest difference over the largest value; inf where got is not finite."""
    if not torch.isfinite(got).all():
        return float("inf")
    return float((got.double() - want).abs().max() / want.abs().max().clip(1e-30)) if got.numel() else 0.0
