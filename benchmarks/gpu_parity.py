"""Compare the engine's models on a GPU with transformers' on the same GPU, on tiny seeded checkpoints.

    python benchmarks/gpu_parity.py [--only NAME ...] [--jobs 12] [--json FILE]

float32: max |a - b| / max |b| of the logits, at most 1e-4, of one prefill and of mixed batches (decodes beside chunks
and padded rows, pages scattered, the pool NaN where the sequence did not write). bfloat16, both sides: the share of
positions whose likeliest token is the same, and the mean and largest KL(transformers || ours), beside what
transformers itself shows between bfloat16 and float32. One process an architecture. T rows, V vocabulary.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from parity import make_prompts, reference_logits, run_mode, worst
from tiny_checkpoints import ARCHITECTURES, reference, save

from truegate.models import load_model
from truegate.models.load import LoadOptions

LIMIT = 1e-4


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
        with tempfile.TemporaryDirectory() as folder:
            save(theirs, Path(folder), dtype=dtype)  # both sides read the same, rounded, weights
            ours = load_model(folder, dtype=dtype, device="cuda", options=LoadOptions(experts=experts))
        if dtype == torch.bfloat16:
            expected["own"] = _logits(theirs.to("cuda"), on_gpu)
        expected[dtype] = _logits(_cast(theirs.to("cuda"), dtype), on_gpu)
        for mode in ("prefill", "mixed"):
            got = run_mode(mode, ours, prompts)
            if dtype == torch.float32:
                found[f"fp32 {mode}"] = worst(got, expected[dtype])
            else:
                found |= {f"bf16 {mode} {key}": value for key, value in kl(expected[dtype], got).items()}
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
        [sys.executable, __file__, "--one", name, "--experts", experts], capture_output=True, text=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else done.stderr[-1500:]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(ARCHITECTURES))
    parser.add_argument("--one", choices=list(ARCHITECTURES), help="in this process; prints the figures as JSON")
    parser.add_argument("--experts", default="triton")
    parser.add_argument("--jobs", type=int, default=12)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(compare(options.one, options.experts)))
        return 0
    import transformers
    import triton

    print(torch.cuda.get_device_name(), "torch", torch.__version__, "triton", triton.__version__, end=" ")
    print("transformers", transformers.__version__, "experts", options.experts)
    print(f"{'':18}  fp32 logits, relative      bf16 prefill                 bf16 mixed              transformers' own")
    print(f"{'architecture':18}{'prefill':>10}{'mixed':>10}" + f"{'top-1':>10}{'KL':>9}{'max':>9}" * 3)
    names = options.only or list(ARCHITECTURES)
    wrong, table = 0, {}
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, got in zip(names, pool.map(lambda one: _apart(one, options.experts), names), strict=True):
            table[name] = got
            if isinstance(got, str):
                wrong += 1
                print(f"{name:18} FAILED\n{got}", flush=True)
                continue
            line = "".join(f"{got[f'fp32 {mode}']:10.1e}" for mode in ("prefill", "mixed"))
            for kind in ("bf16 prefill", "bf16 mixed", "own"):
                line += f"{got[f'{kind} top1']:10.1%}{got[f'{kind} kl']:9.1e}{got[f'{kind} kl_max']:9.1e}"
            bad = max(got["fp32 prefill"], got["fp32 mixed"]) > LIMIT
            wrong += bad
            print(f"{name:18}{line}{'   DIFFERS' if bad else ''}", flush=True)
    print(f"{len(names) - wrong} of {len(names)} architectures agree in float32 within {LIMIT:.0e}")
    if options.json:
        options.json.write_text(json.dumps(table, indent=1))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
