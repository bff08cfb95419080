"""The longest step and shorter ones of other forms, once before anybody waits: kernels are compiled, memory is taken.

Invariant: only page 0, nobody's, is written, and nothing is counted. T rows.
"""

from typing import Any

import torch

from truegate.cache.pools import Pool
from truegate.errors import UserError
from truegate.moe.recorder import Recorder
from truegate.types import Batch


@torch.inference_mode()
def warm_up(model: Any, pool: Pool, *, num_rows: int, max_length: int, all_valid: bool = True) -> None:
    """One prefill of num_rows rows in sequences of at most max_length, as eager steps run, and one row's logits.

    Then one of every row count below it at which layers turn to another form of their kernels. all_valid as the eager
    steps have it. UserError where the device has not the memory.
    """
    try:
        for rows in row_counts(model, num_rows):
            _prefill(model, pool, rows, max_length, all_valid)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a step of {num_rows} rows does not fit beside the weights and {pool.num_bytes / 2**30:.2f} GiB of cache: "
            "lower --chunked-prefill-tokens or --kv-cache-gib"
        ) from error


def row_counts(model: Any, num_rows: int) -> list[int]:
    """Rows of the steps that `warm_up` runs, falling."""
    turns = {rows for layer in model.moe_layers for rows in layer.turns() if 0 < rows < num_rows}
    return sorted({num_rows, *turns}, reverse=True)


def _prefill(model: Any, pool: Pool, num_rows: int, max_length: int, all_valid: bool) -> None:
    lens = [max_length] * (num_rows // max_length) + [num_rows % max_length] * (num_rows % max_length > 0)
    lens.sort(key=lambda size: size > 1)  # a sequence of one row comes first
    nobody_T = torch.zeros(num_rows, dtype=torch.int64, device=model.device)
    positions = [torch.arange(size, device=model.device) for size in lens]
    batch = Batch(
        token_ids_T=nobody_T, positions_T=torch.cat(positions), valid_T=nobody_T == 0, slots_T=nobody_T,
        page_table_NP=nobody_T.new_zeros(len(lens), -(-max(lens) // pool.page_size)), query_lens=lens,
        context_lens=lens, logit_rows_M=nobody_T[:1], all_valid=all_valid,
        recorder=Recorder(weights=False) if model.moe_layers else None)  # fmt: skip
    hidden_TD = model.forward(batch, pool)
    if model.moe_layers:
        batch.recorder.stacked()
    model.logits(hidden_TD[batch.logit_rows_M]).argmax(dim=-1)
