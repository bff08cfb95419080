"""What a MoE layer runs as where nothing else is asked for: the one place, for the engine and for `truegate check`.

Invariant: one EngineConfig on one machine means one device, and with one folder one dtype, set of backends and choices.
"""

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import torch

from truegate.config import DTYPES, EngineConfig, resolve
from truegate.errors import Refused, UserError
from truegate.law.families import main_specs_of
from truegate.law.keys import read_config
from truegate.law.placement import place
from truegate.law.plan import Choices
from truegate.moe import backends


def claim(config: EngineConfig) -> EngineConfig:
    """The config resolved on this machine; a GPU that it numbers becomes the current one."""
    config = resolve(config, cuda=torch.cuda.is_available())
    if config.device != "cpu":
        if find_spec("triton") is None:
            raise UserError(
                "device cuda needs triton, which torch's CUDA builds bring on Linux: install it, or use cpu"
            )
        index = torch.device(config.device).index
        if index is not None:
            torch.cuda.set_device(index)  # kernels and graphs go to the current one
    return config


def fill(config: EngineConfig, folder: Path) -> EngineConfig:
    """A resolved config with dtype, experts, dispatch, fuse_shared and scale_at filled for the model in `folder`.

    A router that is None stays so: `backends.choose` takes the one that goes with the experts.
    """
    config = replace(
        config,
        dtype=config.dtype or _stated_dtype(folder),
        experts=config.experts or ("torch" if config.device == "cpu" else "triton"),
        dispatch=config.dispatch or "local",
        scale_at=config.scale_at or "weights",
    )
    return replace(config, fuse_shared=_fuses_shared(config, folder))


def choices(config: EngineConfig) -> Choices:
    """A filled config's choices, as the plan of a layer takes them."""
    return Choices(fuse_shared=config.fuse_shared, scale_at=config.scale_at)


def _fuses_shared(config: EngineConfig, folder: Path) -> bool:
    """Whether shared experts run as slots of routed ones: as asked; else on a GPU (fewer launches) where they can."""
    if config.fuse_shared is not None or config.device == "cpu":
        return bool(config.fuse_shared)
    chosen = backends.choose(experts=config.experts, dispatch=config.dispatch, router=config.router)
    shared = [spec for spec in main_specs_of(folder) if spec is not None and spec.shared is not None]
    fused = choices(replace(config, fuse_shared=True))
    try:
        for spec in shared:
            backends.compile_layer(spec, chosen, place(num_experts=spec.num_experts), fused)
    except Refused:
        return False
    return bool(shared)


def _stated_dtype(folder: Path) -> str:
    stated = read_config(folder)
    name = stated.get("dtype") or stated.get("torch_dtype") or "bfloat16"
    if name not in DTYPES:
        raise UserError(f"config.json names the dtype {name!r}: give --dtype {', '.join(DTYPES[:-1])} or {DTYPES[-1]}")
    return name
