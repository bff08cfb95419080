"""Twin of kernels/attention.py: the same functions, one sequence and one row of scores at a time, in float32."""

import torch


def decode(q, keys, decodes, *, scale: float) -> torch.Tensor:
    """y_DHV of `kernels.attention.decode`."""
    rows = []
    for row, (seq, context) in enumerate(zip(decodes.seqs_D.tolist(), decodes.contexts_D.tolist(), strict=True)):
        slots_S = _slots(decodes.table_NP[seq], context, decodes.page_size)
        rows.append(_attend(q, keys, row, slots_S, scale))
    return torch.stack(rows).to(q[0].dtype)


def prefill(q, keys, chunks, y_THV: torch.Tensor, *, scale: float) -> None:
    """Fills y_THV as `kernels.attention.prefill` does."""
    chunks_C4 = chunks.chunks_C4.tolist()
    for chunk, block in chunks.blocks_B2.tolist():
        if chunk < 0:
            continue
        first, num_rows, context, keys_at = chunks_C4[chunk]
        if chunks.table_NP is None:
            slots_S = keys_at + torch.arange(context, device=y_THV.device)
        else:
            slots_S = _slots(chunks.table_NP[keys_at], context, chunks.page_size)
        for i in range(block * chunks.block_rows, min(num_rows, (block + 1) * chunks.block_rows)):
            seen = slots_S[: context - num_rows + i + 1]
            y_THV[first + i] = _attend(q, keys, first + i, seen, scale).to(y_THV.dtype)


def _slots(pages_P: torch.Tensor, context: int, page_size: int) -> torch.Tensor:
    offsets_S = torch.arange(context, device=pages_P.device)
    return pages_P.long()[offsets_S // page_size] * page_size + offsets_S % page_size


def _attend(q, keys, row: int, slots_S: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax_s(scale * sum of parts q . k) v over the given slots; 0 where there are none."""
    k1_SKE, _, v_SKV = keys
    groups = q[0].shape[1] // k1_SKE.shape[1]
    scores_HS = torch.zeros(q[0].shape[1], len(slots_S), device=slots_S.device)
    for q_THE, k_SKE in zip(q, keys[:2], strict=True):
        if q_THE is not None:
            k_SHE = k_SKE[slots_S].float().repeat_interleave(groups, dim=1)
            scores_HS += torch.einsum("he,she->hs", q_THE[row].float(), k_SHE)
    weights_HS = (scores_HS * scale).softmax(-1)
    return torch.einsum("hs,shv->hv", weights_HS, v_SKV[slots_S].float().repeat_interleave(groups, dim=1))
