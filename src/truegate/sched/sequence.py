"""One answer on its way: its tokens, its pages, and how far it has been computed.

Invariant: positions 0..num_computed-1 have their keys and values in `pages` (launched, if not yet finished); tokens
that are launched but not yet read back are counted in `in_flight`, so length = len(tokens) + in_flight.
"""

from enum import Enum
from typing import Any

from truegate.cache.radix import Node
from truegate.types import FinishReason, Request, SamplingParams


class Status(Enum):
    WAITING = 0
    RUNNING = 1
    FINISHED = 2


class Sequence:
    """Mutable state of one answer; the scheduler moves it, the engine appends to it."""

    __slots__ = (
        "cached_tokens",
        "finish_reason",
        "in_flight",
        "index",
        "leader",
        "max_length",
        "node",
        "num_computed",
        "order",
        "pages",
        "params",
        "prompt_length",
        "request_id",
        "slot",
        "state",
        "status",
        "stop_reason",
        "tokens",
    )

    def __init__(self, request: Request, index: int, order: int, max_length: int) -> None:
        self.request_id: str = request.request_id
        self.index = index
        self.params: SamplingParams = request.params
        self.tokens: list[int] = list(request.prompt_token_ids)
        self.prompt_length = len(self.tokens)
        self.max_length = min(max_length, self.prompt_length + request.params.max_tokens)
        self.order = order  # of add(): admission and preemption follow it
        self.leader: Sequence | None = None  # the first answer of the same request, whose prompt the cache will share
        self.status = Status.WAITING
        self.pages: list[int] = []
        self.node: Node | None = None  # deepest cached page in use, locked
        self.num_computed = 0
        self.in_flight = 0
        self.slot = -1  # row in per-sequence buffers while running
        self.cached_tokens: int | None = None  # prompt tokens found in the prefix cache at first admission
        self.finish_reason: FinishReason | None = None
        self.stop_reason: int | str | None = None
        self.state: Any = None  # the engine's own: stop ids, sampler row, grammar, records

    @property
    def length(self) -> int:
        return len(self.tokens) + self.in_flight

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.prompt_length
