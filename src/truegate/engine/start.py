"""From a config to a model that may answer: locate, load, self-test, and size the cache.

Invariant: a model whose self-test failed is never returned.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from truegate.config import EngineConfig, ModelFacts, fit, free_host_bytes, resolve
from truegate.engine.tokenizer import Tokenizer
from truegate.errors import UserError
from truegate.hub import model_folder


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
    from truegate.models import load_model

    config = resolve(config, cuda=torch.cuda.is_available())
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    folder = model_folder(config.model)
    tokenizer = Tokenizer(folder)
    model = load_model(folder, dtype=_dtype(config, folder), device=config.device)
    config, num_pages = fit(config, facts_of(model))
    return Parts(
        config=config,
        model=model,
        tokenizer=tokenizer,
        eos_token_ids=tokenizer.eos_token_ids,
        num_pages=num_pages,
    )


def facts_of(model: Any) -> ModelFacts:
    device = torch.device(model.device)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_host_bytes()
    return ModelFacts(max_position=model.max_position, bytes_per_token=model.bytes_per_token, free_bytes=free)


def _dtype(config: EngineConfig, folder: Path) -> torch.dtype:
    import json

    name = config.dtype
    if name is None:
        stated = json.loads((folder / "config.json").read_text())
        name = stated.get("dtype") or stated.get("torch_dtype") or "bfloat16"
    dtype = getattr(torch, str(name), None)
    if not isinstance(dtype, torch.dtype):
        raise UserError(f"config.json names the dtype {name!r}: give --dtype float32, bfloat16 or float16")
    return dtype
