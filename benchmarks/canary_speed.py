"""How fast a canary is made and a quick audit is answered, against our own engine on this machine's CPU.

    python benchmarks/canary_speed.py          # prints a table; exit 1 where a limit is missed

Made: 256 experts, hidden 7168, three MoE layers (limits 60 s, 4 GB of memory). Asked: `truegate canary run --quick` on
DeepSeek-V3's routing with 64 experts, three times, a process each (limit 10 s, the median).
"""

import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from fault_story import TRUEGATE, server

MAKE_LIMIT_S, MAKE_LIMIT_GB, QUICK_LIMIT_S = 60.0, 4.0, 10.0


def timed(*arguments: str) -> float:
    """Seconds of one `truegate` command, which must succeed."""
    started = time.perf_counter()
    done = subprocess.run([*TRUEGATE, *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"truegate {' '.join(arguments)} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - started


def main() -> int:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shape = ("--hidden", "7168", "--experts", "256", "--layers", "4")
        made = timed("canary", "make", "--arch", "deepseek_v3", *shape, "--out", str(folder / "big"))
        memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
        disk = sum(f.stat().st_blocks * 512 for f in (folder / "big").iterdir()) / 1e9
        timed("canary", "make", "--arch", "deepseek_v3", "--out", str(folder / "small"))
        with server([str(folder / "small")], folder / "serve.log") as url:
            audit = ("canary", "run", "--url", url, "--canary", str(folder / "small"), "--quick")
            quick = [timed(*audit) for _ in range(3)]
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n| what | printed | limit |\n|---|---|---|")
    cost = f"{made:.1f} s, {memory:.2f} GB of memory, {disk:.1f} GB on disk"
    print(f"| make, 256 experts, hidden 7168, 3 MoE layers | {cost} | {MAKE_LIMIT_S:g} s, {MAKE_LIMIT_GB:g} GB |")
    seconds = ", ".join(f"{s:.1f}" for s in quick)
    print(f"| `--quick`, 64 experts, right in every phase | {seconds} s | {QUICK_LIMIT_S:g} s |")
    return int(made > MAKE_LIMIT_S or memory > MAKE_LIMIT_GB or median(quick) > QUICK_LIMIT_S)


if __name__ == "__main__":
    sys.exit(main())
