"""Offline decode and prefill speed on one GPU at real shapes with random weights, beside the roofline.

    python benchmarks/gpu_decode.py qwen3 [v2lite] [--batch 1 8 32 128] [--out 256] [--eager] [--profile] [--json FILE]

Each batch: prompts of 1,024 random tokens, one engine, no prefix cache. Prefill: tokens over the time from the first
request to the first token of the last one, while prompts that are through go on answering (whose tokens are not
counted); "alone": the same with answers of one token, as engines have it that prefill a whole batch before its first
decode step. Decode: median time between engine steps once all run. Roofline: bytes of the step (weights outside
experts, the experts that B uniformly routed rows hit, keys and values) over --bandwidth. Prefill's: operations of a
prompt over the rate of large matrix products that run for --seconds, measured here after the batches (a GPU at its
power limit is slower then than in a short test). Profile: kernels of steady decode steps, and of prefill steps, as the
device ran them: how many a layer, time by name, and the gaps before a step's copy to the device, median and largest.
"""

import argparse
import itertools
import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import torch
from gpu_kernels import elapsed_s
from machine import need_gpu, versions

from truegate.config import EngineConfig
from truegate.engine.core import Engine
from truegate.types import Request, SamplingParams

PROMPT = 1024
STEPS = 24  # that are profiled
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32,
        "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "intermediate_size": 6144, "vocab_size": 151936, "norm_topk_prob": True,
        "rope_theta": 1000000.0, "max_position_embeddings": 40960, "rms_norm_eps": 1e-6, "decoder_sparse_step": 1,
        "mlp_only_layers": [], "tie_word_embeddings": False, "hidden_act": "silu",
    },
    "v2lite": {
        "model_type": "deepseek_v2", "hidden_size": 2048, "num_hidden_layers": 27, "num_attention_heads": 16,
        "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
        "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "intermediate_size": 10944,
        "first_k_dense_replace": 1, "vocab_size": 102400, "routed_scaling_factor": 1.0, "topk_method": "greedy",
        "n_group": 1, "topk_group": 1, "norm_topk_prob": False, "scoring_func": "softmax", "hidden_act": "silu",
        "rope_theta": 10000.0, "max_position_embeddings": 163840, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
        "rope_scaling": {
            "type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1,
            "mscale": 0.707, "mscale_all_dim": 0.707,
        },
    },
}  # fmt: skip
SGLANG = {  # 0.5.17 on the same kind of GPU: decode ms a step, prefill tokens/s
    "qwen3": {1: (4.57, 37545), 8: (10.10, 65004), 32: (17.41, 76131), 128: (22.19, 75948)},
    "v2lite": {1: (4.23, 14562), 8: (8.45, 62908), 32: (10.57, 70130), 128: (15.53, 68396)},
}


def start(name: str, batches: list[int], options: argparse.Namespace) -> tuple[Engine, dict[str, float]]:
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(CONFIGS[name]))
        length = PROMPT + max(options.out, answer(max(batches), options.chunk)) + 8
        engine = Engine(
            EngineConfig(
                model=folder,
                device="cuda",
                dtype="bfloat16",
                load_format="dummy",
                max_model_len=length,
                max_running=max(batches),
                chunked_prefill_tokens=options.chunk,
                prefix_cache=False,
                cuda_graphs=False if options.eager else None,
                experts=options.experts,
                router=options.router,
                fuse_shared=options.fuse_shared,
                self_test=not options.no_self_test,
            )
        )
    torch.cuda.synchronize()
    weights = sum(b.numel() * b.element_size() for b in engine.model.buffers())
    pool = engine.runner.pool.num_bytes
    free, total = torch.cuda.mem_get_info()
    return engine, {
        "start_s": time.perf_counter() - began, "weights_gib": weights / 2**30, "kv_gib": pool / 2**30,
        "rest_gib": (torch.cuda.memory_reserved() - weights - pool) / 2**30, "used_gib": (total - free) / 2**30,
    }  # fmt: skip


def answer(batch: int, chunk: int) -> int:
    """Tokens of an answer that outlasts the prefill of its batch and the steps that are profiled."""
    return STEPS + 12 + -(-batch * PROMPT // chunk)


def roofline_ms(model: Any, batch: int, context: int, bandwidth: float) -> float:
    """Fewest milliseconds a decode step can take: its bytes over the bandwidth (TB/s)."""
    experts = sum(layer.w_gate_up.numel() + layer.w_down.numel() for layer in model.moe_layers)
    hit = 0.0
    for layer in model.moe_layers:
        spec, per_slot = layer.spec, layer.w_gate_up[0].numel() + layer.w_down[0].numel()
        distinct = spec.num_experts * (1 - (1 - spec.top_k / spec.num_experts) ** batch)
        hit += (distinct + layer.plan.num_shared) * per_slot
    rest = sum(b.numel() for b in model.buffers() if b.dtype == model.dtype) - experts - model.embedding.numel()
    num_bytes = (hit + rest) * model.dtype.itemsize + batch * context * model.bytes_per_token
    return num_bytes / bandwidth / 1e9


def prompt_operations(model: Any, config: dict[str, Any]) -> float:
    """Operations of a prompt token, logits left out: two a weight that it meets, and attention to half a prompt."""
    slots = [layer.plan.slots_per_row for layer in model.moe_layers]
    sizes = [layer.w_gate_up[0].numel() + layer.w_down[0].numel() for layer in model.moe_layers]
    experts = sum(layer.w_gate_up.numel() + layer.w_down.numel() for layer in model.moe_layers)
    rest = sum(b.numel() for b in model.buffers() if b.dtype == model.dtype) - experts - 2 * model.embedding.numel()
    head = config.get("head_dim") or config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    pair = 2 * config["num_attention_heads"] * (head + config.get("v_head_dim", head))
    attention = model.num_layers * pair * PROMPT / 2
    return 2.0 * (rest + sum(a * b for a, b in zip(slots, sizes, strict=True))) + attention


def steady_rate(seconds: float) -> float:
    """Operations a second of bf16 products [8192, 8192] x [8192, 8192] of random values, one after another so long."""
    left, right = torch.randn((2, 8192, 8192), device="cuda").to(torch.bfloat16).unbind()

    def products(count: int) -> None:
        for _ in range(count):
            left @ right

    products(3)
    many = partial(products, max(1, int(seconds / 2 / elapsed_s(partial(products, 10)) * 10)))
    many()  # the first half warms the chip
    return 2 * 8192**3 * many.args[0] / elapsed_s(many)


def ask(engine: Engine, batch: int, num_out: int, seed: int) -> None:
    """Add `batch` requests of random prompts."""
    generator = torch.Generator().manual_seed(seed)
    params = SamplingParams(max_tokens=num_out, temperature=0, ignore_eos=True)
    for i in range(batch):
        prompt = torch.randint(0, engine.model.vocab_size, (PROMPT,), generator=generator).tolist()
        engine.add(Request(request_id=f"{seed}-{i}", prompt_token_ids=tuple(prompt), params=params))


def run(engine: Engine, batch: int, num_out: int, seed: int) -> dict[str, float]:
    """Prefill and decode of one batch: seconds to all first tokens, median milliseconds of a decode step."""
    ask(engine, batch, num_out, seed)
    torch.cuda.synchronize()
    began = time.perf_counter()
    waiting, moments, prefill = batch, [], 0.0
    seen: set[str] = set()
    stamps = [began]
    while engine.has_work:
        outputs = engine.step()
        now = time.perf_counter()
        if not prefill:
            stamps.append(now)
        fresh = {output.request_id for output in outputs} - seen
        seen |= fresh
        waiting -= len(fresh)
        if not waiting:
            prefill = prefill or now - began
            if len(outputs) == batch:
                moments.append(now)
    steps = [b - a for a, b in itertools.pairwise(moments[2:])] or [float("nan")]
    return {
        "prefill_s": prefill, "step_ms": statistics.median(steps) * 1e3, "steps": len(steps),
        "prefill_steps_ms": [round((b - a) * 1e3, 1) for a, b in itertools.pairwise(stamps)],
    }  # fmt: skip


def profile(engine: Engine, batch: int, chunk: int, num_steps: int = STEPS) -> dict[str, Any]:
    """What the device ran in steady decode steps."""
    ask(engine, batch, answer(batch, chunk), seed=-1)
    for _ in range(6):
        engine.step()
    while engine.scheduler.waiting or any(one.num_output < 2 for one in engine.scheduler.running):
        engine.step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(num_steps):
            engine.step()
        torch.cuda.synchronize()
    for i in range(batch):
        engine.cancel(f"-1-{i}")
    while engine.has_work:
        engine.step()
    return summary(trace, num_steps)


def profile_prefill(engine: Engine, rows: int) -> dict[str, Any]:
    """What the device ran in one prefill step of `rows` rows."""
    ask(engine, rows // PROMPT, 1, seed=-2)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        while engine.has_work:
            engine.step()
        torch.cuda.synchronize()
    return summary(trace, 1)


def summary(trace: Any, num_steps: int) -> dict[str, Any]:
    """Kernels a step, microseconds a step by name, and the gaps before copies to the device: one a step."""
    events = sorted(
        (e.time_range.start, e.time_range.end, e.name) for e in trace.events() if e.device_type.name == "CUDA"
    )
    gaps, end = [], events[0][0]
    for began, ended, name in events:
        if "HtoD" in name:
            gaps.append(began - end)
        end = max(end, ended)
    kernels = [(b, e, n) for b, e, n in events if not n.startswith(("Memcpy", "Memset"))]
    names: Counter[str] = Counter()
    for began, ended, name in kernels:
        names[re.sub(r"<.*", "", name)[:60]] += ended - began
    between = gaps[1:] or [0.0]
    return {
        "kernels_a_step": len(kernels) / num_steps, "gaps": len(gaps[1:]), "gap_us": statistics.median(between),
        "largest_gap_us": max(between),
        "busy_share": sum(e - b for b, e, _ in events) / (events[-1][1] - events[0][0]),
        "us_a_step": {name: us / num_steps for name, us in names.most_common(16)},
        "counts": {n: c / num_steps for n, c in Counter(re.sub(r"<.*", "", n)[:60] for _, _, n in kernels).items()},
    }  # fmt: skip


def show(seen: dict[str, Any], layers: int) -> None:
    print(
        f"  {seen['kernels_a_step']:.0f} kernels a step, {seen['kernels_a_step'] / layers:.1f} a layer; {seen['gaps']} "
        f"gaps between steps: median {seen['gap_us']:.0f} us, largest {seen['largest_gap_us']:.0f} us; "
        f"busy {seen['busy_share']:.0%}",
        flush=True,
    )
    for key, us in seen["us_a_step"].items():
        print(f"    {us:9.1f} us  {seen['counts'][key]:6.1f} x  {key}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="+", choices=list(CONFIGS))
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--out", type=int, default=256, help="tokens an answer")
    parser.add_argument("--chunk", type=int, default=16512, help="rows of one step: 16 prompts beside 128 decodes")
    parser.add_argument("--eager", action="store_true", help="no CUDA graphs")
    parser.add_argument("--experts", help="default: the device's")
    parser.add_argument("--router")
    parser.add_argument("--fuse-shared", action=argparse.BooleanOptionalAction, default=False)
    parser.add_argument("--no-self-test", action="store_true")
    parser.add_argument("--profile", type=int, nargs="*", default=[], metavar="BATCH", help="also profile these")
    parser.add_argument("--bandwidth", type=float, default=4.3,
                        help="TB/s, read plus written: a constant, what device copies had on an H200 (gpu_kernels.py "
                        "measures it); default 4.3")  # fmt: skip
    parser.add_argument("--seconds", type=float, default=1.5, help="of matrix products, for prefill's roofline")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu()
    print(versions(), flush=True)
    found: dict[str, Any] = {}
    for name in options.model:
        engine, facts = start(name, options.batch, options)
        print(name, {key: round(value, 2) for key, value in facts.items()}, engine.parts.self_test, flush=True)
        layers = engine.model.num_layers
        rows: dict[str, Any] = {"start": facts}
        for batch in options.batch:
            run(engine, batch, 4 + batch * PROMPT // options.chunk, seed=batch)  # compiles what this batch needs
            got = run(engine, batch, options.out, seed=1000 + batch)
            floor = roofline_ms(engine.model, batch, PROMPT + options.out // 2, options.bandwidth)
            run(engine, batch, 1, seed=2000 + batch)  # its last step is of a size of its own
            alone = batch * PROMPT / run(engine, batch, 1, seed=3000 + batch)["prefill_s"]
            theirs = SGLANG[name][batch] if batch in SGLANG[name] else (float("nan"), float("nan"))
            prefill = batch * PROMPT / got["prefill_s"]
            print(
                f"{name:7} B={batch:<4} decode {got['step_ms']:7.3f} ms  {batch / got['step_ms'] * 1e3:8.0f} tok/s  "
                f"roofline {floor:6.2f} ms ({floor / got['step_ms']:4.0%})  SGLang {theirs[0]:6.2f} ms "
                f"(x{theirs[0] / got['step_ms']:.2f})  prefill {prefill:8.0f} tok/s (x{prefill / theirs[1]:.2f}), "
                f"alone {alone:8.0f} (x{alone / theirs[1]:.2f})",
                flush=True,
            )
            print(f"  prefill, ms a step: {got['prefill_steps_ms']}", flush=True)
            rows[str(batch)] = {**got, "roofline_ms": floor, "prefill_tok_s": prefill, "alone_tok_s": alone}
            if batch in options.profile:
                seen = rows[str(batch)]["profile"] = profile(engine, batch, options.chunk)
                show(seen, layers)
        if options.profile:
            for prompts in (1, 8):
                print(f"{name} prefill of {prompts} x {PROMPT}:")
                rows[f"prefill_{prompts}"] = seen = profile_prefill(engine, prompts * PROMPT)
                show(seen, layers)
        peak = torch.cuda.max_memory_reserved() / 2**30 - facts["weights_gib"] - facts["kv_gib"]
        held = (torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()) / 2**30
        print(f"{name} peak beyond weights and KV: {peak:.3f} GiB; at most {held:.3f} in use by a step", flush=True)
        rows["peak_rest_gib"], rows["step_gib"] = peak, held
        rate = steady_rate(options.seconds)
        ceiling = rate / prompt_operations(engine.model, CONFIGS[name])
        shares = ", ".join(f"B={b} {rows[str(b)]['alone_tok_s'] / ceiling:.0%}" for b in options.batch)
        print(f"{name} products 8192^3 for {options.seconds} s: {rate / 1e12:.0f} TFLOP/s; prefill at that rate "
              f"{ceiling:.0f} tok/s, of which alone has {shares}", flush=True)  # fmt: skip
        rows["rate"], rows["prefill_ceiling_tok_s"] = rate, ceiling
        found[name] = rows
        if options.json:
            options.json.write_text(json.dumps(found, indent=1))
        engine.shutdown(drain=False)
        del engine
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    return 0


if __name__ == "__main__":
    sys.exit(main())
