"""The verb `truegate bench`; registered in `truegate.cli`."""

from pathlib import Path
from typing import Annotated

import typer


def bench(
    url: Annotated[
        str, typer.Option(help="Of any OpenAI-compatible server, with or without /v1.")
    ] = "http://127.0.0.1:30000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="TRUEGATE_API_KEY", help="If the server wants one.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "completions",
    num_prompts: Annotated[
        int | None, typer.Option(min=1, help="Requests to send; default 100, or all of --prompts.")
    ] = None,
    request_rate: Annotated[
        float, typer.Option(help="Requests per second, Poisson arrivals; inf: all at once.")
    ] = float("inf"),
    burstiness: Annotated[float, typer.Option(help="1: Poisson; below: burstier; above: more regular.")] = 1.0,
    max_concurrency: Annotated[int | None, typer.Option(min=1, help="Requests in flight at most.")] = None,
    random_input_len: Annotated[int, typer.Option(min=1, help="Words (with --tokenizer: tokens) of a prompt.")] = 256,
    random_output_len: Annotated[int, typer.Option(min=1, help="Longest answer in tokens; also for --prompts.")] = 128,
    random_range_ratio: Annotated[float, typer.Option(help="Lengths from this share of the longest up to it.")] = 1.0,
    prompts: Annotated[
        Path | None, typer.Option(help="Prompts of a file instead: JSON lines with prompt or messages, or plain lines.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="tokenizer.json (or its folder): makes random lengths exact.")
    ] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    ignore_eos: Annotated[bool, typer.Option(help="Answers run to their full length (an extension).")] = False,
    extra_body: Annotated[str | None, typer.Option(help="JSON object merged into every request.")] = None,
    warmup_requests: Annotated[int, typer.Option(min=0, help="Sent before the clock starts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    output_file: Annotated[Path | None, typer.Option(help="Write the figures as JSON.")] = None,
    output_details: Annotated[bool, typer.Option(help="... with an entry per request.")] = False,
    plot: Annotated[Path | None, typer.Option(help="Write a page with the distributions (HTML).")] = None,
) -> None:
    """Measure a server: throughput and latencies under load. Exit 0: all answered, 1: some failed, 3: none did."""
    import asyncio

    from truegate.bench.main import Options, run_bench

    options = Options(
        url=url,
        model=model,
        api_key=api_key,
        endpoint=endpoint,
        num_prompts=num_prompts,
        request_rate=request_rate,
        burstiness=burstiness,
        max_concurrency=max_concurrency,
        random_input_len=random_input_len,
        random_output_len=random_output_len,
        random_range_ratio=random_range_ratio,
        prompts=prompts,
        tokenizer=tokenizer,
        temperature=temperature,
        ignore_eos=ignore_eos,
        extra_body=extra_body,
        warmup_requests=warmup_requests,
        seed=seed,
        output_file=output_file,
        output_details=output_details,
        plot=plot,
    )
    result = asyncio.run(run_bench(options))
    if result["failed"]:
        raise typer.Exit(1)
