"""Runs from disk: a folder of ours, or a dump of lm-eval, sgl-eval or inspect.

Invariant: texts are kept only for the looped answers that a report shows; everything else is held as figures.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from truegate.errors import UserError
from truegate.evals import dumps
from truegate.evals.folder import ITEMS, Config, latest, light, read_config, read_records
from truegate.evals.score import Record

TEXTS_KEPT = 40


@dataclass(frozen=True, kw_only=True)
class Run:
    """The records of one task from one run, lightened, and the looped ones with their texts."""

    name: str
    task: str
    source: str  # truegate, lm-eval, sgl-eval, inspect
    records: tuple[Record, ...]
    looped: tuple[Record, ...] = ()
    config: Config | None = None


def make_run(name: str, task: str, source: str, records: Iterable[Record], config: Config | None = None) -> Run:
    """A Run of records that still hold their texts."""
    kept: dict[tuple[str, int], Record] = {}
    whole: dict[tuple[str, int], Record] = {}
    for record in records:
        kept[record.key] = light(record)
        whole.pop(record.key, None)
        if record.looped and len(whole) < TEXTS_KEPT:
            whole[record.key] = record
    if not kept:
        raise UserError(f"{name} holds no answers")
    return Run(
        name=name, task=task, source=source, records=tuple(kept.values()), looped=tuple(whole.values()), config=config
    )


def load_runs(path: Path) -> dict[str, Run]:
    """The runs found at `path`, by task: one run, or a folder of run folders."""
    if not path.exists():
        raise UserError(f"{path} does not exist")
    if path.is_file():
        return _by_task([_from_file(path)])
    if (path / ITEMS).exists():
        return _by_task([_own(path)])
    rollouts = sorted(path.glob("output-rs*.jsonl"))
    if rollouts:
        task = _sgl_task(path)
        records = [r for file in rollouts for r in dumps.sgl_eval(file)]
        return _by_task([make_run(str(path), task, "sgl-eval", records)])
    files = [*sorted(path.rglob("samples_*.jsonl")), *sorted(path.glob("*.eval"))]
    folders = [child for child in sorted(path.iterdir()) if (child / ITEMS).exists()]
    if not files and not folders:
        raise UserError(
            f"{path} holds no run: expected {ITEMS}, folders with {ITEMS}, or a dump of lm-eval, sgl-eval or inspect"
        )
    return _by_task([*map(_own, folders), *map(_from_file, files)])


def load_run(path: Path) -> Run:
    """The single run at `path`."""
    runs = load_runs(path)
    if len(runs) != 1:
        raise UserError(f"{path} holds {len(runs)} tasks ({', '.join(runs)}): name one of them")
    return next(iter(runs.values()))


def _by_task(runs: Iterable[Run]) -> dict[str, Run]:
    found: dict[str, Run] = {}
    for run in runs:
        if run.task in found:
            raise UserError(f"{found[run.task].name} and {run.name} are both runs of {run.task}: name one of them")
        found[run.task] = run
    return found


def _own(folder: Path) -> Run:
    config = read_config(folder)
    records = latest(read_records(folder / ITEMS)).values()
    return make_run(str(folder), config.task if config else folder.name, "truegate", records, config)


def _from_file(path: Path) -> Run:
    if path.name == ITEMS:
        return _own(path.parent)
    if path.suffix == ".eval":
        task, records = dumps.inspect_archive(path)
        return make_run(str(path), task, "inspect", records)
    if path.suffix == ".json":
        task, records = dumps.inspect_json(path)
        return make_run(str(path), task, "inspect", records)
    row = first_row(path)
    if {"doc_id", "resps"} <= row.keys():
        return make_run(str(path), dumps.lm_eval_task(path), "lm-eval", dumps.lm_eval(path))
    if {"generation", "expected_answer"} <= row.keys():
        return make_run(str(path), _sgl_task(path.parent), "sgl-eval", dumps.sgl_eval(path))
    raise UserError(f"{path}: not a run of ours, and not a dump of lm-eval, sgl-eval or inspect")


def first_row(path: Path) -> dict[str, Any]:
    """The first object of a JSONL file."""
    try:
        with path.open(encoding="utf-8") as file:
            line = next((line for line in islice(file, 1000) if line.strip()), "")
        if not line:
            raise UserError(f"{path} holds no lines")
        row = json.loads(line)
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text") from None
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: not a JSONL file ({error})") from None
    if not isinstance(row, dict):
        raise UserError(f"{path}: its first line is not a JSON object")
    return row


def _sgl_task(folder: Path) -> str:
    try:
        name = json.loads((folder / "metrics.json").read_text(encoding="utf-8"))["name"]
    except (OSError, ValueError, KeyError, TypeError):
        return folder.name
    return str(name)
