"""A scripted engine behind the real engine process protocol, for tests of the HTTP side: no torch, starts at once.

An answer is its prompt's tokens, over and over, ended by the end token after three rounds. Words in the prompt make it
misbehave: CRASH, RAISE, HANG, SLOW, REFUSE. Run as the worker command: `python fake_engine.py FD`.
"""

import hashlib
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from truegate.config import EngineConfig
from truegate.engine.detokeniser import Detokeniser
from truegate.engine.tokenizer import Tokenizer
from truegate.errors import TruegateError, UserError
from truegate.serve.worker import channel_from_argv, serve_engine
from truegate.types import EngineStats, Request, RoutedExperts, StepOutput, TokenLogprobs

ROUNDS, LAYERS, TOP_K = 3, 2, 2
VOCAB = 300


@dataclass(kw_only=True)
class Running:
    request: Request
    index: int
    detokeniser: Detokeniser
    text: str
    made: list[int] = field(default_factory=list)


class FakeEngine:
    def __init__(self, config: EngineConfig) -> None:
        if os.environ.get("FAKE_FAILS"):
            raise TruegateError(f"self-test failed: {os.environ['FAKE_FAILS']}")
        time.sleep(float(os.environ.get("FAKE_LOADS", "0")))
        self.config = replace(config, max_model_len=config.max_model_len or 512, max_running=config.max_running or 8)
        self.tokenizer = Tokenizer(Path(config.model or ""))
        self.model_config = {"vocab_size": VOCAB}
        self.running: list[Running] = []
        self.waiting: list[Running] = []
        self.outbox: list[StepOutput] = []
        self.generated = self.prompted = self.steps = 0

    def add(self, request: Request) -> None:
        text = self.tokenizer.decode(request.prompt_token_ids)
        if "REFUSE" in text or request.params.json_schema == '{"type": "refuse"}':
            raise UserError("the engine refuses this")
        self.prompted += len(request.prompt_token_ids)
        for index in range(request.params.n):
            detokeniser = Detokeniser.of(self.tokenizer, request.params)
            self.waiting.append(Running(request=request, index=index, detokeniser=detokeniser, text=text))

    def cancel(self, request_id: str) -> None:
        for one in self.running + self.waiting:
            if one.request.request_id == request_id:
                self.outbox.append(StepOutput(request_id=request_id, index=one.index, finish_reason="abort"))
        self.running = [one for one in self.running if one.request.request_id != request_id]
        self.waiting = [one for one in self.waiting if one.request.request_id != request_id]

    @property
    def has_work(self) -> bool:
        if os.environ.get("FAKE_DIES"):  # first asked right after Ready
            os._exit(9)
        return bool(self.running or self.waiting or self.outbox)

    def step(self) -> list[StepOutput]:
        self.steps += 1
        while self.waiting and len(self.running) < (self.config.max_running or 8):
            self.running.append(self.waiting.pop(0))
        outputs, self.outbox = self.outbox, []
        if any("SLOW" in one.text for one in self.running):
            time.sleep(0.05)
        for one in self.running[:]:
            outputs.append(self._advance(one))
            if outputs[-1].finish_reason is not None:
                self.running.remove(one)
        return outputs

    def _advance(self, one: Running) -> StepOutput:
        if "CRASH" in one.text and len(one.made) == 3:
            os._exit(9)
        if "RAISE" in one.text and len(one.made) == 3:
            raise RuntimeError("a step broke")
        if "HANG" in one.text:
            time.sleep(3600)
        prompt, params = one.request.prompt_token_ids, one.request.params
        token = prompt[len(one.made) % len(prompt)]
        if len(one.made) >= ROUNDS * len(prompt) and not params.ignore_eos and len(one.made) >= params.min_tokens:
            token = self.tokenizer.eos_token_ids[0]
        first = not one.made
        one.made.append(token)
        self.generated += 1
        one.detokeniser.feed([token])
        reason, stop = self._ending(one, token)
        return StepOutput(
            request_id=one.request.request_id,
            index=one.index,
            token_ids=(token,),
            logprobs=(self._describe(token, one, params.logprobs or 0),) if params.wants_logprobs else (),
            prompt_logprobs=self._prompt_logprobs(one) if first and params.prompt_logprobs is not None else (),
            finish_reason=reason,
            stop_reason=stop,
            cached_tokens=len(prompt) // 4,
            routed=self._routed(one) if reason and params.return_routed_experts else None,
        )

    def _ending(self, one: Running, token: int) -> tuple[str | None, int | str | None]:
        params = one.request.params
        if token in self.tokenizer.eos_token_ids and not params.ignore_eos:
            return "stop", None
        if token in params.stop_token_ids:
            return "stop", token
        if one.detokeniser.stopped is not None:
            return "stop", one.detokeniser.stopped
        return ("length", None) if len(one.made) >= params.max_tokens else (None, None)

    def _describe(self, token: int, one: Running, count: int) -> TokenLogprobs:
        top = tuple((other, -0.5 - place) for place, other in enumerate([token, *range(40, 40 + count)][:count]))
        listed = tuple((other, -float(other)) for other in one.request.params.logprob_token_ids)
        return TokenLogprobs(token_id=token, logprob=-0.5, rank=1, top=top, listed=listed)

    def _prompt_logprobs(self, one: Running) -> tuple[TokenLogprobs | None, ...]:
        count = one.request.params.prompt_logprobs or 0
        return (None, *(self._describe(token, one, count) for token in one.request.prompt_token_ids[1:]))

    def _routed(self, one: Running) -> RoutedExperts:
        positions = len(one.request.prompt_token_ids) + len(one.made) - 1
        seed = int.from_bytes(hashlib.blake2b(repr(one.request.prompt_token_ids).encode()).digest()[:4], "little")
        rng = np.random.default_rng(seed)
        ids = rng.integers(0, 8, (positions, LAYERS, TOP_K), dtype=np.int32)
        return RoutedExperts(ids_TLK=ids, weights_TLK=rng.random(ids.shape, dtype=np.float32))

    def stats(self) -> EngineStats:
        return EngineStats(
            running=len(self.running),
            waiting=len(self.waiting),
            pages_used=len(self.running),
            pages_cached=3,
            pages_total=64,
            prefix_query_tokens=self.prompted,
            prefix_hit_tokens=self.prompted // 4,
            prompt_tokens=self.prompted,
            generated_tokens=self.generated,
            preemptions=0,
            steps=self.steps,
            tokens_per_second=1.0,
            expert_load_LE=np.arange(2 * 8).reshape(2, 8),
            self_test="pass: scripted",
            fault=self.config.fault,
        )

    def shutdown(self, *, drain: bool = True) -> list[StepOutput]:
        outputs = []
        while drain and self.has_work:
            outputs += self.step()
        return outputs


if __name__ == "__main__":
    os._exit(serve_engine(channel_from_argv(sys.argv), FakeEngine))
