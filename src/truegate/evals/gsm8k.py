"""The GSM8K task: questions scored from one file, few-shot examples from another, never the same question in both.

Data come from `--data`, or are downloaded once from the public repository at a fixed commit and checked by SHA-256.
"""

import hashlib
import os
import re
from pathlib import Path

from truegate.errors import UserError
from truegate.evals.tasks import STEP_BY_STEP, Item, Mode, Task, make_task, read_jsonl

COMMIT = "3101c7d5072418e28b9008a6636bde82a006892c"
SOURCE = f"https://raw.githubusercontent.com/openai/grade-school-math/{COMMIT}/grade_school_math/data"
TEST_SHA = "3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14"
POOL_LINES = 200  # the pool is the first 200 lines of the training file
POOL_SHA = "03a8e89683ff5335dd79e1d8468ede692f263b4de113e59025833eeadc0f05a9"
STOP = "\nQuestion:"


def gsm8k(*, data: Path | None, shots_data: Path | None, shots: int, mode: Mode) -> Task:
    """All questions of the data file, each after the same `shots` worked examples from the pool."""
    data = data or _fetched("test.jsonl", TEST_SHA, lines=None)
    if shots < 0:
        raise UserError(f"--shots {shots}: must be 0 or more")
    pool = _pool(data, shots_data) if shots else []
    if shots > len(pool):
        raise UserError(f"--shots {shots}: the pool holds {len(pool)} examples")
    questions = [_question(row, data, line) for line, row in enumerate(read_jsonl(data), 1)]
    shared = {q for q, _ in pool[:shots]} & {q for q, _ in questions}
    if shared:
        raise UserError(
            f"{len(shared)} few-shot examples are also scored questions of {data}: "
            "give another --shots-data, or --shots 0"
        )
    examples = "".join(f"Question: {q}\nAnswer: {_worked(a)}\n\n" for q, a in pool[:shots])
    lead = f"{STEP_BY_STEP}\n\n{examples}"
    items = [
        Item(
            id=f"gsm8k-{i:04d}",
            input=f"{lead}Question: {q}" + ("\nAnswer:" if mode == "completion" else ""),
            gold=a.rpartition("#### ")[2].strip(),
        )
        for i, (q, a) in enumerate(questions)
    ]
    stop = (STOP,) if mode == "completion" else ()
    return make_task("gsm8k", items, [q for q, _ in questions], mode=mode, max_tokens=2048, stop=stop)


def _pool(data: Path, shots_data: Path | None) -> list[tuple[str, str]]:
    beside = [data.with_name("train-head.jsonl"), data.with_name("train.jsonl")]
    path = shots_data or next((p for p in beside if p.exists()), None)
    path = path or _fetched("train.jsonl", POOL_SHA, lines=POOL_LINES)
    if path.resolve() == data.resolve():
        raise UserError(f"--shots-data {path} is the file that is scored: give a training file, or --shots 0")
    return [_question(row, path, line) for line, row in enumerate(read_jsonl(path), 1)]


def _question(row: dict[str, object], path: Path, line: int) -> tuple[str, str]:
    question, answer = row.get("question"), row.get("answer")
    if not isinstance(question, str) or not isinstance(answer, str) or "#### " not in answer:
        raise UserError(f'{path}, line {line}: needs "question" and "answer" texts, the answer ending in "#### N"')
    return question, answer


def _worked(answer: str) -> str:
    """A worked answer without the data set's calculator marks `<<3*4=12>>`."""
    return re.sub(r"<<[^<>]*>>", "", answer)


def cache_folder() -> Path:
    """Where downloaded data is kept: $XDG_CACHE_HOME/truegate, or ~/.cache/truegate."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "truegate" / "gsm8k"


def _fetched(name: str, sha: str, *, lines: int | None) -> Path:
    """The cached file (cut to its first lines), downloaded and checked if it is not there yet."""
    path = cache_folder() / (name if lines is None else f"head{lines}-{name}")
    if path.exists() and hashlib.sha256(path.read_bytes()).hexdigest() == sha:
        return path
    import httpx

    url = f"{SOURCE}/{name}"
    remedy = "download it yourself and give --data FILE (and --shots-data FILE, or --shots 0)"
    try:
        response = httpx.get(url, timeout=30, follow_redirects=True)
        response.raise_for_status()
    except httpx.HTTPError as error:
        raise UserError(f"cannot download {url} ({type(error).__name__}): {remedy}") from None
    body = response.content
    if lines is not None:
        body = b"".join(body.splitlines(keepends=True)[:lines])
    if hashlib.sha256(body).hexdigest() != sha:
        raise UserError(f"{url} does not have the expected SHA-256 {sha[:12]}...: {remedy}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(f".part{os.getpid()}")
    part.write_bytes(body)
    part.replace(path)
    return path
