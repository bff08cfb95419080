"""What the server costs over the offline engine, and how long it takes to the first answer.

    python benchmarks/server_overhead.py [--streams 16 64 --rounds 5]

Throughput: the same prompts and lengths (greedy, end token ignored, so that both make the same number of tokens), once
through `Engine` in a process of its own, once through `truegate serve` and streaming HTTP clients in this process; one
thread each for the engine, rounds interleaved, medians compared. Exit 1 if the server is more than 10 percent slower.
Processor time per token (us) of the engine alone, of the server's engine and HTTP processes and of the client stands
beside it: it says the same on a machine that others use too, where the clock does not.
Start: `truegate serve` to the first answer of a fresh process, median of three.
"""

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time

import httpx

from truegate.bench.load import Target, run_load
from truegate.bench.prompts import Prompt
from truegate.evals.ledger import problems

OUTPUT_TOKENS = 128
ENGINE = ["--max-running", "64", "--kv-cache-gib", "0.5"]
BAR, START_BAR = 0.10, 8.0


def questions(streams: int, seed: int) -> list[str]:
    """Two waves of prompts per stream; every round has its own, so that no cache remembers them."""
    return [one.question for one in problems(steps=4, count=2 * streams, seed=1000 + seed)]


def offline() -> None:
    """The child: reads {streams, questions} lines, answers {seconds, tokens}; at most `streams` run at a time."""
    from truegate.config import EngineConfig
    from truegate.engine.core import Engine
    from truegate.types import Request, SamplingParams

    engine = Engine(EngineConfig(max_running=64, kv_cache_gib=0.5, threads=1))
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    print("ready", flush=True)
    for line in sys.stdin:
        order = json.loads(line)
        prompts = [engine.tokenizer.encode_chat([{"role": "user", "content": q}]) for q in order["questions"]]
        began, tokens, waiting, running = time.perf_counter(), 0, list(enumerate(prompts)), 0
        while waiting or running:
            while waiting and running < order["streams"]:
                number, prompt = waiting.pop(0)
                engine.add(Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params))
                running += 1
            for output in engine.step():
                tokens += len(output.token_ids)
                running -= output.finish_reason is not None
        print(json.dumps({"seconds": time.perf_counter() - began, "tokens": tokens}), flush=True)


def through_server(base: str, streams: int, asked: list[str]) -> float:
    """Tokens per second of the same work through HTTP."""
    target = Target(
        base=f"{base}/v1",
        endpoint="chat",
        model="ledger",
        api_key=None,
        temperature=0.0,
        ignore_eos=True,
        extra_body={},
    )
    prompts = [Prompt(content=question, output_len=OUTPUT_TOKENS) for question in asked]
    outcomes, seconds = asyncio.run(
        run_load(target, prompts, request_rate=float("inf"), burstiness=1.0, max_concurrency=streams, seed=0)
    )
    assert all(one.ok and one.output_len == OUTPUT_TOKENS for one in outcomes), [one.error for one in outcomes][:3]
    return len(outcomes) * OUTPUT_TOKENS / seconds


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, all threads."""
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Server:
    """A fresh `truegate serve`."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.began = time.perf_counter()
        command = [sys.executable, "-c", "from truegate.cli import main; main()", "serve"]
        command += ["--port", str(port), "--threads", "1", *ENGINE]
        self.process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)

    def first_answer(self) -> float:
        """Seconds from the start of the process to the end of its first answer."""
        body = {"messages": [{"role": "user", "content": "what is 37 + 85?"}], "max_tokens": 32, "temperature": 0}
        while True:
            try:
                answer = httpx.post(f"{self.base}/v1/chat/completions", json=body, timeout=60)
                assert "122" in answer.json()["choices"][0]["message"]["content"], answer.text
                return time.perf_counter() - self.began
            except httpx.TransportError:
                assert self.process.poll() is None, "the server ended"
                time.sleep(0.02)

    def stop(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)


def compare(streams: list[int], rounds: int) -> bool:
    """Interleaved rounds; prints a table, returns whether every row is within the bar."""
    child = subprocess.Popen(
        [sys.executable, __file__, "--offline"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert child.stdin is not None
    assert child.stdout is not None
    assert child.stdout.readline().strip() == "ready"
    server, good = Server(), True
    server.first_answer()
    pids = [child.pid, httpx.get(f"{server.base}/health").json()["engine"]["pid"], server.process.pid, os.getpid()]
    print(f"{'streams':>8} {'offline tok/s':>14} {'server tok/s':>13} {'server/offline':>15}   rounds")
    try:
        for count in streams:
            ours, theirs, before = [], [], [cpu_seconds(pid) for pid in pids]
            for number in range(rounds + 1):  # the first warms up
                asked = questions(count, 100 * count + number)
                child.stdin.write(json.dumps({"streams": count, "questions": asked}) + "\n")
                child.stdin.flush()
                row = json.loads(child.stdout.readline())
                theirs.append(row["tokens"] / row["seconds"])
                ours.append(through_server(server.base, count, asked))
            ratios = [a / b for a, b in zip(ours[1:], theirs[1:], strict=True)]
            ratio = statistics.median(ours[1:]) / statistics.median(theirs[1:])
            good = good and ratio >= 1 - BAR
            shown = " ".join(f"{one:.2f}" for one in ratios)
            print(
                f"{count:>8} {statistics.median(theirs[1:]):>14.1f} {statistics.median(ours[1:]):>13.1f} "
                f"{ratio:>15.3f}   {shown}",
                flush=True,
            )
            tokens = (rounds + 1) * 2 * count * OUTPUT_TOKENS
            alone, engine, http, client = (
                1e6 * (cpu_seconds(pid) - then) / tokens for pid, then in zip(pids, before, strict=True)
            )
            print(
                f"         us of processor time a token: engine alone {alone:.0f}; server: engine {engine:.0f} "
                f"({engine / alone - 1:+.1%}), HTTP {http:.0f}; client {client:.0f}",
                flush=True,
            )
    finally:
        server.stop()
        child.stdin.close()
        child.wait(60)
    return good


def start_times(count: int) -> float:
    seconds = []
    for _ in range(count):
        server = Server()
        seconds.append(server.first_answer())
        server.stop()
    print(f"start to first answer: {' '.join(f'{one:.2f}' for one in seconds)} s (bar: {START_BAR:g} s)")
    return statistics.median(seconds)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, nargs="*", default=[16, 64])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--starts", type=int, default=3)
    parser.add_argument("--offline", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.offline:
        offline()
        return 0
    print(f"load average before: {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores")
    good = compare(args.streams, args.rounds) if args.streams else True
    good = good and (not args.starts or start_times(args.starts) <= START_BAR)
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
