"""Outcomes to figures, under the names bench_serving gives them.

Invariant: latencies are of completed requests only, and the number that failed stands beside them. Milliseconds.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from truegate.bench.load import Outcome

PERCENTILES = (90, 95, 99)


def measure(outcomes: Sequence[Outcome], duration: float) -> dict[str, Any]:
    """mean, median, std, p90, p95, p99 of TTFT, TPOT, ITL and end-to-end latency, and throughputs per second."""
    done = [one for one in outcomes if one.ok]
    total_input = sum(one.input_len or 0 for one in done)
    total_output = sum(tokens_of(one) for one in done)
    figures: dict[str, Any] = {
        "duration": duration,
        "completed": len(done),
        "failed": len(outcomes) - len(done),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "output_tokens_counted_by": "usage" if all(one.output_len is not None for one in done) else "chunks",
        "request_throughput": len(done) / duration,
        "input_throughput": total_input / duration,
        "output_throughput": total_output / duration,
        "total_throughput": (total_input + total_output) / duration,
        "concurrency": sum(one.latency for one in done) / duration,
    }
    for name, values in series(done).items():
        figures |= _summary(name, values)
    return figures


def tokens_of(outcome: Outcome) -> int:
    """Tokens of the answer, as the server counted; chunks with text if it does not say."""
    if outcome.output_len is not None:
        return outcome.output_len
    return len(outcome.itl) + (outcome.ttft is not None)


def series(done: Sequence[Outcome]) -> dict[str, list[float]]:
    """Seconds, by name; TPOT = (latency - TTFT) / (tokens - 1), of answers with two tokens or more."""
    return {
        "ttft": [one.ttft for one in done if one.ttft is not None],
        "tpot": [
            (one.latency - one.ttft) / (tokens_of(one) - 1)
            for one in done
            if one.ttft is not None and tokens_of(one) > 1
        ],
        "itl": [gap for one in done for gap in one.itl],
        "e2e_latency": [one.latency for one in done],
    }


def _summary(name: str, seconds: Sequence[float]) -> dict[str, float | None]:
    """None where nothing was measured: a zero would look like a result."""
    values = 1000.0 * np.asarray(seconds, dtype=np.float64)
    names = ["mean", "median", "std", *(f"p{p}" for p in PERCENTILES), "max"]
    if not len(values):
        return {f"{statistic}_{name}_ms": None for statistic in names}
    numbers = [values.mean(), np.median(values), values.std(), *np.percentile(values, PERCENTILES), values.max()]
    return {f"{statistic}_{name}_ms": float(number) for statistic, number in zip(names, numbers, strict=True)}


def details(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """One entry per request, in the order sent."""
    return {
        "input_lens": [one.input_len for one in outcomes],
        "output_lens": [tokens_of(one) for one in outcomes],
        "start_times": [one.start for one in outcomes],
        "latencies": [one.latency for one in outcomes],
        "ttfts": [one.ttft for one in outcomes],
        "itls": [one.itl for one in outcomes],
        "generated_texts": [one.text for one in outcomes],
        "finish_reasons": [one.finish_reason for one in outcomes],
        "errors": [one.error for one in outcomes],
    }


def as_table(result: dict[str, Any]) -> str:
    """The figures as bench_serving prints them, with more percentiles."""

    def line(label: str, value: Any) -> str:
        if value is None:
            return f"{label:<40} -"
        return f"{label:<40} {value:.2f}" if isinstance(value, float) else f"{label:<40} {value}"

    lines = [f"{' Serving Benchmark Result ':=^56}"]
    lines += [
        line("Request rate (req/s):", result["request_rate"]),
        line("Max request concurrency:", result["max_concurrency"] or "not set"),
        line("Successful requests:", result["completed"]),
        line("Failed requests:", result["failed"]),
        line("Benchmark duration (s):", result["duration"]),
        line("Total input tokens:", result["total_input_tokens"]),
        line("Total generated tokens:", result["total_output_tokens"]),
        line("Request throughput (req/s):", result["request_throughput"]),
        line("Input token throughput (tok/s):", result["input_throughput"]),
        line("Output token throughput (tok/s):", result["output_throughput"]),
        line("Total token throughput (tok/s):", result["total_throughput"]),
        line("Concurrency:", result["concurrency"]),
        f"{'':-^56}",
        f"{'ms':<14}" + "".join(f"{name:>8}" for name in ("mean", "median", "p90", "p95", "p99")),
    ]
    labels = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e_latency": "E2E latency"}
    for name, label in labels.items():
        values = [result[f"{statistic}_{name}_ms"] for statistic in ("mean", "median", "p90", "p95", "p99")]
        lines.append(f"{label:<14}" + "".join(f"{'-' if value is None else f'{value:.2f}':>8}" for value in values))
    return "\n".join([*lines, "=" * 56])
