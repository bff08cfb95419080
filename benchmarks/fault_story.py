"""What one wrong factor does to answers: a model, right and with a planted fault, on short and on long problems.

    python benchmarks/fault_story.py [--fault shared-inverse-scale] [--steps 2 8 24] [--items 200] [--out DIR]

It starts `truegate serve` on the embedded model twice (right, then with the fault), asks `truegate eval run ledger` at
each length, and compares. Every folder, the page report.html and the table story.md stay in DIR. Exit 0 if the shortest
problems do not show the fault (PASS or INCONCLUSIVE) and the longest do (FAIL): that is the story. Exit 1 otherwise.
With --right URL --wrong URL it asks two servers that already run, of whatever engine, instead of starting its own.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

START_S = 300.0
TRUEGATE = [sys.executable, "-c", "from truegate.cli import main; main()"]


def free_port() -> int:
    """A port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def server(options: list[str], log: Path) -> Iterator[str]:
    """A `truegate serve` process of its own, healthy; stopped at the end."""
    port = free_port()
    command = [*TRUEGATE, "serve", "--port", str(port), *options]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        try:
            wait_healthy(f"http://127.0.0.1:{port}", process, log)
            yield f"http://127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def wait_healthy(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Return when /health answers 200; end the program if the server dies first."""
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise SystemExit(f"`truegate serve` ended with code {process.returncode}:\n{log.read_text()[-1500:]}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5) as response:
                if response.status == 200:
                    return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise SystemExit(f"`truegate serve` is not healthy after {START_S:g} s; its log is {log}")


def evaluate(url: str, folder: Path, options: argparse.Namespace) -> None:
    """`truegate eval run ledger` at each length against one server."""
    for steps in options.steps:
        command = [*TRUEGATE, "eval", "run", "ledger", "--url", url, "--steps", str(steps), "--n", str(options.items)]
        command += ["--save", str(folder / f"ledger-{steps:02d}"), "--concurrency", str(options.concurrency)]
        print(f"$ truegate {' '.join(command[3:])}", flush=True)
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise SystemExit("the run went wrong")


def compare(out: Path) -> dict[str, Any]:
    """`truegate eval compare` over all lengths (Holm), as JSON; writes the page and the Markdown beside it."""
    command = [*TRUEGATE, "eval", "compare", str(out / "right"), str(out / "wrong")]
    (out / "compare.md").write_text(subprocess.run([*command, "--md"], capture_output=True, text=True).stdout)
    done = subprocess.run(
        [*command, "--json", "--html", str(out / "report.html")], stdout=subprocess.PIPE, text=True, check=False
    )
    if done.returncode not in (0, 1, 2):
        raise SystemExit("the comparison went wrong")
    return dict(json.loads(done.stdout))


def table(result: dict[str, Any], title: str) -> str:
    """The story as a Markdown table."""
    names = ("problems of", "right", "wrong", "change", "exact p (Holm)", "length", "runaways", "verdict")
    rows = [title, "", f"| {' | '.join(names)} |", "|---" * len(names) + "|"]
    for task in result["tasks"]:
        low, high = task["difference_ci"].values()
        rows.append(
            f"| {task['task'].removeprefix('ledger-')} steps "
            f"| {task['a']['accuracy']:.1%} | {task['b']['accuracy']:.1%} "
            f"| {100 * task['difference']:+.1f} pp ({100 * low:+.1f} to {100 * high:+.1f}) | {task['p_holm']:.2g} "
            f"| {task['length_ratio']:.2f} times | {task['runaways']['a']:.1%} → {task['runaways']['b']:.1%} "
            f"| {task['verdict']} |"
        )
    return "\n".join(rows) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fault", default="shared-inverse-scale")
    parser.add_argument("--steps", type=int, nargs="+", default=[2, 8, 24])
    parser.add_argument("--items", type=int, default=200)
    parser.add_argument("--concurrency", type=int, default=32)
    parser.add_argument("--out", type=Path, default=Path("eval-runs") / f"fault-story-{time.strftime('%Y%m%d-%H%M%S')}")
    parser.add_argument("--right", metavar="URL", help="a server with right weights, already running")
    parser.add_argument("--wrong", metavar="URL", help="a server with the fault, already running")
    parser.add_argument("--serve", default="", help="more options of `truegate serve`, in one string")
    options = parser.parse_args()
    if bool(options.right) != bool(options.wrong):
        parser.error("give both --right and --wrong, or neither")
    options.steps = sorted(options.steps)
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    if options.right:
        evaluate(options.right, options.out / "right", options)
        evaluate(options.wrong, options.out / "wrong", options)
    else:
        for side, planted in (("right", []), ("wrong", ["--fault", options.fault])):
            with server([*options.serve.split(), *planted], options.out / f"serve-{side}.log") as url:
                evaluate(url, options.out / side, options)
    result = compare(options.out)
    name = "two servers" if options.right else f"right weights against `--fault {options.fault}`"
    story = table(result, f"{options.items} problems of each length, {name}:")
    (options.out / "story.md").write_text(story)
    print(
        f"\n{story}\n{time.monotonic() - started:.0f} s on {os.cpu_count()} cores; page: {options.out / 'report.html'}"
    )
    verdicts = [task["verdict"] for task in result["tasks"]]
    return int(verdicts[0] == "FAIL" or verdicts[-1] != "FAIL")


if __name__ == "__main__":
    sys.exit(main())
