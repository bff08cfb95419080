"""What a load test sends: random prompts of stated lengths, or prompts from a file.

Invariant: the same seed and options give the same prompts in the same order.
"""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from truegate.errors import UserError

# One to two tokens each in the vocabularies in use; only a tokenizer makes lengths exact.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country problem hand "
    "part place case week company system program question work number night point home water room mother area money "
    "story fact month lot right study book eye job word business issue side kind head house service friend father "
    "hour game line end member law car city community name president team minute idea kid body information back parent "
    "face others level office door health person art war history party result change morning reason research girl guy"
).split()


@dataclass(frozen=True, kw_only=True, slots=True)
class Prompt:
    """One request to send: a text or a list of messages, and how long an answer to ask for."""

    content: str | list[dict[str, Any]]
    output_len: int

    def messages(self) -> list[dict[str, Any]]:
        return self.content if isinstance(self.content, list) else [{"role": "user", "content": self.content}]

    def text(self) -> str:
        if isinstance(self.content, str):
            return self.content
        return "\n".join(str(message.get("content", "")) for message in self.content)


def random_prompts(
    count: int, *, input_len: int, output_len: int, range_ratio: float, seed: int, tokenizer: str | None
) -> list[Prompt]:
    """Prompts of random words; lengths uniform in [range_ratio * len, len], exact in tokens if a tokenizer is given."""
    if not 0 <= range_ratio <= 1:
        raise UserError(f"--random-range-ratio must be between 0 and 1, got {range_ratio}")
    rng = random.Random(seed)
    encoder = _load_tokenizer(tokenizer) if tokenizer is not None else None
    prompts = []
    for _ in range(count):
        size = rng.randint(max(1, int(input_len * range_ratio)), input_len)
        answer = rng.randint(max(1, int(output_len * range_ratio)), output_len)
        words = [rng.choice(WORDS) for _ in range(size)]
        text = " ".join(words) if encoder is None else _cut(encoder, words, size)
        prompts.append(Prompt(content=text, output_len=answer))
    return prompts


def file_prompts(path: Path, *, output_len: int, count: int | None, seed: int) -> list[Prompt]:
    """Prompts of a file: JSON lines with `prompt` or `messages` (and `output_len` or `max_tokens`), or one text a line.

    With a count, the file is shuffled and, if it is too short, used over again.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from None
    prompts = [
        _from_line(line, f"{path}:{number}", path.suffix in (".jsonl", ".json"), output_len)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise UserError(f"{path} holds no prompt")
    if count is None:
        return prompts
    random.Random(seed).shuffle(prompts)
    return [prompts[place % len(prompts)] for place in range(count)]


def _from_line(line: str, where: str, as_json: bool, output_len: int) -> Prompt:
    if not as_json:
        return Prompt(content=line, output_len=output_len)
    try:
        row = json.loads(line)
    except ValueError as error:
        raise UserError(f"{where} is not JSON: {error}") from None
    content = row.get("messages", row.get("prompt")) if isinstance(row, dict) else None
    if not isinstance(content, str | list) or not content:
        raise UserError(f"{where} has neither `prompt` (a text) nor `messages` (a list)")
    size = row.get("output_len", row.get("max_tokens", output_len))
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise UserError(f"{where}: output_len must be a whole number above 0, got {size!r}")
    return Prompt(content=content, output_len=size)


def _load_tokenizer(name: str) -> Any:
    from tokenizers import Tokenizer

    path = Path(name) / "tokenizer.json" if Path(name).is_dir() else Path(name)
    if not path.is_file():
        raise UserError(f"--tokenizer {name}: no tokenizer.json there")
    return Tokenizer.from_file(str(path))


def _cut(encoder: Any, words: Sequence[str], size: int) -> str:
    """The longest beginning of the words that has at most `size` tokens (each word has at least one)."""
    low, high = 1, len(words)
    while low < high:
        middle = (low + high + 1) // 2
        fits = len(encoder.encode(" ".join(words[:middle]), add_special_tokens=False).ids) <= size
        low, high = (middle, high) if fits else (low, middle - 1)
    return " ".join(words[:low])
