"""Random schedules through captured steps, run over their buffers instead of replayed, on a toy that reads every token
through the layout the kernels get: a stale number, a wrong row or a page of somebody else is a wrong token."""

import random
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import pytest
import schedules
import torch
from schedules import VOCAB, draw_request

from truegate.cache.pools import MHAPool, MLAPool
from truegate.config import EngineConfig
from truegate.engine import graphs
from truegate.engine.core import Engine
from truegate.engine.graphs import StepGraphs
from truegate.engine.start import Parts
from truegate.layers import paged
from truegate.types import NOT_COMPUTED

EXPERTS = 7
NAN = float("nan")


class PagedToy(schedules.Toy):
    """schedules.Toy over a `PagedStep`. Hidden row: the next token, one-hot; NaN where no decode or chunk is."""

    dtype, num_splits, cosines_XR, head = torch.float32, None, torch.zeros(1, 2), torch.eye(VOCAB) * 10

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.moe_layers = [SimpleNamespace(spec=SimpleNamespace(num_choices=EXPERTS))]

    def make_pool(self, num_pages, page_size):
        pool = self.kind(
            num_layers=1, num_pages=num_pages, page_size=page_size, width=1, dtype=self.dtype, device="cpu"
        )
        pool.data.fill_(schedules.POISON)
        return pool

    def forward(self, batch, pool):
        step = batch.paged or paged.paged_step(batch, pool, self.cosines_XR)
        valid_T, tokens_T = batch.valid_T[: len(batch.token_ids_T)], batch.token_ids_T
        self.num_rows = int(valid_T.sum())
        assert not batch.all_valid, "eager steps take the router's kernel as captured ones have it compiled"
        assert (step.slots_T[~valid_T] < pool.page_size).all(), "rows that pad write page 0"
        pool.write(0, step.slots_T, tokens_T[:, None].float())
        ids_TK = (tokens_T % EXPERTS)[:, None]
        batch.recorder.add(
            SimpleNamespace(scales=SimpleNamespace(factors=SimpleNamespace(later=1))),
            SimpleNamespace(logical_TK=ids_TK, chosen_TK=ids_TK / 2),
        )
        hidden_TV = torch.full((len(tokens_T), VOCAB), NAN)
        seen = 0
        if step.decodes is not None:
            one = step.decodes
            for row, (seq, context) in enumerate(zip(one.seqs_D, one.contexts_D.tolist(), strict=True)):
                if context:
                    slots_S = self._slots(one.table_NP[seq], context, pool.page_size)
                    seen += self._answer(hidden_TV[row : row + 1], pool.read(0, slots_S))
        for keys_S, chunks in [(None, step.chunks), *((part.slots_S, part.chunks) for part in step.expanded)]:
            for chunk, block in chunks.blocks_B2.tolist() if chunks else ():
                if chunk >= 0:
                    first, rows, context, at = chunks.chunks_C4[chunk].tolist()
                    if keys_S is None:
                        slots_S = self._slots(chunks.table_NP[at], context, pool.page_size)
                    else:
                        slots_S = keys_S[at : at + context]
                    begin, end = block * chunks.block_rows, min(rows, (block + 1) * chunks.block_rows)
                    before = pool.read(0, slots_S[: context - rows + end])
                    seen += self._answer(hidden_TV[first + begin : first + end], before)
        assert seen == self.num_rows, "every row is in a decode or a chunk, once"
        return hidden_TV

    def logits(self, hidden_MD):
        return hidden_MD @ self.head

    def _slots(self, pages_P, context, size):
        place_S = torch.arange(context)
        return pages_P.long()[place_S // size] * size + place_S % size

    def _answer(self, hidden_RV, rows_S1):
        next_S = torch.from_numpy(schedules._hash(rows_S1[:, 0].long().numpy()))
        hidden_RV.zero_().scatter_(1, next_S[-len(hidden_RV) :, None], 1.0)
        return len(hidden_RV)


class Uncaptured(StepGraphs):
    """Runs each step over its buffers when it is replayed."""

    def _capture(self, captured):
        captured.graph = SimpleNamespace(replay=lambda: self.count(captured))
        self.seen = Counter()

    def count(self, captured):
        self.seen[captured.num_decodes > 0, captured.num_rows > 0] += 1
        self._step(captured)


def run_captured(seed):
    rng = random.Random(seed)
    page_size, length = rng.choice([1, 2, 4]), rng.randint(6, 60)
    pages_of_one = -(-length // page_size)
    budget = rng.choice([1, 2, 3, 7, 16, 64, 150])
    config = EngineConfig(
        device="cpu", dtype="float32", page_size=page_size, max_model_len=length, chunked_prefill_tokens=budget,
        max_running=min(budget, rng.choice([1, 2, 5, 12])), prefix_cache=rng.random() < 0.75,
        overlap=rng.random() < 0.6)  # fmt: skip
    model = PagedToy(rng.choice([MHAPool, MLAPool]))
    num_pages = 1 + pages_of_one + rng.choice([0, 1, pages_of_one, 8 * pages_of_one])
    engine = Engine(config, Parts(config=config, model=model, tokenizer=None, eos_token_ids=(0,), num_pages=num_pages))
    steps = engine.runner
    steps.graphs = Uncaptured(model, steps.pool, steps.table, steps.last_token_buf, steps.load, max_rows=budget)
    steps.graphs.table_buf.fill_(10**6)  # what is not written must not be read
    rows, launch, step, ended, tokens = [], steps.launch, engine.step, {}, {}

    def counted(chunks, **keys):
        rows.append(sum(chunk.size for chunk in chunks))
        return launch(chunks, **keys)

    def kept():
        outputs = step()
        for one in outputs:
            tokens.setdefault((one.request_id, one.index), []).extend(one.token_ids)
        ended.update({(one.request_id, one.index): one.routed.ids_TLK for one in outputs if one.routed is not None})
        return outputs

    steps.launch, engine.step = counted, kept
    prefixes = [[rng.randrange(VOCAB) for _ in range(length)] for _ in range(2)]
    requests = []
    for number in range(rng.randint(1, 14)):
        request = draw_request(rng, number, prefixes, length)
        drawn = rng.choice([{}, {}, {"temperature": 0.5, "top_k": 1}, {"logprobs": 1}])
        asked = {"return_routed_experts": rng.random() < 0.3, "prompt_logprobs": 0 if rng.random() < 0.1 else None}
        requests.append(replace(request, params=replace(request.params, **drawn, **asked)))
    arrivals = sorted(rng.choice([0, rng.randint(0, 40)]) for _ in requests)
    cancels = {str(number): rng.randint(0, 60) for number in range(len(requests)) if rng.random() < 0.2}
    found = schedules._simulate(engine, requests, arrivals, cancels)
    assert engine.stats().expert_load_LE.sum() == sum(rows), "rows that pad count for nothing"
    for key, ids_TLK in ended.items():
        whole = [*requests[int(key[0])].prompt_token_ids, *tokens[key]]
        for expert, token in zip(ids_TLK[:, 0, 0].tolist(), whole, strict=False):
            assert expert in (NOT_COMPUTED, token % EXPERTS)
    return found + Counter({f"captured {key}": n for key, n in steps.graphs.seen.items()}, routed=len(ended))


@pytest.mark.parametrize("limits", [(64, 32, (64, 128, 256)), (2, 2, (4, 16, 64)), (1, 1, (2, 3))])
def test_captured_schedules_give_each_request_its_own_tokens(limits, monkeypatch):
    """Within the limits of captured steps, and often beyond them, where steps run eagerly in between."""
    for name, value in zip(("BESIDE", "MAX_CHUNKS", "CHUNK_ROWS"), limits, strict=True):
        monkeypatch.setattr(graphs, name, value)
    monkeypatch.setattr(paged, "EXPANDED", 20)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    total = sum((run_captured(seed) for seed in range(40)), start=Counter())
    for name in ("preemptions", "prefix_hit_tokens", "aborted", "overlapped", "routed"):
        assert total[name] > 0
    assert all(total[f"captured {key}"] > 20 for key in ((True, False), (False, True), (True, True))), total
