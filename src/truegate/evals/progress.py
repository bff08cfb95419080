"""The live line of a run: how far, and accuracy, cap rate and loop rate so far.

On a terminal it is a bar; otherwise a plain line at every tenth.
Invariant: it writes to stderr only; results go to stdout.
"""

from collections.abc import Iterable
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from truegate.evals.score import Record


class Live:
    """Counts records as they end and shows them."""

    def __init__(self, total: int, done: Iterable[Record]) -> None:
        self._total, self._seen, self._correct, self._capped, self._looped, self._errors = total, 0, 0, 0, 0, 0
        for record in done:
            self._count(record)
        self._console = Console(stderr=True)
        self._bar = Progress(
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            refresh_per_second=4,
        )
        self._plain = not self._console.is_terminal
        self._next = self._seen + max(1, total // 10)

    def __enter__(self) -> "Live":
        if not self._plain:
            self._bar.start()
            self._task = self._bar.add_task(self.line(), total=self._total, completed=self._seen)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._plain:
            self._bar.update(self._task, description=self.line(), completed=self._seen)
            self._bar.stop()

    def line(self) -> str:
        """accuracy, cap rate, loop rate and errors so far."""
        n = max(1, self._seen)
        errors = f"  errors {self._errors}" if self._errors else ""
        return (
            f"accuracy {100 * self._correct / n:.1f}%  cap {100 * self._capped / n:.1f}%"
            f"  loops {100 * self._looped / n:.1f}%{errors}"
        )

    def seen(self, record: Record) -> None:
        """Count one new record."""
        self._count(record)
        if not self._plain:
            self._bar.update(self._task, description=self.line(), completed=self._seen)
        elif self._seen >= self._next or self._seen == self._total:
            self._next += max(1, self._total // 10)
            self._console.print(f"{self._seen}/{self._total}  {self.line()}", highlight=False)

    def _count(self, record: Record) -> None:
        self._seen += 1
        self._correct += record.correct
        self._capped += record.capped
        self._looped += record.looped
        self._errors += record.error is not None
