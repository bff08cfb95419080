"""Decode steps captured as CUDA graphs, one for each of a grid of batch sizes; a batch runs in the next larger one.

Invariant: rows that only pad have context 0: `valid_T` is false there, they go to no expert, count for nothing, write
page 0 and nobody's last token. A captured step runs the model's own `forward`, so it computes what an eager one does.
B rows of a captured step, S rows in use, F fields of `inputs_buf`, V vocabulary, L MoE layers, K routed top-k.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from truegate.cache.pages import PageTable
from truegate.layers.paged import PagedDecodes, PagedStep, on_device
from truegate.moe.recorder import Recorder
from truegate.sched.scheduler import Chunk
from truegate.types import Batch

FIELDS = ("token", "position", "cache slot", "sequence slot", "context")  # rows of inputs_buf
ON_DEVICE = -1  # the token of a row that reads last_token_buf


def grid(largest: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8, 16 and 32: at most half of a batch's rows pad, from 32 rows on at most a third."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, largest + 32, 32)]
    return sorted({*(size for size in sizes if size < largest), largest})


@dataclass(slots=True)
class Captured:
    """One captured step: fill `inputs_buf`, replay, read the outputs before the next replay of any size."""

    size: int
    inputs_buf: torch.Tensor  # int64 [F, B]
    graph: Any = None
    tokens_B: torch.Tensor | None = None  # the likeliest token of each row
    routed: tuple[torch.Tensor, torch.Tensor] | None = None  # ids_BLK, weights_BLK


class DecodeGraphs:
    """Captures at construction; `replay` runs the chunks of one step, each of one row that samples."""

    def __init__(self, model: Any, pool: Any, table: PageTable, last_token_buf: torch.Tensor, load: Any) -> None:
        self.model, self.pool, self.table, self.last_token_buf, self.load = model, pool, table, last_token_buf, load
        self.device = last_token_buf.device
        self.nobody, num_pages = table.array.shape  # the last row of the buffers by slot is no sequence's
        width = -(-num_pages // 16) * 16  # a row stride that kernels are compiled for once
        self.table_buf = torch.zeros(self.nobody + 1, width, dtype=torch.int32, device=self.device)
        self.largest = self.nobody
        self.logits_buf = torch.empty(self.largest, model.vocab_size, dtype=model.dtype, device=self.device)
        table.record_writes()
        self._rows_buf = torch.arange(self.largest, dtype=torch.int32, device=self.device)
        self._memory = torch.cuda.graph_pool_handle()
        self.captured: dict[int, Captured] = {}
        for size in sorted(grid(self.largest), reverse=True):  # the largest first: the others fit in its memory
            self.captured[size] = self._capture(size)
        self._sizes = sorted(self.captured)

    def takes(self, chunks: list[Chunk]) -> bool:
        """Whether a step is one row for each sequence, all of which sample."""
        return len(chunks) <= self.largest and all(chunk.size == 1 and chunk.samples for chunk in chunks)

    def replay(self, chunks: list[Chunk]) -> Captured:
        """Run one step; outputs are those of the first len(chunks) rows, `logits_buf` included."""
        captured = self.captured[next(size for size in self._sizes if size >= len(chunks))]
        inputs = np.zeros((len(FIELDS), captured.size), dtype=np.int64)
        inputs[3] = self.nobody
        size = self.pool.page_size
        for row, chunk in enumerate(chunks):
            one, start = chunk.sequence, chunk.start
            token = one.tokens[start] if start < len(one.tokens) else ON_DEVICE
            place = one.pages[start // size] * size + start % size
            inputs[:, row] = token, start, place, one.slot, start + 1
        self._update_table()
        captured.inputs_buf.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return captured

    def _update_table(self) -> None:
        places = self.table.take_writes(self.table_buf.shape[1])
        if len(places):
            values = self.table.array[places // self.table_buf.shape[1], places % self.table_buf.shape[1]]
            packed = on_device(np.stack((places, values)), self.device)
            self.table_buf.view(-1).index_copy_(0, packed[0], packed[1].int())

    def _capture(self, size: int) -> Captured:
        inputs_buf = torch.zeros(len(FIELDS), size, dtype=torch.int64, device=self.device)
        inputs_buf[3] = self.nobody
        captured = Captured(size, inputs_buf)
        self._step(captured)  # compiles, and lets libraries allocate
        torch.cuda.synchronize(self.device)  # sync: start-up
        captured.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured.graph, pool=self._memory):
            self._step(captured)
        return captured

    @torch.inference_mode()
    def _step(self, captured: Captured) -> None:
        """What is captured: inputs_buf -> the model -> tokens_B, which are also the slots' last tokens."""
        token, position, place, slot, context = captured.inputs_buf.unbind(0)
        size = captured.size
        valid_T = context > 0
        decodes = PagedDecodes(
            rows_D=self._rows_buf[:size], seqs_D=slot.int(),
            contexts_D=context.int(), table_NP=self.table_buf, page_size=self.pool.page_size,
            num_splits=self.model.num_splits)  # fmt: skip
        batch = Batch(
            token_ids_T=torch.where(token == ON_DEVICE, self.last_token_buf[slot], token), positions_T=position,
            valid_T=valid_T, slots_T=place, page_table_NP=self.table_buf, query_lens=[1] * size,
            context_lens=[1] * size, logit_rows_M=slot, all_valid=False,
            recorder=Recorder() if self.load is not None else None,
            paged=PagedStep(
                positions_T=position, slots_T=place, rotations_XR=self.model.cosines_XR, decodes=decodes, whole=True
            ))  # fmt: skip
        hidden_TD = self.model.forward(batch, self.pool)
        if self.load is not None:
            captured.routed = batch.recorder.stacked()
            self.load.count(captured.routed[0], valid_T)
        logits_BV = self.logits_buf[:size]
        torch.mm(hidden_TD, self.model.head.t(), out=logits_BV)
        captured.tokens_B = logits_BV.argmax(dim=-1)
        self.last_token_buf.index_copy_(0, slot, captured.tokens_B)
