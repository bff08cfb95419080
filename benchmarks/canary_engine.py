"""A quick canary audit of our own engine in this process: every phase, on a CPU or through a GPU's CUDA graphs.

    python benchmarks/canary_engine.py [--device cuda] [--family deepseek_v3 qwen3_moe ...] [--fault NAME]

For a machine that has torch and nothing that speaks HTTP; where it has, `truegate serve` and `truegate canary run` ask
the same questions. Prints, per family, the verdict and the relative errors of the coefficients read. Exit 1 unless
every family is right (with --fault: unless every family is found faulty).
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from truegate import LLM, SamplingParams
from truegate.canary.api import MAX_TOP, Api, Completion
from truegate.canary.archs import default_config
from truegate.canary.ask import QUICK, Asker
from truegate.canary.explain import error_sizes, explain
from truegate.canary.inprocess import InProcess
from truegate.canary.make import Recipe, make

FAMILIES = ("deepseek_v3", "deepseek_v2", "qwen3_moe", "qwen2_moe", "mixtral", "glm4_moe")  # those with a model here


class Offline(InProcess):
    """An `LLM` in the place of a server: what is asked together runs as one batch of different lengths."""

    def __init__(self, llm: LLM) -> None:
        self.llm, self.num_requests = llm, 0

    def generate(self, api: Api, jobs: Sequence[tuple[Sequence[int], int]]) -> list[Completion]:
        params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True, logprobs=api.top) for _, n in jobs]
        answers = self.llm.generate([list(prompt) for prompt, _ in jobs], params, use_tqdm=False)
        return [
            Completion(list(a.token_ids), [{i: e.logprob for i, e in top.items()} for top in a.logprobs])
            for a in (one.outputs[0] for one in answers)
        ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fault", help="plant this fault of the catalogue in every layer")
    options = parser.parse_args()
    verdicts = []
    api = Api(endpoint="completions", ids=True, top=MAX_TOP, batched=True)
    print("| family | verdict | coefficients right | error, max | median | seconds |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        for family in options.family:
            manifest = make(default_config(family), Path(scratch) / family, Recipe())
            settings = {"device": options.device, "dtype": options.dtype, "fault": options.fault}
            llm = LLM(str(Path(scratch) / family), **settings)
            started = time.monotonic()
            evidence = Asker(manifest, Offline(llm), api, QUICK, lambda phase: None).run()
            verdict, seen = explain(manifest, evidence)
            seconds = time.monotonic() - started
            errors = error_sizes(seen)
            told = "; ".join([f.title for f in verdict.findings] + verdict.undecided) or "right"
            verdicts.append(bool(verdict.findings) if options.fault else told == "right")
            counts = f"{verdict.num_right:,} of {verdict.num_cells:,}"
            print(
                f"| {family} | {told} | {counts} | {errors['max']:.1e} | {errors['median']:.1e} | {seconds:.1f} |",
                flush=True,
            )
            del llm
    where = torch.cuda.get_device_name() if options.device == "cuda" else "CPU"
    print(f"\n{options.dtype}, {where}, torch {torch.__version__}")
    return int(not all(verdicts))


if __name__ == "__main__":
    sys.exit(main())
