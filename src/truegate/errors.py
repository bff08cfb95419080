"""Errors and exit codes: the one place that says how a run ends.

0 right or pass, 1 a fault or fail, 2 could not be judged, 3 an invalid run (the server died, data unusable),
64 wrong use.
"""

EXIT_OK = 0
EXIT_FAULT = 1
EXIT_UNDECIDED = 2
EXIT_INVALID = 3
EXIT_USAGE = 64
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells have it


class TruegateError(Exception):
    """An error for the person at the terminal: one clear line that names the thing and the remedy."""

    exit_code = EXIT_FAULT


class UserError(TruegateError):
    """Wrong use: a bad flag, a bad file, a value that cannot be."""

    exit_code = EXIT_USAGE


class InvalidRun(TruegateError):
    """The run itself is unusable: the server died or its data cannot be trusted."""

    exit_code = EXIT_INVALID


class Refused(UserError):
    """Two parts cannot meet: names both sides and the remedy, raised when a plan is compiled."""
