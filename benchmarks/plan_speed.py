"""How long a plan takes: compile + decode at deployment sizes, and `truegate plan` from the shell.

E 256 experts of DeepSeek-V3 with one fused shared expert; R ranks; bars: 50 ms each, and one second for the command.
`python benchmarks/plan_speed.py` prints one line a size; the best and the median of `--repeat` runs.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from truegate.errors import Refused
from truegate.law.families import specs_of
from truegate.law.order import decode, realise
from truegate.law.placement import place
from truegate.law.plan import Choices, Ranks
from truegate.law.select import coefficients, select
from truegate.moe.backends import choose, compile_layer

CONFIG = {
    "model_type": "deepseek_v3", "num_hidden_layers": 61, "first_k_dense_replace": 3, "hidden_size": 7168,
    "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4, "n_shared_experts": 1,
    "routed_scaling_factor": 2.5, "moe_intermediate_size": 2048, "norm_topk_prob": True,
}  # fmt: skip
SIZES = ((8, 32), (16, 32), (32, 32), (64, 64), (320, 64))  # ranks, redundant experts
ROWS = 256
BAR_MS = 50.0


def one(spec, ranks: int, redundant: int, ids, weights) -> tuple[float, np.ndarray]:
    """Milliseconds to place, compile, lay out ROWS rows and decode them; and the matrix."""
    start = time.perf_counter()
    placement = place(num_experts=256, num_ranks=ranks, num_redundant=redundant)
    choices = Choices(ranks=Ranks(dp=ranks, ep=ranks), fuse_shared=True)
    plan = compile_layer(spec, choose(experts="deep_gemm", dispatch="deepep_normal"), placement, choices)
    c = decode(plan, realise(plan, ids, weights, home_T=np.arange(ROWS) % ranks))
    return 1e3 * (time.perf_counter() - start), c


def command(path: Path) -> tuple[float, float]:
    """Wall and processor seconds of `truegate plan` from the shell, interpreter start included."""
    script = Path(sys.executable).with_name("truegate")
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([script, "plan", path, "--ep", "8", "--fuse-shared"], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - start, spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeat", type=int, default=15)
    repeat = parser.parse_args().repeat
    spec = next(s for s in specs_of(CONFIG) if s is not None)
    rng = np.random.default_rng(0)
    logits, bias = rng.normal(size=(ROWS, 256)), 0.1 * rng.normal(size=256)
    want = coefficients(spec, logits, bias_E=bias)
    ids, weights = select(spec, logits, bias_E=bias, scaled=False)
    one(spec, 8, 32, ids, weights)  # imports
    missed = False
    print(
        f"place + compile + realise + decode, E=256, S=1, {ROWS} rows; bar {BAR_MS:g} ms; best and median of {repeat}"
    )
    for ranks, redundant in SIZES:
        runs = [one(spec, ranks, redundant, ids, weights) for _ in range(repeat)]
        np.testing.assert_allclose(runs[0][1], want, rtol=0, atol=1e-12)
        times = sorted(ms for ms, _ in runs)
        missed |= statistics.median(times) > BAR_MS
        print(f"R {ranks:3} redundant {redundant:2}  {times[0]:6.1f} ms  {statistics.median(times):6.1f} ms")
    try:
        place(num_experts=256, num_ranks=7)
    except Refused as refusal:
        print(f"P % R != 0 is refused: {refusal}")
    else:
        print("P % R != 0 was NOT refused")
        missed = True
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "config.json"
        path.write_text(json.dumps(CONFIG))
        command(path)
        times = sorted(command(path) for _ in range(5))
    missed |= times[0][0] > 1.0
    print(
        f"truegate plan, from the shell: {times[0][0]:.2f} s best, {times[2][0]:.2f} s median of 5 "
        f"({times[0][1]:.2f} s of processor); bar 1 s"
    )
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
