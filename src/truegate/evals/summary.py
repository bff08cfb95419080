"""A run in figures. Accuracy counts every asked item: a failed request is not correct, and too many void the run."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from truegate.evals.score import OUTCOMES, Record
from truegate.evals.stats import Interval, mean_interval, wilson

VOID_ABOVE = 0.005  # share of request errors


@dataclass(frozen=True, kw_only=True)
class Summary:
    """The figures of one run; shares in [0, 1], lengths in tokens."""

    answers: int  # records: items times repeats
    items: int
    correct: float  # mean correct answers per repeat
    accuracy: float
    accuracy_ci: tuple[float, float]
    strict: float
    accuracy_finished: float | None  # among answers that ended by themselves
    outcomes: dict[str, int]
    cap_rate: float
    loop_rate: float
    suspect_rate: float
    tokens_total: int
    tokens_per_answer: float
    tokens_ci: tuple[float, float]
    tokens_from: str
    waste_share: float  # of all tokens, spent inside loops
    error_rate: float
    errors: dict[str, int]
    first_error: str | None  # what the first failed request was told

    @property
    def void(self) -> bool:
        """Whether too many requests failed for the figures to mean anything."""
        return self.answers == 0 or self.error_rate > VOID_ABOVE


def by_item(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records grouped by item, in order."""
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[record.id].append(record)
    return dict(groups)


def accuracy_interval(records: Sequence[Record], alpha: float = 0.05) -> Interval:
    """Wilson for one answer an item; with repeats a Student interval of the item means (errors clustered by item)."""
    groups = by_item(records)
    if len(groups) == len(records):
        return wilson(sum(r.correct for r in records), len(records), alpha)
    interval = mean_interval([sum(r.correct for r in g) / len(g) for g in groups.values()], alpha)
    return Interval(max(0.0, interval.low), min(1.0, interval.high))


def summarise(records: Sequence[Record]) -> Summary:
    """The figures of `records`."""
    n = len(records)
    groups = by_item(records)
    share = (lambda flags: sum(flags) / n) if n else (lambda flags: 0.0)
    answered = [r for r in records if r.error is None]
    ended = [r for r in answered if not r.capped]
    tokens = [r.tokens or 0 for r in answered]
    total = sum(tokens)
    interval = accuracy_interval(records)
    length = mean_interval(tokens)
    counted = Counter(r.outcome for r in records)
    accuracy = sum(sum(r.correct for r in g) / len(g) for g in groups.values()) / len(groups) if groups else 0.0
    return Summary(
        answers=n,
        items=len(groups),
        correct=accuracy * len(groups),
        accuracy=accuracy,
        accuracy_ci=(interval.low, interval.high),
        strict=share(r.correct_strict for r in records),
        accuracy_finished=sum(r.correct for r in ended) / len(ended) if ended else None,
        outcomes={name: counted.get(name, 0) for name in OUTCOMES},
        cap_rate=share(r.capped for r in records),
        loop_rate=share(r.looped for r in records),
        suspect_rate=share(r.suspect for r in records),
        tokens_total=total,
        tokens_per_answer=total / len(tokens) if tokens else 0.0,
        tokens_ci=(max(0.0, length.low), length.high) if len(tokens) > 1 else (0.0, float("inf")),
        tokens_from=tokens_source(answered),
        waste_share=sum(r.waste for r in answered) / total if total else 0.0,
        error_rate=share(r.error is not None for r in records),
        errors=dict(Counter((r.error or "").partition(":")[0] for r in records if r.error)),
        first_error=next((r.error for r in records if r.error), None),
    )


def tokens_source(records: Iterable[Record]) -> str:
    """Where token counts come from: usage (the server's), characters (estimated), or mixed."""
    sources = {r.tokens_from for r in records}
    return sources.pop() if len(sources) == 1 else ("mixed" if sources else "usage")


def finite(value: Any) -> Any:
    """`value` with infinities as None, for JSON."""
    if isinstance(value, float) and value in (float("inf"), float("-inf")):
        return None
    if isinstance(value, dict):
        return {key: finite(v) for key, v in value.items()}
    return [finite(v) for v in value] if isinstance(value, list | tuple) else value
