"""The few types that travel between scheduler, runner, model and server.

Invariant: a `Batch` is everything a model reads in one step; padded rows are marked by `valid_T` and by nothing else.
Everything but `Batch` is plain data that crosses the process boundary, and importing this file does not import torch.
T rows (tokens, padded), N sequences, P pages a sequence, M rows whose logits are wanted, L MoE layers, K routed top-k.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from truegate.errors import UserError

if TYPE_CHECKING:  # not to break a cycle: the server's HTTP process reads these types and must not load torch
    import torch

FinishReason = Literal["stop", "length", "abort", "error"]
MAX_LOGPROBS = 256  # alternatives a position may list; the trust tools ask for 64
NOT_COMPUTED = -1  # routed-experts id of a position that came from the prefix cache: nothing ran


@dataclass(frozen=True, kw_only=True, slots=True)
class SamplingParams:
    """How one answer is drawn. Names and meanings as OpenAI's API and vLLM have them; validated in `check_sampling`.

    Lists and mappings are accepted and kept as tuples. Log-probabilities are those of the model's own distribution:
    before bias, penalties, temperature and truncation.
    """

    max_tokens: int = 256
    min_tokens: int = 0
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 or -1: all
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
    prompt_logprobs: int | None = None  # the same for every prompt position but the first
    return_routed_experts: bool = False
    json_schema: str | None = None  # constrain the answer to this schema (a JSON text)
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        keep = object.__setattr__
        if isinstance(self.stop, str):
            keep(self, "stop", (self.stop,))
        if self.top_k == -1:
            keep(self, "top_k", 0)
        for name in ("stop", "stop_token_ids", "logprob_token_ids"):
            try:
                keep(self, name, tuple(getattr(self, name) or ()))
            except TypeError:
                raise UserError(f"{name} must be a list") from None
        bias = self.logit_bias.items() if isinstance(self.logit_bias, Mapping) else self.logit_bias or ()
        try:
            keep(self, "logit_bias", tuple((_token_id(token), float(value)) for token, value in bias))
        except (TypeError, ValueError):
            raise UserError("logit_bias must map token ids to numbers") from None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None or bool(self.logprob_token_ids)


def check_sampling(params: SamplingParams, *, vocab_size: int) -> None:
    """Raise UserError, naming the field, unless every value means something for a vocabulary of this size."""
    for name, low, high in _RANGES:
        value = getattr(params, name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:  # NaN fails too
            raise UserError(f"{name} must be between {low:g} and {high:g}, got {value!r}")
    for name, low, high in _INTEGERS:
        value = getattr(params, name)
        if value is None and name in _OPTIONAL:
            continue
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise UserError(f"{name} must be a whole number from {low} to {high}, got {value!r}")
    if not params.top_p > 0:
        raise UserError(f"top_p must be above 0 and at most 1, got {params.top_p!r}")
    if params.min_tokens > params.max_tokens:
        raise UserError(f"min_tokens ({params.min_tokens}) is above max_tokens ({params.max_tokens})")
    if any(not isinstance(text, str) or not text for text in params.stop):
        raise UserError("stop must hold non-empty strings")
    for name in ("stop_token_ids", "logprob_token_ids"):
        _check_ids(name, getattr(params, name), vocab_size)
    _check_ids("logit_bias", [token for token, _ in params.logit_bias], vocab_size)
    for token, value in params.logit_bias:
        if not math.isfinite(value) or abs(value) > 100:
            raise UserError(f"logit_bias of token {token} must be between -100 and 100, got {value!r}")
    if params.json_schema is not None:
        if not isinstance(params.json_schema, str):
            raise UserError("json_schema must be a JSON text")
        if params.min_tokens or params.ignore_eos:
            raise UserError("json_schema decides where the answer ends: leave out min_tokens and ignore_eos")


_RANGES = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", 0.01, 100.0),  # a logit over less could exceed fp32
)
_INTEGERS = (
    ("max_tokens", 1, 1 << 31),
    ("min_tokens", 0, 1 << 31),
    ("top_k", 0, 1 << 31),
    ("n", 1, 1 << 16),
    ("seed", -(1 << 63), (1 << 64) - 1),
    ("logprobs", 0, MAX_LOGPROBS),
    ("prompt_logprobs", 0, MAX_LOGPROBS),
)
_OPTIONAL = ("seed", "logprobs", "prompt_logprobs")


def _token_id(key: object) -> int:
    """A key of `logit_bias`, which JSON writes as a string."""
    return int(key) if isinstance(key, str) else operator.index(key)


def _check_ids(name: str, ids: object, vocab_size: int) -> None:
    for token in ids:
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab_size:
            raise UserError(f"{name}: {token!r} is no token id of this model (0 to {vocab_size - 1})")


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """One prompt to answer; `params.n` answers are drawn from it, told apart by `StepOutput.index`."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float = 0.0  # seconds; the caller's own clock; requests are admitted in the order of add()


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
    """The experts that ran: ids_TLK and weights_TLK for every position but the last token's, by MoE layer.

    ids int32, logical; -1 (`NOT_COMPUTED`) where the position came from the prefix cache and nothing ran. The last
    sampled token is never an input, so T = prompt + output - 1.
    """

    ids_TLK: Any  # numpy arrays, so that they cross the process boundary
    weights_TLK: Any


@dataclass(frozen=True, kw_only=True, slots=True)
class StepOutput:
    """What one step gave one answer: the tokens to append, and how it ended if it did."""

    request_id: str
    index: int  # which of the n answers
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()  # once, with the first token
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None  # the stop token or string that ended it; None: end of sequence, or length
    cached_tokens: int = 0  # prompt tokens served by the prefix cache
    routed: RoutedExperts | None = None  # with the last output of the answer
    error: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineStats:
    """Counters since start (totals) and gauges of this moment, as /metrics shows them."""

    running: int
    waiting: int
    pages_used: int  # held by running sequences (not the evictable part of the prefix cache)
    pages_cached: int  # held by the prefix cache and free to take
    pages_total: int
    prefix_query_tokens: int  # prompt tokens looked up in the prefix cache
    prefix_hit_tokens: int
    prompt_tokens: int  # rows computed for prompts
    generated_tokens: int
    preemptions: int
    steps: int
    tokens_per_second: float  # generated, over the last ten seconds or so
    expert_load_LE: Any = None  # numpy int64, rows each logical expert got since start, by MoE layer
    self_test: str | None = None  # the verdict's one line; None: the model has no MoE layer
    fault: str | None = None  # the planted fault, if any


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
    paged: Any = None  # layers.paged.PagedStep over the buffers of a captured step; None: the model makes it
