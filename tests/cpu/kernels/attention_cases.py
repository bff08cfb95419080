"""The attention kernels against their twins, wherever they run: what the CPU (interpreted) and GPU tests share.

Every number a kernel must not read is NaN: rows of other sequences, slots past a context, page 0, unused table entries
point outside the pool. T rows, N sequences, S slots, H query heads, K key heads, E, R, V sizes of a head's parts.
"""

from dataclasses import replace

import numpy as np
import torch

from truegate.cache.pools import Pool
from truegate.layers.paged import PagedChunks, PagedStep, chunk_blocks, most_blocks, paged_step
from truegate.types import Batch

PAGE = 16
TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 2e-2}  # of the largest value


class Case:
    """Sequences (rows, context) over scattered pages of a pool of `width` numbers a slot."""

    def __init__(self, parts, *, width: int, dtype: torch.dtype, device: str, seed: int = 0, pool: type = Pool):
        self.generator = torch.Generator().manual_seed(seed)
        parts = sorted(parts, key=lambda part: part[0] > 1)  # decodes come first
        self.parts, self.dtype, self.device = parts, dtype, device
        most = -(-max(context for _, context in parts) // PAGE)
        num_pages = 1 + most * len(parts)
        self.pool = pool(
            num_layers=1, num_pages=num_pages, page_size=PAGE, width=width, dtype=dtype, device=device)  # fmt: skip
        self.pool.data.fill_(float("nan"))
        order = torch.randperm(num_pages - 1, generator=self.generator) + 1
        table_NP = order.view(len(parts), most).clone()
        slots = []
        for n, (rows, context) in enumerate(parts):
            place = torch.arange(context)
            slots_S = table_NP[n][place // PAGE] * PAGE + place % PAGE
            self.pool.rows(0)[slots_S.to(device)] = self.random(context, width)
            slots.append(slots_S[context - rows :])
            table_NP[n, -(-context // PAGE) :] = 1 << 30  # no such page
        positions = [torch.arange(context - rows, context) for rows, context in parts]
        num_rows = sum(rows for rows, _ in parts)
        self.batch = Batch(
            token_ids_T=torch.zeros(num_rows, dtype=torch.int64, device=device),
            positions_T=torch.cat(positions).to(device), valid_T=torch.ones(num_rows, dtype=torch.bool, device=device),
            slots_T=torch.cat(slots).to(device), page_table_NP=table_NP.to(device),
            query_lens=[rows for rows, _ in parts], context_lens=[context for _, context in parts],
            logit_rows_M=torch.arange(num_rows, device=device))  # fmt: skip

    def random(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).to(self.dtype).to(self.device)

    def step(self, *, num_splits: int | None = None) -> PagedStep:
        return paged_step(self.batch, self.pool, torch.zeros(1, 2, device=self.device), num_splits=num_splits)

    def all_chunks(self, spare: int) -> PagedChunks:
        """Every sequence a chunk, decodes too, in buffers for `spare` more rows and chunks, filled with what is unread.

        The spare rows lie behind those of the batch; this is how a captured step of a fixed number of rows is laid out.
        """
        lens, contexts = self.batch.query_lens, self.batch.context_lens
        num_rows, num_chunks = sum(lens) + spare, len(lens) + spare
        chunks_C4 = np.full((num_chunks, 4), -99999, dtype=np.int32)
        firsts = np.cumsum([0, *lens])[:-1]
        chunks_C4[: len(lens)] = np.stack((firsts, lens, contexts, np.arange(len(lens))), 1)
        blocks_B2 = chunk_blocks(lens, contexts, most_blocks(num_rows, num_chunks))
        return PagedChunks(
            chunks_C4=torch.from_numpy(chunks_C4).to(self.device), table_NP=self.batch.page_table_NP, page_size=PAGE,
            blocks_B2=torch.from_numpy(blocks_B2).to(self.device))  # fmt: skip


def error(y: torch.Tensor, right: torch.Tensor) -> float:
    """max |y - right| / max |right|; NaN counts as infinite."""
    return float(((y.float() - right.float()).abs() / right.float().abs().max()).nan_to_num(float("inf")).max())


def gqa(case: Case, num_heads: int, num_keys: int, size: int):
    """q and keys of grouped-query attention: q is a view of a wider row, keys and values are views of the pool."""
    q = case.random(case.batch.token_ids_T.shape[0], num_heads + 3, size)[:, :num_heads]
    kv = case.pool.rows(0).view(-1, 2, num_keys, size)
    return (q, None), (kv[:, 0], None, kv[:, 1]), size**-0.5


def latent(case: Case, num_heads: int, latent_size: int, rotary: int):
    """q and keys of absorbed latent attention: all heads share one key, whose first part is the value."""
    num_rows = case.batch.token_ids_T.shape[0]
    rows = case.pool.rows(0)[:, None]
    q = case.random(num_heads, num_rows, latent_size).transpose(0, 1), case.random(num_rows, num_heads, rotary)
    return (
        q,
        (rows[..., :latent_size], rows[..., latent_size:], rows[..., :latent_size]),
        (latent_size + rotary) ** -0.5,
    )


def check_decode(q, keys, scale: float, step: PagedStep) -> None:
    from truegate.kernels import attention
    from truegate.kernels.ref import attention as ref

    y_DHV = attention.decode(q, keys, step.decodes, scale=scale)
    right_DHV = ref.decode(q, keys, step.decodes, scale=scale)
    assert error(y_DHV, right_DHV) < TOLERANCE[q[0].dtype]


def alone(q, keys, scale: float, decodes, row: int) -> torch.Tensor:
    """y_HV of one decode row without the others."""
    from truegate.kernels import attention

    mine = slice(row, row + 1)
    one = replace(decodes, seqs_D=decodes.seqs_D[mine], contexts_D=decodes.contexts_D[mine])
    parts = tuple(None if part is None else part[mine] for part in q)
    return attention.decode(parts, keys, one, scale=scale)[0]


def check_alone(q, keys, scale: float, decodes) -> None:
    """With fixed splits every row is, to the bit, what it is without the others."""
    from truegate.kernels import attention

    together = attention.decode(q, keys, decodes, scale=scale)
    for row in range(decodes.size):
        assert torch.equal(alone(q, keys, scale, decodes, row), together[row]), f"row {row}"


def check_fixed_splits(q, keys, scale: float, decodes, size: int) -> list[torch.Tensor]:
    """Splits of `size` slots begin at its multiples, however many there may be: a context within the first is whole.

    Returns what 2, 4 and 16 of them give: to the bit the same, where products and their sum are rounded apart.
    """
    from truegate.kernels import attention
    from truegate.kernels.ref import attention as ref

    whole = attention.decode(q, keys, replace(decodes, num_splits=1), scale=scale)
    in_one = decodes.contexts_D <= size
    assert 0 < int(in_one.sum()) < decodes.size
    assert int(decodes.contexts_D.max()) <= 2 * size
    found = []
    for num_splits in (2, 4, 16):
        cut = replace(decodes, num_splits=num_splits, min_split=size)
        found.append(attention.decode(q, keys, cut, scale=scale))
        assert error(found[-1], ref.decode(q, keys, cut, scale=scale)) < TOLERANCE[q[0].dtype]
        assert torch.equal(found[-1][in_one], whole[in_one])
    return found


def check_prefill(q, keys, scale: float, chunks, value_size: int) -> None:
    from truegate.kernels import attention
    from truegate.kernels.ref import attention as ref

    shape = (q[0].shape[0], q[0].shape[1], value_size)
    y_THV, right_THV = (torch.full(shape, 7.0, dtype=q[0].dtype, device=q[0].device) for _ in range(2))
    attention.prefill(q, keys, chunks, y_THV, scale=scale)
    ref.prefill(q, keys, chunks, right_THV, scale=scale)
    assert torch.equal(y_THV == 7, right_THV == 7), "rows of no chunk must stay as they are"
    assert error(y_THV, right_THV) < TOLERANCE[q[0].dtype]


def expanded(case: Case, num_heads: int, nope: int, rotary: int, value: int):
    """q and keys of latent attention expanded to keys and values per head, in the order of `step.expanded`."""
    num_rows, num_keys = case.batch.token_ids_T.shape[0], sum(c for r, c in case.parts if r > 1)
    kv = case.random(num_keys, num_heads, nope + value)
    q = case.random(num_rows, num_heads, nope), case.random(num_rows, num_heads, rotary)
    rest = case.random(num_keys, 1, rotary + 4)[..., :rotary].expand(-1, num_heads, -1)
    return q, (kv[..., :nope], rest, kv[..., nope:]), (nope + rotary) ** -0.5
