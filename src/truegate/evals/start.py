"""Starting a run: options to a task, a client and a folder; then ask, sum up, write the reports."""

import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from truegate import __version__
from truegate.errors import UserError
from truegate.evals import answers, report
from truegate.evals.client import RESERVED, Client, Sampling, base_url, first_model
from truegate.evals.folder import SUMMARY, Writer, write_json
from truegate.evals.load import load_run
from truegate.evals.page import run_page
from truegate.evals.progress import Live
from truegate.evals.run import config_of, default_folder, plan_run, run
from truegate.evals.summary import Summary, finite, summarise
from truegate.evals.tasks import BUILT_IN, Mode, Task, choose, ledger, longform, own_file

LEDGER_ITEMS = 200


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """The options of `eval run`."""

    task: str
    url: str
    model: str | None
    mode: str | None
    n: int | None
    sample: str
    seed: int
    shots: int
    steps: int
    data: Path | None
    shots_data: Path | None
    repeats: int
    concurrency: int
    max_tokens: int | None
    temperature: float
    top_p: float | None
    stop: tuple[str, ...]
    no_stop: bool
    extra: str | None
    timeout_s: float
    retries: int
    retry_errors: bool
    api_key: str
    save: Path | None


@dataclass(frozen=True, kw_only=True)
class RunOutcome:
    """A finished run: where it lies and its figures."""

    folder: Path
    task: str
    asked: int
    seconds: float
    summary: Summary


def run_task(request: RunRequest) -> RunOutcome:
    """Ask what is not yet answered, then write summary.json, report.md and report.html."""
    _check(request)
    task = build_task(request)
    sampling = _sampling(request, task)
    url = base_url(request.url)
    model = request.model or first_model(url, key=request.api_key)
    scoring = "/".join([f"answers-{answers.VERSION}", *sorted({item.extractor for item in task.items})])
    config = config_of(
        task,
        sampling=sampling,
        repeats=request.repeats,
        model=model,
        url=url,
        concurrency=request.concurrency,
        version=__version__,
        scoring=scoring,
    )
    folder = request.save or default_folder(task.name, model, time.strftime("%Y%m%d-%H%M%S"))
    started = time.monotonic()
    with Writer(folder, config) as writer:
        plan = plan_run(task, repeats=request.repeats, done=writer.done, retry_errors=request.retry_errors)
        _say(f"{task.name}: {len(plan.pending)} of {plan.total} to ask {model} at {url}; answers go to {folder}")
        client = Client(
            url=url,
            model=model,
            mode=task.mode,
            timeout_s=request.timeout_s,
            retries=request.retries,
            key=request.api_key,
        )
        with Live(plan.total, plan.done.values()) as live:
            records = run(plan, client, sampling, writer, request.concurrency, live.seen)
        summary = summarise(records)
        stored = {"config": asdict(config), "void": summary.void, **asdict(summary)}
        write_json(folder / SUMMARY, finite(stored))
    text = report.summary_markdown(task.name, str(folder), summary)
    (folder / "report.md").write_text(text, encoding="utf-8")
    (folder / "report.html").write_text(run_page(load_run(folder), summary), encoding="utf-8")
    return RunOutcome(
        folder=folder, task=task.name, asked=len(plan.pending), seconds=time.monotonic() - started, summary=summary
    )


def _check(request: RunRequest) -> None:
    for name, value, least in (
        ("--repeats", request.repeats, 1),
        ("--concurrency", request.concurrency, 1),
        ("--retries", request.retries, 0),
        ("--max-tokens", request.max_tokens if request.max_tokens is not None else 1, 1),
    ):
        if value < least:
            raise UserError(f"{name} {value}: must be at least {least}")
    if not (math.isfinite(request.temperature) and request.temperature >= 0):
        raise UserError(f"--temperature {request.temperature:g}: must be 0 or more")
    if request.top_p is not None and not 0 < request.top_p <= 1:
        raise UserError(f"--top-p {request.top_p:g}: must be above 0 and at most 1")
    if not request.timeout_s > 0:
        raise UserError(f"--timeout {request.timeout_s:g}: must be above 0")
    if request.sample not in ("random", "head"):
        raise UserError(f"--sample {request.sample!r}: use random or head")
    if request.mode not in (None, "chat", "completion"):
        raise UserError(f"--mode {request.mode!r}: use chat or completion")
    if request.stop and request.no_stop:
        raise UserError("give --stop or --no-stop, not both")
    if request.data is not None and request.task != "gsm8k":
        raise UserError("--data belongs to gsm8k; give a JSONL of your own as the task itself")
    if request.shots_data is not None and request.task != "gsm8k":
        raise UserError("--shots-data belongs to gsm8k")


def build_task(request: RunRequest) -> Task:
    """The task that is named, with its items chosen."""
    mode: Mode = "completion" if request.mode == "completion" else "chat"
    if request.task == "ledger":
        count = LEDGER_ITEMS if request.n is None else request.n
        return ledger(steps=request.steps, count=count, seed=request.seed, mode=mode)
    if request.task == "gsm8k":
        from truegate.evals.gsm8k import gsm8k

        task = gsm8k(data=request.data, shots_data=request.shots_data, shots=request.shots, mode=mode)
    elif request.task == "longform":
        task = longform(mode=mode)
    elif Path(request.task).is_file():
        task = own_file(Path(request.task), mode=mode)
    else:
        raise UserError(
            f"there is no task {request.task!r} and no such file: use {', '.join(BUILT_IN)}, or a JSONL file"
        )
    return choose(task, n=request.n, sample=request.sample, seed=request.seed)


def _sampling(request: RunRequest, task: Task) -> Sampling:
    extra: Any = {}
    if request.extra is not None:
        try:
            extra = json.loads(request.extra)
        except ValueError as error:
            raise UserError(f"--extra: not JSON ({error})") from None
        if not isinstance(extra, dict):
            raise UserError('--extra: must be a JSON object, such as {"min_p": 0.1}')
        taken = [name for name in extra if name in RESERVED]
        if taken:
            raise UserError(f"--extra: {', '.join(taken)} cannot be set there")
    return Sampling(
        max_tokens=request.max_tokens or task.max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        stop=() if request.no_stop else request.stop or task.stop,
        extra=extra,
    )


def _say(line: str) -> None:
    Console(stderr=True, highlight=False, markup=False).print(line, soft_wrap=True)
