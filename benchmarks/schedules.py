"""Random schedules through the real engine, on a toy model whose next token is a function of the whole sequence.

    python benchmarks/schedules.py --count 5000

Each schedule draws limits (pages short on purpose), arrivals, lengths, shared prefixes, cancels and stops, and checks
that every answer is exactly its own, that every step keeps the scheduler's laws, that nobody starves, and that pages,
locks and slots return to zero. The toy reads its tokens back through the page table, so a wrong page is a wrong token.
"""

import argparse
import random
import sys
import time
from collections import Counter

import numpy as np
import torch

from truegate.config import EngineConfig
from truegate.engine.core import Engine
from truegate.engine.start import Parts
from truegate.types import Batch, Request, SamplingParams

VOCAB = 61
EOS = 0
PRIME = 1_000_003
POISON = -99_999


def next_token(tokens: list[int]) -> int:
    """What the toy answers to a sequence."""
    return int(_hash(np.array(tokens))[-1])


def _hash(tokens: np.ndarray) -> np.ndarray:
    weights = (np.arange(1, len(tokens) + 1) * 7919) % PRIME
    return (np.cumsum((tokens + 1) * weights) % PRIME * 31 % PRIME) % VOCAB


class Toy:
    """A model in the engine's sense: hidden row = the next token, logits = one high value there."""

    vocab_size = VOCAB
    max_position = 1 << 20
    bytes_per_token = 8
    device = "cpu"

    def __init__(self) -> None:
        self.config, self.moe_layers = {}, []
        self.num_rows = 0  # of the last step

    def make_pool(self, num_pages: int, page_size: int) -> np.ndarray:
        self.page_size = page_size
        return np.full(num_pages * page_size, POISON)

    def forward(self, batch: Batch, pool: np.ndarray) -> torch.Tensor:
        self.num_rows = len(batch.token_ids_T)
        pool[batch.slots_T.numpy()] = batch.token_ids_T.numpy()
        positions, rows, row = batch.positions_T.numpy(), [], 0
        for table, query, context in zip(
            batch.page_table_NP.numpy(), batch.query_lens, batch.context_lens, strict=True
        ):
            assert positions[row] == context - query
            assert positions[row + query - 1] == context - 1
            place = np.arange(context)
            tokens = pool[table[place // self.page_size] * self.page_size + place % self.page_size]
            rows.append(_hash(tokens)[context - query :])
            row += query
        return torch.from_numpy(np.concatenate(rows))[:, None]

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return torch.zeros(hidden_MD.shape[0], VOCAB).scatter_(1, hidden_MD, 10.0)


def toy_engine(**options) -> Engine:
    num_pages = options.pop("num_pages")
    config = EngineConfig(device="cpu", dtype="float32", **options)
    return Engine(config, Parts(config=config, model=Toy(), tokenizer=None, eos_token_ids=(EOS,), num_pages=num_pages))


def expected(prompt: list[int], params: SamplingParams, max_model_len: int) -> tuple[list[int], str]:
    """The one right answer and how it ends."""
    tokens, limit = list(prompt), min(max_model_len, len(prompt) + params.max_tokens)
    while True:
        token = next_token(tokens)
        tokens.append(token)
        if token in params.stop_token_ids or (token == EOS and not params.ignore_eos):
            return tokens[len(prompt) :], "stop"
        if len(tokens) >= limit:
            return tokens[len(prompt) :], "length"


class Wrong(AssertionError):
    """A law was broken."""


def check_step(engine: Engine, num_rows: int) -> None:
    """The laws that hold between any two steps."""
    scheduler, limits = engine.scheduler, engine.scheduler.limits
    private = sum(len(one.pages) - one.node.depth for one in scheduler.running)
    held = scheduler.allocator.num_free + scheduler.tree.num_nodes + private
    if held != scheduler.allocator.num_pages:
        raise Wrong(f"{scheduler.allocator.num_pages} pages, {held} accounted for")
    if num_rows > limits.token_budget or len(scheduler.running) > scheduler.max_running:
        raise Wrong(f"{num_rows} rows or {len(scheduler.running)} sequences are over the limits")
    orders = [one.order for one in scheduler.running]
    if orders != sorted(orders):
        raise Wrong("the running list lost its order")


def check_end(engine: Engine) -> None:
    """The laws that hold once everything has ended."""
    scheduler = engine.scheduler
    if scheduler.running or scheduler.waiting or scheduler.tree.num_locked or engine._answers:
        raise Wrong("something is still held after the last answer")
    scheduler.tree.clear()
    if scheduler.allocator.num_free != scheduler.allocator.num_pages or scheduler.tree.num_nodes:
        raise Wrong("pages did not come back")
    if sorted(scheduler.table._free) != list(range(scheduler.max_running)):
        raise Wrong("slots did not come back")


def draw_request(rng: random.Random, number: int, prefixes: list[list[int]], max_model_len: int) -> Request:
    prefix = rng.choice(prefixes)[: rng.randint(0, max_model_len)] if rng.random() < 0.6 else []
    tail = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 1 + max_model_len // 3))]
    prompt = (prefix + tail)[: max_model_len - 1]
    params = SamplingParams(
        temperature=0.0,
        max_tokens=rng.randint(1, max_model_len),
        ignore_eos=rng.random() < 0.5,
        stop_token_ids=[rng.randrange(VOCAB)] if rng.random() < 0.2 else [],
        n=rng.choice([1, 1, 1, 1, 2, 3]),
    )
    return Request(request_id=str(number), prompt_token_ids=tuple(prompt), params=params)


def run_schedule(seed: int) -> Counter:
    """One random schedule, checked throughout; returns what happened in it."""
    rng = random.Random(seed)
    page_size = rng.choice([1, 2, 3, 4, 8])
    max_model_len = rng.randint(page_size + 2, 48)
    pages_of_one = -(-max_model_len // page_size)
    engine = toy_engine(
        num_pages=1 + pages_of_one + rng.choice([0, 0, 1, pages_of_one, 4 * pages_of_one]),  # often room for one only
        page_size=page_size,
        max_model_len=max_model_len,
        max_running=rng.randint(1, 12),
        chunked_prefill_tokens=rng.choice([1, 2, 5, 16, 64]),
        prefix_cache=rng.random() < 0.75,
        overlap=rng.random() < 0.5,
    )
    prefixes = [[rng.randrange(VOCAB) for _ in range(max_model_len)] for _ in range(2)]
    count = rng.randint(1, 14)
    requests = [draw_request(rng, number, prefixes, max_model_len) for number in range(count)]
    arrivals = sorted(rng.choice([0, rng.randint(0, 60)]) for _ in requests)
    cancels = {str(number): rng.randint(0, 80) for number in range(count) if rng.random() < 0.2}
    return _simulate(engine, requests, arrivals, cancels)


def _simulate(engine: Engine, requests: list[Request], arrivals: list[int], cancels: dict[str, int]) -> Counter:
    got: dict[tuple[str, int], list[int]] = {}
    ends: dict[tuple[str, int], str] = {}
    waiting, step, idle = list(zip(arrivals, requests, strict=True)), 0, 0
    answers = {one.request_id: one.params.n for one in requests}
    # alone, a sequence needs at most its length in steps; recomputation can only repeat that per younger sequence
    patience = 100 + 4 * sum(engine.config.max_model_len * count for count in answers.values())
    while waiting or engine.has_work:
        while waiting and waiting[0][0] <= step:
            engine.add(waiting.pop(0)[1])
        for request_id, when in cancels.items():
            if when == step:
                engine.cancel(request_id)
        oldest = engine.scheduler.running[0] if engine.scheduler.running else None
        before = oldest.num_computed if oldest else 0
        engine.model.num_rows = 0
        outputs = engine.step()
        check_step(engine, engine.model.num_rows)
        stuck = oldest is not None and oldest.status.name == "RUNNING" and oldest.num_computed <= before
        if stuck and oldest.length < oldest.max_length:
            raise Wrong(f"step {step}: the oldest running sequence did not advance")
        for output in outputs:
            key = (output.request_id, output.index)
            if key in ends:
                raise Wrong(f"{key} spoke after its end")
            got.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason:
                ends[key] = output.finish_reason
        idle = 0 if outputs else idle + 1
        step += 1
        if step > patience:
            raise Wrong(f"no end after {step} steps")
    for request in requests:
        tokens, reason = expected(list(request.prompt_token_ids), request.params, engine.config.max_model_len)
        for index in range(request.params.n):
            key = (request.request_id, index)
            if key not in ends:
                raise Wrong(f"{key} never ended")
            own = got.get(key, [])
            if ends[key] == "abort" and request.request_id in cancels:
                tokens_now = tokens[: len(own)]
            else:
                tokens_now = tokens
                if ends[key] != reason:
                    raise Wrong(f"{key} ended by {ends[key]}, not {reason}")
            if own != tokens_now:
                raise Wrong(f"{key} got {own}, its own are {tokens}")
    stats = engine.stats()
    check_end(engine)
    return Counter(
        schedules=1,
        answers=len(ends),
        aborted=sum(reason == "abort" for reason in ends.values()),
        tokens=stats.generated_tokens,
        preemptions=stats.preemptions,
        prefix_hit_tokens=stats.prefix_hit_tokens,
        steps=stats.steps,
        overlapped=int(engine.config.overlap),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=5000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    total, since = Counter(), time.monotonic()
    for seed in range(options.seed, options.seed + options.count):
        try:
            total += run_schedule(seed)
        except Exception as error:
            print(f"schedule {seed}: {type(error).__name__}: {error}")
            sys.exit(1)
    print(", ".join(f"{name} {value:,}" for name, value in total.items()))
    print(f"all right in {time.monotonic() - since:.0f} s")


if __name__ == "__main__":
    main()
