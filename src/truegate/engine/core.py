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

from truegate.config import EngineConfig
from truegate.engine.tokenizer import Tokenizer
from truegate.types import EngineStats, Request, StepOutput


class Engine:
    """One loaded model and its scheduler.

    Attributes: `config` (resolved), `tokenizer` (engine/tokenizer.py, which also renders the chat template),
    `model_config` (the checkpoint's config.json, as a dict).
    """

    config: EngineConfig
    tokenizer: Tokenizer
    model_config: dict

    def __init__(self, config: EngineConfig) -> None:
        raise NotImplementedError

    def add(self, request: Request) -> None:
        """Queue a request, its `params.n` answers as indices 0..n-1. Request ids must be unique among live ones."""
        raise NotImplementedError

    def cancel(self, request_id: str) -> None:
        """End every answer of a request with finish_reason "abort" at the next step; unknown ids are ignored."""
        raise NotImplementedError

    def step(self) -> list[StepOutput]:
        """Compute one batch (or nothing, if there is no work) and return what moved."""
        raise NotImplementedError

    @property
    def has_work(self) -> bool:
        """True while a step would have something to do, undelivered aborts included."""
        raise NotImplementedError

    def stats(self) -> EngineStats:
        raise NotImplementedError

    def shutdown(self, *, drain: bool = True) -> list[StepOutput]:
        """Finish (drain) or abort what is queued and running; returns the remaining outputs. add() then refuses."""
        raise NotImplementedError
