"""The command line: one thin function per verb; everything heavy is imported inside it.

Invariant: a user's mistake ends in one clear line and exit code 64, never a traceback (`--debug` shows it).
"""

import os
import sys
from typing import Annotated

import typer

from truegate import __version__
from truegate.errors import EXIT_INTERRUPTED, EXIT_INVALID, EXIT_USAGE, TruegateError

app = typer.Typer(
    name="truegate",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


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
        return f"{message}{where}", EXIT_USAGE
    return f"{type(error).__name__}: {error} (a defect of truegate; `--debug` shows where)", EXIT_INVALID
