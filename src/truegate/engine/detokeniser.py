"""Token ids to text, as they come: whole characters only, and never past a stop string.

Invariant: the pieces `feed` and `finish` return, joined, are the decoded text of all ids fed (cut at the stop string).
The engine finds stop strings with this class and the server writes text with it, so the two cannot differ.
"""

from collections.abc import Iterable

from truegate.engine.tokenizer import Tokenizer
from truegate.types import SamplingParams, StepOutput

_REPLACEMENT = "\ufffd"
_MAX_PENDING = 16  # a character spans at most 4 tokens: a longer unfinished run is invalid text, not a late character


class Detokeniser:
    """Text of one answer, piece by piece; `stopped` names the stop string once one was found."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stop: tuple[str, ...] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        self.tokenizer = tokenizer
        self.stop = stop
        self.min_tokens = min_tokens  # text of the first ones cannot stop the answer
        self.include_stop = include_stop
        self.skip_special_tokens = skip_special_tokens
        self.stopped: str | None = None
        self._num_fed = 0
        self._ids: list[int] = []  # the window: ids before `_read` have been written, and give the rest its context
        self._read = 0
        self._written = ""  # text of the ids before `_read`
        self._held = ""  # text that might begin a stop string

    @classmethod
    def of(cls, tokenizer: Tokenizer, params: SamplingParams) -> "Detokeniser":
        return cls(
            tokenizer,
            stop=params.stop,
            min_tokens=params.min_tokens,
            include_stop=params.include_stop_str_in_output,
            skip_special_tokens=params.skip_special_tokens,
        )

    def feed(self, token_ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        return "".join([self._release(self._decode(token_id)) for token_id in token_ids])

    def take(self, output: StepOutput) -> str:
        """The text that one output of the engine completes.

        The end-of-sequence token or stop id that ended the answer is not part of it, unless stops are to be included.
        """
        ids = output.token_ids
        if ids and output.finish_reason == "stop" and not self.include_stop:
            ended_by_eos = output.stop_reason is None and ids[-1] in self.tokenizer.eos_token_ids
            if ended_by_eos or output.stop_reason == ids[-1]:
                ids = ids[:-1]
        text = self.feed(ids)
        return text if output.finish_reason is None else text + self.finish()

    def finish(self) -> str:
        """What was held back, once nothing can follow."""
        if self.stopped is not None:
            return ""
        text = self._text()[len(self._written) :]
        self._ids, self._read, self._written = [], 0, ""
        released = self._release(text)
        rest, self._held = self._held, ""
        return released + rest

    def _text(self) -> str:
        return self.tokenizer.decode(self._ids, skip_special_tokens=self.skip_special_tokens)

    def _decode(self, token_id: int) -> str:
        """The new characters that `token_id` completes, if any: decoded behind the last written ids, whose text is cut
        off, because a decoder may treat the start of its input differently."""
        self._num_fed += 1
        self._ids.append(token_id)
        text = self._text()
        if text.endswith(_REPLACEMENT) and len(self._ids) - self._read < _MAX_PENDING:
            return ""
        new = text[len(self._written) :]
        del self._ids[: self._read]
        self._read = len(self._ids)
        self._written = self._text() if self._ids else ""
        return new

    def _release(self, new: str) -> str:
        if self.stopped is not None:
            return ""
        if not self.stop or self._num_fed <= self.min_tokens:
            return new
        text = self._held + new
        found = [(text.find(stop), stop) for stop in self.stop if stop in text]
        if found:
            start, self.stopped = min(found, key=lambda one: (one[0] + len(one[1]), one[0]))  # the first completed
            self._held = ""
            return text[: start + len(self.stopped)] if self.include_stop else text[:start]
        keep = max(_overlap(text, stop) for stop in self.stop)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """The longest proper prefix of `stop` that `text` ends with."""
    for size in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
