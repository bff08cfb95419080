"""What is asked: the tasks and their items. Invariant: no few-shot example is ever scored.

Tasks: gsm8k (few-shot, from a pool of its own), ledger (generated, any number of steps), longform (our own long
problems), or a JSONL of one's own with `prompt` or `messages`, `answer` and, if wanted, `id` and `extractor`.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from truegate.errors import UserError
from truegate.evals.answers import extractor_named

Mode = Literal["chat", "completion"]
Messages = tuple[tuple[str, str], ...]  # (role, content)
BUILT_IN = ("gsm8k", "ledger", "longform")
STEP_BY_STEP = "Solve the problem step by step. End with a line `#### N`, where N is the answer as a plain number."


@dataclass(frozen=True, kw_only=True)
class Item:
    """One question: its input as sent (text, or messages), the gold answer, and how an answer is read."""

    id: str
    input: str | Messages
    gold: str
    extractor: str = "number"

    def messages(self) -> list[dict[str, str]]:
        """The input as chat messages."""
        if isinstance(self.input, str):
            return [{"role": "user", "content": self.input}]
        return [{"role": role, "content": content} for role, content in self.input]

    def sha(self) -> str:
        """Hash of the input as sent."""
        return digest([self.input])


@dataclass(frozen=True, kw_only=True)
class Task:
    """Items to ask and how: mode, default cap, default stop strings (none in chat: reasoning must not be cut)."""

    name: str
    items: tuple[Item, ...]
    dataset_sha: str  # of ids, questions and golds, before any prompt is wrapped around them
    mode: Mode
    max_tokens: int
    stop: tuple[str, ...] = ()

    def prompt_sha(self) -> str:
        """Hash of every input as sent."""
        return digest([item.input for item in self.items])


def digest(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of a value's JSON."""
    text = json.dumps(value, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def choose(task: Task, *, n: int | None, sample: str, seed: int) -> Task:
    """The task cut to n items: `random` by seed (the first items of a file are often the easy ones) or `head`."""
    if n is None or n == len(task.items):
        return task
    if not 0 < n <= len(task.items):
        raise UserError(f"--n {n}: {task.name} has {len(task.items)} items")
    if sample == "random":
        kept = sorted(random.Random(seed).sample(range(len(task.items)), n))
    elif sample == "head":
        kept = list(range(n))
    else:
        raise UserError(f"--sample {sample!r}: use random or head")
    items = tuple(task.items[i] for i in kept)
    return replace(task, items=items, dataset_sha=digest([task.dataset_sha, [item.id for item in items]]))


def make_task(name: str, items: Iterable[Item], questions: Sequence[Any], **settings: Any) -> Task:
    """A task whose data set hash covers ids, bare questions and golds."""
    items = tuple(items)
    dataset = digest([[item.id, question, item.gold] for item, question in zip(items, questions, strict=True)])
    return Task(name=name, items=items, dataset_sha=dataset, **settings)


def ledger(*, steps: int, count: int, seed: int, mode: Mode = "chat") -> Task:
    """The embedded model's word problems: `count` of them, each of `steps` steps; the bare question is the prompt."""
    from truegate.evals.ledger import problems

    if mode != "chat":
        raise UserError("ledger is asked in chat: the embedded model's template is part of the task")
    if steps < 1 or count < 1:
        raise UserError(f"--steps {steps} --n {count}: both must be at least 1")
    asked = problems(steps=steps, count=count, seed=seed)
    items = [Item(id=f"ledger-{steps}-{i:05d}", input=p.question, gold=p.answer) for i, p in enumerate(asked)]
    return make_task(f"ledger-{steps}", items, [p.question for p in asked], mode=mode, max_tokens=128 + 64 * steps)


def longform(*, mode: Mode = "chat") -> Task:
    """Our own problems that need long reasoning, each with one whole number as its answer."""
    from truegate.evals.longform import PROBLEMS

    items = [
        Item(id=f"longform-{p.name}", input=f"{p.question}\n\n{STEP_BY_STEP}", gold=str(p.answer)) for p in PROBLEMS
    ]
    return make_task("longform", items, [p.question for p in PROBLEMS], mode=mode, max_tokens=16384)


def own_file(path: Path, *, mode: Mode | None = None) -> Task:
    """A JSONL of one's own: every line {"prompt" or "messages", "answer", optional "id", optional "extractor"}."""
    rows = read_jsonl(path)
    items, seen, chat_only = [], set(), False
    for line, row in enumerate(rows, 1):
        where = f"{path}, line {line}"
        asked: str | Messages
        if ("prompt" in row) == ("messages" in row):
            raise UserError(f'{where}: give either "prompt" or "messages"')
        if "prompt" in row:
            if not isinstance(row["prompt"], str):
                raise UserError(f'{where}: "prompt" must be text')
            asked = row["prompt"]
        else:
            chat_only, asked = True, _messages(row["messages"], where)
        answer = row.get("answer")
        if isinstance(answer, bool) or not isinstance(answer, str | int | float):
            raise UserError(f'{where}: "answer" must be text or a number')
        extractor = row.get("extractor", "number")
        if not isinstance(extractor, str):
            raise UserError(f'{where}: "extractor" must be text')
        extractor_named(extractor)
        item = Item(
            id=str(row.get("id", f"{path.stem}-{line:05d}")), input=asked, gold=str(answer), extractor=extractor
        )
        if item.id in seen:
            raise UserError(f"{where}: the id {item.id!r} occurs twice")
        seen.add(item.id)
        items.append(item)
    if chat_only and mode == "completion":
        raise UserError(f'{path} holds "messages": it cannot be asked in completion mode')
    return make_task(path.stem, items, [item.input for item in items], mode=mode or "chat", max_tokens=4096)


def _messages(value: Any, where: str) -> Messages:
    messages = value if isinstance(value, list) else []
    if not messages or not all(
        isinstance(m, dict) and isinstance(m.get("role"), str) and isinstance(m.get("content"), str) for m in messages
    ):
        raise UserError(f'{where}: "messages" must be a list of {{"role", "content"}} texts')
    return tuple((m["role"], m["content"]) for m in messages)


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file; an empty or broken file is refused with its line."""
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start})") from None
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise UserError(f"{path}, line {number}: not JSON ({error})") from None
        if not isinstance(row, dict):
            raise UserError(f"{path}, line {number}: not a JSON object")
        rows.append(row)
    if not rows:
        raise UserError(f"{path} holds no lines")
    return rows
