"""From chunks to tokens: builds the Batch, runs the model, samples.

Invariant: nothing here waits for the device; `Launched.read` is the one place that does, and the engine calls it after
the next step was launched when it runs ahead. Legend: types.py, plus S sequences that sample in this step.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from truegate.cache.pages import PageTable
from truegate.config import EngineConfig
from truegate.engine.graphs import Captured, StepGraphs
from truegate.engine.sampler import Described, Sampler, describe
from truegate.layers.paged import aligned, on_device
from truegate.moe.recorder import Recorder
from truegate.sched.scheduler import Chunk
from truegate.sched.sequence import Sequence
from truegate.types import Batch


@dataclass(slots=True)
class Launched:
    """A step on its way: what it computed, for whom."""

    chunks: list[Chunk]
    sampled: list[Sequence]
    tokens_S: torch.Tensor | None
    described: Described | None = None
    prompt_described: list[tuple[Chunk, Described]] = field(default_factory=list)
    routed: tuple[torch.Tensor, torch.Tensor] | None = None  # ids_TLK, weights_TLK, if anybody asked
    done: Any = None  # event on a GPU: what is read has come to the host

    def fetch(self, device: torch.device) -> "Launched":
        """Start bringing to the host what is read later; a GPU then goes on with the next step."""
        if device.type == "cpu":
            return self
        if self.tokens_S is not None:
            self.tokens_S = self.tokens_S.to("cpu", non_blocking=True)
        for described in (self.described, *(one for _, one in self.prompt_described)):
            if described is not None:
                described.fetch()
        if self.routed is not None:
            self.routed = tuple(part.to("cpu", non_blocking=True) for part in self.routed)
        self.done = torch.cuda.Event()
        self.done.record()
        return self

    def read(self) -> list[int]:
        if self.done is not None:
            self.done.synchronize()  # sync: the step's tokens
        return self.tokens_S.tolist() if self.tokens_S is not None else []


class ExpertLoad:
    """How many rows each logical expert got since start, by MoE layer: load_LE += sum_TK [ids_TLK = e]."""

    def __init__(self, moe_layers: list[Any], device: torch.device) -> None:
        self.num_experts = max(layer.spec.num_choices for layer in moe_layers)
        width = self.num_experts + 1  # the last column takes the -1 of layers with fewer choices
        self._load_buf = torch.zeros(len(moe_layers) * width, dtype=torch.int64, device=device)
        self._first_L1 = torch.arange(len(moe_layers), device=device)[:, None] * width

    def count(self, ids_TLK: torch.Tensor, valid_T: torch.Tensor) -> None:
        index_TLK = ids_TLK % (self.num_experts + 1) + self._first_L1
        rows_TLK = valid_T.to(torch.int64)[:, None, None].expand_as(index_TLK)
        self._load_buf.scatter_add_(0, index_TLK.flatten(), rows_TLK.flatten())

    def read(self) -> np.ndarray:
        return self._load_buf.view(-1, self.num_experts + 1)[:, :-1].cpu().numpy().copy()


class Runner:
    """Owns the model, its pool, and the sampler."""

    def __init__(self, model: Any, pool: Any, table: PageTable, config: EngineConfig) -> None:
        self.model = model
        self.pool = pool
        self.table = table
        self.page_size = config.page_size
        self.runs_ahead = config.overlap  # the next step takes its tokens from last_token_buf
        self.device = torch.device(model.device)
        num_slots = table.array.shape[0]
        self.sampler = Sampler(model.vocab_size, num_slots, self.device)
        self.last_token_buf = torch.zeros(
            num_slots + 1, dtype=torch.int64, device=self.device
        )  # by slot; last: nobody's
        self.load = ExpertLoad(model.moe_layers, self.device) if model.moe_layers else None
        self._always_valid = torch.ones(1, dtype=torch.bool, device=self.device)
        self.graphs: StepGraphs | None = None
        if config.cuda_graphs:
            self.graphs = StepGraphs(
                model, pool, table, self.last_token_buf, self.load, max_rows=config.chunked_prefill_tokens
            )  # fmt: skip

    @torch.inference_mode()
    def launch(self, chunks: list[Chunk], *, routed: bool = False) -> Launched:
        """Run one step; `routed` also keeps which experts ran."""
        chunks = sorted(chunks, key=lambda chunk: chunk.size > 1)  # rows of decodes come first
        if self.graphs is not None:
            captured = None if any(map(_prompt_rows, chunks)) else self.graphs.takes(chunks)
            if captured is not None:
                return self._replay(captured, chunks, routed).fetch(self.device)
            self.graphs.update_table()
        batch, sampled, prompts = self._build(chunks)
        if self.load is not None:
            batch.recorder = Recorder(weights=routed)
        hidden_TD = self.model.forward(batch, self.pool)
        launched = Launched(chunks, sampled, None)
        if self.load is not None:
            ids_TLK, weights_TLK = batch.recorder.stacked()
            self.load.count(ids_TLK, batch.valid_T)
            launched.routed = (ids_TLK, weights_TLK) if routed else None
        if sampled:
            every_row = len(sampled) == hidden_TD.shape[0]  # then the sampling rows are all rows, in order
            rows_S = batch.logit_rows_M[: len(sampled)]
            logits_SV = self.model.logits(hidden_TD if every_row else hidden_TD[rows_S])
            launched.tokens_S, launched.described = self.sampler.sample(logits_SV, sampled)
            self._keep_tokens(launched)
        launched.prompt_described = self._describe_prompts(prompts, hidden_TD, batch.logit_rows_M[len(sampled) :])
        return launched.fetch(self.device)

    def _replay(self, captured: Captured, chunks: list[Chunk], routed: bool) -> Launched:
        """One step captured before."""
        sampled = [chunk.sequence for chunk in self.graphs.replay(captured, chunks)]
        launched = Launched(chunks, sampled, captured.tokens_M[: len(sampled)])
        if not all(one.state.draw.plain for one in sampled):
            logits_SV = self.graphs.logits_buf[: len(sampled)].float()
            launched.tokens_S, launched.described = self.sampler.sample(logits_SV, sampled)
            self._keep_tokens(launched)
        if routed:
            launched.routed = self.graphs.routed(captured, chunks)
        return launched

    def _describe_prompts(
        self, prompts: list[tuple[Chunk, int]], hidden_TD: torch.Tensor, rows_M: torch.Tensor
    ) -> list[tuple[Chunk, Described]]:
        """What was asked about prompt tokens, which rows_M predict: first those of the first chunk."""
        described = []
        for chunk, count in prompts:
            mine, rows_M = rows_M.tensor_split([count])
            params = chunk.sequence.params
            positions = range(chunk.start + 1, chunk.start + 1 + count)  # these logits speak about
            described.append((chunk, describe(
                lambda run, mine=mine: self.model.logits(hidden_TD[mine[run]]),
                self._tensor(chunk.sequence.tokens[positions.start : positions.stop]), self.model.vocab_size,
                list(positions), [params.prompt_logprobs] * count, [list(params.logprob_token_ids)] * count,
            )))  # fmt: skip
        return described

    def _keep_tokens(self, launched: Launched) -> None:
        """For the next step, which may be launched before the host knows them."""
        if self.runs_ahead:
            slots = self._tensor([one.slot for one in launched.sampled])
            self.last_token_buf.index_copy_(0, slots, launched.tokens_S)

    def _build(self, chunks: list[Chunk]) -> tuple[Batch, list[Sequence], list[tuple[Chunk, int]]]:
        """The Batch; its logit rows are first those that sample, then the prompt rows whose logits were asked for."""
        size = self.page_size
        token_ids: list[int] = []
        positions: list[int] = []
        cache_slots: list[int] = []
        unknown: list[tuple[int, int]] = []  # (row, slot): the token is still on the device
        sampled, sample_rows, prompts, prompt_rows = [], [], [], []
        for chunk in chunks:
            one, start = chunk.sequence, chunk.start
            row, end = len(token_ids), start + chunk.size
            if chunk.size == 1:
                if start < len(one.tokens):
                    token_ids.append(one.tokens[start])
                else:
                    unknown.append((row, one.slot))
                    token_ids.append(0)
                positions.append(start)
                cache_slots.append(one.pages[start // size] * size + start % size)
            else:
                token_ids += one.tokens[start:end]
                positions += range(start, end)
                place = np.arange(start, end)
                cache_slots += (self.table.array[one.slot, place // size] * size + place % size).tolist()
            if chunk.samples:
                sampled.append(one)
                sample_rows.append(row + chunk.size - 1)
            wanted = _prompt_rows(chunk)
            if wanted:
                prompts.append((chunk, wanted))
                prompt_rows += range(row, row + wanted)
        context_lens = [chunk.start + chunk.size for chunk in chunks]
        num_rows, width = len(token_ids), -(-max(context_lens) // size)
        slots = [chunk.sequence.slot for chunk in chunks]
        fields_3T = self._on_device(aligned([token_ids, positions, cache_slots], np.int64))[:, :num_rows]
        token_ids_T, positions_T, slots_T = fields_3T.unbind(0)
        if unknown:
            rows, unknown_slots = zip(*unknown, strict=True)
            token_ids_T[self._tensor(rows)] = self.last_token_buf[self._tensor(unknown_slots)]
        if num_rows > self._always_valid.shape[0]:
            self._always_valid = torch.ones(2 * num_rows, dtype=torch.bool, device=self.device)
        batch = Batch(
            token_ids_T=token_ids_T,
            positions_T=positions_T,
            valid_T=self._always_valid[:num_rows],
            slots_T=slots_T,
            page_table_NP=self._on_device(self.table.array[slots, :width]),
            query_lens=[chunk.size for chunk in chunks],
            context_lens=context_lens,
            logit_rows_M=self._tensor(sample_rows + prompt_rows),
            all_valid=self.graphs is None,  # else through the router's kernel as captured steps have it compiled
        )
        return batch, sampled, prompts

    def _tensor(self, values: Any) -> torch.Tensor:
        return self._on_device(np.array(values, dtype=np.int64))

    def _on_device(self, array: np.ndarray) -> torch.Tensor:
        return on_device(array, self.device)


def _prompt_rows(chunk: Chunk) -> int:
    """Rows of a chunk whose logits predict a prompt token that was asked about."""
    one = chunk.sequence
    if one.params.prompt_logprobs is None or one.num_output or one.in_flight:
        return 0
    return max(0, min(chunk.start + chunk.size, one.prompt_length - 1) - chunk.start)
