"""Steps captured as CUDA graphs for a grid of sizes: decode steps, and prefill steps too short to keep a GPU busy from
Python, alone or beside decodes. A step runs in the next larger graph.

Invariant: rows that only pad have context 0: `valid_T` is false there, they go to no expert, count for nothing, write
page 0 and nobody's last token. A captured step runs the model's own `forward`, so it computes what an eager one does.
X rows of a captured step: first D decodes (one row a sequence), then T rows of chunks; C chunks, M rows that sample,
F fields of a row, V vocabulary, L MoE layers, K routed top-k.
"""

from itertools import accumulate
from typing import Any

import numpy as np
import torch

from truegate.cache.pages import PageTable
from truegate.cache.pools import MLAPool
from truegate.layers.paged import (
    NO_BLOCK,
    Expanded,
    PagedChunks,
    PagedDecodes,
    PagedStep,
    chunk_blocks,
    empty_table,
    most_blocks,
    on_device,
)  # fmt: skip
from truegate.moe.recorder import Recorder
from truegate.sched.scheduler import Chunk
from truegate.types import Batch

FIELDS = ("token", "position", "cache slot", "sequence slot", "context")  # of a row
ON_DEVICE = -1  # the token of a row that reads last_token_buf
CHUNK_ROWS = (64, 128, 256, 384, 512, 768, 1024, 1536, 2048)  # T: above it the device is slower than Python
BESIDE = 64  # D of a captured step that mixes decodes and chunks
MAX_CHUNKS = 32  # C


def grid(largest: int) -> list[int]:
    """1, 2, 4, 8, then steps of 8, 16 and 32: at most half of a batch's rows pad, from 32 rows on at most a third."""
    sizes = [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, *range(128, largest + 32, 32)]
    return sorted({*(size for size in sizes if size < largest), largest})


def shapes(max_running: int, max_rows: int) -> list[tuple[int, int]]:
    """The (D, T) to capture for at most max_running sequences and max_rows rows of chunks a step.

    A chunk is one of the sequences and has at least two of the rows: what then cannot run beside it is not captured.
    """
    lengths = [rows for last, rows in zip((1, *CHUNK_ROWS), CHUNK_ROWS, strict=False) if last < max_rows]
    beside = max(0, min(BESIDE, max_running - 1, max_rows - 2))
    return [(size, 0) for size in grid(max_running)] + [(d, rows) for rows in lengths for d in sorted({0, beside})]


class Captured:
    """One captured step: fill `inputs_buf`, replay, read the outputs before the next replay of any size."""

    def __init__(self, num_decodes: int, num_rows: int, device: torch.device, nobody: int) -> None:
        self.num_decodes, self.num_rows = num_decodes, num_rows
        num_chunks = MAX_CHUNKS if num_rows else 0
        self.num_blocks = most_blocks(num_rows, num_chunks)
        self.num_samples = num_decodes + num_chunks
        self._shapes = (
            (len(FIELDS), num_decodes + num_rows),
            (num_chunks, 4),
            (self.num_blocks, 2),
            (2, self.num_samples),
        )
        idle = np.zeros(sum(a * b for a, b in self._shapes), dtype=np.int64)
        fields_FX, _, blocks_B2, samples_2M = self.parts(idle)
        fields_FX[3] = samples_2M[1] = nobody
        blocks_B2[:] = NO_BLOCK
        self.idle = idle  # what the buffer holds where nothing runs
        self.inputs_buf = torch.tensor(idle, device=device)
        self.graph: Any = None
        self.tokens_M: torch.Tensor | None = None  # the likeliest token of each row that samples

    def parts(self, inputs: Any) -> list[Any]:
        """Views of an array or tensor like inputs_buf: fields_FX, chunks_C4, blocks_B2 and samples_2M (row, slot)."""
        ends = accumulate(a * b for a, b in self._shapes)
        return [inputs[end - a * b : end].reshape(a, b) for (a, b), end in zip(self._shapes, ends, strict=True)]


class StepGraphs:
    """Captures at construction; `replay` runs the chunks of one step that `takes` agreed to, decodes first."""

    def __init__(
        self, model: Any, pool: Any, table: PageTable, last_token_buf: torch.Tensor, load: Any, *, max_rows: int
    ) -> None:
        self.model, self.pool, self.table, self.last_token_buf, self.load = model, pool, table, last_token_buf, load
        self.device = last_token_buf.device
        self.nobody, num_pages = table.array.shape  # the last row of the buffers by slot is no sequence's
        self.table_buf = empty_table(self.nobody + 1, num_pages, self.device)
        self.expands = isinstance(pool, MLAPool)
        table.record_writes()
        wanted = sorted(shapes(self.nobody, max_rows), key=sum, reverse=True)
        made = [Captured(*shape, self.device, self.nobody) for shape in wanted]
        samples = max(one.num_samples for one in made)
        self.logits_buf = torch.empty(samples, model.vocab_size, dtype=model.dtype, device=self.device)
        self.routed_bufs: tuple[torch.Tensor, ...] = ()  # ids_XLK and weights_XLK; as logits_buf, one for all sizes
        self._memory = torch.cuda.graph_pool_handle() if self.device.type == "cuda" else None
        for one in made:  # the largest first: the others fit in its memory
            self._capture(one)
        self.captured = made[::-1]  # the smallest first

    def takes(self, chunks: list[Chunk]) -> Captured | None:
        """The graph for a step, or None: then it runs eagerly."""
        many = [chunk for chunk in chunks if chunk.size > 1]
        if not many and not all(chunk.samples for chunk in chunks):
            return None  # every row of a decode step samples
        num_decodes, num_rows = len(chunks) - len(many), sum(chunk.size for chunk in many)
        if len(many) > MAX_CHUNKS or (self.expands and any(chunk.start for chunk in many)):
            return None
        fits = (
            one for one in self.captured
            if one.num_decodes >= num_decodes and one.num_rows >= num_rows and bool(one.num_rows) == bool(many)
        )  # fmt: skip
        return next(fits, None)

    def replay(self, captured: Captured, chunks: list[Chunk]) -> list[Chunk]:
        """Run one step, chunks of one row first; returns those that sample, in the order of tokens_M and logits_buf."""
        inputs = captured.idle.copy()
        fields_FX, chunks_C4, blocks_B2, samples_2M = captured.parts(inputs)
        size, decodes, lens, contexts = self.pool.page_size, 0, [], []
        row, sampling = captured.num_decodes, []
        for chunk in chunks:
            one, start, end = chunk.sequence, chunk.start, chunk.start + chunk.size
            if chunk.size == 1:
                token = one.tokens[start] if start < len(one.tokens) else ON_DEVICE
                place = one.pages[start // size] * size + start % size
                fields_FX[:, decodes] = token, start, place, one.slot, end
                last, decodes = decodes, decodes + 1
            else:
                rows, place = slice(row, row + chunk.size), np.arange(start, end)
                pages = self.table.array[one.slot, place // size]
                fields_FX[0, rows], fields_FX[1, rows] = one.tokens[start:end], place
                fields_FX[2, rows], fields_FX[3, rows] = pages * size + place % size, one.slot
                fields_FX[4, rows] = place + 1
                chunks_C4[len(lens)] = row, chunk.size, end, row - captured.num_decodes if self.expands else one.slot
                row += chunk.size
                lens.append(chunk.size)
                contexts.append(end)
                last = row - 1
            if chunk.samples:
                samples_2M[:, len(sampling)] = last, one.slot
                sampling.append(chunk)
        if lens:
            blocks_B2[:] = chunk_blocks(lens, contexts, captured.num_blocks)
        self.update_table()
        captured.inputs_buf.copy_(torch.from_numpy(inputs).pin_memory(), non_blocking=True)
        captured.graph.replay()
        return sampling

    def routed(self, captured: Captured, chunks: list[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """ids_TLK and weights_TLK of the rows that ran, in the order of `chunks` (one-row ones first)."""
        num_rows = sum(chunk.size for chunk in chunks)
        num_decodes = sum(chunk.size == 1 for chunk in chunks)
        end = captured.num_decodes + num_rows - num_decodes
        return tuple(torch.cat((part[:num_decodes], part[captured.num_decodes : end])) for part in self.routed_bufs)

    def update_table(self) -> None:
        """Bring the page table's copy up to date: for every step, or what eager ones wrote would pile up."""
        places = self.table.take_writes(self.table_buf.shape[1])
        if len(places):
            values = self.table.array[places // self.table_buf.shape[1], places % self.table_buf.shape[1]]
            packed = on_device(np.stack((places, values)), self.device)
            self.table_buf.view(-1).index_copy_(0, packed[0], packed[1].int())

    def _capture(self, captured: Captured) -> None:
        self._step(captured)  # compiles, and lets libraries allocate
        torch.cuda.synchronize(self.device)  # sync: start-up
        captured.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured.graph, pool=self._memory):
            self._step(captured)

    @torch.inference_mode()
    def _step(self, captured: Captured) -> None:
        """What is captured: inputs_buf -> the model -> tokens_M, which are also the slots' last tokens."""
        fields_FX, chunks_C4, blocks_B2, samples_2M = captured.parts(captured.inputs_buf)
        token, position, place, slot, context = fields_FX.unbind(0)
        valid_X = context > 0
        batch = Batch(
            token_ids_T=torch.where(token == ON_DEVICE, self.last_token_buf[slot], token), positions_T=position,
            valid_T=valid_X, slots_T=place, page_table_NP=self.table_buf, query_lens=[], context_lens=[],
            logit_rows_M=samples_2M[0], all_valid=False, recorder=Recorder() if self.load is not None else None,
            paged=self._paged(captured, fields_FX, chunks_C4, blocks_B2))  # fmt: skip
        hidden_XD = self.model.forward(batch, self.pool)
        if self.load is not None:
            num_rows = captured.num_decodes + captured.num_rows
            if not self.routed_bufs or len(self.routed_bufs[0]) < num_rows:  # the first step, the largest
                self.routed_bufs = batch.recorder.stacked()
            ids_buf, weights_buf = self.routed_bufs
            ids_XLK, _ = batch.recorder.stacked((ids_buf[:num_rows], weights_buf[:num_rows]))
            self.load.count(ids_XLK, valid_X)
        sampled_MD, slot_M = (hidden_XD[samples_2M[0]], samples_2M[1]) if captured.num_rows else (hidden_XD, slot)
        logits_MV = self.logits_buf[: captured.num_samples]
        torch.mm(sampled_MD, self.model.head.t(), out=logits_MV)
        captured.tokens_M = logits_MV.argmax(dim=-1)
        self.last_token_buf.index_copy_(0, slot_M, captured.tokens_M)

    def _paged(
        self, captured: Captured, fields_FX: torch.Tensor, chunks_C4: torch.Tensor, blocks_B2: torch.Tensor
    ) -> PagedStep:
        num_decodes, page_size = captured.num_decodes, self.pool.page_size
        position, place, slot, context = fields_FX[1:].unbind(0)
        decodes, chunks, expanded = None, None, ()
        if num_decodes:
            decodes = PagedDecodes(
                seqs_D=slot[:num_decodes].int(), contexts_D=context[:num_decodes].int(), table_NP=self.table_buf,
                page_size=page_size, num_splits=self.model.num_splits)  # fmt: skip
        if captured.num_rows:
            table_NP = None if self.expands else self.table_buf
            chunks = PagedChunks(
                chunks_C4=chunks_C4.int(), blocks_B2=blocks_B2.int(), table_NP=table_NP, page_size=page_size
            )  # fmt: skip
            if self.expands:
                chunks, expanded = None, (Expanded(slots_S=place[num_decodes:], chunks=chunks),)
        return PagedStep(
            positions_T=position, slots_T=place, rotations_XR=self.model.cosines_XR, decodes=decodes, chunks=chunks,
            whole=not captured.num_rows, expanded=expanded)  # fmt: skip
