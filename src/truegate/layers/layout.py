"""What every attention layer of one step shares: which rows form which sequence, and which pool slots each one reads.

Invariant: only slots inside a sequence's context are ever gathered; page-table entries past its end are never read, so
stale or foreign keys (NaN included) cannot reach an answer. Computed once a step, on the device, from host lists.
T rows, N decode sequences, P pages a sequence, S slots read by a sequence, Q rows of a sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from truegate.cache.pools import Pool
from truegate.types import Batch

# A group costs a few small operations; padding a context costs its bytes. On a CPU (one core, fp32) six operations take
# about as long as reading 128 KiB of keys, and a group whose rows fit the cache is attended to at half the time of one
# that does not: 16 contexts of 512 latents (19 MB) take 9.4 ms in one group, 5.2 in groups of 2 or 4, 6.5 one by one.
GROUP_COST_BYTES = 128 << 10
GROUP_MAX_BYTES = 4 << 20


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Rows [start, stop) of the decode rows, attended to as one padded batch of `length` slots.

    slots_S int64 [N * length]: reading past a context repeats its last slot, at bias -inf. A slice on a CPU where one
    sequence lies in neighbouring pages, and nothing has to be gathered.
    bias_N1S [N, 1, length] in the run dtype: 0 inside the context, -inf past it; None where all contexts are `length`.
    """

    start: int
    stop: int
    length: int
    slots_S: torch.Tensor | slice
    bias_N1S: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Decodes:
    """Sequences with one row each: which rows of the batch they are, in the order of the groups."""

    rows: slice | torch.Tensor
    size: int
    groups: tuple[DecodeGroup, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """One sequence with several rows [start, stop), of which the last is position `context` - 1.

    slots_S int64 [context], or None where the rows are the whole context and nothing has to be read back.
    bias_QS [Q, context]: 0 where slot <= row's position, else -inf; None with slots_S (plain causal).
    """

    start: int
    stop: int
    context: int
    slots_S: torch.Tensor | None
    bias_QS: torch.Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class StepLayout:
    """The step's rows, sorted into decodes and chunks; `rotations_T1R` are the rows' rotary factors."""

    num_rows: int
    slots_T: torch.Tensor
    rotations_T1R: torch.Tensor
    decodes: Decodes | None
    chunks: tuple[Chunk, ...]
    whole: Decodes | Chunk | None  # the part that is the entire batch in order: its output needs no scattering


def step_layout(batch: Batch, pool: Pool, rotations_XR: torch.Tensor) -> StepLayout:
    """Sort the batch's sequences; `rotations_XR` is the model's rotary table."""
    starts = [0, *accumulate(batch.query_lens)]
    singles = [n for n, query_len in enumerate(batch.query_lens) if query_len == 1]
    num_rows = batch.token_ids_T.shape[0]
    decodes = _decodes(batch, singles, starts, pool) if singles else None
    chunks = tuple(_chunk(batch, n, starts[n], pool) for n, query_len in enumerate(batch.query_lens) if query_len > 1)
    whole: Decodes | Chunk | None = None
    if decodes is not None and not chunks and decodes.rows == slice(0, num_rows):
        whole = decodes
    elif decodes is None and len(chunks) == 1 and chunks[0].stop == num_rows:
        whole = chunks[0]
    return StepLayout(
        num_rows=num_rows,
        slots_T=batch.slots_T,
        rotations_T1R=rotations_XR.index_select(0, batch.positions_T).unsqueeze(1),
        decodes=decodes,
        chunks=chunks,
        whole=whole,
    )


def cut(lengths: Sequence[int], most: int, cost: int) -> tuple[list[int], int]:
    """Cut a row of contexts into consecutive groups: (ends of the groups, slots read in all, groups' cost included).

    A context opens a new group when padding it, or the group to it, would read `cost` slots more than it has, or when
    the group would exceed `most` slots.
    """
    ends, longest, size, total = [], 0, 0, 0
    for place, length in enumerate(lengths):
        wider = max(longest, length)
        waste = (wider - longest) * size + (wider - length)
        if size and (waste > cost or wider * (size + 1) > most):
            ends.append(place)
            total += longest * size + cost
            longest = size = 0
            wider = length
        longest, size = wider, size + 1
    return [*ends, len(lengths)], total + longest * size + cost


def _decodes(batch: Batch, sequences: list[int], starts: list[int], pool: Pool) -> Decodes:
    """Groups of like context: in the batch's own order, or longest first where that reads fewer slots."""
    on_cpu = batch.slots_T.device.type == "cpu"
    slot_bytes = pool.width * pool.data.element_size()
    most, cost = (GROUP_MAX_BYTES // slot_bytes, GROUP_COST_BYTES // slot_bytes) if on_cpu else (1 << 60, 1 << 60)
    contexts = batch.context_lens
    ends, total = cut([contexts[n] for n in sequences], most, cost)
    if len(ends) > 1:
        longest_first = sorted(sequences, key=lambda n: -contexts[n])
        other_ends, other_total = cut([contexts[n] for n in longest_first], most, cost)
        if other_total < total:
            sequences, ends = longest_first, other_ends
    device = batch.slots_T.device
    rows = _rows([starts[n] for n in sequences], device)
    table_NP = batch.page_table_NP[_rows(sequences, device)]
    last_N1 = batch.positions_T[rows].unsqueeze(1)
    groups = []
    for start, stop in zip([0, *ends], ends, strict=False):
        lengths = [contexts[n] for n in sequences[start:stop]]
        groups.append(_group(start, stop, lengths, table_NP[start:stop], last_N1[start:stop], pool))
    return Decodes(rows=rows, size=len(sequences), groups=tuple(groups))


def _group(
    start: int, stop: int, lengths: list[int], table_NP: torch.Tensor, last_N1: torch.Tensor, pool: Pool
) -> DecodeGroup:
    length = max(lengths)
    if stop - start == 1 and table_NP.device.type == "cpu":
        pages = table_NP[0, : -(-length // pool.page_size)].tolist()  # sync: a CPU tensor
        if pages == list(range(pages[0], pages[0] + len(pages))):
            first = pages[0] * pool.page_size
            return DecodeGroup(
                start=start, stop=stop, length=length, slots_S=slice(first, first + length), bias_N1S=None
            )
    offsets_S = torch.arange(length, device=table_NP.device)
    bias = None
    if min(lengths) < length:
        bias = torch.zeros(stop - start, 1, length, dtype=pool.data.dtype, device=table_NP.device)
        bias.masked_fill_((offsets_S > last_N1).unsqueeze(1), float("-inf"))
    inside_NS = torch.minimum(offsets_S, last_N1)  # past the context: its last slot again
    pages_NS = table_NP.gather(1, inside_NS // pool.page_size)
    slots_NS = pages_NS.mul_(pool.page_size).add_(inside_NS.remainder_(pool.page_size))
    return DecodeGroup(start=start, stop=stop, length=length, slots_S=slots_NS.view(-1), bias_N1S=bias)


def _chunk(batch: Batch, n: int, start: int, pool: Pool) -> Chunk:
    query_len, context = batch.query_lens[n], batch.context_lens[n]
    if query_len == context:
        return Chunk(start=start, stop=start + query_len, context=context, slots_S=None, bias_QS=None)
    device = batch.slots_T.device
    offsets_S = torch.arange(context, device=device)
    positions_Q1 = batch.positions_T[start : start + query_len].unsqueeze(1)
    bias_QS = torch.zeros(query_len, context, dtype=pool.data.dtype, device=device)
    size = pool.page_size
    return Chunk(
        start=start,
        stop=start + query_len,
        context=context,
        slots_S=batch.page_table_NP[n][offsets_S // size] * size + offsets_S % size,
        bias_QS=bias_QS.masked_fill_(offsets_S > positions_Q1, float("-inf")),
    )


def _rows(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice where the indices are consecutive (views, no copies), an index tensor elsewhere."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, device=device)
