"""Ask every item of a task once (per repeat), write each reply as it ends, and stop early when the server is gone.

Invariant: an (item, repeat) whose record is on disk is not asked again; memory does not grow with the replies' length.
"""

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from truegate.errors import InvalidRun
from truegate.evals.client import Client, Sampling
from truegate.evals.folder import Config, Writer, light
from truegate.evals.score import Asked, Record, score, with_remedy
from truegate.evals.tasks import Item, Task

STREAK = 20  # this many failed requests in a row, and as many as are in flight, end the run


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What is left to ask, and what is already known."""

    total: int
    done: dict[tuple[str, int], Record]
    pending: tuple[tuple[Item, int], ...]


def plan_run(task: Task, *, repeats: int, done: dict[tuple[str, int], Record], retry_errors: bool) -> Plan:
    """Pending (item, repeat) pairs, repeats outermost; a request that never reached a server counts as not asked."""
    wanted = [(item, repeat) for repeat in range(repeats) for item in task.items]
    keep = {
        key: record
        for key, record in done.items()
        if record.error is None or not (retry_errors or record.error.startswith("connect"))
    }
    pending = tuple((item, repeat) for item, repeat in wanted if (item.id, repeat) not in keep)
    kept = {(item.id, repeat): keep[item.id, repeat] for item, repeat in wanted if (item.id, repeat) in keep}
    return Plan(total=len(wanted), done=kept, pending=pending)


def run(
    plan: Plan, client: Client, sampling: Sampling, writer: Writer, concurrency: int, seen: Callable[[Record], None]
) -> list[Record]:
    """Every record of the run, texts left on disk; `seen` is called with each new one."""
    records = dict(plan.done)
    guard = _Guard(max(STREAK, concurrency))

    async def worker(source: Iterator[tuple[Item, int]]) -> None:
        async with client.connection() as http:
            for item, repeat in source:  # one iterator for all workers: each pair is taken once
                reply = await client.ask(http, item, sampling)
                record = score(_asked(item, repeat), reply)
                writer.write(record)
                records[record.key] = light(record)
                seen(record)
                guard.check(record)

    async def everything() -> None:
        source = iter(plan.pending)
        async with asyncio.TaskGroup() as group:
            for _ in range(min(concurrency, len(plan.pending))):
                group.create_task(worker(source))

    try:
        asyncio.run(everything())
    except ExceptionGroup as group:
        stopped = [error for error in group.exceptions if isinstance(error, InvalidRun)]
        if not stopped:
            raise
        raise stopped[0] from None
    return list(records.values())


def _asked(item: Item, repeat: int) -> Asked:
    return Asked(id=item.id, repeat=repeat, prompt_sha=item.sha(), gold=item.gold, extractor=item.extractor)


class _Guard:
    """Ends a run whose server is gone or refuses every request: what would follow is no measurement."""

    def __init__(self, limit: int) -> None:
        self._limit, self._streak = limit, 0

    def check(self, record: Record) -> None:
        self._streak = self._streak + 1 if record.error else 0
        if record.error and self._streak >= self._limit:
            raise InvalidRun(
                f"the last {self._streak} requests all failed ({with_remedy(record.error)}); the run is stopped. "
                "Put the server right and give the same command with the same --save and --retry-errors to go on"
            )


def config_of(
    task: Task, *, sampling: Sampling, repeats: int, model: str, url: str, concurrency: int, version: str, scoring: str
) -> Config:
    """The run.json of a run."""
    fields = sampling.fields()
    return Config(
        task=task.name,
        dataset=task.dataset_sha,
        prompt=task.prompt_sha(),
        mode=task.mode,
        sampling={name: value for name, value in fields.items() if name != "max_tokens"},
        max_tokens=sampling.max_tokens,
        scoring=scoring,
        items=len(task.items),
        repeats=repeats,
        model=model,
        url=url,
        concurrency=concurrency,
        version=version,
    )


def default_folder(task: str, model: str, stamp: str) -> Path:
    """eval-runs/TASK-MODEL-TIME: a new folder for every run, so that no old answer passes for a new one."""
    name = "".join(c if c.isalnum() or c in "._" else "-" for c in f"{task}-{Path(model).name}")
    return Path("eval-runs") / f"{name}-{stamp}"
