"""How a model can be asked, and what it answers: shared by the HTTP client and the one for a model in process.

Invariant: nothing here speaks HTTP, so that an audit in process needs numpy only.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Literal, Protocol

from truegate.errors import InvalidRun

MAX_TOP = 20
_BODY = 300  # characters of a refusal that are quoted


class ServerLost(InvalidRun):
    """The server died, hung or cannot be reached."""


class Refusal(Exception):
    """The server answered with an HTTP error; the text is its own."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text[:_BODY]}")
        self.status = status


Endpoint = Literal["completions", "generate", "chat"]


@dataclass(frozen=True, kw_only=True)
class Api:
    """What the server can do, as found by trying."""

    endpoint: Endpoint
    ids: bool  # prompts as token ids; else as text
    top: int  # log-probabilities a token; 0: none
    batched: bool = False  # a list of prompts in one request
    echo: bool = False  # log-probabilities of every prompt position
    id_names: bool = False  # tokens come back as "token_id:7" (asked for), not as text
    greedy_by_top_k: bool = False
    model: str = "canary"

    def describe(self) -> str:
        prompts = "token-id prompts" if self.ids else "text prompts"
        top = f"top-{self.top} log-probabilities" if self.top else "no log-probabilities (greedy questions)"
        more = [w for w, on in (("batched prompt lists", self.batched), ("echo", self.echo)) if on]
        route = {"completions": "/v1/completions", "generate": "/generate", "chat": "/v1/chat/completions"}
        return ", ".join([route[self.endpoint], prompts, top, *more])


@dataclass(frozen=True)
class Completion:
    """Generated token ids (None: text that is no token) and the top log-probabilities of each step."""

    tokens: list[int | None]
    tops: list[dict[int, float]]
    echo: list[dict[int, float] | None] = field(default_factory=list)  # by prompt position: what follows it


class Server(Protocol):
    """What the phases of an audit need: a server behind HTTP (`client.Client`) or a model in this process."""

    num_requests: int

    def complete(
        self, api: Api, prompts: Sequence[Sequence[int]], max_tokens: int, *, echo: bool = False
    ) -> list[Completion]: ...

    def together(
        self, api: Api, jobs: Sequence[tuple[Sequence[int], int]], parallel: int
    ) -> list[Completion | Refusal]: ...

    def on_rank(self, rank: int) -> AbstractContextManager[str]: ...
