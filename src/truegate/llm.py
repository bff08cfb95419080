"""Offline use, in this process: `from truegate import LLM, SamplingParams`.

    llm = LLM()                                     # the embedded model; or LLM("folder or hub id", dtype=..., ...)
    llm.generate(["..."], SamplingParams(...))      # a list of RequestOutput, in the order of the prompts
    llm.chat([{"role": "user", "content": "..."}])
    for piece in llm.stream("..."): print(piece.text, end="")

Names and shapes as vLLM has them. Invariant: outputs come in the order of the prompts, whatever order they end in.
"""

import itertools
import operator
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from typing import Any

from truegate.config import EngineConfig
from truegate.engine.core import Engine
from truegate.engine.detokeniser import Detokeniser
from truegate.engine.tokenizer import Tokenizer
from truegate.errors import InvalidRun, UserError
from truegate.types import FinishReason, Request, RoutedExperts, SamplingParams, StepOutput, TokenLogprobs

Prompt = str | Sequence[int] | dict[str, Any]
Message = dict[str, Any]

_VLLM_NAMES = {  # what vLLM calls our settings
    "max_num_seqs": "max_running",
    "max_num_batched_tokens": "chunked_prefill_tokens",
    "enable_prefix_caching": "prefix_cache",
    "block_size": "page_size",
    "gpu_memory_utilization": "mem_fraction",
}


@dataclass(slots=True)
class Logprob:
    """One entry of a position's log-probabilities, keyed by token id."""

    logprob: float
    rank: int | None
    decoded_token: str


@dataclass(slots=True)
class CompletionOutput:
    """One of the n answers."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    routed_experts: RoutedExperts | None = None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and its answers."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """What a stream yields: the text and tokens one answer gained; the last one says how it ended."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None


class LLM:
    """An engine in this process. Settings are the fields of EngineConfig; vLLM's names for them are understood."""

    def __init__(self, model: str | None = None, **settings: Any) -> None:
        self.engine = Engine(_config(model, settings))
        if self.engine.tokenizer is None:
            raise UserError(f"{model} has no tokenizer.json: use truegate.engine.core.Engine with token ids")
        self._numbers = itertools.count()

    @property
    def tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def get_tokenizer(self) -> Tokenizer:
        return self.engine.tokenizer

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Answers to all prompts (texts, token ids, or dicts with `prompt` or `prompt_token_ids`), batched."""
        many = _as_list(prompts)
        return self._run([self._tokens(one) for one in many], _spread(sampling_params, len(many)), use_tqdm)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        **template: Any,
    ) -> list[RequestOutput]:
        """Answers to one conversation or several, by the checkpoint's chat template (`template` goes to it)."""
        if not messages:
            raise UserError("chat needs at least one message")
        many = [messages] if isinstance(messages[0], dict) else list(messages)
        rendered = [self.tokenizer.render_chat(list(one), **template) for one in many]
        prompts = [(text, self.tokenizer.encode(text, add_special_tokens=False)) for text in rendered]
        return self._run(prompts, _spread(sampling_params, len(many)), use_tqdm)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None, **template: Any
    ) -> Iterator[Piece]:
        """The answers to one prompt, or to a conversation (a list of messages), as they come."""
        if not isinstance(prompt, str | dict) and prompt and isinstance(prompt[0], dict):
            tokens = self.tokenizer.encode_chat(list(prompt), **template)
        else:
            _, tokens = self._tokens(prompt)
        params = sampling_params or SamplingParams()
        request_id = self._add(tokens, params)
        texts = [Detokeniser.of(self.tokenizer, params) for _ in range(params.n)]
        try:
            left = params.n
            while left:
                for output in self.engine.step():
                    if output.request_id != request_id:
                        continue  # the rest of a stream that was abandoned
                    _raise_if_failed(output)
                    text = texts[output.index].take(output)
                    left -= output.finish_reason is not None
                    yield Piece(output.index, text, output.token_ids, output.finish_reason)
        finally:
            self.engine.cancel(request_id)

    def shutdown(self) -> None:
        self.engine.shutdown(drain=False)

    def __enter__(self) -> "LLM":
        return self

    def __exit__(self, *_: object) -> None:
        self.shutdown()

    def _tokens(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        if isinstance(prompt, dict):
            prompt = prompt["prompt_token_ids"] if "prompt_token_ids" in prompt else prompt.get("prompt")
        if isinstance(prompt, str):
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Iterable):
            return None, [operator.index(token) if hasattr(token, "__index__") else token for token in prompt]
        raise UserError(f"a prompt is a text, a list of token ids, or a dict with one of them; got {prompt!r}")

    def _add(self, tokens: list[int], params: SamplingParams) -> str:
        request_id = f"offline-{next(self._numbers)}"
        request = Request(
            request_id=request_id, prompt_token_ids=tuple(tokens), params=params, arrival=time.monotonic()
        )
        self.engine.add(request)
        return request_id

    def _run(
        self, prompts: list[tuple[str | None, list[int]]], params: list[SamplingParams], use_tqdm: bool
    ) -> list[RequestOutput]:
        collectors: dict[str, _Collector] = {}
        try:
            for (text, tokens), one in zip(prompts, params, strict=True):
                request_id = self._add(tokens, one)
                collectors[request_id] = _Collector(self.tokenizer, request_id, text, tokens, one)
            left = len(collectors)
            with _progress(left, use_tqdm) as bar:
                while left:
                    for output in self.engine.step():
                        collector = collectors.get(output.request_id)
                        if collector is not None and collector.take(output):
                            left -= 1
                            if bar is not None:
                                bar.update()
        finally:
            for request_id in collectors:
                self.engine.cancel(request_id)
        return [collector.output for collector in collectors.values()]


class _Collector:
    """Gathers one request's step outputs into its RequestOutput."""

    def __init__(self, tokenizer: Tokenizer, request_id: str, text: str | None, tokens: list[int], params):
        self.tokenizer = tokenizer
        self.params: SamplingParams = params
        answers = [CompletionOutput(index) for index in range(params.n)]
        if params.wants_logprobs:
            for answer in answers:
                answer.logprobs, answer.cumulative_logprob = [], 0.0
        self.output = RequestOutput(request_id, text, tokens, answers)
        self.texts = [Detokeniser.of(tokenizer, params) for _ in range(params.n)]
        self.left = params.n

    def take(self, output: StepOutput) -> bool:
        """Add a step's output; True once every answer has ended."""
        _raise_if_failed(output)
        answer = self.output.outputs[output.index]
        answer.text += self.texts[output.index].take(output)
        answer.token_ids += output.token_ids
        for one in output.logprobs:
            answer.cumulative_logprob += one.logprob
            answer.logprobs.append(self._entries(one))
        if output.prompt_logprobs and self.output.prompt_logprobs is None:
            self.output.prompt_logprobs = [self._entries(one) if one else None for one in output.prompt_logprobs]
        if output.index == 0:
            self.output.num_cached_tokens = output.cached_tokens
        if output.finish_reason is None:
            return False
        answer.finish_reason, answer.stop_reason = output.finish_reason, output.stop_reason
        answer.routed_experts = output.routed
        self.left -= 1
        self.output.finished = not self.left
        return self.output.finished

    def _entries(self, one: TokenLogprobs) -> dict[int, Logprob]:
        """The chosen token first, then alternatives, then listed ids (whose rank nobody asked for)."""
        ranked = [(one.token_id, one.logprob, one.rank)]
        ranked += [(token, value, rank) for rank, (token, value) in enumerate(one.top, 1)]
        ranked += [(token, value, None) for token, value in one.listed]
        entries: dict[int, Logprob] = {}
        for token, value, rank in ranked:
            if token not in entries:
                entries[token] = Logprob(value, rank, self.tokenizer.decode([token], skip_special_tokens=False))
        return entries


def run_prompt(
    prompt: str, *, model: str | None, params: SamplingParams, raw: bool, stats: bool, **settings: Any
) -> None:
    """`truegate run`: print the answer as it comes."""
    began = time.monotonic()
    with LLM(model, max_running=1, **settings) as llm:
        ready = time.monotonic()
        plain = raw or llm.tokenizer.chat_template is None
        first, count, ended = None, 0, None
        for piece in llm.stream(prompt if plain else [{"role": "user", "content": prompt}], params):
            first = first or time.monotonic()
            count += len(piece.token_ids)
            ended = piece.finish_reason
            print(piece.text, end="", flush=True)
        print()
        if ended == "length":
            print("(cut at the token limit: raise --max-tokens)", file=sys.stderr)
        if stats and first is not None:
            speed = (count - 1) / max(time.monotonic() - first, 1e-9)
            print(
                f"loaded in {ready - began:.2f} s, first token after {first - ready:.3f} s, "
                f"{count} tokens, {speed:.0f} tokens/s after the first",
                file=sys.stderr,
            )


def _raise_if_failed(output: StepOutput) -> None:
    if output.finish_reason == "error":
        raise InvalidRun(output.error or "the engine gave up on this request")


def _config(model: str | None, settings: dict[str, Any]) -> EngineConfig:
    settings = {_VLLM_NAMES.get(name, name): value for name, value in settings.items()}
    known = {one.name for one in fields(EngineConfig)}
    unknown = sorted(set(settings) - known)
    if unknown:
        raise UserError(f"LLM has no setting {', '.join(unknown)}; it has {', '.join(sorted(known - {'model'}))}")
    if settings.get("dtype") == "auto":
        settings["dtype"] = None
    return EngineConfig(model=model, **settings)


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several: a text, a dict and a list of numbers are one."""
    if isinstance(prompts, str | dict) or not isinstance(prompts, Iterable):
        return [prompts]
    many = list(prompts)
    return [many] if many and hasattr(many[0], "__index__") and not getattr(many[0], "shape", ()) else many


def _spread(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise UserError(f"{count} prompts and {len(params)} sampling parameters: give one for all, or one each")
    return list(params)


def _progress(total: int, wanted: bool) -> Any:
    if not wanted or not sys.stderr.isatty():
        return nullcontext()
    try:
        from tqdm import tqdm
    except ImportError:
        return nullcontext()
    return tqdm(total=total, desc="prompts", unit="prompt", dynamic_ncols=True)
