"""Answers that must match a JSON schema: the tokens allowed next, from llguidance.

Invariant: a sequence's matcher has consumed exactly its output tokens; a mask is computed from that state alone, so it
survives preemption and any batch. V vocabulary, R rows.
"""

import numpy as np
import torch

from truegate.engine.tokenizer import Tokenizer
from truegate.errors import UserError

try:
    import llguidance
    import llguidance.numpy
except ImportError:  # asked for only when a request brings a schema
    llguidance = None

# Written as json.dumps does: with free whitespace a small model can fill the whole answer with newlines.
_STYLE = {"lenient": False, "whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class Grammars:
    """Compiles schemas for one tokenizer; holds the thread pool that fills masks."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        if llguidance is None:
            raise UserError("json_schema needs llguidance: pip install llguidance")
        self.vocab_size = vocab_size
        eos = [token for token in tokenizer.eos_token_ids if token < vocab_size]
        if not eos:
            raise UserError("json_schema needs a tokenizer with an end-of-sequence token")
        self.tokens = llguidance.LLTokenizer(tokenizer.backend.to_str(), n_vocab=vocab_size, eos_token=eos)
        self.pool = llguidance.LLExecutor(num_threads=1)

    def compile(self, schema: str) -> "Grammar":
        """A fresh matcher; UserError if any part of the schema cannot be honoured."""
        try:
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=_STYLE)
        except ValueError as error:
            raise UserError(f"json_schema is not JSON: {error}") from None
        is_error, messages = llguidance.LLMatcher.validate_grammar_with_warnings(grammar, self.tokens)
        if is_error or messages:
            raise UserError(f"json_schema cannot be honoured: {'; '.join(messages)}")
        matcher = llguidance.LLMatcher(self.tokens, grammar, log_level=0)
        if matcher.is_error():
            raise UserError(f"json_schema cannot be honoured: {matcher.get_error()}")
        return Grammar(self, matcher)


class Grammar:
    """The state of one answer."""

    def __init__(self, owner: Grammars, matcher: "llguidance.LLMatcher") -> None:
        self.owner = owner
        self.matcher = matcher

    def advance(self, token_id: int) -> str | None:
        """Consume the sampled token; the error message if the grammar does not allow it."""
        return None if self.matcher.consume_token(token_id) else self.matcher.get_error() or "token not allowed"

    @property
    def complete(self) -> bool:
        """Nothing but the end of sequence may follow."""
        return self.matcher.is_stopped()

    def copy(self) -> "Grammar":
        return Grammar(self.owner, self.matcher.deep_copy())

    def masks(self, grammars: list["Grammar"], vocab_size: int) -> torch.Tensor:
        """allowed_RV of these grammars, filled in parallel."""
        bits = llguidance.numpy.allocate_token_bitmask(len(grammars), vocab_size)
        matchers = [(one.matcher, row) for row, one in enumerate(grammars)]
        llguidance.numpy.fill_next_token_bitmask_par(self.owner.pool, matchers, bits)
        return _unpack(bits, vocab_size)

    def draft_masks(self, draft: list[int], vocab_size: int) -> torch.Tensor:
        """allowed_RV before each token of `draft` and after the last (R = len(draft) + 1); the state stays."""
        bits = llguidance.numpy.allocate_token_bitmask(len(draft) + 1, vocab_size)
        matchers = [(self.matcher, 0, list(draft))]
        llguidance.numpy.fill_next_token_bitmask_par_with_draft_tokens(self.owner.pool, matchers, bits)
        return _unpack(bits, vocab_size)


def _unpack(bits: np.ndarray, vocab_size: int) -> torch.Tensor:
    flat = np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little")[:, :vocab_size]
    return torch.from_numpy(flat.view(np.bool_))
