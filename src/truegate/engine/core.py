"""The engine core: requests in, steps, outputs out. Single-threaded; the caller owns the loop.

    engine = Engine(config)              # loads, self-tests, allocates; raises TruegateError with one clear line
    engine.add(request)                  # validates; UserError (nothing added) if it cannot be honoured
    while engine.has_work:
        for output in engine.step(): ... # StepOutput per answer that moved; the last one carries finish_reason
    engine.shutdown()

Invariant: every request that `add` accepted ends with exactly `params.n` outputs whose finish_reason is set, whatever
happens: stop, length, abort (cancelled, shut down) or error. Stop strings are found here (the output's tokens end with
the token that completed the string); turning tokens into text is the caller's, with `engine/detokeniser.py`.
"""

import random
import time
from collections import deque
from typing import Any

from truegate.config import EngineConfig
from truegate.engine.answer import Answer
from truegate.engine.runner import Launched, Runner
from truegate.engine.start import Parts, load_parts
from truegate.engine.tokenizer import Tokenizer
from truegate.engine.warm import warm_up
from truegate.errors import UserError
from truegate.sched.scheduler import Limits, Scheduler
from truegate.sched.sequence import Sequence, Status
from truegate.types import EngineStats, Request, StepOutput, TokenLogprobs, check_sampling

_RATE_SECONDS = 10.0


class Engine:
    """One loaded model and its scheduler.

    Attributes: `config` (resolved), `tokenizer` (engine/tokenizer.py, which also renders the chat template),
    `model_config` (the checkpoint's config.json, as a dict). `parts` brings a model that is already in memory.
    """

    config: EngineConfig
    tokenizer: Tokenizer
    model_config: dict

    def __init__(self, config: EngineConfig, parts: Parts | None = None) -> None:
        self.parts = parts = parts or load_parts(config)
        self.config = config = parts.config
        self.tokenizer = parts.tokenizer
        self.model = parts.model
        self.model_config = parts.model.config
        limits = Limits(
            num_pages=parts.num_pages,
            page_size=config.page_size,
            max_running=config.max_running,
            max_model_len=config.max_model_len,
            token_budget=config.chunked_prefill_tokens,
            prefix_cache=config.prefix_cache,
        )
        self.scheduler = Scheduler(limits)
        pool = parts.model.make_pool(parts.num_pages, config.page_size)
        self.runner = Runner(parts.model, pool, self.scheduler.table, config)
        if self.runner.device.type != "cpu":
            rows = config.chunked_prefill_tokens
            length, eager_alone = min(rows, config.max_model_len), self.runner.graphs is None
            warm_up(
                parts.model, pool, num_rows=rows, max_length=length, max_running=config.max_running,
                all_valid=eager_alone,
            )  # fmt: skip
        self._answers: dict[str, list[Sequence]] = {}  # live ones, by request
        self._order = 0
        self._outbox: list[StepOutput] = []
        self._pending: Launched | None = None
        self._closed = False
        self._seeds = random.Random(config.seed)
        self._grammars: Any = None
        self._num_grammars = 0
        self._num_recording = 0
        self._counts = {"prompt": 0, "generated": 0, "steps": 0}
        self._rate: deque[tuple[float, int]] = deque()  # (time, generated so far), at most ten a second

    # --- requests

    def add(self, request: Request) -> None:
        """Queue a request, its `params.n` answers as indices 0..n-1. Request ids must be unique among live ones."""
        if self._closed:
            raise UserError("the engine is shutting down and takes no more requests")
        if request.request_id in self._answers:
            raise UserError(f"request id {request.request_id} is in use")
        params = request.params
        check_sampling(params, vocab_size=self.model.vocab_size)
        self._check_prompt(request)
        grammar = self._compile(params.json_schema) if params.json_schema is not None else None
        key = params.seed if params.seed is not None else self._seeds.getrandbits(64)
        sequences = []
        for index in range(params.n):
            sequence = Sequence(request, index, self._order, self.config.max_model_len)
            self._order += 1
            sequence.state = Answer(sequence, self.parts, key)
            if grammar is not None:
                sequence.state.draw.grammar = grammar if params.n == 1 else grammar.copy()
            if index and sequence.prompt_length > self.config.page_size:
                sequence.leader = sequences[0]
            sequences.append(sequence)
        self._answers[request.request_id] = sequences
        for sequence in sequences:
            self.scheduler.add(sequence)
        self._num_grammars += params.n * (grammar is not None)
        self._num_recording += params.n * params.return_routed_experts

    def _check_prompt(self, request: Request) -> None:
        tokens, limit, vocab_size = request.prompt_token_ids, self.config.max_model_len, self.model.vocab_size
        if not tokens:
            raise UserError("the prompt is empty: give at least one token")
        if len(tokens) >= limit:
            raise UserError(
                f"the prompt has {len(tokens)} tokens; at most {limit - 1} leave room for an answer "
                f"(max_model_len {limit})"
            )
        wrong = next((token for token in tokens if type(token) is not int or not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise UserError(f"prompt token {wrong!r} is no token id of this model (0 to {vocab_size - 1})")
        if request.params.stop and self.tokenizer is None:
            raise UserError("stop strings need a tokenizer")
        if request.params.return_routed_experts and not self.model.moe_layers:
            raise UserError("return_routed_experts: this model has no routed experts")

    def _compile(self, schema: str) -> Any:
        from truegate.engine.grammar import Grammars

        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.model.vocab_size)
        return self._grammars.compile(schema)

    def cancel(self, request_id: str) -> None:
        """End every answer of a request with finish_reason "abort" at the next step; unknown ids are ignored."""
        for sequence in self._answers.get(request_id, [])[:]:
            self._outbox.append(self._finish(sequence, "abort"))

    # --- steps

    @property
    def has_work(self) -> bool:
        """True while a step would have something to do, undelivered aborts included."""
        scheduler = self.scheduler
        return bool(scheduler.running or scheduler.waiting or self._outbox or self._pending)

    def step(self) -> list[StepOutput]:
        """Compute one batch (or nothing, if there is no work) and return what moved."""
        outputs, self._outbox = self._outbox, []
        ahead = self._pending
        if ahead is not None and not self._can_run_ahead():
            outputs += self._collect(ahead)
            ahead = None
        chunks = self.scheduler.schedule()
        launched = None
        if chunks:
            launched = self.runner.launch(chunks, routed=self._num_recording > 0)
            self.scheduler.launched(chunks)
            self._counts["steps"] += 1
        if ahead is not None:
            outputs += self._collect(ahead)
        if launched is not None and not self.config.overlap:
            outputs += self._collect(launched)
            launched = None
        self._pending = launched
        return outputs

    def _can_run_ahead(self) -> bool:
        """Whether the next step can be launched before the last one's tokens are known: no grammar waits for them and
        nobody must be preempted."""
        return not self._num_grammars and self.scheduler.next_fits()

    def _collect(self, launched: Launched) -> list[StepOutput]:
        """Read a step's results and give each token to its answer."""
        tokens = launched.read()
        for chunk, described in launched.prompt_described:
            chunk.sequence.state.prompt_logprobs.update(described.read())
        if launched.routed is not None:
            self._record(launched)
        logprobs = launched.described.read() if launched.described is not None else {}
        self._counts["prompt"] += sum(one.size for one in launched.chunks if one.start < one.sequence.prompt_length)
        outputs = []
        for row, (sequence, token) in enumerate(zip(launched.sampled, tokens, strict=True)):
            sequence.in_flight -= 1
            if sequence.status is not Status.FINISHED:
                outputs.append(self._append(sequence, token, logprobs.get(row)))
        self._count_rate()
        return outputs

    def _append(self, sequence: Sequence, token: int, logprobs: TokenLogprobs | None) -> StepOutput:
        first = sequence.num_output == 0
        sequence.tokens.append(token)
        self._counts["generated"] += 1
        reason, stop_reason, error = sequence.state.judge(sequence, token)
        if reason is None:
            return StepOutput(
                request_id=sequence.request_id,
                index=sequence.index,
                token_ids=(token,),
                logprobs=(logprobs,) if logprobs is not None else (),
                prompt_logprobs=sequence.state.read_prompt_logprobs(sequence) if first else (),
                cached_tokens=sequence.cached_tokens,
            )
        return self._finish(sequence, reason, token=token, logprobs=logprobs, stop_reason=stop_reason, error=error)

    def _finish(
        self,
        sequence: Sequence,
        reason: str,
        *,
        token: int | None = None,
        logprobs: TokenLogprobs | None = None,
        stop_reason: int | str | None = None,
        error: str | None = None,
    ) -> StepOutput:
        """Take an answer out of the engine and say how it ended."""
        self.scheduler.finish(sequence)
        live = self._answers[sequence.request_id]
        live.remove(sequence)
        if not live:
            del self._answers[sequence.request_id]
        self._num_grammars -= sequence.params.json_schema is not None
        self._num_recording -= sequence.params.return_routed_experts
        return StepOutput(
            request_id=sequence.request_id,
            index=sequence.index,
            token_ids=(token,) if token is not None else (),
            logprobs=(logprobs,) if logprobs is not None else (),
            prompt_logprobs=sequence.state.read_prompt_logprobs(sequence) if sequence.num_output == 1 else (),
            finish_reason=reason,
            stop_reason=stop_reason,
            cached_tokens=sequence.cached_tokens or 0,
            routed=sequence.state.routed(sequence),
            error=error,
        )

    def _record(self, launched: Launched) -> None:
        """Hand each sequence its rows of what the MoE layers saw."""
        ids_TLK, weights_TLK = (part.cpu().numpy() for part in launched.routed)  # sync: somebody asked
        row = 0
        for chunk in launched.chunks:
            if chunk.sequence.params.return_routed_experts:
                rows = slice(row, row + chunk.size)
                chunk.sequence.state.record(chunk.start, ids_TLK[rows], weights_TLK[rows])
            row += chunk.size

    # --- the whole

    def stats(self) -> EngineStats:
        scheduler = self.scheduler
        cached = scheduler.tree.num_evictable
        return EngineStats(
            running=len(scheduler.running),
            waiting=len(scheduler.waiting),
            pages_used=scheduler.allocator.num_pages - scheduler.num_available,
            pages_cached=cached,
            pages_total=scheduler.allocator.num_pages,
            prefix_query_tokens=scheduler.query_tokens,
            prefix_hit_tokens=scheduler.hit_tokens,
            prompt_tokens=self._counts["prompt"],
            generated_tokens=self._counts["generated"],
            preemptions=scheduler.preemptions,
            steps=self._counts["steps"],
            tokens_per_second=self._tokens_per_second(),
            expert_load_LE=self.runner.load.read() if self.runner.load is not None else None,
            self_test=self.parts.self_test,
            fault=self.config.fault,
        )

    def flush_cache(self) -> int:
        """Drop the prefix cache's pages that no running sequence holds; returns how many."""
        return self.scheduler.tree.clear()

    def shutdown(self, *, drain: bool = True) -> list[StepOutput]:
        """Finish (drain) or abort what is queued and running; returns the remaining outputs. add() then refuses."""
        self._closed = True
        outputs: list[StepOutput] = []
        if not drain:
            for request_id in list(self._answers):
                self.cancel(request_id)
        while self.has_work:
            outputs += self.step()
        return outputs

    def _count_rate(self) -> None:
        now = time.monotonic()
        if not self._rate or now - self._rate[-1][0] > 0.1:
            self._rate.append((now, self._counts["generated"]))
            while now - self._rate[0][0] > _RATE_SECONDS:
                self._rate.popleft()

    def _tokens_per_second(self) -> float:
        if not self._rate:
            return 0.0
        now, (since, count) = time.monotonic(), self._rate[0]
        if now - self._rate[-1][0] > _RATE_SECONDS:
            return 0.0
        return (self._counts["generated"] - count) / max(now - since, 0.1)
