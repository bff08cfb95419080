"""Repetition loops in generated text, found by characters and not by words (a word view misses `333333...`).

For a text x of n characters and its tail T (the last 4,096):
    L(p)      = length of the longest suffix of T with exact period p        (x[i] = x[i+p] throughout it)
    LoopScore = max over p <= 1024 with L(p) >= 3p of L(p), divided by |T|;  looped: that L is at least 200
    novelty   = share of the 32-character grams of the last 2,048 that had fewer than 2 earlier occurrences in x
Invariant: a text that left its loop before its end is not looped.
"""

import re
import zlib
from dataclasses import dataclass

TAIL = 4096
MAX_PERIOD = 1024
MIN_COPIES = 3
MIN_LENGTH = 200
GRAM = 32
NOVELTY_WINDOW = 2048
NOVELTY_FLOOR = 0.02
RATE_WINDOW = 4000  # seq-rep-4 and the compression ratio look at the last 4,000 characters


@dataclass(frozen=True, kw_only=True)
class Loop:
    """What was found in one text; lengths and positions in characters, shares in [0, 1]."""

    score: float  # LoopScore
    period: int | None  # smallest period of the repeated suffix, None where nothing repeats three times
    copies: float
    novelty: float | None  # None: shorter than the window
    exact: bool
    near: bool
    templated: bool  # repeats once digits are masked: a counter, or a healthy table
    onset: float | None  # where the loop starts, as a share of the whole text
    rep4: float  # 1 - |unique word 4-grams| / |word 4-grams|; reported only
    compression: float  # bytes / zlib bytes; reported only: healthy enumerations reach 7

    @property
    def looped(self) -> bool:
        """Whether the text ends in a loop, exact or nearly so."""
        return self.exact or self.near

    def waste(self, tokens: int | None) -> float:
        """Tokens spent inside the loop = tokens * (1 - onset)."""
        return 0.0 if tokens is None or self.onset is None else tokens * (1.0 - self.onset)


def find_loop(text: str) -> Loop:
    """The loop at the end of `text`, if there is one."""
    period, length = _periodic_suffix(text[-TAIL:])
    exact = period is not None and length >= MIN_LENGTH
    novelty = _novelty(text)
    near = novelty is not None and novelty < NOVELTY_FLOOR
    masked = _novelty(re.sub(r"\d+", "#", text))
    onset: int | None = None
    if period is not None and exact:
        onset = len(text) - _extend(text, period, length)
    elif near:
        onset = _near_onset(text)
    return Loop(
        score=length / len(text[-TAIL:]) if text else 0.0,
        period=period,
        copies=length / period if period else 0.0,
        novelty=novelty,
        exact=exact,
        near=near,
        templated=masked is not None and masked < NOVELTY_FLOOR,
        onset=None if onset is None else onset / len(text),
        rep4=_rep4(text[-RATE_WINDOW:]),
        compression=_compression(text[-RATE_WINDOW:]),
    )


def _periodic_suffix(tail: str) -> tuple[int | None, int]:
    """(p, L): the smallest period whose periodic suffix is longest among those with at least three copies."""
    best_period, best_length = None, 0
    for period, match in enumerate(_prefix_matches(tail[::-1], MAX_PERIOD + 1)):
        length = period + match
        if period and length >= MIN_COPIES * period and length > best_length:
            best_period, best_length = period, length
    return best_period, best_length


def _prefix_matches(text: str, count: int) -> list[int]:
    """z[i] = longest common prefix of `text` and `text[i:]`, for i < count, in linear time (the Z algorithm)."""
    size = len(text)
    z = [0] * min(count, size)
    left = right = 0
    for i in range(1, len(z)):
        match = min(right - i, z[i - left]) if i < right else 0
        while i + match < size and text[match] == text[i + match]:
            match += 1
        z[i] = match
        if i + match > right:
            left, right = i, i + match
    return z


def _extend(text: str, period: int, length: int) -> int:
    """Length of the suffix of the full text with `period`, known to be at least `length`."""
    step = 4096
    while length < len(text) and step:
        start = len(text) - length
        begin = max(0, start - step)
        if text[begin:start] == text[begin + period : start + period]:
            length += start - begin
        else:
            step //= 2
    return length


def _novelty(text: str) -> float | None:
    """Share of the last window's grams seen fewer than twice before; None for a text shorter than the window.

    Twice, not once: an answer drafted in the reasoning and copied into the reply is no loop.
    """
    first = len(text) - NOVELTY_WINDOW
    if first < 0:
        return None
    seen = {text[i : i + GRAM]: 0 for i in range(first, len(text) - GRAM + 1)}
    novel = 0
    for i in range(len(text) - GRAM + 1):
        gram = text[i : i + GRAM]
        count = seen.get(gram)
        if count is None:
            continue
        seen[gram] = count + 1
        novel += i >= first and count < MIN_COPIES - 1
    return novel / (NOVELTY_WINDOW - GRAM + 1)


def _near_onset(text: str) -> int:
    """Start of the stretch that only repeats: the first occurrence of the earliest gram of the window."""
    grams = {text[i : i + GRAM] for i in range(len(text) - NOVELTY_WINDOW, len(text) - GRAM + 1)}
    return next(i for i in range(len(text)) if text[i : i + GRAM] in grams)


def _rep4(text: str) -> float:
    words = text.split()
    grams = [tuple(words[i : i + 4]) for i in range(len(words) - 3)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def _compression(text: str) -> float:
    raw = text.encode("utf-8", "surrogatepass")
    return len(raw) / len(zlib.compress(raw, 6)) if raw else 0.0
