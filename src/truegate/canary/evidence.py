"""What a run saw: answers to probes and to questions, each with the conditions it was asked under.

Invariant: an observation says which probe was asked and how; nothing here judges it.
"""

from dataclasses import dataclass, field

from truegate.canary.api import Api


@dataclass(frozen=True)
class Observation:
    """One answer to one probe, with the conditions it was asked under."""

    phase: str
    probe: int
    top: dict[int, float]
    batch: int = 1  # rows asked for together
    row: int = 0
    position: int = 0  # of the probe in its sequence
    error: str | None = None
    check: int = -1  # of observations between phases: after how many phases


@dataclass(frozen=True)
class QuestionAnswer:
    """The greedy token that answered a question (None: no known token)."""

    phase: str
    question: int
    token: int | None
    position: int = 0
    batch: int = 1


@dataclass(kw_only=True)
class Evidence:
    """Everything a run saw, in order."""

    api: Api
    observations: list[Observation] = field(default_factory=list)
    answers: list[QuestionAnswer] = field(default_factory=list)
    phases: dict[str, str] = field(default_factory=dict)  # phase -> what it did, or why it did not
    seconds: dict[str, float] = field(default_factory=dict)
    lost: str | None = None
    server: dict[str, str] = field(default_factory=dict)
    num_requests: int = 0
    wandered: dict[str, int] = field(default_factory=dict)  # phase -> walks that left the expected path
