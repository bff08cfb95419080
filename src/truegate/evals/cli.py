"""`truegate eval`: run, compare, power, noise, loops. Thin functions: options in, a report and an exit code out."""

from pathlib import Path
from typing import Annotated

import typer

from truegate.errors import EXIT_FAULT, EXIT_INTERRUPTED, EXIT_INVALID, EXIT_OK, UserError

app = typer.Typer(
    no_args_is_help=True,
    help="Tell a real regression from noise, against any OpenAI-compatible endpoint.",
    context_settings={"help_option_names": ["-h", "--help"]},
)

Alpha = Annotated[float, typer.Option(help="Error rate of the intervals and tests.")]
Power = Annotated[float, typer.Option(help="Power for the numbers of items.")]
Margin = Annotated[float, typer.Option(help="Fall in accuracy that is tolerated, as a share.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command("run")
def run_command(
    task: Annotated[str, typer.Argument(help="gsm8k, ledger, longform, or a JSONL of your own.")],
    url: Annotated[str, typer.Option(help="The server, with or without /v1.")] = "http://127.0.0.1:30000",
    model: Annotated[str | None, typer.Option(help="Default: the first that the server lists.")] = None,
    mode: Annotated[str | None, typer.Option(help="chat (default) or completion.")] = None,
    n: Annotated[int | None, typer.Option(help="Number of items; default: all (ledger: 200).")] = None,
    sample: Annotated[str, typer.Option(help="How --n items are chosen: random or head.")] = "random",
    seed: Annotated[int, typer.Option(help="Seed of the choice, and of ledger's problems.")] = 0,
    shots: Annotated[int, typer.Option(help="gsm8k: worked examples before each question.")] = 5,
    steps: Annotated[int, typer.Option(help="ledger: steps of each problem.")] = 8,
    data: Annotated[Path | None, typer.Option(help="gsm8k: the test file, instead of downloading it.")] = None,
    shots_data: Annotated[Path | None, typer.Option(help="gsm8k: the file of worked examples.")] = None,
    repeats: Annotated[int, typer.Option(help="Times every item is asked.")] = 1,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.")] = 64,
    max_tokens: Annotated[int | None, typer.Option(help="Cap of a reply; default by task.")] = None,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    top_p: Annotated[float | None, typer.Option(help="Not sent unless given.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Stop string, repeatable; in chat none is sent.")] = None,
    no_stop: Annotated[bool, typer.Option("--no-stop", help="Send no stop string (reasoning models).")] = False,
    extra: Annotated[str | None, typer.Option(help='More request fields as JSON, such as {"min_p": 0.1}.')] = None,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 3600.0,
    retries: Annotated[int, typer.Option(help="More tries after 429, 5xx or a lost connection.")] = 4,
    retry_errors: Annotated[
        bool, typer.Option("--retry-errors", help="Ask failed requests of this folder again.")
    ] = False,
    api_key: Annotated[
        str, typer.Option(envvar="OPENAI_API_KEY", show_default=False, help="Sent as bearer token.")
    ] = "",
    save: Annotated[Path | None, typer.Option(help="Folder; give it again to go on with an interrupted run.")] = None,
    json_out: Json = False,
) -> None:
    """Ask every item, score every reply, write items.jsonl, summary.json, report.md and report.html.

    Exit codes: 0 a valid run, 3 an invalid one (too many failed requests), 64 wrong use, 130 interrupted.
    """
    from truegate.evals import start, verbs

    request = start.RunRequest(
        task=task,
        url=url,
        model=model,
        mode=mode,
        n=n,
        sample=sample,
        seed=seed,
        shots=shots,
        steps=steps,
        data=data,
        shots_data=shots_data,
        repeats=repeats,
        concurrency=concurrency,
        max_tokens=max_tokens,
        temperature=temperature,
        top_p=top_p,
        stop=tuple(stop or ()),
        no_stop=no_stop,
        extra=extra,
        timeout_s=timeout,
        retries=retries,
        retry_errors=retry_errors,
        api_key=api_key,
        save=save,
    )
    try:
        outcome = start.run_task(request)
    except KeyboardInterrupt:
        typer.echo("interrupted: give the same command with the same --save to go on", err=True)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    verbs.print_summary(outcome, as_json=json_out)
    raise typer.Exit(EXIT_INVALID if outcome.summary.void else EXIT_OK)


@app.command("compare")
def compare_command(
    a: Annotated[str, typer.Argument(help="Baseline: a run folder, a folder of them, a dump; with --counts 192/200.")],
    b: Annotated[str | None, typer.Argument(help="Candidate.")] = None,
    counts: Annotated[bool, typer.Option("--counts", help="A and B are CORRECT/ITEMS of a report.")] = False,
    margin: Margin = 0.01,
    alpha: Alpha = 0.05,
    power: Power = 0.8,
    length_window: Annotated[tuple[float, float], typer.Option(help="Tolerated ratio of mean lengths, B to A.")] = (
        0.9,
        1.1,
    ),
    gate: Annotated[str, typer.Option(help="pairs, or mlperf: against a published reference.")] = "pairs",
    reference: Annotated[float | None, typer.Option(help="mlperf: reference exact match, in percent.")] = None,
    reference_tokens: Annotated[float | None, typer.Option(help="mlperf: reference tokens per sample.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Compare runs that differ in prompt, sampling or cap.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the bootstrap.")] = 0,
    json_out: Json = False,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown, for a pull request.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write one self-contained page.")] = None,
) -> None:
    """Compare two runs pair by pair: accuracy, runaways, lengths. A is the baseline.

    Exit codes: 0 PASS, 1 FAIL, 2 INCONCLUSIVE, 3 a void run, 64 wrong use or runs that are not comparable.
    """
    from truegate.evals import verbs
    from truegate.evals.gate import Rule

    if json_out and markdown:
        raise UserError("give --json or --md, not both")
    form = "json" if json_out else "md" if markdown else "table"
    rule = Rule(margin=margin, alpha=alpha, power=power, length_window=length_window)
    if gate == "mlperf":
        if html is not None:
            raise UserError("--html shows a comparison of two runs: not with --gate mlperf")
        code = verbs.judge_mlperf([a] if b is None else [a, b], counts, rule, reference, reference_tokens, form)
        raise typer.Exit(code)
    if gate != "pairs":
        raise UserError(f"--gate {gate!r}: use pairs or mlperf")
    if reference is not None or reference_tokens is not None:
        raise UserError("--reference and --reference-tokens belong to --gate mlperf")
    if b is None:
        raise UserError("compare needs two runs, A (baseline) and B")
    if counts:
        if html is not None or force:
            raise UserError("--html and --force need runs: not with --counts")
        raise typer.Exit(verbs.judge_counts(a, b, rule, form))
    raise typer.Exit(verbs.judge_runs(Path(a), Path(b), rule, force=force, seed=seed, form=form, html=html))


@app.command("power")
def power_command(
    p: Annotated[float, typer.Option("--p", help="Accuracy of the baseline.")] = 0.95,
    delta: Annotated[float, typer.Option(help="Fall that must be seen.")] = 0.01,
    psi: Annotated[float | None, typer.Option(help="Share of items that change between the runs.")] = None,
    n: Annotated[int | None, typer.Option("--n", help="Say what this many items can show.")] = None,
    alpha: Alpha = 0.05,
    power: Power = 0.8,
    json_out: Json = False,
) -> None:
    """How many items it takes to see a fall, paired and unpaired; or what n items can show."""
    from truegate.evals import verbs
    from truegate.evals.gate import Rule

    verbs.print_power(p=p, delta=delta, psi=psi, n=n, rule=Rule(alpha=alpha, power=power), as_json=json_out)


@app.command("noise")
def noise_command(
    runs: Annotated[
        list[str], typer.Argument(help="Two or more runs of the same thing; with --counts 168/200 176/200 ...")
    ],
    counts: Annotated[bool, typer.Option("--counts", help="The arguments are CORRECT/ITEMS.")] = False,
    alpha: Alpha = 0.05,
    power: Power = 0.8,
    force: Annotated[bool, typer.Option("--force", help="Also runs that differ in prompt, sampling or cap.")] = False,
    json_out: Json = False,
) -> None:
    """The A/A floor: how much runs of the same thing differ, and the smallest difference that is more than that.

    Exit code 1 if two of the runs differ beyond chance: then they are no A/A pair.
    """
    from truegate.evals import verbs
    from truegate.evals.gate import Rule

    differ = verbs.print_noise(runs, counts=counts, rule=Rule(alpha=alpha, power=power), force=force, as_json=json_out)
    raise typer.Exit(EXIT_FAULT if differ else EXIT_OK)


@app.command("loops")
def loops_command(
    file: Annotated[Path, typer.Argument(help="A run folder, a dump of another harness, or any JSONL with texts.")],
    field: Annotated[
        str | None, typer.Option(help="The field that holds the text, in a JSONL of another kind.")
    ] = None,
    max_rate: Annotated[float, typer.Option(help="Share of looped answers that is tolerated.")] = 0.0,
    show: Annotated[int, typer.Option(help="Looped answers to list.")] = 20,
    json_out: Json = False,
) -> None:
    """Find answers that end in a repetition loop, offline, in any dump. Exit code 1 above --max-rate."""
    from truegate.evals import verbs

    above = verbs.print_loops(file, field=field, max_rate=max_rate, show=show, as_json=json_out)
    raise typer.Exit(EXIT_FAULT if above else EXIT_OK)
