"""`truegate bench`: options to prompts, prompts to load, load to figures.

Invariant: a run of which nothing completed is an error, not a table of zeros.
"""

import json
import sys
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx

from truegate.bench.load import Target, client_for, run_load, send
from truegate.bench.measure import as_table, details, measure
from truegate.bench.plot import page
from truegate.bench.prompts import Prompt, file_prompts, random_prompts
from truegate.errors import InvalidRun, UserError
from truegate.evals.client import base_url

DEFAULT_NUM_PROMPTS = 100


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The flags of `truegate bench`."""

    url: str
    model: str | None = None
    api_key: str | None = None
    endpoint: str = "completions"
    num_prompts: int | None = None
    request_rate: float = float("inf")
    burstiness: float = 1.0
    max_concurrency: int | None = None
    random_input_len: int = 256
    random_output_len: int = 128
    random_range_ratio: float = 1.0
    prompts: Path | None = None
    tokenizer: str | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: str | None = None
    warmup_requests: int = 1
    seed: int = 0
    output_file: Path | None = None
    output_details: bool = False
    plot: Path | None = None


async def run_bench(options: Options) -> dict[str, Any]:
    """Run it, print the table, write what was asked for; returns the figures."""
    target = await _target(options)
    prompts = _prompts(options)
    await _warm_up(target, prompts, options.warmup_requests)
    outcomes, duration = await run_load(
        target,
        prompts,
        request_rate=options.request_rate,
        burstiness=options.burstiness,
        max_concurrency=options.max_concurrency,
        seed=options.seed,
    )
    errors = [one.error for one in outcomes if one.error]
    if len(errors) == len(outcomes):
        raise InvalidRun(f"none of {len(outcomes)} requests was answered; the first said: {errors[0]}")
    result = _settings(options, target) | measure(outcomes, duration)
    print(as_table(result))
    if errors:
        print(f"{len(errors)} requests failed; the first said: {errors[0]}", file=sys.stderr)
    if options.output_file is not None:
        body = result | (details(outcomes) if options.output_details else {})
        _write(options.output_file, json.dumps(body) + "\n")
    if options.plot is not None:
        _write(options.plot, page(result, outcomes))
    return result


async def _target(options: Options) -> Target:
    if options.endpoint not in ("chat", "completions"):
        raise UserError(f"--endpoint {options.endpoint!r}: chat or completions")
    if not options.request_rate > 0 or not options.burstiness > 0:
        raise UserError("--request-rate and --burstiness must be above 0")
    try:
        extra = json.loads(options.extra_body or "{}")
    except ValueError as error:
        raise UserError(f"--extra-body is not JSON: {error}") from None
    if not isinstance(extra, dict):
        raise UserError("--extra-body must be a JSON object")
    target = Target(
        base=base_url(options.url),
        endpoint=options.endpoint,
        model=options.model or "",
        api_key=options.api_key,
        temperature=options.temperature,
        ignore_eos=options.ignore_eos,
        extra_body=extra,
    )
    model = options.model or await _first_model(target)
    return Target(**{**asdict(target), "model": model})


async def _first_model(target: Target) -> str:
    async with client_for(target, 1) as http:
        try:
            response = await http.get(f"{target.base}/models", timeout=10)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except httpx.HTTPError as error:
            raise UserError(f"no OpenAI-compatible server answers at {target.base} ({error})") from None
        except (ValueError, LookupError, TypeError):
            raise UserError(f"{target.base}/models lists no model: give --model") from None


def _prompts(options: Options) -> list[Prompt]:
    if options.prompts is not None:
        return file_prompts(
            options.prompts, output_len=options.random_output_len, count=options.num_prompts, seed=options.seed
        )
    return random_prompts(
        options.num_prompts or DEFAULT_NUM_PROMPTS,
        input_len=options.random_input_len,
        output_len=options.random_output_len,
        range_ratio=options.random_range_ratio,
        seed=options.seed,
        tokenizer=options.tokenizer,
    )


async def _warm_up(target: Target, prompts: list[Prompt], count: int) -> None:
    async with client_for(target, 1) as http:
        for place in range(count):
            first = prompts[place % len(prompts)]
            outcome = await send(http, target, Prompt(content=first.content, output_len=min(first.output_len, 16)), 0.0)
            if outcome.error:
                raise InvalidRun(f"the warm-up request failed: {outcome.error}")


def _settings(options: Options, target: Target) -> dict[str, Any]:
    rate = options.request_rate
    return {
        "backend": "openai-chat" if target.endpoint == "chat" else "openai",
        "base_url": target.base,
        "model": target.model,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dataset_name": "random" if options.prompts is None else options.prompts.name,
        "num_prompts": options.num_prompts,
        "request_rate": rate if rate != float("inf") else "inf",
        "burstiness": options.burstiness,
        "max_concurrency": options.max_concurrency,
        "random_input_len": options.random_input_len,
        "random_output_len": options.random_output_len,
        "random_range_ratio": options.random_range_ratio,
        "temperature": options.temperature,
        "ignore_eos": options.ignore_eos,
        "extra_body": target.extra_body,
        "seed": options.seed,
    }


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {error}") from None
