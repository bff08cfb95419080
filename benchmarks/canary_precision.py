"""How exactly a canary reads healthy models: every family, transformers in process, top-20 log-probabilities only.

    python benchmarks/canary_precision.py [--family deepseek_v3 ...] [--dtype float32 bfloat16] [--device cuda]

Prints, per family and dtype, the relative error of every coefficient recovered from one forward pass of all probes
against the float64 definition, how many greedy questions were answered otherwise than "as defined", and with `--audit`
what all phases of `truegate canary run --quick` say. Needs torch and transformers, and nothing that speaks HTTP.
"""

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from machine import need_gpu
from transformers import AutoModelForCausalLM

from truegate.canary.archs import ARCHS, default_config
from truegate.canary.ask import QUICK
from truegate.canary.explain import explain
from truegate.canary.inprocess import ask_in_process
from truegate.canary.layout import RUNGS
from truegate.canary.make import Recipe, make
from truegate.canary.manifest import Manifest
from truegate.canary.read import read

COLUMNS = ("coefficients", "max", "median", "spurious", "unreadable", "questions", "wrong answers")


@torch.no_grad()
def last_logits(model: torch.nn.Module, sequences: list[list[int]]) -> torch.Tensor:
    """Logits [N, V] float32 after each sequence; one batch, padded at the right, where no row looks."""
    lengths = [len(s) for s in sequences]
    padded = torch.tensor([s + [0] * (max(lengths) - len(s)) for s in sequences], device=model.device)
    logits = model(padded, use_cache=False).logits
    return logits[torch.arange(len(lengths)), torch.tensor(lengths) - 1].float()


def measure(model: torch.nn.Module, manifest: Manifest) -> dict[str, float]:
    """Errors over all probes with an expected reading, and the questions not answered "as defined"."""
    probes = [p for p in manifest.probes if p.index in manifest.expected]
    logits = last_logits(model, [[manifest.token(p.index)] for p in probes])
    top = logits.log_softmax(-1).topk(20)
    errors, spurious, missing = [], 0.0, 0
    for p, ids, values in zip(probes, top.indices.tolist(), top.values.tolist(), strict=True):
        want, got = manifest.expected[p.index], read(manifest, p.index, dict(zip(ids, values, strict=True)))
        if got.values is None:
            missing += 1
            continue
        on = want != 0
        errors += (np.abs(got.values - want)[on] / np.abs(want[on])).tolist()
        spurious = max(spurious, float(np.abs(got.values[~on]).max(initial=0)))
    first = manifest.vocabulary.first_question
    asked = [[first + q.index] for q in manifest.questions]
    answers = torch.cat([last_logits(model, asked[i : i + 512]).argmax(-1) for i in range(0, len(asked), 512)])
    wrong = int((answers != manifest.vocabulary.first_rung + RUNGS.index(0.0)).sum())
    values = (len(errors), max(errors), float(np.median(errors)), spurious, missing, len(asked), wrong)
    return dict(zip(COLUMNS, values, strict=True))


def audit(model: torch.nn.Module, manifest: Manifest) -> str:
    """What every phase of a quick audit says."""
    evidence = ask_in_process(manifest, lambda rows: last_logits(model, rows).cpu().numpy(), QUICK)
    verdict, _ = explain(manifest, evidence)
    told = [f.title for f in verdict.findings] + verdict.undecided
    return "; ".join(told) or f"right: {verdict.num_right} of {verdict.num_cells}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=list(ARCHS), choices=list(ARCHS))
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--audit", action="store_true", help="also ask every phase of a quick audit")
    args = parser.parse_args()
    need_gpu(args.device)
    start = time.monotonic()
    columns = ["family", "dtype", *COLUMNS, *(["audit"] if args.audit else [])]
    print(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    with tempfile.TemporaryDirectory() as scratch:
        for family in args.family:
            folder = Path(scratch) / family
            manifest = make(default_config(family), folder, Recipe())  # bf16, whose every value is exact in fp32
            for dtype in args.dtype:
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).to(args.device).eval()
                got = [f"{v:.1e}" if isinstance(v, float) else str(v) for v in measure(model, manifest).values()]
                said = [audit(model, manifest)] if args.audit else []
                print(f"| {' | '.join([family, dtype, *got, *said])} |", flush=True)
    where = torch.cuda.get_device_name() if args.device.startswith("cuda") else "cpu"
    print(f"\ntorch {torch.__version__}, {where}, {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main()
