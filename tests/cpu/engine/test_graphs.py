"""What captured steps stand on and a CPU can test: the grid of sizes, the copy of the page table, and the steps
themselves, run over their buffers with interpreted kernels instead of replayed."""

import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from truegate.cache.pages import PageTable
from truegate.config import EngineConfig, fit, resolve
from truegate.engine.core import Engine
from truegate.engine.graphs import CHUNK_ROWS, StepGraphs, grid, shapes
from truegate.engine.start import Parts, facts_of
from truegate.models import load_model
from truegate.types import Request, SamplingParams

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))


def test_the_grid_ends_at_the_largest_batch_and_never_pads_more_than_half():
    for largest in (1, 2, 3, 7, 21, 64, 100, 128, 200, 256):
        sizes = grid(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for rows in range(1, largest + 1):
            size = next(size for size in sizes if size >= rows)
            assert size - rows <= rows, (largest, rows, size)


def test_a_copy_that_takes_the_writes_is_the_page_table():
    table, rng, width = PageTable(3, 5), np.random.default_rng(0), 16
    table.write(1, 0, [9, 8])
    copy = np.zeros((3, width), dtype=np.int64)
    copy[:, :5] = table.array
    table.record_writes()
    for _ in range(20):
        for _ in range(rng.integers(0, 4)):
            start = int(rng.integers(0, 4))
            table.write(int(rng.integers(0, 3)), start, rng.integers(1, 99, 5 - start).tolist())
        places = table.take_writes(width)
        assert len(places) == len(set(places.tolist()))
        copy.reshape(-1)[places] = table.array[places // width, places % width]
        assert (copy[:, :5] == table.array).all()
    assert not len(table.take_writes(width))


def test_every_step_within_the_budget_has_a_shape():
    for max_running, budget in ((1, 1), (8, 8), (21, 100), (256, 4096), (64, 2048)):
        made = shapes(max_running, budget)
        assert len(made) == len(set(made))
        beside = min(64, max_running - 1, budget - 2)
        assert all((d, rows) in made for rows in CHUNK_ROWS if rows <= budget for d in (0, beside))
        longest = max(rows for _, rows in made)
        assert longest == CHUNK_ROWS[-1] or budget == 1 or budget <= longest < 2 * max(budget, 33)


def test_nothing_is_captured_that_no_step_can_use():
    for max_running, budget in ((1, 1), (1, 4096), (2, 2), (3, 4), (5, 3)):
        made = shapes(max_running, budget)
        steps = [(d, 0) for d in range(1, max_running + 1)]
        steps += [(d, rows) for d in range(max_running) for rows in range(2, budget - d + 1)]
        fitting = [min((s for s in made if s[0] >= d and s[1] >= t and bool(s[1]) == bool(t)), key=sum, default=None)
                   for d, t in steps]  # fmt: skip
        assert None not in [one for one, (_, rows) in zip(fitting, steps, strict=True) if rows <= CHUNK_ROWS[-1]]
        unused = set(made) - set(fitting)
        assert not unused, (max_running, budget, unused)


class Uncaptured(StepGraphs):
    """Runs each step over its buffers when it is replayed; between steps they hold what the last step left."""

    seen: list

    def _capture(self, captured):
        self.seen = []
        captured.graph = SimpleNamespace(replay=lambda: (self.seen.append(captured), self._step(captured)))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Qwen3-MoE", "DeepSeek-V3"])
def test_captured_steps_give_the_tokens_of_eager_ones(name, tmp_path, monkeypatch):
    """Prompts beside decodes, chunks with and without a prefix, drawn and greedy answers, routed experts."""
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    from tiny_checkpoints import reference, save

    folder = save(reference(name, num_hidden_layers=2), tmp_path)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    made = []
    generator = torch.Generator().manual_seed(0)
    for i, length in enumerate((5, 1, 60)):
        prompt = tuple(torch.randint(2, 200, (length,), generator=generator).tolist())
        params = SamplingParams(
            max_tokens=2 + i,
            temperature=0.7 * (i % 2),
            seed=i,
            ignore_eos=True,
            return_routed_experts=i == 2,
        )
        made.append(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
    found = []
    for captures in (False, True):
        model = load_model(folder)
        config = EngineConfig(
            max_running=4, chunked_prefill_tokens=50, page_size=16, self_test=False, kv_cache_gib=0.01
        )
        config, num_pages = fit(resolve(config, cuda=False), facts_of(model))
        parts = Parts(config=config, model=model, tokenizer=None, eos_token_ids=(), num_pages=num_pages)
        engine = Engine(config, parts)
        if captures:
            model.uses_kernels = True
            model.num_splits = 2  # interpreted, each split of a row costs 10 ms
            steps = engine.runner
            steps.pool.data.fill_(float("nan"))
            steps.pool.data.view(-1)[0] = 0.0
            steps.graphs = Uncaptured(
                model, steps.pool, steps.table, steps.last_token_buf, steps.load, max_rows=config.chunked_prefill_tokens
            )
            steps.runs_ahead = True
        for request in made:
            engine.add(request)
        tokens, routed = {}, None
        while engine.has_work:
            for output in engine.step():
                tokens.setdefault(output.request_id, []).extend(output.token_ids)
                routed = output.routed if output.routed is not None else routed
        found.append((tokens, routed, engine.stats().expert_load_LE))
    assert found[0][0] == found[1][0]
    assert (found[0][1].ids_TLK == found[1][1].ids_TLK).all()
    np.testing.assert_allclose(found[1][1].weights_TLK, found[0][1].weights_TLK, rtol=1e-4)
    assert (found[0][2] == found[1][2]).all(), "padded rows must count for nothing"
    used = {(one.num_decodes, one.num_rows) for one in steps.graphs.seen}
    assert {rows > 0 for _, rows in used} == {True, False}
    assert any(d and rows for d, rows in used)


def test_steps_that_run_eagerly_leave_no_writes_of_the_page_table_behind(tmp_path):
    """Answers of one token whose prompts are asked about never run a captured step."""
    pytest.importorskip("triton", reason="the kernels need Triton: pip install triton")
    from tiny_checkpoints import reference, save

    model = load_model(save(reference("Qwen3-MoE", num_hidden_layers=1), tmp_path))
    config = EngineConfig(max_running=2, kv_cache_gib=0.01, prefix_cache=False)
    config, num_pages = fit(resolve(config, cuda=False), facts_of(model))
    engine = Engine(config, Parts(config=config, model=model, tokenizer=None, eos_token_ids=(), num_pages=num_pages))
    steps = engine.runner
    steps.graphs = Uncaptured(model, steps.pool, steps.table, steps.last_token_buf, steps.load, max_rows=2)
    for i in range(3):
        params = SamplingParams(max_tokens=1, prompt_logprobs=0)
        engine.add(Request(request_id=str(i), prompt_token_ids=tuple(range(2 + i, 40)), params=params))
    while engine.has_work:
        engine.step()
    assert not steps.graphs.seen
    assert not len(steps.table.take_writes(steps.table.array.shape[1]))
    assert (steps.graphs.table_buf[:-1].numpy() == steps.table.array).all()


def test_steps_that_run_eagerly_have_the_layout_that_kernels_were_compiled_for_at_start():
    """Another dtype, alignment or kind of stride would be compiled when such a step first comes."""
    from schedules import Toy

    from truegate.layers.paged import paged_step

    class Checked(Toy):
        def forward(self, batch, pool):
            step = paged_step(batch, SimpleNamespace(page_size=self.page_size), torch.zeros(1, 2))
            numbers, one = [batch.token_ids_T, step.positions_T, step.slots_T], step.decodes
            if one is not None:
                numbers += one.seqs_D, one.contexts_D
                sizes.add(one.size)
            for numbers_X in numbers:
                assert numbers_X.stride() == (1,)
                assert numbers_X.storage_offset() * numbers_X.itemsize % 16 == 0
            for part in filter(None, (one, step.chunks)):
                table_NP = part.table_NP
                assert (table_NP.dtype, table_NP.stride(0) % 16, table_NP.stride(1)) == (torch.int32, 0, 1)
                assert (table_NP[:, : batch.page_table_NP.shape[1]] == batch.page_table_NP).all()
            return super().forward(batch, pool)

    sizes = set()
    config = EngineConfig(device="cpu", max_running=5, max_model_len=40, chunked_prefill_tokens=11, page_size=2)
    config = resolve(config, cuda=False)
    engine = Engine(config, Parts(config=config, model=Checked(), tokenizer=None, eos_token_ids=(), num_pages=200))
    for i in range(7):
        params = SamplingParams(max_tokens=3 + i, temperature=0.0)
        engine.add(Request(request_id=str(i), prompt_token_ids=tuple(range(1, 2 + 3 * i)), params=params))
    while engine.has_work:
        engine.step()
    assert sizes >= {1, 2, 3, 4, 5}
