"""A quick canary audit of our own engine in this process: every phase, on a CPU or through a GPU's CUDA graphs.

    python benchmarks/canary_engine.py [--device cuda] [--family deepseek_v3 qwen3_moe ...] [--fault NAME] [--jobs N]

For a machine that has torch and nothing that speaks HTTP; where it has, `truegate serve` and `truegate canary run` ask
the same questions. Prints, per family, the verdict and the relative errors of the coefficients read. Exit 1 unless
every family is right (with --fault: unless every family is found faulty).
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from machine import need_gpu, versions

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


def audit(family: str, options: argparse.Namespace) -> tuple[str, bool]:
    """The family's row of the table, and whether it is what it should be."""
    settings = {"device": options.device, "dtype": options.dtype, "fault": options.fault}
    if options.device == "cuda":
        settings |= {"kv_cache_gib": 1.0, "max_running": 32, "chunked_prefill_tokens": 512}  # beside others, few graphs
    api = Api(endpoint="completions", ids=True, top=MAX_TOP, batched=True)
    with tempfile.TemporaryDirectory() as scratch:
        manifest = make(default_config(family), Path(scratch) / family, Recipe())
        started = time.monotonic()
        llm = LLM(str(Path(scratch) / family), **settings)
        ready = time.monotonic()
        evidence = Asker(manifest, Offline(llm), api, QUICK, lambda phase: None).run()
        verdict, seen = explain(manifest, evidence)
    asked = time.monotonic() - ready
    errors = error_sizes(seen)
    told = "; ".join([f.title for f in verdict.findings] + verdict.undecided) or "right"
    row = (
        f"| {family} | {told} | {verdict.num_right:,} of {verdict.num_cells:,} | {errors['max']:.1e} | "
        f"{errors['median']:.1e} | {ready - started:.1f} | {asked:.1f} |"
    )
    return row, bool(verdict.findings) if options.fault else told == "right"


def apart(family: str, options: argparse.Namespace) -> tuple[str, bool]:
    """`audit` in a process of its own."""
    flags = ["--device", options.device, "--dtype", options.dtype]
    flags += ["--fault", options.fault] if options.fault else []
    done = subprocess.run(
        [sys.executable, __file__, "--family", family, "--one", *flags], capture_output=True, text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    rows = [line for line in done.stdout.splitlines() if line.startswith(f"| {family} |")]
    return rows[-1] if rows else f"| {family} | failed: {done.stderr[-1500:]} |", done.returncode == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", nargs="*", default=list(FAMILIES), choices=FAMILIES)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--fault", help="plant this fault of the catalogue in every layer")
    parser.add_argument("--jobs", type=int, help="families at a time, a process each; default: 1 on a CPU, else all")
    parser.add_argument("--one", action="store_true", help="the one family, in this process")
    options = parser.parse_args()
    need_gpu(options.device)
    if options.one:
        row, as_it_should = audit(options.family[0], options)
        print(row)
        return int(not as_it_should)
    jobs = options.jobs or (1 if options.device == "cpu" else len(options.family))
    print(versions(cpu=options.device == "cpu") + "\n")
    print("| family | verdict | coefficients right | error, max | median | start, s | asked, s |\n" + "|---" * 7 + "|")
    all_right = True
    with ThreadPoolExecutor(jobs) as pool:
        for row, as_it_should in pool.map(lambda family: apart(family, options), options.family):
            print(row, flush=True)
            all_right &= as_it_should
    print(f"\n{options.dtype}, {options.device}")
    return int(not all_right)


if __name__ == "__main__":
    sys.exit(main())
