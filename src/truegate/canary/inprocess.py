"""A client for a model in this process, in place of one for a server: sequences in, the last position's logits out.

Invariant: what the phases see is what a server with token-id prompts, lists and top log-probabilities would show.
V vocabulary, N sequences of one batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
from numpy.typing import NDArray

from truegate.canary.api import MAX_TOP, Api, Completion, Refusal
from truegate.canary.ask import Asker, Effort
from truegate.canary.evidence import Evidence
from truegate.canary.manifest import Manifest

Forward = Callable[[list[list[int]]], NDArray[np.floating]]  # N sequences -> logits [N, V]


class InProcess:
    """`forward` runs a batch of sequences and gives the logits after each; generation repeats it."""

    def __init__(self, forward: Forward) -> None:
        self._forward = forward
        self.num_requests = 0

    @contextmanager
    def on_rank(self, rank: int) -> Iterator[str]:
        yield "the one rank of this process"

    def complete(
        self, api: Api, prompts: Sequence[Sequence[int]], max_tokens: int, *, echo: bool = False
    ) -> list[Completion]:
        """Greedy continuations of one batch; only what is generated can be read."""
        assert not echo, "Api.echo is never set for a model in process"
        self.num_requests += 1
        return self.generate(api, [(prompt, max_tokens) for prompt in prompts])

    def together(
        self, api: Api, jobs: Sequence[tuple[Sequence[int], int]], parallel: int
    ) -> list[Completion | Refusal]:
        """Requests of different lengths as one batch that shrinks, `parallel` rows at a time."""
        out: list[Completion | Refusal] = []
        for start in range(0, len(jobs), max(1, parallel)):
            part = jobs[start : start + max(1, parallel)]
            self.num_requests += len(part)
            out += self.generate(api, part)
        return out

    def generate(self, api: Api, jobs: Sequence[tuple[Sequence[int], int]]) -> list[Completion]:
        """Greedy continuations of (prompt, number of tokens), as one batch that shrinks."""
        rows = [list(prompt) for prompt, _ in jobs]
        answers = [Completion([], []) for _ in jobs]
        for step in range(max((n for _, n in jobs), default=0)):
            active = [i for i, (_, n) in enumerate(jobs) if step < n]
            logits = np.asarray(self._forward([rows[i] for i in active]), dtype=np.float64)
            for i, scores in zip(active, logits, strict=True):
                rows[i].append(int(scores.argmax()))
                answers[i].tokens.append(rows[i][-1])
                if api.top:
                    answers[i].tops.append(_top(scores, api.top))
        return answers


def _top(scores: NDArray[np.float64], count: int) -> dict[int, float]:
    """The `count` best log-probabilities, ties to the lowest id."""
    peak = scores.max()
    total = peak + np.log(np.exp(scores - peak).sum())
    best = np.argsort(-scores, kind="stable")[:count]
    return {int(i): float(scores[i] - total) for i in best}


def ask_in_process(manifest: Manifest, forward: Forward, effort: Effort, *, top: int = MAX_TOP) -> Evidence:
    """All phases against a model in this process; `top` 0 asks the greedy questions."""
    api = Api(endpoint="completions", ids=True, top=top, batched=True)
    return Asker(manifest, InProcess(forward), api, effort, lambda phase: None).run()
