"""What the engine keeps of one answer beside its tokens: when it ends, how it is drawn, what was asked about it.

Invariant: everything here is keyed by position, so a preempted and recomputed answer keeps what it had.
T positions, L MoE layers, K routed top-k.
"""

import numpy as np

from truegate.engine.detokeniser import Detokeniser
from truegate.engine.sampler import Draw
from truegate.engine.start import Parts
from truegate.sched.sequence import Sequence
from truegate.types import NOT_COMPUTED, FinishReason, RoutedExperts, TokenLogprobs

Verdict = tuple[FinishReason | None, int | str | None, str | None]  # finish reason, stop reason, error


class Answer:
    """The engine's own state of a sequence (`Sequence.state`)."""

    __slots__ = (
        "detokeniser",
        "draw",
        "eos_ids",
        "ids_TLK",
        "prompt_length",
        "prompt_logprobs",
        "stop_ids",
        "weights_TLK",
    )

    def __init__(self, sequence: Sequence, parts: Parts, key: int) -> None:
        params = sequence.params
        self.eos_ids = frozenset() if params.ignore_eos else frozenset(parts.eos_token_ids)
        self.stop_ids = frozenset(params.stop_token_ids)
        ending = tuple(dict.fromkeys([*(() if params.ignore_eos else parts.eos_token_ids), *params.stop_token_ids]))
        ending = tuple(token for token in ending if token < parts.model.vocab_size)
        self.draw = Draw(params, sequence.index, sequence.prompt_length, ending, key)
        self.detokeniser = Detokeniser.of(parts.tokenizer, params) if params.stop else None
        self.prompt_length = sequence.prompt_length
        self.prompt_logprobs: dict[int, TokenLogprobs] = {}
        self.ids_TLK: np.ndarray | None = None
        self.weights_TLK: np.ndarray | None = None

    def judge(self, sequence: Sequence, token: int) -> Verdict:
        """Whether the token just appended ends the answer."""
        grammar = self.draw.grammar
        if grammar is not None:
            error = grammar.advance(token)
            if error is not None:
                return "error", None, f"json_schema: {error}"
        if token in self.eos_ids:
            return "stop", None, None
        if token in self.stop_ids:
            return "stop", token, None
        if self.detokeniser is not None:
            self.detokeniser.feed((token,))
            if self.detokeniser.stopped is not None:
                return "stop", self.detokeniser.stopped, None
        if grammar is not None and grammar.complete:
            return "stop", None, None
        if len(sequence.tokens) >= sequence.max_length:
            return "length", None, None
        return None, None, None

    def read_prompt_logprobs(self, sequence: Sequence) -> tuple[TokenLogprobs | None, ...]:
        """One entry per prompt position, the first None: nothing precedes it."""
        if sequence.params.prompt_logprobs is None:
            return ()
        return (None, *(self.prompt_logprobs[position] for position in range(1, sequence.prompt_length)))

    def record(self, start: int, ids_TLK: np.ndarray, weights_TLK: np.ndarray) -> None:
        """Keep what ran at positions start.. ; a recomputed position says the same again."""
        end = start + ids_TLK.shape[0]
        if self.ids_TLK is None or end > self.ids_TLK.shape[0]:
            grown = (max(self.prompt_length, 2 * end), *ids_TLK.shape[1:])
            ids = np.full(grown, NOT_COMPUTED, dtype=np.int32)
            weights = np.zeros(grown, dtype=np.float32)
            if self.ids_TLK is not None:
                ids[: len(self.ids_TLK)], weights[: len(self.weights_TLK)] = self.ids_TLK, self.weights_TLK
            self.ids_TLK, self.weights_TLK = ids, weights
        self.ids_TLK[start:end] = ids_TLK
        self.weights_TLK[start:end] = weights_TLK

    def routed(self, sequence: Sequence) -> RoutedExperts | None:
        if self.ids_TLK is None:
            return None
        count = len(sequence.tokens) - 1
        return RoutedExperts(ids_TLK=self.ids_TLK[:count].copy(), weights_TLK=self.weights_TLK[:count].copy())
