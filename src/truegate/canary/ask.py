"""Phases of questions to a server: single tokens, decode walks, long prompts, batches, streams at once, and again.

Invariant: nothing here judges an answer.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from truegate.canary.api import Api, Completion, Refusal, Server, ServerLost
from truegate.canary.definition import SMALL, Kind
from truegate.canary.evidence import Evidence, Observation, QuestionAnswer
from truegate.canary.fingerprint import mismatch
from truegate.canary.manifest import FINGERPRINTS, Manifest

OFF_GRID = (3, 5, 7, 9, 15, 17, 23, 33, 63, 65, 127, 129, 255, 257)  # beside the sizes that engines capture graphs for
LONG = (7, 33, 129, 300)
BETWEEN = "between phases"
_CROWD = 300  # more rows of one expert than kernels' blocks and small capacities hold
_LIST = 50  # prompts in one list of `lists`
_PLACES = 6  # probes asked between phases: did experts move since?


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much to ask."""

    name: str = "default"
    batches: tuple[int, ...] = (3, 5, 7, 9, 15, 17, 23, 33, 63, 65)
    streams: int = 11
    walk: int = 24
    long: tuple[int, ...] = LONG
    questions: int = 4000
    silence: float = 2.0
    dp_ranks: int = 1
    repeats: int = 2  # of small batches, streams and walks
    alone: int | None = None  # lone prompts where lists can be asked, all probes being asked in lists; None: all


QUICK = Effort(name="quick", batches=(3, 7, 17), streams=5, walk=12, long=(33,), questions=300, silence=0.2, repeats=1,
               alone=16)  # fmt: skip
THOROUGH = Effort(name="thorough", batches=OFF_GRID, streams=33, walk=32, long=(*LONG, 1000), questions=20000,
                  silence=8.0)  # fmt: skip
Progress = Callable[[str], None]


class Asker:
    """Asks one server about one canary, phase by phase; a lost server ends the run with what was seen."""

    def __init__(self, manifest: Manifest, client: Server, api: Api, effort: Effort, progress: Progress) -> None:
        self.manifest, self.client, self.api, self.effort = manifest, client, api, effort
        self.progress = progress
        self.evidence = Evidence(api=api)
        self.rng = np.random.RandomState(11)
        self.probes = [p.index for p in manifest.probes if p.kind is not Kind.FINGERPRINT]

    def run(self) -> Evidence:
        """Every phase that this server's API allows, in order."""
        phases = self._logprob_phases() if self.api.top else self._greedy_phases()
        try:
            for number, (name, phase) in enumerate(phases):
                if not number:
                    self._check(0, name)
                self._phase(name, phase)
                self._check(number + 1, name)
        except ServerLost as lost:
            self.evidence.lost = str(lost)
        self.evidence.num_requests = self.client.num_requests
        if BETWEEN in self.evidence.phases:
            self.evidence.phases[BETWEEN] = self.evidence.phases.pop(BETWEEN)  # listed last
        return self.evidence

    def _check(self, number: int, phase: str) -> None:
        """Between phases: is it still this checkpoint, and does each expert still stand where it stood?"""
        index = number % FINGERPRINTS
        probes = [index, *(self._places if self.api.top else [])]
        try:
            if self.api.batched:
                answers = self.client.complete(self.api, [self._tokens([p]) for p in probes], 1)
            else:
                answers = [self.client.complete(self.api, [self._tokens([p])], 1)[0] for p in probes]
            problem = mismatch(self.manifest, self.api, index, answers[0])
            if problem is not None:  # in a batch, a row can hold another's answer: ask again, alone
                answers[0] = self.client.complete(self.api, [self._tokens([index])], 1)[0]
                problem = mismatch(self.manifest, self.api, index, answers[0])
        except Refusal:
            return  # no evidence about routing; a phase that is refused says so
        if problem is not None:
            e = self.evidence  # what this phase saw may be another checkpoint's already
            e.observations = [o for o in e.observations if o.phase != phase]
            e.answers = [a for a in e.answers if a.phase != phase]
            raise ServerLost(f"the server was restarted or reloaded during {phase}: {problem}")
        batch = len(probes) if self.api.batched else 1
        for row, (probe, answer) in enumerate(zip(probes[1:], answers[1:], strict=True)):
            top = answer.tops[0] if answer.tops else {}
            self.evidence.observations.append(Observation(BETWEEN, probe, top, batch, row + 1, check=number))
        asked = f"a fingerprint token{f' and {len(probes) - 1} probes' if len(probes) > 1 else ''}"
        self.evidence.phases[BETWEEN] = f"{asked}, before the first phase and after each"

    @cached_property
    def _places(self) -> list[int]:
        """Plain probes spread over layers and experts."""
        plain = [p.index for p in self.manifest.probes if p.kind is Kind.PLAIN]
        return _spread(plain, _PLACES)

    def _phase(self, name: str, phase: Callable[[str], str]) -> None:
        self.progress(name)
        start = time.monotonic()
        try:
            self.evidence.phases[name] = phase(name)
        except Refusal as refusal:
            self.evidence.phases[name] = f"refused: {refusal}"
        except ServerLost:
            self.evidence.phases[name] = "the server was lost here"
            raise
        finally:
            self.evidence.seconds[name] = round(time.monotonic() - start, 2)

    def _logprob_phases(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        e = self.effort
        if e.alone is not None and self.api.batched:
            yield "lists", self._lists
        yield "single", self._single
        yield "decode", self._decode
        if e.long:
            yield "long", self._long
        if self.api.echo:
            yield "echo", self._echo
        for size in e.batches:
            yield f"batch {size}", self._batch_of(size)
        yield "same experts", self._same_experts
        yield "one rank", self._one_rank
        yield f"{e.streams} streams", self._streams
        yield "mixed", self._mixed
        yield "shrinking batch", self._shrinking
        yield "prefix cache", self._prefix_cache
        if e.dp_ranks > 1:
            for rank in range(e.dp_ranks):
                yield f"data-parallel rank {rank}", self._on_rank(rank)
            for streams in (e.dp_ranks - 1, e.dp_ranks + 1):
                yield f"{streams} stream{'s' * (streams > 1)} on {e.dp_ranks} ranks", self._beside_ranks(streams)
        yield "after silence", self._after_silence
        yield "again", self._again

    def _greedy_phases(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        yield "questions", self._questions
        yield "questions in long prompts", self._long_questions
        yield f"questions in {self.effort.streams} streams", self._question_streams
        yield "questions after silence", self._late_questions

    # --- asking --------------------------------------------------------------------------------------------------

    def _tokens(self, probes: Sequence[int]) -> list[int]:
        return [self.manifest.token(p) for p in probes]

    def _ask_each(self, phase: str, prompts: Sequence[Sequence[int]], parallel: int, batch: int) -> None:
        """One request a prompt; the last probe of each prompt is observed."""
        answers = self.client.together(self.api, [(self._tokens(p), 1) for p in prompts], parallel)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            self._note(phase, prompt[-1], answer, batch=batch, row=row, position=len(prompt) - 1)

    def _ask_list(self, phase: str, prompts: Sequence[Sequence[int]]) -> None:
        """One request with all prompts where the API has it, else as many requests at once."""
        if not self.api.batched:
            self._ask_each(phase, prompts, parallel=len(prompts), batch=len(prompts))
            return
        answers = self.client.complete(self.api, [self._tokens(p) for p in prompts], 1)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            self._note(phase, prompt[-1], answer, batch=len(prompts), row=row, position=len(prompt) - 1)

    def _note(
        self, phase: str, probe: int, answer: Completion | Refusal, *, batch: int, row: int, position: int
    ) -> None:
        if isinstance(answer, Refusal):
            found = Observation(phase, probe, {}, batch, row, position, error=str(answer))
        else:
            found = Observation(phase, probe, answer.tops[0] if answer.tops else {}, batch, row, position)
        self.evidence.observations.append(found)

    def _some(self, count: int) -> list[int]:
        """`count` probes, all kinds mixed, every probe as often as any other."""
        rounds = -(-count // len(self.probes))
        return [self.probes[i] for _ in range(rounds) for i in self.rng.permutation(len(self.probes))][:count]

    # --- phases --------------------------------------------------------------------------------------------------

    def _lists(self, phase: str) -> str:
        """Every probe, when there is no time to ask each alone."""
        for start in range(0, len(self.probes), _LIST):
            self._ask_list(phase, [[p] for p in self.probes[start : start + _LIST]])
        return f"{len(self.probes)} prompts of one token in lists of up to {_LIST}"

    def _single(self, phase: str) -> str:
        probes = self._alone
        self._ask_each(phase, [[p] for p in probes], parallel=1, batch=1)
        return f"{len(probes)} prompts of one token, one after the other"

    @property
    def _alone(self) -> list[int]:
        """The probes to be asked alone, spread over layers; half of them with the small activations of `SMALL`."""
        alone = self.effort.alone if self.api.batched else None
        if alone is None or alone >= len(self.probes):
            return self.probes
        small = [p for p in self.probes if self.manifest.probes[p].kind in SMALL]
        other = [p for p in self.probes if self.manifest.probes[p].kind not in SMALL]
        return _spread(small, alone // 2) + _spread(other, alone - alone // 2)

    def _again(self, phase: str) -> str:
        """The first phase once more, after load."""
        if self.effort.alone is not None and self.api.batched:
            self._lists(phase)
            return "the lists once more"
        probes = self._some(16) if self.effort.name == "quick" else self.probes
        self._ask_each(phase, [[p] for p in probes], parallel=1, batch=1)
        return f"{len(probes)} of the single prompts once more"

    def _walk(self, phase: str, start: int, answer: Completion, batch: int, row: int, *, shrinks: bool = False) -> None:
        """Follow a greedy walk from probe `start`; observations stop where it leaves the known cycle.

        Where the batch shrinks, walk `row` ends after row + 1 steps: at step s, `batch` - s are left.
        """
        probe = start
        for step, top in enumerate(answer.tops):
            left, place = (max(1, batch - step), max(0, row - step)) if shrinks else (batch, row)
            self.evidence.observations.append(Observation(phase, probe, top, left, place, step))
            probe = self.manifest.successor(probe)
            if step >= len(answer.tokens) or answer.tokens[step] != self.manifest.token(probe):
                self.evidence.wandered[phase] = self.evidence.wandered.get(phase, 0) + 1
                return

    def _decode(self, phase: str) -> str:
        cycle = self.manifest.data["cycle"]
        starts = cycle[:: self.effort.walk][: 2 if self.effort.name == "quick" else None]
        for start in starts:
            answer = self.client.complete(self.api, [self._tokens([start])], self.effort.walk)[0]
            self._walk(phase, start, answer, 1, 0)
        return f"{len(starts)} walks of {self.effort.walk} generated tokens"

    def _long(self, phase: str) -> str:
        prompts = [self._some(length) for length in self.effort.long for _ in range(self.effort.repeats)]
        self._ask_each(phase, prompts, parallel=1, batch=1)
        return f"{len(prompts)} prompts of {', '.join(map(str, self.effort.long))} tokens"

    def _echo(self, phase: str) -> str:
        rounds = 2 * self.effort.repeats - 1
        for _ in range(rounds):
            prompt = self._some(min(len(self.probes), 250))
            answer = self.client.complete(self.api, [self._tokens(prompt)], 1, echo=True)[0]
            for position, (probe, top) in enumerate(zip(prompt, answer.echo, strict=False)):
                if top is not None:
                    self.evidence.observations.append(Observation(phase, probe, top, 1, 0, position))
        return f"{rounds} prompt{'s' * (rounds > 1)}, every position read"

    def _batch_of(self, size: int) -> Callable[[str], str]:
        def phase(name: str) -> str:
            repeats = self.effort.repeats if size <= 17 else 1
            for _ in range(repeats):
                self._ask_list(name, [[p] for p in self._some(size)])
            how = "one request" if self.api.batched else "as many requests at once"
            return f"{repeats} x {size} prompts in {how}"

        return phase

    def _same_experts(self, phase: str) -> str:
        """Every row routes to the same experts: the most skewed batch there is."""
        plain = [p.index for p in self.manifest.probes if p.kind is Kind.PLAIN]
        for probe in self.rng.permutation(plain)[: self.effort.repeats].tolist():
            self._ask_list(phase, [[probe]] * 33)
            self._ask_each(phase, [[probe] * _CROWD], parallel=1, batch=1)
        return f"{self.effort.repeats} x 33 rows that all choose the same experts, and {_CROWD} in one prompt"

    def _one_rank(self, phase: str) -> str:
        """Rows whose experts are as close together as they come: with expert parallelism one rank gets most."""

        def low(probe: int) -> float:
            return float(np.mean(np.flatnonzero(self.manifest.expected[probe][: self.manifest.num_experts])))

        plain = [p.index for p in self.manifest.probes if p.kind is Kind.PLAIN]
        ordered = sorted(plain, key=low)
        for part in (ordered[:16], ordered[-16:]):
            self._ask_list(phase, [[p] for p in part])
        return "16 rows that favour the lowest expert ids, 16 the highest"

    def _streams(self, phase: str) -> str:
        prompts = [
            self._some(1 + int(self.rng.randint(6))) for _ in range(2 * self.effort.repeats * self.effort.streams)
        ]
        self._ask_each(phase, prompts, parallel=self.effort.streams, batch=self.effort.streams)
        return f"{len(prompts)} requests, {self.effort.streams} at a time"

    def _mixed(self, phase: str) -> str:
        """Walks that decode while long prompts are read: prompts and answers in one step of the engine."""
        walks, length = self.effort.streams, max(self.effort.long, default=33)
        prompts = [self._some(1) for _ in range(walks)] + [self._some(length) for _ in range(2)]
        jobs = [(self._tokens(p), self.effort.walk if len(p) == 1 else 1) for p in prompts]
        self._walks(phase, prompts, jobs, batch=len(jobs), shrinks=False)
        return f"{walks} walks of {self.effort.walk} tokens beside 2 prompts of {length}"

    def _shrinking(self, phase: str) -> str:
        """Walks of different lengths at once: the decode batch shrinks through every size."""
        prompts = [[s] for s in self._some(self.effort.streams)]
        jobs = [(self._tokens(p), 1 + row) for row, p in enumerate(prompts)]
        self._walks(phase, prompts, jobs, batch=len(jobs), shrinks=True)
        return f"{len(jobs)} walks of 1 to {len(jobs)} tokens at once"

    def _walks(
        self, phase: str, prompts: Sequence[Sequence[int]], jobs: Sequence[tuple[list[int], int]], *, batch: int,
        shrinks: bool,
    ) -> None:  # fmt: skip
        answers = self.client.together(self.api, jobs, len(jobs))
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            if isinstance(answer, Refusal) or len(prompt) > 1:
                self._note(phase, prompt[-1], answer, batch=batch, row=row, position=len(prompt) - 1)
            else:
                self._walk(phase, prompt[0], answer, batch, row, shrinks=shrinks)

    def _prefix_cache(self, phase: str) -> str:
        shared = self._some(96)
        prompts = [shared, shared, *([*shared[:80], p] for p in self._some(2 * self.effort.repeats)), shared]
        self._ask_each(phase, prompts, parallel=1, batch=1)
        return f"one prompt of 96 tokens three times, and {len(prompts) - 3} that share 80 tokens with it"

    def _on_rank(self, rank: int) -> Callable[[str], str]:
        def phase(name: str) -> str:
            with self.client.on_rank(rank) as how:
                self._ask_each(name, [[p] for p in self.probes], parallel=1, batch=1)
            return f"{len(self.probes)} single prompts with {how}; whether the server obeys, its answers do not show"

        return phase

    def _beside_ranks(self, streams: int) -> Callable[[str], str]:
        """One request fewer than there are ranks, and one more: some rank is idle, or holds two."""

        def phase(name: str) -> str:
            prompts = [[p] for p in self._some(4 * streams)]
            self._ask_each(name, prompts, parallel=streams, batch=streams)
            return f"{len(prompts)} requests, {streams} at a time, spread as the server likes"

        return phase

    def _after_silence(self, phase: str) -> str:
        time.sleep(self.effort.silence)
        probes = self._some(2 * self.effort.repeats)
        self._ask_each(phase, [[p] for p in probes], parallel=1, batch=1)
        return f"{len(probes)} single prompts after {self.effort.silence:g} s of silence: all other ranks idle"

    # --- greedy questions ----------------------------------------------------------------------------------------

    def _ask_questions(self, phase: str, chosen: Sequence[int], parallel: int, before: int) -> str:
        first = self.manifest.vocabulary.first_question
        prompts = [[*self._tokens(self._some(before)), first + q] for q in chosen]
        answers = self.client.together(self.api, [(p, 1) for p in prompts], parallel)
        failed = 0
        for q, answer in zip(chosen, answers, strict=True):
            if isinstance(answer, Refusal):
                failed += 1
                if failed == len(chosen):
                    raise answer
                continue
            token = answer.tokens[0] if answer.tokens else None
            self.evidence.answers.append(QuestionAnswer(phase, q, token, before, parallel))
        return f"{len(chosen)} questions" + (f", {failed} refused" if failed else "")

    def _pick(self, count: int) -> list[int]:
        """Questions for whole table rows, as many rows as fit, spread over the layers."""
        by_row: dict[tuple[int, int], list[int]] = {}
        for q in self.manifest.questions:
            by_row.setdefault((q.row, q.layer), []).append(q.index)
        out: list[int] = []
        for key in sorted(by_row):
            if len(out) + len(by_row[key]) > count and out:
                break
            out += by_row[key]
        return out

    def _questions(self, phase: str) -> str:
        return self._ask_questions(phase, self._pick(self.effort.questions), 1, 0)

    def _long_questions(self, phase: str) -> str:
        chosen = self.rng.permutation(len(self.manifest.questions))[: 40 if self.effort.name != "quick" else 10]
        return self._ask_questions(phase, chosen.tolist(), 1, 40)

    def _question_streams(self, phase: str) -> str:
        chosen = self.rng.permutation(len(self.manifest.questions))[: 10 * self.effort.streams]
        return self._ask_questions(phase, chosen.tolist(), self.effort.streams, 0)

    def _late_questions(self, phase: str) -> str:
        time.sleep(self.effort.silence)
        return self._ask_questions(phase, self.rng.permutation(len(self.manifest.questions))[:10].tolist(), 1, 0)


def _spread(items: Sequence[int], count: int) -> list[int]:
    """`count` of the items, evenly spaced."""
    return [items[i] for i in np.linspace(0, len(items) - 1, min(count, len(items))).astype(int)]
