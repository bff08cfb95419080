"""The engine's settings: one frozen value, resolved once, then read.

Invariant: after `resolve` and `fit` no field is None except those that mean "off"; neither changes its argument.
"""

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

from truegate.errors import UserError

log = logging.getLogger("truegate.engine")

DTYPES = ("float32", "bfloat16", "float16")
GIB = 1 << 30
MAX_SPLITS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig:
    """What a user may choose; None asks for the default of the device and the model."""

    model: str | None = None  # folder or hub id; None: the model that ships with the package
    device: str | None = None  # "cpu", "cuda"
    dtype: str | None = None  # of DTYPES; default float32 on a CPU (bf16 is slower), the checkpoint's on a GPU
    max_model_len: int | None = None  # tokens of prompt and answer together
    max_running: int | None = None  # sequences computed in one step
    kv_cache_gib: float | None = None
    mem_fraction: float | None = None  # of the device's free memory, instead of kv_cache_gib
    chunked_prefill_tokens: int | None = None  # rows of one step, prefill and decode together
    page_size: int = 16  # tokens
    prefix_cache: bool = True
    overlap: bool | None = None  # launch a step before the last one's tokens are read; default: on a GPU
    cuda_graphs: bool | None = None  # replay captured decode steps; default: on a GPU, if the MoE backends allow it
    attention_splits: int | None = None  # parts (a power of two) of every decode context; None: what fills the GPU
    load_format: str = "checkpoint"  # "dummy": random weights, config.json alone is read (to measure speed)
    experts: str | None = None  # file of moe/experts; None: the device's default
    dispatch: str | None = None  # file of moe/dispatch
    router: str | None = None  # file of moe/routers
    fuse_shared: bool | None = None
    scale_at: str | None = None  # "weights" or "output": where the routed scale is applied
    fault: str | None = None  # plant this fault (law/faults.py); loud, for people who want to see what it does
    self_test: bool = True
    threads: int | None = None  # of torch on a CPU; None: as torch starts
    seed: int = 0  # of answers that bring no seed of their own


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelFacts:
    """What `fit` must know of a loaded model and its machine."""

    max_position: int
    bytes_per_token: int  # of keys and values, all layers
    free_bytes: int  # of device memory after the weights
    not_capturable: str | None = None  # MoE backends that bring numbers to the host, by name
    step_bytes: Callable[[int, int], int] = lambda rows, context: 0  # what computing steps of such sizes takes


def resolve(config: EngineConfig, *, cuda: bool) -> EngineConfig:
    """Fill what the device alone decides, and refuse what cannot be."""
    for one in fields(config):
        if getattr(config, one.name) == "":
            raise UserError(f"{one.name} is empty: give a value, or leave it out")
    device = config.device or ("cuda" if cuda else "cpu")
    if device not in ("cpu", "cuda") and not device.startswith("cuda:"):
        raise UserError(f"device {device!r} is unknown: cpu or cuda")
    if device != "cpu" and not cuda:
        raise UserError("device cuda was asked for, but torch sees no GPU here: use --device cpu")
    if config.load_format not in ("checkpoint", "dummy"):
        raise UserError(f"load_format {config.load_format!r} is unknown: checkpoint or dummy")
    if device == "cpu" and (config.cuda_graphs or config.attention_splits):
        name = "cuda_graphs" if config.cuda_graphs else "attention_splits"
        raise UserError(f"{name} goes with --device cuda: on a CPU nothing is captured or split")
    if config.dtype is not None and config.dtype not in DTYPES:
        raise UserError(f"dtype {config.dtype!r} is unknown: {', '.join(DTYPES)}")
    on_cpu = device == "cpu"
    positive = (
        "max_model_len", "max_running", "kv_cache_gib", "chunked_prefill_tokens", "page_size", "threads",
        "attention_splits",
    )  # fmt: skip
    for name in positive:
        value = getattr(config, name)
        if value is not None and not value > 0:
            raise UserError(f"{name} must be above 0, got {value!r}")
    splits = config.attention_splits
    if splits is not None and (splits > MAX_SPLITS or splits & (splits - 1)):
        raise UserError(f"attention_splits must be a power of two up to {MAX_SPLITS}, got {splits}")
    if config.mem_fraction is not None and not 0 < config.mem_fraction <= 1:
        raise UserError(f"mem_fraction must be above 0 and at most 1, got {config.mem_fraction!r}")
    if config.mem_fraction is not None and config.kv_cache_gib is not None:
        raise UserError("mem_fraction and kv_cache_gib both size the cache: give one")
    rows = config.chunked_prefill_tokens or (512 if on_cpu else 8192)
    running = config.max_running or min(64 if on_cpu else 256, rows)
    if running > rows:
        raise UserError(
            f"max_running {running} is above chunked_prefill_tokens {rows}: every running sequence has a row in every "
            "step; lower --max-running or raise --chunked-prefill-tokens"
        )
    return replace(
        config,
        device=device,
        dtype=config.dtype or ("float32" if on_cpu else None),
        max_running=running,
        chunked_prefill_tokens=rows,
        overlap=(not on_cpu) if config.overlap is None else config.overlap,
    )


def fit(config: EngineConfig, facts: ModelFacts) -> tuple[EngineConfig, int]:
    """Fill what the model decides; returns the config and the number of pages (page 0, nobody's, included).

    pages = 1 + kv bytes // (page_size * bytes_per_token), never more than max_running sequences fill twice: a warning
    says so where a larger cache was asked for.
    """
    max_model_len = config.max_model_len or facts.max_position
    if max_model_len > facts.max_position:
        raise UserError(
            f"max_model_len {max_model_len} is above the model's {facts.max_position} positions: lower --max-model-len"
        )
    if config.kv_cache_gib is not None:
        kv_bytes = int(min(config.kv_cache_gib, 1 << 30) * GIB)
    elif config.mem_fraction is not None:
        kv_bytes = int(config.mem_fraction * facts.free_bytes)
    elif config.device == "cpu":
        kv_bytes = min(int(0.85 * facts.free_bytes), GIB)
    else:
        kv_bytes = _kv_on_gpu(facts.free_bytes, facts.step_bytes(config.chunked_prefill_tokens, max_model_len))
    pages_per_sequence = -(-max_model_len // config.page_size)
    page_bytes = config.page_size * facts.bytes_per_token
    most = 2 * pages_per_sequence * config.max_running
    num_pages = min(kv_bytes // page_bytes, most)
    if config.kv_cache_gib is not None and num_pages * page_bytes > facts.free_bytes:
        raise UserError(
            f"--kv-cache-gib {config.kv_cache_gib:g}: {num_pages * page_bytes / GIB:.2f} GiB of it would be used, "
            f"{facts.free_bytes / GIB:.2f} GiB are free: lower it, --max-running or --max-model-len"
        )
    if kv_bytes // page_bytes > most and (config.kv_cache_gib or config.mem_fraction):
        log.warning(
            "the cache is cut to %.2f GiB of the %.2f asked for: %d sequences (--max-running) of %d tokens "
            "(--max-model-len) fill half of that",
            most * page_bytes / GIB, kv_bytes / GIB, config.max_running, max_model_len,
        )  # fmt: skip
    if num_pages < pages_per_sequence:
        if config.max_model_len is not None:
            raise UserError(
                f"a sequence of {max_model_len} tokens needs {pages_per_sequence * page_bytes / GIB:.3f} GiB of cache, "
                f"{kv_bytes / GIB:.3f} GiB are given: raise --kv-cache-gib or lower --max-model-len"
            )
        max_model_len = num_pages * config.page_size
        if max_model_len < 1:
            raise UserError(
                f"{kv_bytes / GIB:.3f} GiB of cache hold no page of {page_bytes} bytes: raise --kv-cache-gib"
            )
    return replace(config, max_model_len=max_model_len, cuda_graphs=_captures(config, facts)), num_pages + 1


def _kv_on_gpu(free_bytes: int, step_bytes: int) -> int:
    """All but 2 percent, and what steps need with a third more for what allocators waste, at least 1 GiB."""
    return max(0, int(0.98 * free_bytes) - max(GIB, GIB // 4 + int(1.3 * step_bytes)))


def _captures(config: EngineConfig, facts: ModelFacts) -> bool:
    if config.cuda_graphs and facts.not_capturable:
        raise UserError(f"--cuda-graphs cannot go with {facts.not_capturable}: leave one of them out")
    if config.cuda_graphs is not None:
        return config.cuda_graphs
    return config.device != "cpu" and facts.not_capturable is None


def free_host_bytes() -> int:
    """Memory the machine can still give, by the kernel's own estimate."""
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
