"""POST /v1/completions: plain text or token ids, one prompt or many, with the prompt echoed and scored if asked."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from truegate.serve.answers import Answer, Piece, completion_logprobs, extras, prompt_logprobs
from truegate.serve.errors import ApiError
from truegate.serve.generation import Job, Service, Wanted, check_model, check_prompt, encode, sampling_params
from truegate.serve.protocol import CompletionRequest
from truegate.serve.respond import dump, respond
from truegate.types import TokenLogprobs

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def complete(service: Service, body: CompletionRequest, request: Request) -> Response:
    check_model(service, body.model)
    prompts = await _prompts(service, body)
    wanted = Wanted(
        max_tokens=body.max_tokens,
        default_max_tokens=DEFAULT_MAX_TOKENS,
        logprobs=body.logprobs,
        prompt_logprobs=body.logprobs if body.echo and body.prompt_logprobs is None else body.prompt_logprobs,
    )
    params = [sampling_params(service, body, wanted, len(prompt)) for prompt in prompts]
    job = Job(service, prompts, params, user=body.user)
    for answer in job.answers:
        answer.score_only = body.max_tokens == 0
    return await respond(job, body, request, _CompletionShape(job, body))


async def _prompts(service: Service, body: CompletionRequest) -> list[tuple[int, ...]]:
    """The prompts as token ids, in the order given."""
    given = body.prompt
    many: Sequence[Any] = [given] if isinstance(given, str) or isinstance(given[0], int) else given
    limit = service.limits.max_prompts
    if len(many) > limit:
        raise ApiError(400, f"{len(many)} prompts in one request; {limit} are taken (--max-prompts)", param="prompt")
    prompts = []
    for prompt in many:
        special = body.add_special_tokens is not False
        ids = await encode(service, prompt, add_special_tokens=special) if isinstance(prompt, str) else tuple(prompt)
        check_prompt(service, ids, "prompt")
        prompts.append(ids)
    return prompts


class _CompletionShape:
    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"

    def __init__(self, job: Job, body: CompletionRequest) -> None:
        self.job, self.body = job, body
        self.vocabulary = job.service.vocabulary
        self._offsets: dict[int, int] = {}  # characters of an answer's logprobs written so far
        texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
        num_answers = len(job.answers) // len(job.prompts)
        self._echoes = [
            (texts[place] if isinstance(texts[place], str) else self._decode(prompt)) if body.echo else ""
            for place, prompt in enumerate(job.prompts)
            for _ in range(num_answers)
        ]

    def top(self) -> dict[str, Any]:
        return {}

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "text": self._echoes[answer.index] + "".join(answer.text),
            "logprobs": self._logprobs(answer, answer.token_ids, answer.logprobs, first=True),
            "finish_reason": answer.finish_reason,
            **self._prompt_fields(answer),
            **extras(answer, self.body, answer.token_ids),
        }

    def opening(self, answer: Answer) -> dict[str, Any] | None:
        """The prompt, if it is echoed or its fields were asked for."""
        fields = self._prompt_fields(answer)
        if not self.body.echo and not fields:
            return None
        logprobs = self._logprobs(answer, (), (), first=True)
        text = self._echoes[answer.index]
        return {"index": answer.index, "text": text, "logprobs": logprobs, "finish_reason": None, **fields}

    def delta(self, answer: Answer, piece: Piece) -> str | None:
        if piece.finish_reason is None and not piece.logprobs and not self.body.return_token_ids:
            if not piece.text:
                return None
            text = dump(piece.text)
            return f'{{"index":{answer.index},"text":{text},"logprobs":null,"finish_reason":null}}'
        return dump(
            {
                "index": answer.index,
                "text": piece.text,
                "logprobs": self._logprobs(answer, piece.token_ids, piece.logprobs, first=False),
                "finish_reason": piece.finish_reason,
                **extras(answer, self.body, piece.token_ids),
            }
        )

    def _prompt_fields(self, answer: Answer) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.body.return_token_ids:
            out["prompt_token_ids"] = list(answer.prompt_token_ids)
        if self.body.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(answer.prompt_logprobs, self.vocabulary)
        return out

    def _logprobs(
        self, answer: Answer, token_ids: Sequence[int], entries: Sequence[TokenLogprobs], *, first: bool
    ) -> dict[str, Any] | None:
        """The logprobs object of this piece; `first` puts the echoed prompt's before it."""
        if self.body.logprobs is None and not self.body.logprob_token_ids:
            return None
        rows: list[tuple[int, TokenLogprobs | None]] = []
        if first and self.body.echo:
            known = answer.prompt_logprobs or (None,) * len(answer.prompt_token_ids)
            rows += zip(answer.prompt_token_ids, known, strict=True)
        rows += zip(token_ids, entries, strict=True)
        offset = self._offsets.get(answer.index, 0)
        self._offsets[answer.index] = offset + sum(self.vocabulary.num_characters(token_id) for token_id, _ in rows)
        as_ids = bool(self.body.return_tokens_as_token_ids)
        return completion_logprobs(rows, self.vocabulary, offset=offset, as_ids=as_ids)

    def _decode(self, prompt: Sequence[int]) -> str:
        skip = self.body.skip_special_tokens is not False
        return self.job.service.tokenizer.decode(list(prompt), skip_special_tokens=skip)
