"""One answer on its way out: token ids become text, log-probabilities and experts in the shapes of OpenAI's API.

Invariant: the pieces of a streamed answer, joined, are the unstreamed one. T positions, L MoE layers, K routed top-k.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from truegate.engine.detokeniser import Detokeniser
from truegate.engine.tokenizer import Tokenizer
from truegate.serve.protocol import Sampling
from truegate.serve.vocabulary import Vocabulary
from truegate.types import RoutedExperts, SamplingParams, StepOutput, TokenLogprobs

LOWEST = -9999.0  # JSON has no minus infinity
ExpertsFormat = Literal["list", "base64"]


@dataclass(kw_only=True, slots=True)
class Piece:
    """What one output added to an answer."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None


@dataclass(kw_only=True, slots=True)
class Answer:
    """The state of one choice of a response."""

    index: int  # in the response
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    detokeniser: Detokeniser
    score_only: bool = False  # the prompt is scored; the one token the engine must draw is thrown away
    text: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    cached_tokens: int = 0
    routed: RoutedExperts | None = None

    def feed(self, output: StepOutput) -> Piece:
        """Take one output of the engine."""
        self.prompt_logprobs = output.prompt_logprobs or self.prompt_logprobs
        self.cached_tokens = max(self.cached_tokens, output.cached_tokens)
        if self.score_only and output.error is None:
            if output.finish_reason is not None:
                self.finish_reason = "abort" if output.finish_reason == "abort" else "length"
                self.routed = output.routed
            return Piece(text="", token_ids=(), logprobs=(), finish_reason=self.finish_reason)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        text = self.detokeniser.take(output)
        if output.finish_reason is not None:
            self.finish_reason, self.stop_reason = output.finish_reason, output.stop_reason
            self.error, self.routed = output.error, output.routed
        self.text.append(text)
        return Piece(
            text=text, token_ids=output.token_ids, logprobs=output.logprobs, finish_reason=output.finish_reason
        )


def new_answer(tokenizer: Tokenizer, params: SamplingParams, prompt: tuple[int, ...], index: int) -> Answer:
    detokeniser = Detokeniser.of(tokenizer, params)
    return Answer(index=index, prompt_token_ids=prompt, params=params, detokeniser=detokeniser)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)


def chat_logprobs(entries: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> dict[str, Any]:
    """`choice.logprobs` of the chat API: {"content": [{token, logprob, bytes, top_logprobs}], "refusal": null}."""
    content = []
    for entry in entries:
        item = _chat_token(entry.token_id, entry.logprob, vocabulary)
        item["top_logprobs"] = [_chat_token(token_id, value, vocabulary) for token_id, value in entry.top]
        if entry.listed:
            item["listed_logprobs"] = [
                {"token_id": token_id, **_chat_token(token_id, value, vocabulary)} for token_id, value in entry.listed
            ]
        content.append(item)
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary) -> dict[str, Any]:
    return {
        "token": vocabulary.text(token_id),
        "logprob": finite(logprob),
        "bytes": list(vocabulary.bytes(token_id)),
    }


def completion_logprobs(
    entries: Sequence[tuple[int, TokenLogprobs | None]], vocabulary: Vocabulary, *, offset: int, as_ids: bool
) -> dict[str, Any]:
    """`choice.logprobs` of the completions API; an entry without log-probabilities (the first of a prompt) is null."""

    def name(token_id: int) -> str:
        return f"token_id:{token_id}" if as_ids else vocabulary.text(token_id)

    out: dict[str, Any] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for token_id, entry in entries:
        out["tokens"].append(name(token_id))
        out["text_offset"].append(offset)
        offset += vocabulary.num_characters(token_id)
        out["token_logprobs"].append(finite(entry.logprob) if entry else None)
        out["top_logprobs"].append(_top(entry, name) if entry else None)
    if any(entry and entry.listed for _, entry in entries):
        out["listed_logprobs"] = [
            {str(token_id): finite(value) for token_id, value in entry.listed} if entry else None
            for _, entry in entries
        ]
    return out


def _top(entry: TokenLogprobs, name: Any) -> dict[str, float]:
    """Token to log-probability, likeliest first; the chosen token is in it, as OpenAI has it."""
    values: dict[str, float] = {}
    for token_id, value in entry.top:
        values.setdefault(name(token_id), finite(value))  # two ids can share a text: the likelier keeps it
    values.setdefault(name(entry.token_id), finite(entry.logprob))
    return values


def prompt_logprobs(entries: Sequence[TokenLogprobs | None], vocabulary: Vocabulary) -> list[dict[str, Any] | None]:
    """As vLLM has it: for every prompt position, {token id: {logprob, rank, decoded_token}}; null at the first."""
    out: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            out.append(None)
            continue
        values = {
            str(token_id): {"logprob": finite(value), "rank": rank, "decoded_token": vocabulary.text(token_id)}
            for rank, (token_id, value) in enumerate(entry.top, start=1)
        }
        values[str(entry.token_id)] = {
            "logprob": finite(entry.logprob),
            "rank": entry.rank,
            "decoded_token": vocabulary.text(entry.token_id),
        }
        for token_id, value in entry.listed:
            values.setdefault(str(token_id), {"logprob": finite(value), "decoded_token": vocabulary.text(token_id)})
        out.append(values)
    return out


def routed_experts(routed: RoutedExperts, form: ExpertsFormat) -> dict[str, Any]:
    """{"shape": [T, L, K], "ids", "weights"}: nested lists, or base64 of little-endian int32 and float32."""
    ids_TLK = np.ascontiguousarray(routed.ids_TLK, dtype="<i4")
    weights_TLK = np.ascontiguousarray(routed.weights_TLK, dtype="<f4")
    out: dict[str, Any] = {"format": form, "shape": list(ids_TLK.shape)}
    if form == "base64":
        return out | {
            "ids": base64.b64encode(ids_TLK.tobytes()).decode(),
            "weights": base64.b64encode(weights_TLK.tobytes()).decode(),
        }
    weights_TLK = np.nan_to_num(weights_TLK.astype(np.float64), posinf=LOWEST, neginf=LOWEST)
    return out | {"ids": ids_TLK.tolist(), "weights": np.round(weights_TLK, 9).tolist()}


def extras(answer: Answer, body: Sampling, token_ids: Sequence[int]) -> dict[str, Any]:
    """The extensions of one choice: why it stopped, its token ids, its experts (with its end)."""
    out: dict[str, Any] = {}
    if answer.finish_reason is not None:
        out["stop_reason"] = answer.stop_reason
    if body.return_token_ids:
        out["token_ids"] = list(token_ids)
    if answer.routed is not None:
        form = body.return_routed_experts
        out["routed_experts"] = routed_experts(answer.routed, form if isinstance(form, str) else "list")
    return out


def usage(answers: Sequence[Answer], prompt_tokens: int, cached_tokens: int) -> dict[str, Any]:
    """Token counts of a response; each prompt counts once, however many answers it has."""
    completion = sum(len(answer.token_ids) for answer in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }
