"""Reading the answer out of a reply. Numbers are compared as Decimal, so 29.00 is 29 and -10 is not 10.

strict: only what follows the first `#### `.
flexible: that, else the last \\boxed{}, else "answer is x", else the last number.
Invariant: extraction never looks inside a chain of thought that is marked as one.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from truegate.errors import UserError

VERSION = 1  # raise it with any change of what is extracted: runs of different versions are not comparable

THOUGHT_MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
)
_SIGN = r"(?:(?<![\w)\]])[-−+]\s?)?"  # noqa: RUF001  # a minus between two figures is a subtraction, not a sign
_DIGITS = r"(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+"
NUMBER = rf"{_SIGN}[$€£¥]?\s?{_SIGN}(?:{_DIGITS})(?:[eE][-+]?\d{{1,3}}(?![\w.]))?"
_NUMBER = re.compile(NUMBER)
# a number, but not that of a heading such as "#### 2. Then"
_HASHES = re.compile(rf"####[ \t]*(?:[*_\\(\[{{]+[ \t]*)?((?>{NUMBER}))(?![ \t]*[.):][ \t]+\S)")
_ANSWER_IS = re.compile(rf"\banswer(?:\s\w+){{0,3}}?\s{{0,3}}(?:is|=|:)[^\d\n−-]{{0,20}}?({NUMBER})", re.IGNORECASE)  # noqa: RUF001
_BRACES = re.compile(r"\\boxed\{|[{}]")
_FRACTION = re.compile(r"\$?(-)?(?:\\[dt]?frac)?\{?(-?\d+)\}?/?\{?(?<=[/{])(\d+)\}?\$?")
_NEW_QUESTION = re.compile(r"^[ \t]*Question:", re.MULTILINE)
_CHOICE = re.compile(r"\banswer(?:\s\w+){0,3}?\s{0,3}(?:is|=|:)?[\s*_(\[]{0,9}([A-J])\b", re.IGNORECASE)
_LONE_CHOICE = re.compile(r"(?<![\w'])\(?([A-J])\)?(?![\w'])")


@dataclass(frozen=True, kw_only=True)
class Extracted:
    """The answer as read, both ways; None where there is none."""

    strict: str | None
    flexible: str | None


def split_thought(text: str) -> tuple[str, str]:
    """(reasoning, reply) of a text that may hold a marked chain of thought; an unclosed mark leaves no reply."""
    for begin, end in THOUGHT_MARKS:
        if end in text:
            thought, _, reply = text.rpartition(end)
            return thought.removeprefix(begin), reply
        if begin in text:
            reply, _, thought = text.partition(begin)
            return thought, reply
    return "", text


def to_decimal(text: str) -> Decimal | None:
    """The number written in `text` ($1,234.50, −10, 29.00, 1e3, 3/4), or None."""
    cleaned = re.sub(r"[$€£¥,\s]", "", text).replace("−", "-")  # noqa: RUF001
    over, _, under = cleaned.partition("/")
    try:
        value = Decimal(over) / Decimal(under) if under else Decimal(cleaned)
    except (InvalidOperation, ZeroDivisionError):
        return None
    return value if value.is_finite() else None


def same_answer(extracted: str | None, gold: str) -> bool:
    """Whether the extracted answer equals the gold one: as numbers if both are, else as folded text."""
    if extracted is None:
        return False
    left, right = to_decimal(extracted), to_decimal(gold)
    if left is not None and right is not None:
        return left == right
    return " ".join(extracted.split()).casefold() == " ".join(gold.split()).casefold()


def extract(text: str, extractor: str) -> Extracted:
    """The answer in `text` by the named extractor: number, choice, text, or regex:PATTERN (its first group, if any)."""
    return extractor_named(extractor)(text)


def extractor_named(name: str) -> Callable[[str], Extracted]:
    """The extractor of that name; a wrong name or pattern is refused here, before anything is asked."""
    if name.startswith("regex:"):
        try:
            pattern = re.compile(name.removeprefix("regex:"))
        except re.error as error:
            raise UserError(f"extractor {name!r}: not a regular expression ({error})") from None
        return lambda text: _by_pattern(text, pattern)
    if name in _EXTRACTORS:
        return _EXTRACTORS[name]
    raise UserError(f"there is no extractor {name!r}: use {', '.join(_EXTRACTORS)} or regex:PATTERN")


def _by_pattern(text: str, pattern: re.Pattern[str]) -> Extracted:
    found = list(pattern.finditer(text))
    answer = None
    if found:
        last = found[-1]
        answer = last.group(1) if pattern.groups and last.group(1) is not None else last.group(0)
    return Extracted(strict=answer, flexible=answer)


def _number(text: str) -> Extracted:
    text = _plain_latex(_before_next_question(text))
    hashes = _HASHES.search(text)
    if hashes:
        return Extracted(strict=_tidy(hashes[1]), flexible=_tidy(hashes[1]))
    for candidate in (_boxed_number(_last_boxed(text)), _last_group(_ANSWER_IS, text), _last_number(text)):
        if candidate is not None:
            return Extracted(strict=None, flexible=candidate)
    return Extracted(strict=None, flexible=None)


def _choice(text: str) -> Extracted:
    """A letter A to J; a lone lower-case letter is a word ("a"), never an answer."""
    text = _before_next_question(text)
    stated = None
    for match in _CHOICE.finditer(text):
        if match[1].isupper():
            stated = match[1]
    boxed = _LONE_CHOICE.findall(_last_boxed(text) or "")
    lone = [letter for letter in _LONE_CHOICE.findall(text) if letter != "I"]
    flexible = stated or (boxed[-1] if boxed else None) or (lone[-1] if lone else None)
    return Extracted(strict=stated, flexible=flexible)


def _text(text: str) -> Extracted:
    answer = text.strip() or None
    return Extracted(strict=answer, flexible=answer)


_EXTRACTORS: dict[str, Callable[[str], Extracted]] = {"number": _number, "choice": _choice, "text": _text}


def _before_next_question(text: str) -> str:
    """The text up to where a run-on starts the next few-shot question."""
    for match in _NEW_QUESTION.finditer(text):
        if not text[: match.start()].isspace() and match.start():
            return text[: match.start()]
    return text


def _plain_latex(text: str) -> str:
    return text.replace("{,}", ",").replace("\\$", "$").replace("\\,", "").replace("\\!", "").replace("\\%", "%")


def _tidy(number: str) -> str:
    return " ".join(number.split())


def _last_number(text: str | None) -> str | None:
    last = _last_match(_NUMBER, text or "")
    return _tidy(last[0]) if last else None


def _boxed_number(boxed: str | None) -> str | None:
    fraction = _FRACTION.fullmatch(boxed.strip()) if boxed else None
    return f"{fraction[1] or ''}{fraction[2]}/{fraction[3]}" if fraction else _last_number(boxed)


def _last_group(pattern: re.Pattern[str], text: str) -> str | None:
    last = _last_match(pattern, text)
    return _tidy(last[1]) if last else None


def _last_match(pattern: re.Pattern[str], text: str) -> re.Match[str] | None:
    last = None
    for match in pattern.finditer(text):
        last = match
    return last


def _last_boxed(text: str) -> str | None:
    """What the last closed \\boxed{...} holds, braces balanced, words in \\text{} taken out; one pass."""
    found, stack = None, []
    for mark in _BRACES.finditer(text):
        if mark[0] != "}":
            stack.append((mark.end(), len(mark[0]) > 1))
        elif stack:
            begin, boxed = stack.pop()
            if boxed:
                found = text[begin : mark.start()]
    return re.sub(r"\\(?:text|mathrm)\s*\{[^{}]*\}", " ", found) if found is not None else None
