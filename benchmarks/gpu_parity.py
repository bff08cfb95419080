"""Compare the engine's models on a GPU with transformers' on the same GPU, on tiny seeded checkpoints.

    python benchmarks/gpu_parity.py [--only NAME ...] [--jobs 13] [--json FILE]

float32: what benchmarks/parity.py asks on a CPU, in the same modes: max |a - b| / max |b| of the logits, at most 1e-4,
and 64 greedy tokens after each of 20 prompts through the engine as it serves, CUDA graphs and fused shared experts
included, none of which may differ. bfloat16, both sides: the share of positions whose likeliest token is the same, and
the mean and largest KL(transformers || ours), beside what transformers itself shows between bfloat16 and float32. One
process an architecture. T rows, V vocabulary.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from machine import need_gpu, versions
from parity import (
    GREEDY_MODES,
    LIMIT,
    MODES,
    NUM_PROMPTS,
    NUM_TOKENS,
    compare_greedy,
    make_prompts,
    reference_logits,
    run_mode,
    worst,
)
from tiny_checkpoints import ARCHITECTURES, reference, save

from truegate.config import EngineConfig
from truegate.models import load_model
from truegate.models.load import LoadOptions
from truegate.moe import defaults

SMALL = {"max_running": 16, "chunked_prefill_tokens": 256}  # few sizes to capture


def kl(theirs: list[torch.Tensor], ours: list[torch.Tensor]) -> dict[str, float]:
    """Agreement of the likeliest token, and KL(theirs || ours), over all positions."""
    theirs_TV, ours_TV = torch.cat(theirs).double(), torch.cat(ours).double()
    log_p, log_q = theirs_TV.log_softmax(-1), ours_TV.log_softmax(-1)
    kl_T = (log_p.exp() * (log_p - log_q)).sum(-1).nan_to_num(float("inf"))
    same_T = theirs_TV.argmax(-1) == ours_TV.argmax(-1)
    return {"top1": float(same_T.double().mean()), "kl": float(kl_T.mean()), "kl_max": float(kl_T.max())}


def compare(name: str, experts: str) -> dict[str, float]:
    prompts = make_prompts()
    on_gpu = [prompt.cuda() for prompt in prompts]
    theirs = reference(name)
    found, expected = {}, {}
    for dtype in (torch.float32, torch.bfloat16):
        exact = dtype == torch.float32
        with tempfile.TemporaryDirectory() as folder:
            save(theirs, Path(folder), dtype=dtype)  # both sides read the same, rounded, weights
            ours = load_model(folder, dtype=dtype, device="cuda", options=LoadOptions(experts=experts))
            if exact:
                config = defaults.fill(EngineConfig(device="cuda", experts=experts), Path(folder))
                options = LoadOptions(experts=experts, choices=defaults.choices(config))
                as_served = load_model(folder, dtype=dtype, device="cuda", options=options)
        if not exact:
            expected["own"] = _logits(theirs.to("cuda"), on_gpu)
        expected[dtype] = _logits(_cast(theirs.to("cuda"), dtype), on_gpu)
        for mode in MODES if exact else ("prefill", "mixed"):
            got = run_mode(mode, ours, prompts)
            if exact:
                found[f"fp32 {mode}"] = worst(got, expected[dtype])
            else:
                found |= {f"bf16 {mode} {key}": value for key, value in kl(expected[dtype], got).items()}
        if exact:
            graphs = {"cuda_graphs": True} if experts == "triton" else {}
            differing = compare_greedy(theirs, as_served, **SMALL, **graphs)
            found |= {f"greedy {mode}": count for mode, count in differing.items()}
        theirs.to("cpu", torch.float32)
    found |= {f"own {key}": value for key, value in kl(expected["own"], expected[torch.bfloat16]).items()}
    return found


def _logits(model: torch.nn.Module, prompts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [logits.float().cpu() for logits in reference_logits(model, prompts)]


def _cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in `dtype`, but for a correction bias, which transformers keeps in float32 when it loads one."""
    model.to(dtype)
    for key, buffer in model.named_buffers():
        if "correction_bias" in key:
            buffer.data = buffer.data.float()
    return model


def _apart(name: str, experts: str) -> dict[str, float] | str:
    done = subprocess.run(
        [sys.executable, __file__, "--one", name, "--experts", experts], capture_output=True, text=True, timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES))
    parser.add_argument("--one", choices=list(ARCHITECTURES), help="in this process; prints the figures as JSON")
    parser.add_argument("--experts", default="triton")
    parser.add_argument("--jobs", type=int, default=len(ARCHITECTURES))
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    need_gpu()
    if options.one:
        print(json.dumps(compare(options.one, options.experts)))
        return 0
    print(versions())
    print(f"experts {options.experts}")
    names = options.only or list(ARCHITECTURES)
    tokens = NUM_PROMPTS * NUM_TOKENS
    print("float32".ljust(18) + "  logits, max relative error".ljust(40) + f"  differing greedy tokens of {tokens}")
    print(f"{'architecture':18}" + "".join(f"{mode:>10}" for mode in (*MODES, *GREEDY_MODES)), flush=True)
    table: dict[str, dict[str, float]] = {}
    agree = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, got in zip(names, pool.map(lambda one: _apart(one, options.experts), names), strict=True):
            if isinstance(got, str):
                print(f"{name:18} FAILED\n{got}", flush=True)
                continue
            table[name] = got
            errors = [got[f"fp32 {mode}"] for mode in MODES]
            differing = [got[f"greedy {mode}"] for mode in GREEDY_MODES]
            right = max(errors) <= LIMIT and not any(differing)
            agree += right
            row = "".join(f"{error:10.1e}" for error in errors) + "".join(f"{count:10}" for count in differing)
            print(f"{name:18}{row}{'' if right else '   DIFFERS'}", flush=True)
    print("bfloat16".ljust(18) + "  prefill".ljust(28) + "  mixed".ljust(28) + "  transformers' own")
    print(f"{'architecture':18}" + f"{'top-1':>10}{'KL':>9}{'max':>9}" * 3)
    for name, got in table.items():
        kinds = ("bf16 prefill", "bf16 mixed", "own")
        row = "".join(f"{got[f'{k} top1']:10.1%}{got[f'{k} kl']:9.1e}{got[f'{k} kl_max']:9.1e}" for k in kinds)
        print(f"{name:18}{row}")
    print(f"{agree} of {len(names)} architectures agree in float32 (logits within {LIMIT:.0e}, 0 differing tokens)")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return int(agree < len(names))


if __name__ == "__main__":
    sys.exit(main())
