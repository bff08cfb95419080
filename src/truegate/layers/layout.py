"""What every attention layer of one step shares: which rows form which sequence, and which pool slots each one reads.

Invariant: only slots inside a sequence's context are ever gathered; page-table entries past its end are never read, so
stale or foreign keys (NaN included) cannot reach an answer. Computed once a step, on the device, from host lists.
T rows, N sequences, P pages a sequence, S slots read by a sequence, Q rows of a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

import torch

from truegate.types import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Sequences with one row each, attended to as one padded batch of `length` slots.

    slots_S int64 [N * length]: reading past a context repeats its last slot, at bias -inf.
    bias_N1S [N, 1, length] in the run dtype: 0 inside the context, -inf past it; None where all contexts are `length`.
    """

    rows: slice | torch.Tensor
    size: int
    length: int
    slots_S: torch.Tensor
    bias_N1S: torch.Tensor | None


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
    """The step's rows, sorted into decode groups and chunks; `rotations_T1R` are the rows' rotary factors."""

    num_rows: int
    slots_T: torch.Tensor
    rotations_T1R: torch.Tensor
    decodes: tuple[DecodeGroup, ...]
    chunks: tuple[Chunk, ...]
    has_pads: bool

    def whole(self) -> DecodeGroup | Chunk | None:
        """The one part that covers every row, if there is one: its output needs no scattering."""
        parts = (*self.decodes, *self.chunks)
        return parts[0] if len(parts) == 1 and not self.has_pads else None


def step_layout(batch: Batch, page_size: int, rotations_XR: torch.Tensor, dtype: torch.dtype) -> StepLayout:
    """Sort the batch's sequences; `rotations_XR` is the model's rotary table."""
    starts = [0, *accumulate(batch.query_lens)]
    singles = [n for n, query_len in enumerate(batch.query_lens) if query_len == 1]
    num_rows = batch.token_ids_T.shape[0]
    return StepLayout(
        num_rows=num_rows,
        slots_T=batch.slots_T,
        rotations_T1R=rotations_XR.index_select(0, batch.positions_T).unsqueeze(1),
        decodes=tuple(_decode_group(batch, group, starts, page_size, dtype) for group in _by_length(batch, singles)),
        chunks=tuple(
            _chunk(batch, n, starts[n], page_size, dtype)
            for n, query_len in enumerate(batch.query_lens)
            if query_len > 1
        ),
        has_pads=starts[-1] < num_rows,
    )


# A further group costs about as much as reading this many padded slots (measured: see docs of `_by_length`).
GROUP_COST_SLOTS = 512


def _by_length(batch: Batch, sequences: list[int]) -> Iterator[list[int]]:
    """Cut decode sequences into groups of like context, so that one long context does not pad all the others.

    Greedy from the longest: a sequence opens a new group when padding the rest to the open group's length would cost
    more slots than a group costs.
    """
    if not sequences:
        return
    ordered = sorted(sequences, key=lambda n: -batch.context_lens[n])
    group: list[int] = []
    for place, n in enumerate(ordered):
        if group:
            waste = (batch.context_lens[group[0]] - batch.context_lens[n]) * (len(ordered) - place)
            if waste > GROUP_COST_SLOTS:
                yield sorted(group)
                group = []
        group.append(n)
    yield sorted(group)


def _decode_group(
    batch: Batch, sequences: list[int], starts: list[int], page_size: int, dtype: torch.dtype
) -> DecodeGroup:
    device = batch.slots_T.device
    lengths = [batch.context_lens[n] for n in sequences]
    length = max(lengths)
    rows = _rows([starts[n] for n in sequences], device)
    table_NP = batch.page_table_NP[_rows(sequences, device)]
    last_N1 = batch.positions_T[rows].unsqueeze(1)
    offsets_S = torch.arange(length, device=device)
    inside_NS = torch.minimum(offsets_S, last_N1)  # past the context: its last slot again
    pages_NS = table_NP.gather(1, inside_NS // page_size)
    bias = None
    if min(lengths) < length:
        bias = torch.zeros(len(sequences), 1, length, dtype=dtype, device=device)
        bias.masked_fill_((offsets_S > last_N1).unsqueeze(1), float("-inf"))
    return DecodeGroup(
        rows=rows,
        size=len(sequences),
        length=length,
        slots_S=(pages_NS * page_size + inside_NS % page_size).view(-1),
        bias_N1S=bias,
    )


def _chunk(batch: Batch, n: int, start: int, page_size: int, dtype: torch.dtype) -> Chunk:
    query_len, context = batch.query_lens[n], batch.context_lens[n]
    if query_len == context:
        return Chunk(start=start, stop=start + query_len, context=context, slots_S=None, bias_QS=None)
    device = batch.slots_T.device
    offsets_S = torch.arange(context, device=device)
    positions_Q1 = batch.positions_T[start : start + query_len].unsqueeze(1)
    bias_QS = torch.zeros(query_len, context, dtype=dtype, device=device)
    return Chunk(
        start=start,
        stop=start + query_len,
        context=context,
        slots_S=batch.page_table_NP[n][offsets_S // page_size] * page_size + offsets_S % page_size,
        bias_QS=bias_QS.masked_fill_(offsets_S > positions_Q1, float("-inf")),
    )


def _rows(indices: list[int], device: torch.device) -> slice | torch.Tensor:
    """A slice where the indices are consecutive (views, no copies), an index tensor elsewhere."""
    if indices == list(range(indices[0], indices[0] + len(indices))):
        return slice(indices[0], indices[0] + len(indices))
    return torch.tensor(indices, device=device)
