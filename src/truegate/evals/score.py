"""From one reply to one scored record: extraction, outcome, loop.

Outcome is the first that holds: request_error, correct, looped, truncated, no_answer, wrong. The loop and cap flags are
kept apart from it, because a correct answer can still have run to the cap. Invariant: a reply is scored from its record
alone, so that a stored run can be scored again.
"""

import hashlib
import re
from dataclasses import dataclass

from truegate.evals.answers import extract, same_answer, split_thought
from truegate.evals.loops import find_loop

OUTCOMES = ("correct", "wrong", "no_answer", "truncated", "looped", "request_error")
CHARS_PER_TOKEN = 4.0  # used only where the server reports no usage, and named in every report that rests on it


@dataclass(frozen=True, kw_only=True)
class Reply:
    """What a server sent, or why nothing usable came."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None  # stop, length, ... as the server says
    tokens: int | None = None  # completion tokens by the server's usage, reasoning included
    prompt_tokens: int | None = None
    seconds: float = 0.0
    error: str | None = None  # "kind: detail"; kinds: connect, timeout, dropped, http, body


OVER_CAP = re.compile(r"http: 4\d\d .*(max_(completion_|new_)?tokens|context (length|size|window))", re.IGNORECASE)


def with_remedy(error: str) -> str:
    """A request error, with what to do about it where the server refuses prompt and cap together."""
    return f"{error}: give a lower --max-tokens" if OVER_CAP.match(error) else error


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """One scored reply: a line of items.jsonl. Positions are shares of the text, lengths tokens or characters."""

    id: str
    repeat: int
    prompt_sha: str
    gold: str
    extractor: str
    text: str
    reasoning: str
    text_sha: str
    characters: int  # of reasoning and text
    finish: str | None
    tokens: int | None
    tokens_from: str  # usage, characters
    prompt_tokens: int | None
    seconds: float
    strict: str | None
    extracted: str | None
    correct: bool
    correct_strict: bool
    outcome: str
    capped: bool
    looped: bool
    suspect: bool
    loop_score: float
    loop_period: int | None
    loop_onset: float | None
    novelty: float | None
    rep4: float
    compression: float
    waste: float  # tokens after the onset of the loop
    error: str | None

    @property
    def key(self) -> tuple[str, int]:
        """What the record answers: (item, repeat)."""
        return self.id, self.repeat

    @property
    def runaway(self) -> bool:
        """Whether the answer did not end by itself: looped or cut at the cap."""
        return self.looped or self.capped


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The part of a record that is known before the reply."""

    id: str
    repeat: int
    prompt_sha: str
    gold: str
    extractor: str


def outcome_of(*, error: str | None, correct: bool, looped: bool, capped: bool, extracted: str | None) -> str:
    """The first outcome that holds, in the order the module states."""
    if error is not None:
        return "request_error"
    flags = {"correct": correct, "looped": looped, "truncated": capped, "no_answer": extracted is None}
    return next((name for name, holds in flags.items() if holds), "wrong")


def score(asked: Asked, reply: Reply) -> Record:
    """The record of `reply` to `asked`."""
    thought, answer = split_thought(reply.text)
    if not answer.strip() and reply.finish == "stop":
        answer = reply.reasoning or thought  # a reply that ended but sits whole in the reasoning field is still a reply
    found = extract(answer, asked.extractor)
    whole = reply.reasoning + reply.text
    loop = find_loop(whole)
    capped = reply.finish == "length"
    tokens = reply.tokens
    if tokens is None and reply.error is None:
        tokens = round(len(whole) / CHARS_PER_TOKEN)
    correct = reply.error is None and same_answer(found.flexible, asked.gold)
    return Record(
        id=asked.id,
        repeat=asked.repeat,
        prompt_sha=asked.prompt_sha,
        gold=asked.gold,
        extractor=asked.extractor,
        text=reply.text,
        reasoning=reply.reasoning,
        text_sha=hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:16],
        characters=len(whole),
        finish=reply.finish,
        tokens=tokens,
        tokens_from="usage" if reply.tokens is not None else "characters",
        prompt_tokens=reply.prompt_tokens,
        seconds=round(reply.seconds, 4),
        strict=found.strict,
        extracted=found.flexible,
        correct=correct,
        correct_strict=reply.error is None and same_answer(found.strict, asked.gold),
        outcome=outcome_of(
            error=reply.error, correct=correct, looped=loop.looped, capped=capped, extracted=found.flexible
        ),
        capped=capped,
        looped=loop.looped,
        suspect=loop.templated and capped and not loop.looped,
        loop_score=round(loop.score, 4),
        loop_period=loop.period if loop.exact else None,
        loop_onset=None if loop.onset is None else round(loop.onset, 5),
        novelty=None if loop.novelty is None else round(loop.novelty, 4),
        rep4=round(loop.rep4, 4),
        compression=round(loop.compression, 3),
        waste=round(loop.waste(tokens), 1),
        error=reply.error,
    )
