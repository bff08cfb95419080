"""The load: requests sent at a rate or a concurrency, each streamed answer timed chunk by chunk.

Invariant: a clock is read when a chunk arrives, before it is parsed; a request that failed is counted, never dropped.
"""

import asyncio
import json
import math
import random
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import httpx

from truegate.bench.prompts import Prompt

Endpoint = Literal["chat", "completions"]
WAIT_SECONDS = 3600.0


@dataclass(kw_only=True, slots=True)
class Outcome:
    """What one request did; times in seconds, `start` since the run's begin."""

    start: float
    latency: float = 0.0
    ttft: float | None = None  # None: no text came
    itl: list[float] = field(default_factory=list)  # between chunks with text; a chunk may hold more than one token
    text: str = ""
    input_len: int | None = None  # by the server's own count
    output_len: int | None = None
    finish_reason: str | None = None
    error: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Where requests go and what every one of them says."""

    base: str  # ends in /v1
    endpoint: Endpoint
    model: str
    api_key: str | None
    temperature: float
    ignore_eos: bool
    extra_body: dict[str, Any]

    def body(self, prompt: Prompt) -> dict[str, Any]:
        content = {"messages": prompt.messages()} if self.endpoint == "chat" else {"prompt": prompt.text()}
        body = {
            "model": self.model,
            **content,
            "max_tokens": prompt.output_len,
            "temperature": self.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return body | ({"ignore_eos": True} if self.ignore_eos else {}) | self.extra_body

    @property
    def path(self) -> str:
        return f"{self.base}/chat/completions" if self.endpoint == "chat" else f"{self.base}/completions"


def client_for(target: Target, connections: int | None) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {target.api_key}"} if target.api_key else {}
    limits = httpx.Limits(max_connections=connections, max_keepalive_connections=connections)
    return httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(WAIT_SECONDS, connect=30))


async def run_load(
    target: Target,
    prompts: Sequence[Prompt],
    *,
    request_rate: float,
    burstiness: float,
    max_concurrency: int | None,
    seed: int,
) -> tuple[list[Outcome], float]:
    """Send every prompt; returns the outcomes in order and the seconds from the first send to the last end."""
    gate = asyncio.Semaphore(max_concurrency) if max_concurrency else None
    async with client_for(target, max_concurrency) as http:
        began = time.perf_counter()

        async def one(prompt: Prompt) -> Outcome:
            if gate is None:
                return await send(http, target, prompt, began)
            async with gate:
                return await send(http, target, prompt, began)

        tasks = [
            asyncio.create_task(one(prompt))
            async for prompt in paced(prompts, request_rate, burstiness, random.Random(seed))
        ]
        outcomes = await asyncio.gather(*tasks)
        return list(outcomes), time.perf_counter() - began


async def paced(prompts: Sequence[Prompt], rate: float, burstiness: float, rng: random.Random) -> AsyncIterator[Prompt]:
    """Prompts at gamma-distributed intervals of mean 1/rate (burstiness 1: a Poisson process); inf: all at once."""
    due = time.perf_counter()
    for prompt in prompts:
        yield prompt
        if math.isfinite(rate):
            due += rng.gammavariate(burstiness, 1 / (rate * burstiness))  # from the plan, so that delays do not add up
            await asyncio.sleep(max(0.0, due - time.perf_counter()))


async def send(http: httpx.AsyncClient, target: Target, prompt: Prompt, began: float) -> Outcome:
    """One request, timed."""
    sent = last = time.perf_counter()
    outcome = Outcome(start=sent - began)
    pieces: list[str] = []
    try:
        async with http.stream("POST", target.path, json=target.body(prompt)) as response:
            if response.status_code != 200:
                await response.aread()
                outcome.error = f"HTTP {response.status_code}: {response.text[:300]}"
                return outcome
            async for now, event in events(response):
                piece = _read(event, outcome)
                if piece:
                    if outcome.ttft is None:
                        outcome.ttft = now - sent
                    else:
                        outcome.itl.append(now - last)
                    last = now
                    pieces.append(piece)
    except (httpx.HTTPError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    outcome.latency = time.perf_counter() - sent
    outcome.text = "".join(pieces)
    if outcome.ok and outcome.finish_reason is None:
        outcome.error = "the stream ended without a finish reason"
    return outcome


async def events(response: httpx.Response) -> AsyncIterator[tuple[float, dict[str, Any]]]:
    """(arrival, event) of a server-sent stream, up to [DONE]; split by hand, since this loop shares the cores."""
    rest = b""
    async for chunk in response.aiter_bytes():
        now = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            data = line[5:].strip() if line.startswith(b"data:") else b""
            if data == b"[DONE]":
                return
            if data:
                yield now, json.loads(data)


def _read(event: dict[str, Any], outcome: Outcome) -> str:
    """Take what an event says; returns its text."""
    if event.get("error"):
        outcome.error = f"stream error: {event['error']}"
    usage = event.get("usage")
    if usage:
        outcome.input_len, outcome.output_len = usage.get("prompt_tokens"), usage.get("completion_tokens")
    text = ""
    for choice in event.get("choices") or []:
        outcome.finish_reason = choice.get("finish_reason") or outcome.finish_reason
        delta = choice.get("delta") or {}
        text += choice.get("text") or delta.get("content") or delta.get("reasoning_content") or ""
    return text
