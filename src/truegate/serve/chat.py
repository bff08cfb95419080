"""POST /v1/chat/completions: a conversation through the checkpoint's own template."""

from collections.abc import Sequence
from typing import Any

from fastapi import Request
from starlette.responses import Response

from truegate.serve.answers import Answer, Piece, chat_logprobs, extras, prompt_logprobs
from truegate.serve.generation import Job, Service, Wanted, check_model, check_prompt, encode, sampling_params
from truegate.serve.protocol import ChatRequest, Message
from truegate.serve.respond import dump, respond
from truegate.types import TokenLogprobs


async def chat(service: Service, body: ChatRequest, request: Request) -> Response:
    check_model(service, body.model)
    prompt = await render(service, body.messages, body.add_generation_prompt, body.chat_template_kwargs)
    check_prompt(service, prompt, "messages")
    wanted = Wanted(
        max_tokens=body.max_completion_tokens or body.max_tokens,
        logprobs=(body.top_logprobs or 0) if body.logprobs else None,
        prompt_logprobs=body.prompt_logprobs,
    )
    job = Job(service, [prompt], [sampling_params(service, body, wanted, len(prompt))], user=body.user)
    return await respond(job, body, request, _ChatShape(job, body))


async def render(
    service: Service, messages: Sequence[Message], add_generation_prompt: bool | None, variables: dict[str, Any] | None
) -> tuple[int, ...]:
    """Token ids of a conversation; the template writes the special tokens itself."""
    text = service.tokenizer.render_chat(
        [message.as_template_input() for message in messages],
        add_generation_prompt=add_generation_prompt is not False,
        template_kwargs=variables,
    )
    return await encode(service, text, add_special_tokens=False)


class _ChatShape:
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, job: Job, body: ChatRequest) -> None:
        self.job, self.body = job, body
        self.vocabulary = job.service.vocabulary

    def top(self) -> dict[str, Any]:
        out: dict[str, Any] = {}
        if self.body.return_token_ids:
            out["prompt_token_ids"] = list(self.job.prompts[0])
        if self.body.prompt_logprobs is not None:
            out["prompt_logprobs"] = prompt_logprobs(self.job.answers[0].prompt_logprobs, self.vocabulary)
        return out

    def whole(self, answer: Answer) -> dict[str, Any]:
        return {
            "index": answer.index,
            "message": {"role": "assistant", "content": "".join(answer.text), "refusal": None},
            "logprobs": self._logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
            **extras(answer, self.body, answer.token_ids),
        }

    def opening(self, answer: Answer) -> dict[str, Any]:
        first = {"role": "assistant", "content": ""}
        return {"index": answer.index, "delta": first, "logprobs": None, "finish_reason": None}

    def delta(self, answer: Answer, piece: Piece) -> str | None:
        if piece.finish_reason is None and not piece.logprobs and not self.body.return_token_ids:
            if not piece.text:
                return None
            text = dump(piece.text)  # by far the most frequent chunk, so written by hand
            return f'{{"index":{answer.index},"delta":{{"content":{text}}},"logprobs":null,"finish_reason":null}}'
        return dump(
            {
                "index": answer.index,
                "delta": {"content": piece.text} if piece.text else {},
                "logprobs": self._logprobs(piece.logprobs),
                "finish_reason": piece.finish_reason,
                **extras(answer, self.body, piece.token_ids),
            }
        )

    def _logprobs(self, entries: Sequence[TokenLogprobs]) -> dict[str, Any] | None:
        wanted = self.body.logprobs or self.body.logprob_token_ids
        return chat_logprobs(entries, self.vocabulary) if wanted else None
