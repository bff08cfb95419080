"""What the attention kernels read of one step: which rows belong to which sequence and page-table row, on the device.

Invariant: built from the batch's host lists with one copy to the device; a captured step reads the same tensors again,
so its `PagedStep` is made once over buffers that are filled between steps.
T rows, D sequences with one row, C chunks (sequences with more), N sequences, P pages of one, X positions, R rotary,
B blocks of chunks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import numpy as np
import torch

from truegate.cache.pools import MLAPool, Pool
from truegate.types import Batch

EXPANDED = 1 << 15  # slots of contexts that latent attention holds keys and values of: 256 MiB at 16 heads in bf16
BLOCK_ROWS = 128  # rows of one entry of the work list; tiles of the prefill kernel divide it
NO_BLOCK = -1  # the chunk of an entry that only fills the list up


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedDecodes:
    """Row d attends to the contexts_D[d] slots of page-table row seqs_D[d]; int32, context 0: a padded row.

    num_splits cuts every context into so many parts (None: as many as fill the device), of at least min_split slots.
    """

    seqs_D: torch.Tensor
    contexts_D: torch.Tensor
    table_NP: torch.Tensor
    page_size: int
    num_splits: int | None = None
    min_split: int = 1

    @property
    def size(self) -> int:
        return self.seqs_D.shape[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedChunks:
    """chunks_C4 int32: first row, rows, context after them, row of table_NP (or first row of keys in order).

    blocks_B2 int32 is the work list, as `chunk_blocks` makes it: (chunk, which block_rows of its rows), or NO_BLOCK.
    A kernel's grid depends on B only. A chunk may have one row (a decode), or anything where no block names it.
    """

    chunks_C4: torch.Tensor
    blocks_B2: torch.Tensor
    table_NP: torch.Tensor | None
    page_size: int
    block_rows: int = BLOCK_ROWS


@dataclass(frozen=True, kw_only=True, slots=True)
class Expanded:
    """Chunks whose contexts latent attention expands to keys and values, once a layer, before it attends to them.

    slots_S are the pool slots of the contexts in a row, as `chunks` numbers them.
    """

    slots_S: torch.Tensor
    chunks: PagedChunks


@dataclass(frozen=True, kw_only=True, slots=True)
class PagedStep:
    """One step for the kernels: the decodes' rows, 0..D-1, come first; `whole` where they are all, `padded` where some
    rows belong to nobody.

    `expanded` stands for `chunks` over latents: as many at a time as EXPANDED holds. rotations_XR has cosines at even
    and sines at odd columns.
    """

    positions_T: torch.Tensor
    slots_T: torch.Tensor
    rotations_XR: torch.Tensor
    decodes: PagedDecodes | None
    chunks: PagedChunks | None = None
    whole: bool = False
    padded: bool = True
    expanded: tuple[Expanded, ...] = ()

    def rows_of(self, like: torch.Tensor, num_heads: int, size: int) -> torch.Tensor:
        """y_THE to be written by decodes and chunks, in the dtype of like_TX; rows that only pad are 0."""
        make = like.new_zeros if self.padded else like.new_empty
        return make(like.shape[0], num_heads, size)


def paged_step(batch: Batch, pool: Pool, rotations_XR: torch.Tensor, *, num_splits: int | None = None) -> PagedStep:
    """The layout of a batch whose sequences of one row come first; `num_splits` fixes how their contexts are cut.

    Numbers and alignment are as in a captured step: kernels are compiled for these, at start and not for a later step.
    """
    lens, contexts = batch.query_lens, batch.context_lens
    starts = [0, *accumulate(lens)]
    singles = [n for n, size in enumerate(lens) if size == 1]
    many = [n for n, size in enumerate(lens) if size > 1]
    if many and singles and singles[-1] > many[0]:
        raise ValueError("sequences of one row must come first in a batch that goes through the kernels")
    latent = isinstance(pool, MLAPool)
    groups = groups_of(many, contexts) if latent else [many] if many else []
    arrays = [aligned([singles, [contexts[n] for n in singles]], np.int32)]
    for group in groups:
        firsts = accumulate((contexts[n] for n in group), initial=0)
        paged = [(starts[n], lens[n], contexts[n], n) for n in group]
        in_order = [(*row[:3], first) for row, first in zip(paged, firsts, strict=False)]
        arrays += np.array(paged, dtype=np.int32), np.array(in_order, dtype=np.int32)
        arrays.append(chunk_blocks([lens[n] for n in group], [contexts[n] for n in group]))
    packed = on_device(np.concatenate([array.reshape(-1) for array in arrays]), batch.slots_T.device)
    pieces = iter(packed.split([array.size for array in arrays]))
    table_NP, page_size = _as_captured(batch.page_table_NP), pool.page_size
    seqs_D, contexts_D = next(pieces).view(2, -1)[:, : len(singles)].unbind(0)
    decodes = chunks = None
    if singles:
        decodes = PagedDecodes(
            seqs_D=seqs_D, contexts_D=contexts_D, table_NP=table_NP, page_size=page_size, num_splits=num_splits
        )
    expanded = []
    for group in groups:
        paged_C4, in_order_C4, blocks_B2 = next(pieces).view(-1, 4), next(pieces).view(-1, 4), next(pieces).view(-1, 2)
        chunks = PagedChunks(chunks_C4=paged_C4, blocks_B2=blocks_B2, table_NP=table_NP, page_size=page_size)
        if latent:
            slots_S = _slots_of(paged_C4, in_order_C4, table_NP, page_size, sum(contexts[n] for n in group))
            expanded.append(
                Expanded(slots_S=slots_S, chunks=replace(chunks, chunks_C4=in_order_C4, table_NP=None))
            )  # fmt: skip
    padded = starts[-1] < batch.token_ids_T.shape[0]
    return PagedStep(
        positions_T=batch.positions_T, slots_T=batch.slots_T, rotations_XR=rotations_XR, decodes=decodes,
        chunks=None if latent else chunks, whole=not many and not padded, padded=padded,
        expanded=tuple(expanded))  # fmt: skip


def groups_of(sequences: list[int], contexts: list[int]) -> list[list[int]]:
    """The sequences in runs whose contexts are at most EXPANDED together; a longer one stands alone."""
    groups: list[list[int]] = []
    room = 0
    for n in sequences:
        if not groups or contexts[n] > room:
            groups.append([])
            room = EXPANDED
        groups[-1].append(n)
        room -= contexts[n]
    return groups


def chunk_blocks(lens: list[int], contexts: list[int], length: int | None = None) -> np.ndarray:
    """blocks_B2 of `PagedChunks` for chunks of so many rows that end at these contexts; what sees most comes first.

    B is `length` where given, filled up with NO_BLOCK; `most_blocks` of the rows and chunks is always enough.
    """
    rows_C, contexts_C = np.array([lens, contexts], dtype=np.int64).reshape(2, -1)
    counts_C = -(-rows_C // BLOCK_ROWS)
    chunk_B = np.repeat(np.arange(len(lens)), counts_C)
    block_B = np.arange(len(chunk_B)) - np.repeat(np.cumsum(counts_C) - counts_C, counts_C)
    seen_B = (contexts_C - rows_C)[chunk_B] + np.minimum((block_B + 1) * BLOCK_ROWS, rows_C[chunk_B])
    order_B = np.argsort(-seen_B, kind="stable")
    blocks_B2 = np.full((len(order_B) if length is None else length, 2), NO_BLOCK, dtype=np.int32)
    blocks_B2[: len(order_B)] = np.stack((chunk_B, block_B), 1)[order_B]
    return blocks_B2


def most_blocks(num_rows: int, num_chunks: int) -> int:
    """Blocks of num_rows rows in at most num_chunks chunks, however they are cut."""
    return min(num_rows, (num_rows + (BLOCK_ROWS - 1) * num_chunks) // BLOCK_ROWS)


def _as_captured(table_NP: torch.Tensor) -> torch.Tensor:
    """The page table as StepGraphs holds it."""
    wide_NP = empty_table(*table_NP.shape, table_NP.device)
    wide_NP[:, : table_NP.shape[1]] = table_NP
    return wide_NP


def empty_table(num_rows: int, num_pages: int, device: torch.device) -> torch.Tensor:
    """Zeros for a page table as the kernels read it: int32, rows a multiple of 16 apart."""
    return torch.zeros(num_rows, -(-num_pages // 16) * 16, dtype=torch.int32, device=device)


def aligned(rows: Sequence[Sequence[int]], dtype: type[np.integer]) -> np.ndarray:
    """The rows, all of one length, as an array each row of which begins at 16 bytes, zeros behind them."""
    length, step = len(rows[0]), 16 // np.dtype(dtype).itemsize
    array = np.zeros((len(rows), -(-length // step) * step), dtype=dtype)
    array[:, :length] = rows
    return array


def _slots_of(
    paged_C4: torch.Tensor, in_order_C4: torch.Tensor, table_NP: torch.Tensor, page_size: int, total: int
) -> torch.Tensor:
    """Slots of the chunks' contexts, one context after another."""
    chunk_S = torch.repeat_interleave(paged_C4[:, 2].long(), output_size=total)
    offset_S = torch.arange(total, device=table_NP.device) - in_order_C4[chunk_S, 3]
    return table_NP[paged_C4[chunk_S, 3].long(), offset_S // page_size].long() * page_size + offset_S % page_size


def on_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """The array on the device; on a GPU through pinned memory, so that the host does not wait for earlier work."""
    return to_device(torch.from_numpy(array), device)


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """`on_device` of a tensor on the host."""
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)
