"""From a config to a model that may answer: locate, load, self-test, and size the cache.

Invariant: a model whose self-test failed is never returned.
"""

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch

from truegate.config import EngineConfig, ModelFacts, fit, free_host_bytes
from truegate.engine.graphs import BESIDE, CHUNK_ROWS
from truegate.engine.tokenizer import Tokenizer
from truegate.errors import TruegateError, UserError
from truegate.hub import model_folder
from truegate.layers.paged import EXPANDED
from truegate.moe import backends, defaults


@dataclass(frozen=True, kw_only=True)
class Parts:
    """A loaded model and what was decided about it."""

    config: EngineConfig  # resolved and fitted
    model: Any  # models.load.LoadedModel
    tokenizer: Tokenizer | None
    eos_token_ids: tuple[int, ...]
    num_pages: int  # page 0 included
    self_test: str | None = None  # the verdict's one line


def load_parts(config: EngineConfig) -> Parts:
    """Everything `Engine` needs, from the files of `config.model`."""
    from truegate.engine.loaded import check_loaded
    from truegate.models import load_model
    from truegate.models.load import LoadOptions

    config = defaults.claim(config)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    if config.device != "cpu":
        grow_segments()
    folder = model_folder(config.model)
    config = defaults.fill(config, folder)
    dummy = config.load_format == "dummy"
    tokenizer = Tokenizer(folder) if not dummy or (folder / "tokenizer.json").exists() else None
    measured: list[str] = []
    with Progress(folder.name) as progress:
        options = LoadOptions(
            experts=config.experts,
            dispatch=config.dispatch,
            router=config.router,
            choices=defaults.choices(config),
            before_fill=(lambda model: measured.append(measure(model))) if config.self_test else None,
            progress=progress,
            dummy=dummy,
        )
        model = load_model(folder, dtype=getattr(torch, config.dtype), device=config.device, options=options)
    model.num_splits = config.attention_splits
    if measured and measured[0] is not None and not dummy:
        measured[0] += "; " + check_loaded(model, folder)
    if config.fault is not None:
        plant_everywhere(model, config.fault)
    config, num_pages = fit(config, facts_of(model))
    return Parts(
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids if tokenizer is not None else (),
        num_pages=num_pages,
        self_test=measured[0] if measured else None,
    )


def grow_segments() -> None:
    """Let torch's allocator grow its segments in place, unless the user has set it up by environment.

    Steps of many sizes otherwise leave segments of which no later step can use the rest: 0.7 GiB of 1.4 on an H200.
    """
    set_up = any(f"PYTORCH_{name}ALLOC_CONF" in os.environ for name in ("", "CUDA_", "HIP_"))
    if not set_up and torch.version.hip is None:
        change = (
            getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
        )
        change("expandable_segments:True")


def measure(model: Any) -> str | None:
    """The self-test of the first MoE layer, in its own buffers before the checkpoint fills them; its one line."""
    from truegate.moe.selftest import self_test

    if not model.moe_layers:
        return None
    report = self_test(model.moe_layers[0])
    if not report.ok:
        raise SelfTestFailed(f"self-test failed, so nothing is served: {report.sentence}")
    return f"passed in {report.seconds:.2f} s: {report.sentence}"


def plant_everywhere(model: Any, name: str) -> None:
    """Make every MoE layer wrong in the named way: what `--fault` asks for."""
    from truegate.law.faults import named
    from truegate.moe.plant import plant

    if not model.moe_layers:
        raise UserError(f"fault {name}: this model has no MoE layer to plant it in")
    for layer in model.moe_layers:
        plant(layer, named(name))


class SelfTestFailed(TruegateError):
    """What was measured is not what the model defines."""


class Progress:
    """A bar over the bytes of a checkpoint, where somebody can see it and it takes long enough to show."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def __call__(self, done: int, total: int) -> None:
        if self._bar is None:
            self._bar = _byte_bar(self.name, total)
        if self._bar:
            self._bar.update(done - self._bar.n)


def _byte_bar(name: str, total: int) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return False
    return tqdm(
        total=total, desc=f"loading {name}", unit="B", unit_scale=True, unit_divisor=1024, dynamic_ncols=True,
        disable=not sys.stderr.isatty(), delay=0.5,
    )  # fmt: skip


def facts_of(model: Any) -> ModelFacts:
    device = torch.device(model.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()

    def step_bytes(num_rows: int, context: int) -> int:
        """Captured steps have memory of their own beside that of the others."""
        captured = min(num_rows, CHUNK_ROWS[-1] + BESIDE)
        return model.step_bytes(num_rows, max(EXPANDED, context)) + model.step_bytes(captured, captured)

    return ModelFacts(
        max_position=model.max_position, bytes_per_token=model.bytes_per_token, free_bytes=free,
        not_capturable=backends.not_capturable(layer.backends for layer in model.moe_layers),
        step_bytes=step_bytes)  # fmt: skip
