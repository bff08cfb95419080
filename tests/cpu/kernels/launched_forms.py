"""Start engines on a GPU that is not here and print which forms of kernels only a later step launches.

A form is what Triton compiles anew: constants, types, alignments and options. Nothing runs and nothing is compiled:
tensors on the device have no memory, and Triton's `jit_cache_hook` (a knob of its own, called with the very key under
which it looks for a compiled kernel) takes the form down and says that it has been seen to. Prints JSON a scene.
A script of its own: Triton decides at its first import whether it compiles or interprets.
"""

import argparse
import json
import os
import random
import tempfile
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from gpu_decode import CONFIGS
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from truegate.config import EngineConfig
from truegate.engine.core import Engine
from truegate.sched.scheduler import Chunk

GPU = torch.device("cuda", 0)
LONGEST = 16512
SHORT = 100  # rows of a chunk beside decodes
CONFIGS = {
    **CONFIGS,
    "mixtral": {
        "model_type": "mixtral", "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8,
        "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2, "vocab_size": 32000,
        "rope_theta": 1000000.0, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5, "tie_word_embeddings": False,
        "hidden_act": "silu",
    },
    "v3": {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_attention_heads": 128, "num_key_value_heads": 128,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "moe_intermediate_size": 2048,
        "intermediate_size": 18432, "first_k_dense_replace": 1, "vocab_size": 129280, "routed_scaling_factor": 2.5,
        "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "norm_topk_prob": True, "scoring_func": "sigmoid",
        "hidden_act": "silu", "rope_theta": 10000.0, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    },
}  # fmt: skip
SCENES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3, long steps": ("qwen3", {"chunked_prefill_tokens": LONGEST}),
    "qwen3, short steps": ("qwen3", {"chunked_prefill_tokens": 511}),
    "qwen3, nothing captured": ("qwen3", {"chunked_prefill_tokens": 3001, "cuda_graphs": False}),
    "v2lite, long steps": ("v2lite", {"chunked_prefill_tokens": LONGEST, "fuse_shared": False}),
    "v2lite, fused": ("v2lite", {"fuse_shared": True}),
    "mixtral, long steps": ("mixtral", {"chunked_prefill_tokens": LONGEST}),
    "v3, long steps": ("v3", {"chunked_prefill_tokens": LONGEST}),
}


class Generator(torch.Generator):
    """One of no device."""

    def __new__(cls, device=None):
        return super().__new__(cls)


class Driver:
    """What Triton asks of a driver before it launches."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0


class Absent(TorchFunctionMode):
    """Tensors on the GPU are meta tensors that say they are on the GPU, to all but torch's own functions."""

    inside = False

    def __enter__(self):
        on_meta = torch.Tensor.is_meta.__get__
        device = torch.Tensor.device.__get__
        torch.Tensor.device = property(lambda x: GPU if on_meta(x) and not Absent.inside else device(x))
        torch.Tensor.is_cuda = property(lambda x: on_meta(x) and not Absent.inside)
        torch.Tensor.data_ptr = lambda x: x.storage_offset() * x.element_size()  # allocations are aligned
        return super().__enter__()

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is torch.device:
            return function(*args, **(kwargs or {}))
        if function in (torch.Tensor.pin_memory, torch.Tensor.normal_):
            return args[0]
        if function is torch.Tensor.to and args[1] == "cpu":
            return torch.empty(args[0].shape, dtype=args[0].dtype)
        was, Absent.inside = Absent.inside, True
        try:
            return function(*map(_place, args), **{name: _place(value) for name, value in (kwargs or {}).items()})
        finally:
            Absent.inside = was


def _place(value: Any) -> Any:
    return torch.device("meta") if isinstance(value, torch.device) and value.type == "cuda" else value


def install() -> None:
    """An H200, as torch and Triton see it."""
    os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"  # the engine would set this up on the device
    cuda = torch.cuda
    cuda.is_available = lambda: True
    cuda.get_device_capability = lambda device=None: (9, 0)
    cuda.get_device_name = lambda device=None: "NVIDIA H200"
    cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=132)
    cuda.mem_get_info = lambda device=None: (100 << 30, 141 << 30)
    cuda.synchronize = lambda device=None: None
    cuda.graph_pool_handle = lambda: None
    cuda.CUDAGraph = lambda: SimpleNamespace(replay=lambda: None)
    cuda.Event = lambda: SimpleNamespace(record=lambda: None)
    cuda.device = lambda device: nullcontext()
    cuda.graph = lambda *args, **options: nullcontext()
    torch.Generator = Generator
    driver.set_active(Driver())


class Forms:
    """Forms as launched: by key, the first step that did and what is compiled in; and the keys of the last step."""

    def __init__(self) -> None:
        self.first: dict[tuple[str, str], tuple[str | None, dict[str, str]]] = {}
        self.step: str | None = None  # None: at start
        self.now: set[tuple[str, str]] = set()
        triton.knobs.runtime.jit_cache_hook = self._take

    def _take(self, *, key: str, fn: Any, compile: dict[str, Any], **_: Any) -> bool:
        form = f"{fn.module.rpartition('.')[2]}.{fn.name}", key
        self.now.add(form)
        if form not in self.first:
            self.first[form] = self.step, _readable(compile)
        return True  # nothing is compiled

    def late(self) -> list[str]:
        """Forms that start did not launch, and how each differs from what is most like it there."""
        lines = []
        for (kernel, _), (step, form) in self.first.items():
            if step is not None:
                known = [other for (name, _), (s, other) in self.first.items() if name == kernel and s is None]
                changes = [dict(form.items() - other.items()) for other in known]
                lines.append(f"{kernel} at {step}: {min(changes, key=len, default='another kernel')}")
        return lines


def _readable(compiled: dict[str, Any]) -> dict[str, str]:
    """What is compiled in by argument: its type, or value, or alignment; and options."""
    names = list(compiled["signature"])
    form = {f"type of {name}": str(kind) for name, kind in compiled["signature"].items()}
    form |= {names[place[0]]: str(value) for place, value in compiled["constants"].items()}
    form |= {f"alignment of {names[place[0]]}": str(value) for place, value in compiled["configs"][0].items()}
    return form | {name: str(compiled[name]) for name in ("num_warps", "num_stages")}


class Steps:
    """Eager steps of an engine: chunks are asked for the log-probabilities of their prompts, of one row a step."""

    def __init__(self, engine: Engine, forms: Forms) -> None:
        self.engine, self.forms = engine, forms
        self.longest, self.most = engine.config.chunked_prefill_tokens, engine.scheduler.max_running
        length = engine.config.max_model_len
        tokens, pages = [0] * length, [0] * (length // engine.config.page_size + 1)
        params = SimpleNamespace(prompt_logprobs=0, logprob_token_ids=())
        state = SimpleNamespace(draw=SimpleNamespace(plain=True))
        self.sequences = [
            SimpleNamespace(
                tokens=tokens, pages=pages, slot=slot, params=params, state=state, num_output=0, in_flight=0,
                prompt_length=1)
            for slot in range(self.most)
        ]  # fmt: skip

    def run(self, decodes: int, sizes: list[int], start: int = 0) -> frozenset[tuple[str, str]]:
        """Launch a step and return its forms."""
        if sizes:
            self.sequences[decodes].prompt_length = start + 2  # one row of the first chunk
        chunks = [Chunk(one, 9, 1, False) for one in self.sequences[:decodes]]
        chunks += [Chunk(one, start, size, False) for one, size in zip(self.sequences[decodes:], sizes, strict=False)]
        self.forms.step = f"{decodes} decodes and chunks of {sizes} rows from {start} on"
        self.forms.now.clear()
        self.engine.runner.launch(chunks)
        for one in self.sequences:
            one.prompt_length = 1
        return frozenset(self.forms.now)

    def rows(self, count: int) -> frozenset[tuple[str, str]]:
        return self.run(0, [count]) if count > 1 else self.run(1, [])

    def sweep(self, seed: int) -> None:
        """Row counts around every change of forms between neighbours of a grid, and random ones; decodes; mixtures."""
        seen: dict[int, frozenset[tuple[str, str]]] = {}

        def at(count: int) -> frozenset[tuple[str, str]]:
            if count not in seen:
                seen[count] = self.rows(count)
            return seen[count]

        def between(low: int, high: int) -> None:
            if at(low) != at(high) and high - low > 1:
                between(low, (low + high) // 2)
                between((low + high) // 2, high)

        grid = {*range(1, 34), *(int(2 ** (i / 2)) for i in range(10, 30)), self.longest}
        for low, high in pairwise(sorted(count for count in grid if count <= self.longest)):
            between(low, high)
        rng = random.Random(seed)
        for count in rng.sample(range(1, self.longest + 1), 24):
            at(count)
        for count in rng.sample(range(16, self.longest + 1, 16), 12):
            at(count)
        near = {power + more for power in (32, 64, 96, 128, 192, 256) for more in (-1, 0, 1)}
        for decodes in sorted({*range(1, 32), *near, self.most}):
            if decodes <= self.most:
                self.run(decodes, [SHORT] if decodes < self.most else [])
        for _ in range(8):
            chunks, decodes = rng.randint(2, 40), rng.randint(0, 64)
            sizes = [rng.randint(2, (self.longest - decodes) // chunks) for _ in range(chunks)]
            self.run(decodes, sizes, start=rng.choice([0, 16, 99]))


def examine(name: str, later_splits: int | None = None) -> dict[str, Any]:
    """Kernels that were launched, how many forms at start, and those of later steps alone.

    later_splits: from then on contexts are cut into so many parts, as no engine does.
    """
    config, options = SCENES[name]
    forms = Forms()
    with tempfile.TemporaryDirectory() as folder, Absent():
        text = json.dumps(CONFIGS[config] | {"num_hidden_layers": 2})
        (Path(folder) / "config.json").write_text(text)
        engine = Engine(
            EngineConfig(
                model=folder, device="cuda", dtype="bfloat16", load_format="dummy", self_test=False, max_running=256,
                max_model_len=LONGEST, **options)
        )  # fmt: skip
        at_start, engine.model.num_splits = len(forms.first), later_splits
        Steps(engine, forms).sweep(seed=len(name))
    kernels = sorted({kernel for kernel, _ in forms.first})
    return {"scene": name, "kernels": kernels, "at_start": at_start, "late": forms.late()}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("scenes", nargs="*", default=list(SCENES))
    parser.add_argument("--later-splits", type=int)
    options = parser.parse_args()
    install()
    for scene in options.scenes:
        print(json.dumps(examine(scene, options.later_splits)), flush=True)
