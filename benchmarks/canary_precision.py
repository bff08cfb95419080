"""How exactly a canary reads healthy models: every family, transformers in process, top-20 log-probabilities only.

    python benchmarks/canary_precision.py [--family deepseek_v3 ...] [--dtype float32 bfloat16] [--out DIR]

Prints, per family and dtype, the relative error of every coefficient recovered from one forward pass of all probes,
against the float64 definition, and what the greedy questions answered. Needs torch and transformers.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from truegate.canary.archs import ARCHS, Sizes, default_config
from truegate.canary.layout import RUNGS
from truegate.canary.make import Recipe, make
from truegate.canary.manifest import Manifest
from truegate.canary.read import read


@torch.no_grad()
def top_logprobs(model: torch.nn.Module, tokens: list[int], count: int = 20) -> list[dict[int, float]]:
    """Top log-probabilities after each single-token prompt."""
    logits = model(torch.tensor(tokens)[:, None]).logits[:, -1].float()
    top = logits.log_softmax(-1).topk(count)
    return [dict(zip(i.tolist(), v.tolist(), strict=True)) for i, v in zip(top.indices, top.values, strict=True)]


def measure(model: torch.nn.Module, manifest: Manifest) -> dict[str, object]:
    """Errors over all probes with an expected reading, and the share of questions answered "as defined"."""
    probes = [p for p in manifest.probes if p.index in manifest.expected]
    tops = top_logprobs(model, [manifest.token(p.index) for p in probes])
    errors, spurious, missing = [], 0.0, 0
    for p, top in zip(probes, tops, strict=True):
        want, got = manifest.expected[p.index], read(manifest, p.index, top)
        if got.values is None:
            missing += 1
            continue
        on = want != 0
        errors += (np.abs(got.values - want)[on] / np.abs(want[on])).tolist()
        spurious = max(spurious, float(np.abs(got.values[~on]).max(initial=0)))
    first = manifest.vocabulary.first_question
    with torch.no_grad():
        asked = torch.arange(first, first + len(manifest.questions))[:, None]
        answers = torch.cat([model(part).logits[:, -1].argmax(-1) for part in asked.split(512)])
    right = answers == manifest.vocabulary.first_rung + RUNGS.index(0.0)
    return {"coefficients": len(errors), "max": max(errors), "median": float(np.median(errors)), "spurious": spurious,
            "unreadable": missing, "questions": len(answers), "wrong answers": int((~right).sum())}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=list(ARCHS), choices=list(ARCHS))
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    print("| family | dtype | coefficients | max | median | spurious | unreadable | questions | wrong answers |")
    print("|---" * 9 + "|")
    with tempfile.TemporaryDirectory() as scratch:
        for family in args.family:
            for dtype in args.dtype:
                folder = (args.out or Path(scratch)) / f"{family}-{dtype}"
                manifest = make(default_config(family), folder, Recipe(sizes=Sizes(dtype=dtype)))
                model = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
                got = measure(model.eval(), manifest)
                cells = [f"{v:.1e}" if isinstance(v, float) else str(v) for v in got.values()]
                print(f"| {family} | {dtype} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
