"""2,000 mixed requests against `truegate serve`, a quarter cancelled midway: none lost, none mixed up, memory flat.

    python benchmarks/server_soak.py [--requests 2000 --concurrency 64]      # a few minutes on 2 cores

Every answer is checked against the offline engine's greedy answer to the same prompt: a finished one must be equal, a
cancelled one a beginning of it, token by token and in text. Where they part, the offline engine's own margin between
its first and second choice decides: below 1e-3 it is a near tie that another batch may round the other way, else wrong.
Resident memory (PSS) of both processes after the first 200 requests is compared with that at the end. Exit 0, or 1.
"""

import argparse
import asyncio
import json
import random
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from typing import Any

import httpx

KV_CACHE_GIB = 0.06  # too small for 64 answers: the first 200 requests touch all of it, and answers are preempted
NEAR_TIE = 1e-3
CONTEXT = 1024
TOLERANCE = 0.03


@dataclass(kw_only=True)
class Case:
    """A prompt, and the offline engine's answer to it."""

    question: str
    max_tokens: int
    text: str = ""
    finish_reason: str = ""
    token_ids: list[int] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # margin of each token over the second choice


def make_cases(count: int, seed: int) -> list[Case]:
    from truegate.evals.ledger import problems, sums

    rng = random.Random(seed)
    questions = [one.question for one in sums(count=count // 4, seed=seed)]
    for steps in (1, 2, 4, 8):
        questions += [one.question for one in problems(steps=steps, count=count // 4, seed=seed)]
    rng.shuffle(questions)
    return [Case(question=question, max_tokens=rng.choice((2, 8, 24, 48, 96))) for question in questions[:count]]


def answer_offline(cases: list[Case]) -> list[Case]:
    """The cases with their reference answers, from an engine in this process."""
    from truegate import LLM, SamplingParams

    llm = LLM(max_model_len=CONTEXT, kv_cache_gib=KV_CACHE_GIB)
    params = [SamplingParams(temperature=0.0, max_tokens=case.max_tokens, logprobs=2) for case in cases]
    conversations = [[{"role": "user", "content": case.question}] for case in cases]
    for case, output in zip(cases, llm.chat(conversations, params, use_tqdm=False), strict=True):
        (best,) = output.outputs
        case.text, case.finish_reason = best.text, best.finish_reason
        case.token_ids = list(best.token_ids)
        for entries in best.logprobs:
            values = sorted((entry.logprob for entry in entries.values()), reverse=True)
            case.gaps.append(values[0] - values[1])
    return cases


@dataclass(kw_only=True)
class Tally:
    finished: int = 0
    cancelled: int = 0
    near_ties: int = 0
    wrong: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)


def judge(case: Case, ids: list[int], text: str, finish_reason: str | None, tally: Tally) -> None:
    """Finish reason None: the request was cancelled, and what came must be a beginning of the reference."""
    if finish_reason is None:
        tally.cancelled += 1
    else:
        tally.finished += 1
    same = case.token_ids[: len(ids)] == ids and case.text.startswith(text)
    if same and finish_reason in (None, case.finish_reason) and (finish_reason is None or text == case.text):
        return
    place = next((i for i, (a, b) in enumerate(zip(ids, case.token_ids, strict=False)) if a != b), None)
    if place is not None and case.gaps[place] < NEAR_TIE:
        tally.near_ties += 1
    else:
        tally.wrong.append(f"{case.question[:50]!r} at token {place}: {text[-60:]!r}, not {case.text[-60:]!r}")


async def one_request(http: httpx.AsyncClient, case: Case, rng: random.Random, tally: Tally) -> None:
    """Ask, streaming or not; one in four is cancelled: after some pieces, or after some milliseconds."""
    cancel = rng.random() < 0.25
    messages = [{"role": "user", "content": case.question}]
    body = {"messages": messages, "max_tokens": case.max_tokens, "temperature": 0, "return_token_ids": True}
    try:
        if rng.random() < 0.6:
            await _streamed(http, case, body, tally, leave_after=rng.randrange(1, case.max_tokens) if cancel else None)
        elif cancel:
            try:
                await asyncio.wait_for(_whole(http, case, body, tally), rng.random())
            except TimeoutError:
                tally.cancelled += 1
        else:
            await _whole(http, case, body, tally)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        tally.lost.append(f"{case.question[:50]!r}: {type(error).__name__}: {error}")


async def _whole(http: httpx.AsyncClient, case: Case, body: dict[str, Any], tally: Tally) -> None:
    response = await http.post("/v1/chat/completions", json=body)
    if response.status_code != 200:
        tally.lost.append(f"{response.status_code}: {response.text[:200]}")
        return
    (choice,) = response.json()["choices"]
    judge(case, choice["token_ids"], choice["message"]["content"], choice["finish_reason"], tally)


async def _streamed(
    http: httpx.AsyncClient, case: Case, body: dict[str, Any], tally: Tally, leave_after: int | None
) -> None:
    text, ids, finish, pieces = "", [], None, 0
    async with http.stream("POST", "/v1/chat/completions", json=body | {"stream": True}) as response:
        if response.status_code != 200:
            tally.lost.append(f"{response.status_code}: {(await response.aread())[:200]!r}")
            return
        async for line in response.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            (choice,) = json.loads(line[6:])["choices"]
            text += choice["delta"].get("content") or ""
            ids += choice.get("token_ids") or []
            finish = choice["finish_reason"] or finish
            pieces += 1
            if pieces == leave_after and finish is None:
                judge(case, ids, text, None, tally)
                return
    if finish is None:
        tally.lost.append(f"{case.question[:50]!r}: the stream ended without a finish reason")
    else:
        judge(case, ids, text, finish, tally)


def resident(pids: list[int]) -> list[int]:
    """Proportional set size of each process, in bytes."""
    sizes = []
    for pid in pids:
        with open(f"/proc/{pid}/smaps_rollup") as lines:
            sizes.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")))
    return sizes


async def soak(
    base: str, pids: list[int], cases: list[Case], args: argparse.Namespace
) -> tuple[Tally, list[list[int]]]:
    """All requests, at the concurrency asked for; memory after the first 200 and at every further hundred."""
    tally, memory, rng, done = Tally(), [], random.Random(args.seed), 0
    plan = [(rng.choice(cases), random.Random(rng.random())) for _ in range(args.requests)]
    queue = iter(plan)
    limits = httpx.Limits(max_connections=args.concurrency)
    async with httpx.AsyncClient(base_url=base, timeout=600, limits=limits) as http:

        async def worker() -> None:
            nonlocal done
            for case, mine in queue:
                await one_request(http, case, mine, tally)
                done += 1
                if done >= 200 and done % 100 == 0:
                    memory.append(resident(pids))
                    print(f"  {done} requests, {sum(memory[-1]) / 2**20:.1f} MiB", flush=True)

        await asyncio.gather(*(worker() for _ in range(args.concurrency)))
        await asyncio.sleep(2)
        health = (await http.get("/health")).json()
        if health["answers_in_flight"] or health["engine"]["running"] or health["engine"]["waiting"]:
            tally.lost.append(f"something still runs: {health}")
        memory.append(resident(pids))
    return tally, memory


def reference_answers(args: argparse.Namespace) -> list[Case]:
    """From an engine in a process of its own, so that its memory and threads are gone before the server starts."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(answer_offline, make_cases(args.prompts, args.seed)).result()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--prompts", type=int, default=200, help="different prompts among them")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began = time.monotonic()
    cases = reference_answers(args)
    print(f"{len(cases)} reference answers from the offline engine, {time.monotonic() - began:.0f} s", flush=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    flags = ["--port", str(port), "--max-model-len", str(CONTEXT), "--kv-cache-gib", str(KV_CACHE_GIB)]
    server = subprocess.Popen([sys.executable, "-c", "from truegate.cli import main; main()", "serve", *flags])
    base = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                health = httpx.get(f"{base}/health").json()
                break
            except httpx.TransportError:
                if server.poll() is not None:
                    return 1
                time.sleep(0.2)
        began = time.monotonic()
        tally, memory = asyncio.run(soak(base, [server.pid, health["engine"]["pid"]], cases, args))
        seconds = time.monotonic() - began
    finally:
        server.send_signal(signal.SIGTERM)
        code = server.wait(60)
    return report(tally, memory, seconds, code, args)


def report(tally: Tally, memory: list[list[int]], seconds: float, code: int, args: argparse.Namespace) -> int:
    first, last = memory[0], memory[-1]
    growth = sum(last) / sum(first) - 1
    print(f"{args.requests} requests at concurrency {args.concurrency} in {seconds:.0f} s")
    print(f"  finished {tally.finished}, cancelled {tally.cancelled}, lost {len(tally.lost)}")
    print(f"  wrong or mixed up {len(tally.wrong)}, near ties {tally.near_ties}")
    for name, before, after in zip(("HTTP process", "engine process"), first, last, strict=True):
        print(f"  {name}: {before / 2**20:.1f} MiB after 200 requests, {after / 2**20:.1f} MiB at the end")
    print(f"  memory {growth:+.2%} (bar: within {TOLERANCE:.0%}); server ended with code {code}")
    for line in (tally.lost + tally.wrong)[:10]:
        print("   ", line)
    accounted = tally.finished + tally.cancelled + len(tally.lost) == args.requests
    good = not tally.lost and not tally.wrong and accounted and growth <= TOLERANCE and code == 0
    print("PASS" if good else "FAIL")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
