"""How fast `truegate eval` asks and scores: 1,319 items at concurrency 128 against a scripted endpoint on loopback.

    python benchmarks/eval_speed.py            # prints a table; exit 1 above 20 s or if memory grows

The endpoint is a process of its own and answers each request after 20 ms with about 600 characters; client and
endpoint share the machine's cores. Memory is the client's peak, for 1,319 items and for four times as many.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ENDPOINT = ROOT / "tests" / "cpu" / "evals" / "eval_endpoint.py"
CLIENT = """
import resource
from truegate.evals.cli import app
app(standalone_mode=False)
used = resource.getrusage(resource.RUSAGE_SELF)
print(used.ru_utime + used.ru_stime, used.ru_maxrss)
"""
ITEMS, CONCURRENCY, LIMIT_S, LIMIT_MIB = 1319, 128, 20.0, 40.0


def start_endpoint(folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """The endpoint process and its address."""
    port_file = folder / "port"
    process = subprocess.Popen([sys.executable, str(ENDPOINT), str(port_file)])
    while not port_file.exists() or not port_file.read_text():
        if process.poll() is not None:
            raise SystemExit("the scripted endpoint did not start")
        time.sleep(0.05)
    return process, f"http://127.0.0.1:{port_file.read_text()}"


def ask(folder: Path, url: str, count: int) -> dict[str, float]:
    """Ask `count` items in a process of its own: its figures, wall time and peak memory."""
    items = folder / f"items{count}.jsonl"
    items.write_text("".join(json.dumps({"prompt": f"question {i}", "answer": "42"}) + "\n" for i in range(count)))
    command = [sys.executable, "-c", CLIENT, "run", str(items), "--url", url, "--save", str(folder / f"run{count}")]
    started = time.perf_counter()
    done = subprocess.run(
        [*command, "--concurrency", str(CONCURRENCY)],
        capture_output=True,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    seconds = time.perf_counter() - started
    summary = json.loads((folder / f"run{count}" / "summary.json").read_text())
    if done.returncode or summary["answers"] != count or summary["accuracy"] != 1.0:
        raise SystemExit(f"the run went wrong: {done.stderr[-500:]}")
    cpu, kib = done.stdout.split()[-2:]
    return {"items": count, "seconds": seconds, "cpu": float(cpu), "mib": int(kib) / 1024}


def main() -> int:
    before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        endpoint, url = start_endpoint(folder)
        try:
            rows = [ask(folder, url, ITEMS), ask(folder, url, 4 * ITEMS)]
        finally:
            endpoint.terminate()
            endpoint.wait()
    print(
        f"{CONCURRENCY} requests in flight, {os.cpu_count()} cores shared with the endpoint, load {before:.1f} before"
    )
    names = ("items", "seconds, start to report", "client's CPU seconds", "items/s", "peak memory, MiB")
    print(f"| {' | '.join(names)} |\n{'|---' * len(names)}|")
    for row in rows:
        rate = row["items"] / row["seconds"]
        print(f"| {row['items']:,} | {row['seconds']:.1f} | {row['cpu']:.1f} | {rate:.0f} | {row['mib']:.0f} |")
    grown = rows[1]["mib"] - rows[0]["mib"]
    print(f"four times the items take {grown:.1f} MiB more (limit {LIMIT_MIB:g}); {ITEMS:,} may take {LIMIT_S:g} s")
    return int(rows[0]["seconds"] > LIMIT_S or grown > LIMIT_MIB)


if __name__ == "__main__":
    sys.exit(main())
