"""A run's folder: run.json (what is asked, fixed at the start), items.jsonl (one record a line), summary.json, reports.

Invariant: items.jsonl only ever grows by whole lines; a line cut off by a crash is dropped before anything is added.
"""

import fcntl
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from truegate.errors import InvalidRun, UserError
from truegate.evals.score import Record

CONFIG, ITEMS, SUMMARY = "run.json", "items.jsonl", "summary.json"
# two runs that differ in one of these measured different things
COMPARED = ("dataset", "prompt", "mode", "sampling", "max_tokens", "scoring")
_FIELDS = {f.name for f in fields(Record)}


@dataclass(frozen=True, kw_only=True)
class Config:
    """What a run asks, from which server, and how its replies are scored."""

    task: str
    dataset: str
    prompt: str
    mode: str
    sampling: dict[str, Any]
    max_tokens: int
    scoring: str
    items: int
    repeats: int
    model: str
    url: str
    concurrency: int
    version: str

    def differences(self, other: "Config", names: tuple[str, ...]) -> list[str]:
        """`name: a is not b` for each of `names` that differs."""
        left, right = asdict(self), asdict(other)
        return [f"{name}: {left[name]!r} is not {right[name]!r}" for name in names if left[name] != right[name]]


def write_json(path: Path, value: Any) -> None:
    """Write JSON whole or not at all."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8", errors="surrogatepass")
    part.replace(path)


def read_config(folder: Path) -> Config | None:
    """The folder's run.json, or None where there is none."""
    path = folder / CONFIG
    if not path.exists():
        return None
    try:
        return Config(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} cannot be read as a run of this version ({error})") from None


def read_records(path: Path) -> Iterator[Record]:
    """The records of an items.jsonl; an unfinished last line is left out, any other broken line is refused."""
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith(b"\n"):
                return
            try:
                row = json.loads(line)
                yield Record(**{name: value for name, value in row.items() if name in _FIELDS})
            except (ValueError, TypeError, AttributeError) as error:
                raise InvalidRun(f"{path}, line {number}: not a record of an eval run ({error})") from None


def latest(records: Iterator[Record]) -> dict[tuple[str, int], Record]:
    """One record for each (item, repeat): the last written, in the order of first writing."""
    found: dict[tuple[str, int], Record] = {}
    for record in records:
        found[record.key] = record
    return found


def light(record: Record) -> Record:
    """The record without its texts, to be held for thousands of items."""
    return replace(record, text="", reasoning="")


class Writer:
    """Appends records to a folder's items.jsonl; one writer at a time."""

    def __init__(self, folder: Path, config: Config) -> None:
        self._path = folder / ITEMS
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._file = self._path.open("ab")
        except OSError as error:
            raise UserError(f"--save {folder}: {error.strerror}") from None
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise UserError(f"--save {folder}: another run is writing there") from None
        try:
            self._claim(folder, config)
            self.done = {key: light(record) for key, record in latest(read_records(self._path)).items()}
            self._drop_unfinished_line()
        except BaseException:
            self._file.close()
            raise

    def _claim(self, folder: Path, config: Config) -> None:
        before = read_config(folder)
        if before is None:
            if self._path.stat().st_size:
                raise UserError(f"--save {folder}: holds {ITEMS} but no {CONFIG}; give another folder")
            write_json(folder / CONFIG, asdict(config))
            return
        names = (*COMPARED, "task", "items", "repeats", "model")
        differ = before.differences(config, names)
        if differ:
            raise UserError(f"--save {folder} holds another run ({'; '.join(differ)}); give another folder")

    def _drop_unfinished_line(self) -> None:
        with self._path.open("rb+") as file:
            size = file.seek(0, os.SEEK_END)
            end = size
            while end and _byte(file, end - 1) != b"\n":
                end -= 1
            if end < size:
                file.truncate(end)

    def write(self, record: Record) -> None:
        """Append one record and hand it to the operating system at once."""
        line = json.dumps(asdict(record), ensure_ascii=True, separators=(",", ":")) + "\n"
        try:
            self._file.write(line.encode())
            self._file.flush()
        except OSError as error:
            raise InvalidRun(f"cannot write {self._path}: {error.strerror}") from None

    def __enter__(self) -> "Writer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._file.close()


def _byte(file: Any, at: int) -> bytes:
    file.seek(at)
    return bytes(file.read(1))
