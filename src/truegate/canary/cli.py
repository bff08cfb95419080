"""`truegate canary`: make a checkpoint with known coefficients, and read them back from any engine over HTTP.

Invariant: exit 0 all right, 1 a fault, 2 not judged, 3 the server died or was unusable, 64 wrong use.
"""

from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Audit the mixture-of-experts layers of any engine through its HTTP API.")


@app.command("make")
def make_command(
    out: Annotated[Path | None, typer.Option(help="Folder to write; new, or an earlier canary.")] = None,
    like: Annotated[Path | None, typer.Option(help="Real model: its folder or config.json; routing is copied.")] = None,
    arch: Annotated[str | None, typer.Option(help="Family, for a small canary of it; see --list.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Decoder layers; default: three with experts.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Hidden size; default: as the real model, or 512.")] = None,
    intermediate: Annotated[int | None, typer.Option(min=1, help="Width of an expert; default: 128 x tp.")] = None,
    experts: Annotated[int | None, typer.Option(min=1, help="Number of routed experts.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel size the server will run with.")] = 1,
    dtype: Annotated[str, typer.Option(help="bfloat16, float16 or float32.")] = "bfloat16",
    seed: Annotated[int, typer.Option(min=0, help="Another seed, another canary; the same seed, the same bytes.")] = 0,
    list_archs: Annotated[bool, typer.Option("--list", help="Print the families and stop.")] = False,
) -> None:
    """Write a checkpoint of which every routed coefficient is known.

    For example `truegate canary make --arch qwen3_moe --out canary/`, or `--like /models/DeepSeek-R1`.
    """
    from truegate.canary.archs import ARCHS, Sizes, default_config
    from truegate.canary.make import Recipe, make
    from truegate.errors import UserError
    from truegate.law.families import read_config

    if list_archs:
        typer.echo("\n".join(ARCHS))
        return
    if out is None:
        raise UserError("give --out FOLDER, where the canary is to be written")
    if (like is None) == (arch is None):
        raise UserError("give either --like MODEL or --arch FAMILY")
    config = default_config(arch) if arch is not None else read_config(like or Path())
    sizes = Sizes(hidden=hidden, layers=layers, intermediate=intermediate, tp=tp, dtype=dtype, num_experts=experts)
    manifest = make(config, out, Recipe(sizes=sizes, seed=seed))
    size = sum(f.stat().st_size for f in out.iterdir()) / 1e6
    layers_made = f"{len(manifest.layers)} MoE layers of {manifest.num_experts} experts"
    counted = f"{manifest.num_coefficients:,} coefficients, {size:,.0f} MB (sparse)"
    typer.echo(f"{out}: {manifest.data['family']}, {layers_made}, {counted}")
    typer.echo(f"start your engine on {out}, then: truegate canary run --url URL --canary {out}")


@app.command("run")
def run_command(
    url: Annotated[str, typer.Option(help="The server, e.g. http://127.0.0.1:8000")],
    canary: Annotated[Path, typer.Option(help="The canary folder that the server was started on.")],
    quick: Annotated[bool, typer.Option("--quick", help="Fewer batches and streams: seconds.")] = False,
    thorough: Annotated[bool, typer.Option("--thorough", help="Batches up to 257, more streams: minutes.")] = False,
    report: Annotated[Path | None, typer.Option(help="Write an HTML page.")] = None,
    json_out: Annotated[Path | None, typer.Option("--json", help="Write the result with its evidence.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML for a CI.")] = None,
    model: Annotated[str | None, typer.Option(help="Model name to ask for; default: the server's first.")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="Seconds that one request may take.")] = 120.0,
    dp_ranks: Annotated[int, typer.Option(min=1, help="Ask each of N data-parallel ranks (SGLang, vLLM).")] = 1,
    api_key: Annotated[
        str | None, typer.Option(envvar="OPENAI_API_KEY", help="Bearer token, if one is needed.")
    ] = None,
) -> None:
    """Ask a running server about the canary it serves, and say what is wrong, or that all coefficients are right."""
    from dataclasses import replace

    from rich.console import Console

    from truegate.canary.ask import QUICK, THOROUGH, Effort
    from truegate.canary.manifest import load
    from truegate.canary.run import Target, audit
    from truegate.errors import UserError

    if quick and thorough:
        raise UserError("give --quick or --thorough, not both")
    if not url.startswith(("http://", "https://")):
        raise UserError(f"--url {url} must begin with http:// or https://")
    for path in (report, json_out, junit):
        if path is not None and not path.parent.is_dir():
            raise UserError(f"{path}: its folder does not exist")
        if path is not None and path.is_dir():
            raise UserError(f"{path} is a folder; give a file to write")
    if api_key and not (api_key.isascii() and api_key.isprintable()):
        raise UserError("--api-key holds characters that an HTTP header cannot carry")
    effort = replace(QUICK if quick else THOROUGH if thorough else Effort(), dp_ranks=dp_ranks)
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    manifest = load(canary)
    console = Console(stderr=True)
    with console.status("finding the API") as status:
        data = audit(manifest, Target(url=url, model=model, timeout=timeout, headers=headers), effort,
                     lambda phase: status.update(f"asking: {phase}"))  # fmt: skip
    _finish(data, report, json_out, junit)


@app.command("explain")
def explain_command(
    result: Annotated[Path, typer.Argument(help="What `canary run --json` wrote.")],
    report: Annotated[Path | None, typer.Option(help="Write an HTML page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML for a CI.")] = None,
) -> None:
    """Explain a saved result again, from its evidence."""
    from truegate.canary.report import read_json
    from truegate.canary.run import explain_again

    _finish(explain_again(read_json(result)), report, None, junit)


@app.command("diff")
def diff_command(
    a: Annotated[Path, typer.Argument(help="A result of `canary run --json`.")],
    b: Annotated[Path, typer.Argument(help="Another, of the same canary.")],
) -> None:
    """Compare two results: two engines, or two sets of flags. Exit 0 when they agree, 1 when they differ."""
    from rich.console import Console

    from truegate.canary.diff import diff, print_diff
    from truegate.canary.report import read_json
    from truegate.errors import EXIT_FAULT

    found = diff(read_json(a), read_json(b))
    print_diff(found, Console())
    if found["only_a"] or found["only_b"] or found["phases"] or found["coefficients"]:
        raise typer.Exit(EXIT_FAULT)


def _finish(data: dict[str, Any], report: Path | None, json_out: Path | None, junit: Path | None) -> None:
    """Write what was asked for, print the result, end with its code."""
    from rich.console import Console

    from truegate.canary.report import print_result, write_html, write_json, write_junit

    for path, write in ((report, write_html), (json_out, write_json), (junit, write_junit)):
        if path is not None:
            write(data, path)
    print_result(data, Console())
    if data["exit"]:
        raise typer.Exit(data["exit"])
