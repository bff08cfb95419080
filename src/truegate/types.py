"""The few types that travel between scheduler, runner, model and server.

Invariant: a `Batch` is everything a model reads in one step; padded rows are marked by `valid_T` and by nothing else.
T rows (tokens, padded), N sequences, P pages a sequence, M rows whose logits are wanted, L MoE layers, K routed top-k.
"""

from dataclasses import dataclass, field
from typing import Any, Literal

import torch

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one answer is drawn. Names and meanings as OpenAI's API and vLLM have them; validated in `check_sampling`."""

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    n: int = 1
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    logprobs: int | None = None  # number of alternatives beside the chosen token; 0: the chosen one only
    logprob_token_ids: tuple[int, ...] = ()  # also report these ids at every position
    prompt_logprobs: int | None = None
    return_routed_experts: bool = False
    json_schema: str | None = None  # constrain the answer to this schema (a JSON text)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One sequence to generate; a request with n > 1 becomes n of these before it reaches the scheduler."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    index: int = 0  # which of the n choices
    arrival: float = 0.0  # seconds, monotonic clock


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenLogprobs:
    """Log-probabilities at one position: the token itself, then alternatives by descending value."""

    token_id: int
    logprob: float
    rank: int  # 1 is the most likely
    top: tuple[tuple[int, float], ...] = ()  # (token id, log-probability)
    listed: tuple[tuple[int, float], ...] = ()  # of `logprob_token_ids`, in their order


@dataclass(frozen=True, kw_only=True, slots=True)
class RoutedExperts:
    """The experts that ran: ids_TLK and weights_TLK for each computed position, by MoE layer.

    ids int16 or int32, logical; -1 (`NOT_COMPUTED`) where the position came from the prefix cache and nothing ran.
    """

    ids_TLK: Any  # numpy arrays, so that they cross the process boundary
    weights_TLK: Any


NOT_COMPUTED = -1


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step gave one request: the tokens to append, and how it ended if it did."""

    request_id: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    routed: RoutedExperts | None = None  # with the last output of the request
    error: str | None = None


@dataclass(kw_only=True, slots=True)
class Batch:
    """The rows of one step. Sequences are contiguous runs of rows; decode sequences have one row.

    Tensors live on the model's device; the host lists carry the same numbers so that no step waits on the device.
    """

    token_ids_T: torch.Tensor  # int64
    positions_T: torch.Tensor  # int64, 0-based position in the sequence
    valid_T: torch.Tensor  # bool; False: the row only pads
    slots_T: torch.Tensor  # int64: page * page_size + offset where the row's key/value goes; pads write page 0
    page_table_NP: torch.Tensor  # int64, page ids of each sequence, padded with 0 (page 0 is nobody's)
    query_lens: list[int]  # rows of each sequence in this step
    context_lens: list[int]  # tokens of each sequence after this step (cached + query)
    logit_rows_M: torch.Tensor  # int64, rows whose logits are wanted
    all_valid: bool = True  # host copy of valid_T.all()
    recorder: Any = field(default=None)  # moe.recorder.Recorder, or None: nobody asked which experts ran
