"""Random schedules: every answer its own tokens, everything returned, nobody starves (5,000 by the benchmark).

The mutants at the end break the engine on purpose: what is under test there is whether the simulation sees it.
"""

import pytest
import schedules
from schedules import Wrong, run_schedule, toy_engine

from truegate.types import Request, SamplingParams

BLOCK = 50


@pytest.mark.parametrize("block", range(10))
def test_every_schedule_gives_each_request_its_own_tokens_and_returns_everything(block):
    for seed in range(1_000_000 + block * BLOCK, 1_000_000 + (block + 1) * BLOCK):
        run_schedule(seed)


def test_the_schedules_do_exercise_preemption_prefix_hits_cancellation_and_overlap():
    total = sum((run_schedule(seed) for seed in range(40)), start=schedules.Counter())
    assert min(total[name] for name in ("preemptions", "prefix_hit_tokens", "aborted", "overlapped")) > 0


def _broken(monkeypatch, owner, name, replacement):
    monkeypatch.setattr(owner, name, replacement)
    for seed in range(60):
        try:
            run_schedule(seed)
        except (Wrong, RuntimeError, AssertionError, IndexError, ValueError):
            return True
    return False


def test_the_simulation_sees_a_page_written_to_the_wrong_table_row(monkeypatch):
    write = schedules.Engine.__init__.__globals__["Scheduler"].__init__.__globals__["PageTable"].write

    def late(self, slot, start, pages):
        write(self, slot, start + (start == 3), pages)

    from truegate.cache.pages import PageTable

    assert _broken(monkeypatch, PageTable, "write", late)


def test_the_simulation_sees_a_prefix_matched_one_page_too_deep(monkeypatch):
    from truegate.cache.radix import PrefixTree

    match = PrefixTree.match

    def deep(self, token_ids, limit):
        node = match(self, token_ids, limit)
        return (
            next(iter(node.children.values()), node) if node.depth * self.page_size + self.page_size <= limit else node
        )

    assert _broken(monkeypatch, PrefixTree, "match", deep)


def test_the_simulation_sees_a_lock_that_is_not_given_back(monkeypatch):
    from truegate.cache.radix import PrefixTree

    assert _broken(monkeypatch, PrefixTree, "unlock", lambda self, node: None)


def test_the_simulation_sees_a_token_lost_in_preemption(monkeypatch):
    from truegate.sched.scheduler import Scheduler

    preempt = Scheduler._preempt

    def forgetful(self, sequence):
        preempt(self, sequence)
        if sequence.num_output:
            sequence.tokens.pop()

    assert _broken(monkeypatch, Scheduler, "_preempt", forgetful)


def test_admission_is_first_come_first_served_even_when_the_first_is_the_largest():
    engine = toy_engine(
        num_pages=1 + 8, page_size=4, max_model_len=32, max_running=8, chunked_prefill_tokens=8, overlap=False
    )
    sizes = {"small": 4, "large": 28, "later": 4}
    for name, size in sizes.items():
        params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
        engine.add(Request(request_id=name, prompt_token_ids=tuple(range(1, 1 + size)), params=params))
    first = {}
    step = 0
    while engine.has_work:
        for output in engine.step():
            first.setdefault(output.request_id, step)
        step += 1
    assert first["small"] < first["large"] <= first["later"]
