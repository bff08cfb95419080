"""The command line: one thin function per verb; everything heavy is imported inside it.

Invariant: a user's mistake ends in one clear line and exit code 64, never a traceback (`--debug` shows it).
"""

import os
import re
import sys
from typing import Annotated

import typer

from truegate import __version__
from truegate.bench import verbs as bench_verbs
from truegate.canary.cli import app as canary_app
from truegate.errors import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE, TruegateError
from truegate.evals.cli import app as eval_app
from truegate.moe import verbs as moe_verbs
from truegate.serve import verbs as serve_verbs

app = typer.Typer(
    name="truegate",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.command(rich_help_panel="Engine")(serve_verbs.serve)
app.command(rich_help_panel="Engine")(serve_verbs.chat)
app.command(rich_help_panel="Engine")(bench_verbs.bench)
app.command(rich_help_panel="Trust")(moe_verbs.plan)
app.command(rich_help_panel="Trust")(serve_verbs.check)
app.add_typer(canary_app, name="canary", rich_help_panel="Trust")
app.add_typer(eval_app, name="eval", rich_help_panel="Trust")


def _version(show: bool) -> None:
    if show:
        print(f"truegate {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Serve mixture-of-experts models, and check that every token reaches the experts its gate chose, at its weight.

    New here? `truegate run "what is 37 + 85?"` answers from the model that ships with the package;
    `truegate serve` starts an OpenAI-compatible server;
    `truegate canary` and `truegate eval` test any engine over HTTP.
    """


@app.command(rich_help_panel="Engine")
def run(
    prompt: Annotated[str, typer.Argument(help="What to ask; `-` reads it from standard input.")],
    model: Annotated[str | None, typer.Option(help="Folder or hub id; default: the model that ships here.")] = None,
    max_tokens: Annotated[int, typer.Option(help="Longest answer, in tokens.")] = 1024,
    temperature: Annotated[float, typer.Option(help="0 is greedy.")] = 0.0,
    seed: Annotated[int | None, typer.Option(help="Makes a sampled answer repeatable.")] = None,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the text as it is, without the chat template.")] = False,
    stats: Annotated[bool, typer.Option("--stats", help="Print times and speed to standard error.")] = False,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; default: cuda if there is one.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16.")] = None,
) -> None:
    """Answer one prompt in this process, streamed to the terminal."""
    from truegate.llm import run_prompt
    from truegate.types import SamplingParams

    text = sys.stdin.read() if prompt == "-" else prompt
    params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=seed)
    run_prompt(text, model=model, params=params, raw=raw, stats=stats, device=device, dtype=dtype)


def main() -> None:
    """Entry point: runs the app and turns every outcome into an exit code (0, 1, 2, 3, 64; 130 for Ctrl-C)."""
    debug = "--debug" in sys.argv[1:] or os.environ.get("TRUEGATE_DEBUG") == "1"
    sys.argv[1:] = [word for word in sys.argv[1:] if word != "--debug"]  # accepted anywhere on the line
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if debug:
            raise
        line, code = explain(error)
        if line:  # empty where a group without a verb has shown its help
            print(f"truegate: {line}", file=sys.stderr)
    sys.exit(code if isinstance(code, int) else 0)


def explain(error: BaseException) -> tuple[str, int]:
    """One line and the exit code for an error that reached the top."""
    if isinstance(error, TruegateError):
        return str(error), error.exit_code
    if isinstance(error, typer.Abort):
        return "stopped", EXIT_INTERRUPTED
    if hasattr(error, "format_message"):  # the argument parser's own errors, whose code 2 means something else here
        ctx = getattr(error, "ctx", None)
        where = f" (see `{ctx.command_path} --help`)" if ctx is not None else ""
        message = " ".join(error.format_message().split())
        return (f"{message}{where}" if message else ""), EXIT_USAGE
    if isinstance(error, ModuleNotFoundError) and _of_the_engine(error.name or ""):
        return (
            f"this verb needs the engine, and {error.name} is not installed: pip install 'truegate[serve]'",
            EXIT_USAGE,
        )
    return f"{type(error).__name__}: {error} (a defect of truegate; `--debug` shows where)", EXIT_INVALID


def _of_the_engine(module: str) -> bool:
    """Whether a module comes with the extra `serve` and not with the base install."""
    from importlib.metadata import requires

    needs = [need for need in requires("truegate") or () if "extra" in need and "serve" in need]
    return module.partition(".")[0] in {re.split(r"[^\w-]", need)[0].replace("-", "_") for need in needs}
