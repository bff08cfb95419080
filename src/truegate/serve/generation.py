"""From a checked body to running answers: prompts become token ids, fields become SamplingParams, limits are applied.

Invariant: everything that can be refused is refused before the engine hears of the request; a job that was started is
closed exactly once, which cancels what still runs.
"""

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from truegate.engine.tokenizer import Tokenizer
from truegate.serve.answers import Answer, Piece, new_answer
from truegate.serve.client import EngineClient, Mailbox, Stream
from truegate.serve.errors import ApiError
from truegate.serve.metrics import Metrics
from truegate.serve.protocol import ResponseFormat, Sampling
from truegate.serve.vocabulary import Vocabulary
from truegate.types import Request, SamplingParams, check_sampling

log = logging.getLogger("truegate.serve")

INLINE_CHARACTERS = 8_000  # longer prompts are tokenised in a thread, so that streams do not wait for them
MAX_STOPS = 16
MAX_STOP_CHARACTERS = 1_000
_DEFAULT_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What one client may ask for; each is a flag of `truegate serve`."""

    max_body_bytes: int = 4 << 20
    body_timeout: float = 30.0
    max_queue: int = 1024  # answers waiting beyond those that run
    max_n: int = 16
    max_prompts: int = 256  # in one request
    max_prompt_tokens: int | None = None  # None: what the context leaves
    stall_seconds: float = 60.0  # without a word from the engine process, after which /health is unhealthy


@dataclass(kw_only=True, slots=True)
class Service:
    """What every route needs."""

    names: tuple[str, ...]  # of the model; the first is the one that answers carry
    folder: Path
    tokenizer: Tokenizer
    client: EngineClient
    metrics: Metrics
    limits: Limits
    log_requests: bool = False
    fault: str | None = None  # what the planted fault does
    created: int = field(default_factory=lambda: int(time.time()))
    vocabulary: Vocabulary = field(init=False)
    defaults: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        self.vocabulary = Vocabulary(self.tokenizer)
        self.defaults = sampling_defaults(self.folder)

    @property
    def max_model_len(self) -> int:
        return self.client.resolved.max_model_len or 1  # `fit` has filled it in

    @property
    def vocab_size(self) -> int:
        return self.client.vocab_size

    @property
    def max_prompt_tokens(self) -> int:
        return min(self.limits.max_prompt_tokens or self.max_model_len, self.max_model_len - 1)


def sampling_defaults(folder: Path) -> dict[str, Any]:
    """What the checkpoint's generation_config.json recommends (peers apply it too); do_sample false is greedy."""
    try:
        settings = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    found = {key: settings[key] for key in _DEFAULT_KEYS if settings.get(key) is not None}
    return found | {"temperature": 0.0} if settings.get("do_sample") is False else found


def check_model(service: Service, model: str | None) -> None:
    if model is not None and model not in service.names:
        served = ", ".join(service.names)
        raise ApiError(
            404, f"the model `{model}` is not served here, but {served} is", param="model", code="model_not_found"
        )


async def encode(service: Service, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
    """Token ids of a prompt; one that cannot fit is refused without being tokenised."""
    limit = service.vocabulary.max_bytes_per_token
    if limit is not None and len(text) > service.max_prompt_tokens * limit:
        raise _too_long(service, f"has more than {len(text) // limit} tokens ({len(text)} characters)")
    try:
        if len(text) <= INLINE_CHARACTERS:
            return tuple(service.tokenizer.encode(text, add_special_tokens=add_special_tokens))
        return tuple(await asyncio.to_thread(service.tokenizer.encode, text, add_special_tokens=add_special_tokens))
    except UnicodeEncodeError:
        raise ApiError(400, "the prompt holds a lone surrogate, which is no text") from None


def check_prompt(service: Service, prompt: Sequence[int], where: str) -> None:
    """Refuse a prompt that is empty, too long or not of this vocabulary."""
    if not prompt:
        raise ApiError(400, f"`{where}` has no tokens", param=where)
    if len(prompt) > service.max_prompt_tokens:
        raise _too_long(service, f"has {len(prompt)} tokens")
    wrong = next((token for token in prompt if token >= service.vocab_size), None)
    if wrong is not None:
        message = f"`{where}` holds {wrong}, which is no token id of this model (0 to {service.vocab_size - 1})"
        raise ApiError(400, message, param=where)


def _too_long(service: Service, what: str) -> ApiError:
    message = f"the prompt {what}; {service.max_prompt_tokens} fit, with room for an answer"
    return ApiError(400, message, param="prompt", code="context_length_exceeded")


@dataclass(frozen=True, kw_only=True, slots=True)
class Wanted:
    """What the two APIs spell differently."""

    max_tokens: int | None  # None: what the context leaves
    default_max_tokens: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None


def sampling_params(service: Service, body: Sampling, wanted: Wanted, prompt_length: int) -> SamplingParams:
    """SamplingParams of one prompt; an ApiError or UserError names the field that cannot be honoured."""
    room = service.max_model_len - prompt_length
    if wanted.max_tokens is not None and wanted.max_tokens > room:
        raise ApiError(
            400,
            f"the prompt has {prompt_length} tokens and max_tokens is {wanted.max_tokens}: together more than the "
            f"{service.max_model_len} of --max-model-len",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if (body.n or 1) > service.limits.max_n:
        raise ApiError(400, f"n is {body.n}; this server gives at most {service.limits.max_n} (--max-n)", param="n")
    given = {key: getattr(body, key) for key in _DEFAULT_KEYS if getattr(body, key) is not None}
    params = SamplingParams(
        **(service.defaults | given),
        max_tokens=room if wanted.max_tokens is None and wanted.default_max_tokens is None else _tokens(wanted, room),
        min_tokens=body.min_tokens or 0,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        seed=body.seed,
        n=body.n or 1,
        stop=_stops(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        logit_bias=_logit_bias(body.logit_bias),
        logprobs=wanted.logprobs,
        logprob_token_ids=tuple(body.logprob_token_ids or ()),
        prompt_logprobs=wanted.prompt_logprobs,
        return_routed_experts=bool(body.return_routed_experts),
        json_schema=_json_schema(body.response_format),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
    )
    check_sampling(params, vocab_size=service.vocab_size)
    return params


def _tokens(wanted: Wanted, room: int) -> int:
    if wanted.max_tokens is not None:
        return max(wanted.max_tokens, 1)  # 0 only scores the prompt: the one token is thrown away
    return min(wanted.default_max_tokens or room, room)


def _stops(stop: str | list[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if len(stops) > MAX_STOPS:
        raise ApiError(400, f"stop holds {len(stops)} texts; at most {MAX_STOPS} are watched for", param="stop")
    if any(not text or len(text) > MAX_STOP_CHARACTERS for text in stops):
        raise ApiError(400, f"each stop text has 1 to {MAX_STOP_CHARACTERS} characters", param="stop")
    return stops


def _logit_bias(bias: dict[str, float] | None) -> tuple[tuple[int, float], ...]:
    try:
        return tuple((int(token), value) for token, value in (bias or {}).items())
    except ValueError:
        raise ApiError(400, "logit_bias maps token ids, written as digits, to numbers", param="logit_bias") from None


def _json_schema(wanted: ResponseFormat | None) -> str | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.json_schema is None:
        return '{"type": "object"}'
    try:
        return json.dumps(wanted.json_schema.schema_, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the schema is not plain JSON: {error}", param="response_format") from None


class Job:
    """The answers of one HTTP request while they run: `next` gives what came, `close` cancels the rest."""

    def __init__(
        self,
        service: Service,
        prompts: Sequence[tuple[int, ...]],
        params: Sequence[SamplingParams],
        *,
        user: str | None = None,
    ) -> None:
        self.service, self.user = service, user
        self._started = time.monotonic()
        self.prompts = prompts
        self.mailbox = Mailbox()
        self.streams: list[Stream] = []
        self.answers: list[Answer] = []
        self._watcher: asyncio.Task[None] | None = None
        self._by_prompt: list[list[Answer]] = []
        self._admit(sum(one.n for one in params))
        for position, (prompt, one) in enumerate(zip(prompts, params, strict=True)):
            request = Request(
                request_id=uuid.uuid4().hex, prompt_token_ids=prompt, params=one, arrival=time.monotonic()
            )
            self.streams.append(service.client.submit(request, self.mailbox, position))
            mine = [new_answer(service.tokenizer, one, prompt, len(self.answers) + i) for i in range(one.n)]
            self._by_prompt.append(mine)
            self.answers += mine

    @property
    def done(self) -> bool:
        return all(answer.finish_reason is not None for answer in self.answers)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(prompt) for prompt in self.prompts)

    @property
    def cached_tokens(self) -> int:
        """Of each prompt, what its first answer found in the prefix cache."""
        return sum(answers[0].cached_tokens for answers in self._by_prompt)

    def watch(self, receive: Callable[[], Awaitable[Any]]) -> None:
        """Abandon the job when the client disconnects."""

        async def until_gone() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            self.mailbox.abandon()

        self._watcher = asyncio.create_task(until_gone())

    async def next(self) -> list[tuple[Answer, Piece]]:
        """What came since the last call; [] once the client is gone."""
        came = []
        for stream, output in await self.mailbox.take():
            answer = self._by_prompt[stream.position][output.index]
            came.append((answer, answer.feed(output)))
        return came

    def raise_if_broken(self) -> None:
        for answer in self.answers:
            if answer.finish_reason == "error":
                raise ApiError(500, f"the engine broke off: {answer.error}", code="engine_error")

    def close(self) -> None:
        """Cancel what still runs; the request's one line in the log, if asked for."""
        if self._watcher is not None:
            self._watcher.cancel()
        for stream in self.streams:
            self.service.client.release(stream)
        if self.service.log_requests:
            log.info(
                "user=%s prompt_tokens=%d completion_tokens=%d finished=%s seconds=%.3f",
                self.user,
                self.prompt_tokens,
                sum(len(answer.token_ids) for answer in self.answers),
                ",".join(answer.finish_reason or "client left" for answer in self.answers),
                time.monotonic() - self._started,
            )

    def _admit(self, num_answers: int) -> None:
        client, limits = self.service.client, self.service.limits
        capacity = (client.resolved.max_running or 0) + limits.max_queue
        if num_answers > capacity:
            raise ApiError(400, f"{num_answers} answers in one request; {capacity} may run and wait (--max-queue)")
        if client.open_answers + num_answers > capacity:
            raise ApiError(
                429, f"the queue is full ({capacity} answers run or wait): try again later", code="queue_full"
            )
