"""The longest step and shorter ones of other forms, once before anybody waits: kernels are compiled, memory is taken.

Invariant: only page 0, nobody's, is written, and nothing is counted; no later step launches a form of a kernel that
neither these nor the captured steps have (tests/cpu/kernels/test_forms.py). T rows.
"""

from typing import Any

import torch

from truegate.cache.pools import Pool
from truegate.errors import UserError
from truegate.layers.linear import SLICE
from truegate.moe.recorder import Recorder
from truegate.types import Batch


@torch.inference_mode()
def warm_up(
    model: Any, pool: Pool, *, num_rows: int, max_length: int, max_running: int, all_valid: bool = True
) -> None:  # fmt: skip
    """One prefill of num_rows rows in sequences of at most max_length, as eager steps run, and one row's logits.

    Then one of every row count below it at which layers turn to another form of their kernels, and decodes of at most
    max_running sequences. all_valid as the eager steps have it: only where it is True, nothing is captured. UserError
    where the device has not the memory.
    """
    try:
        for rows in row_counts(model, num_rows):
            _step(model, pool, _prefill(rows, max_length), all_valid)
        for size in decode_counts(max_running, captured=not all_valid):
            _step(model, pool, [1] * size, all_valid)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"a step of {num_rows} rows does not fit beside the weights and {pool.num_bytes / 2**30:.2f} GiB of cache: "
            "lower --chunked-prefill-tokens or --kv-cache-gib"
        ) from error


def row_counts(model: Any, num_rows: int) -> list[int]:
    """Rows of the prefills that `warm_up` runs, falling."""
    turns = {rows for layer in model.moe_layers for rows in layer.turns()}
    turns.add(num_rows - num_rows % 2)  # the router takes an even number in pairs
    if len(model.moe_layers) < model.num_layers:
        turns.add(SLICE + 1)  # the last row of a dense MLP goes alone
    return sorted({num_rows, *(rows for rows in turns if 0 < rows < num_rows)}, reverse=True)


def decode_counts(most: int, *, captured: bool) -> list[int]:
    """Sequences of the decodes that `warm_up` runs, falling: a number between any two powers of two, and these too
    unless steps of them are captured.

    Contexts are cut and tiled in one way from a power of two to the next, in some other one at the power itself.
    """
    powers = [1 << i for i in range(most.bit_length())]
    between = [min(3 * power, most) for power in powers if 2 * power < most]
    return sorted({*between, *([] if captured else powers)}, reverse=True)


def _prefill(num_rows: int, max_length: int) -> list[int]:
    """Lengths of the sequences; one of one row comes first."""
    lens = [max_length] * (num_rows // max_length) + [num_rows % max_length] * (num_rows % max_length > 0)
    return sorted(lens, key=lambda size: size > 1)


def _step(model: Any, pool: Pool, lens: list[int], all_valid: bool) -> None:
    nobody_T = torch.zeros(sum(lens), dtype=torch.int64, device=model.device)
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
