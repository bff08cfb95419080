"""Multi-head and grouped-query attention over a paged pool.

Invariant: y_T = residual_T + W_o concat_h softmax_{s <= t}(scale * q_Th . k_sh) v_sh, for any mix of decode and chunks.
T rows, Q rows of a sequence, N sequences, S slots, H query heads, K key/value heads, G = H / K, E head size, D hidden.
"""

import torch
from torch import nn
from torch.nn import functional as F

from truegate.cache.pools import Pool
from truegate.layers.layout import Chunk, Decodes, StepLayout
from truegate.layers.linear import Linear
from truegate.layers.norm import RMSNorm
from truegate.layers.paged import PagedStep
from truegate.layers.rope import rotate_


class Attention(nn.Module):
    """qkv is one matrix of H + 2K heads; the rotated keys and the values of a row are one row of the pool."""

    def __init__(
        self,
        *,
        layer: int,
        hidden: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        rotary_dim: int,
        qkv_bias: bool,
        out_bias: bool,
        qk_norm_eps: float | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.layer, self.head_dim, self.rotary_dim = layer, head_dim, rotary_dim
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.scale = head_dim**-0.5
        self.qkv = Linear(hidden, (num_heads + 2 * num_kv_heads) * head_dim, bias=qkv_bias, dtype=dtype, device=device)
        self.out = Linear(num_heads * head_dim, hidden, bias=out_bias, dtype=dtype, device=device)
        self.qk_norm = None
        if qk_norm_eps is not None:
            self.qk_norm = RMSNorm((num_heads + num_kv_heads, head_dim), qk_norm_eps, dtype=dtype, device=device)

    def values(self, num_rows: int, expanded: int) -> int:
        """Numbers that a step holds here at a time beside what goes in and out."""
        return num_rows * (self.qkv.weight.shape[0] + self.out.weight.shape[1])

    def paged(
        self, before: RMSNorm, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: PagedStep, pool: Pool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Through the kernels: W_o attention(before(residual + x)), and residual + x.

        Of several rows both are written over what came in.
        """
        from truegate.kernels import attention, norm

        qkv, residual_TD = self.qkv.normed(before, x_TD, residual_TD)
        out_TD = torch.empty_like(residual_TD) if x_TD is None else x_TD  # which holds the norm, read by now
        rows = pool.rows(self.layer)
        weights = None if self.qk_norm is None else (self.qk_norm.weight, self.qk_norm.eps)
        norm.rotate_and_store(qkv, (self.num_heads, self.num_kv_heads), weights, step.rotations_XR, step, rows)
        q = qkv.unflatten(1, (-1, self.head_dim))[:, : self.num_heads], None
        kv = rows.view(-1, 2, self.num_kv_heads, self.head_dim)
        keys = kv[:, 0], None, kv[:, 1]
        if step.whole:
            y_THE = attention.decode(q, keys, step.decodes, scale=self.scale)
            return self.out.into(y_THE.flatten(1), out_TD), residual_TD
        y_THE = step.rows_of(qkv, self.num_heads, self.head_dim)
        if step.decodes is not None:
            y_THE[: step.decodes.size] = attention.decode(q, keys, step.decodes, scale=self.scale)
        if step.chunks is not None:
            attention.prefill(q, keys, step.chunks, y_THE, scale=self.scale)
        return self.out.into(y_THE.flatten(1), out_TD), residual_TD

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, step: StepLayout, pool: Pool) -> torch.Tensor:
        qkv = self.qkv(x_TD)
        heads = qkv.view(step.num_rows, -1, self.head_dim)
        rotated = heads[:, : self.num_heads + self.num_kv_heads]
        if self.qk_norm is not None:
            self.qk_norm.apply_(rotated)
        rotate_(rotated[..., : self.rotary_dim], step.rotations_T1R)
        kv = qkv[:, self.num_heads * self.head_dim :]
        pool.write(self.layer, step.slots_T, kv)
        return self.out(self._attend(heads[:, : self.num_heads], kv, step, pool), residual_TD)

    def _attend(self, q_THE: torch.Tensor, kv_TW: torch.Tensor, step: StepLayout, pool: Pool) -> torch.Tensor:
        if isinstance(step.whole, Decodes):
            return self._decode(q_THE, step.whole, pool)
        if isinstance(step.whole, Chunk):
            return self._chunk(q_THE, kv_TW, step.whole, pool)
        y_TX = q_THE.new_zeros(step.num_rows, self.num_heads * self.head_dim)  # padded rows stay 0
        if step.decodes is not None:
            y_TX[step.decodes.rows] = self._decode(q_THE[step.decodes.rows], step.decodes, pool)
        for chunk in step.chunks:
            rows = slice(chunk.start, chunk.stop)
            y_TX[rows] = self._chunk(q_THE[rows], kv_TW[rows], chunk, pool)
        return y_TX

    def _decode(self, q_NHE: torch.Tensor, decodes: Decodes, pool: Pool) -> torch.Tensor:
        """The G queries that share a key head are its "rows", so that no key is repeated."""
        q_NKGE = q_NHE.view(decodes.size, self.num_kv_heads, -1, self.head_dim)
        mixed = []
        for group in decodes.groups:
            rows = pool.borrow(self.layer, group.slots_S)
            kv = rows.view(group.stop - group.start, group.length, 2, self.num_kv_heads, self.head_dim)
            k_NKSE, v_NKSE = kv.permute(2, 0, 3, 1, 4).unbind(0)
            bias = None if group.bias_N1S is None else group.bias_N1S.unsqueeze(1)
            q = q_NKGE[group.start : group.stop]
            mixed.append(F.scaled_dot_product_attention(q, k_NKSE, v_NKSE, attn_mask=bias, scale=self.scale))
        return (mixed[0] if len(mixed) == 1 else torch.cat(mixed)).reshape(decodes.size, -1)

    def _chunk(self, q_QHE: torch.Tensor, kv_QW: torch.Tensor, chunk: Chunk, pool: Pool) -> torch.Tensor:
        rows = kv_QW if chunk.slots_S is None else pool.read(self.layer, chunk.slots_S)
        kv = rows.unflatten(-1, (2, self.num_kv_heads, 1, self.head_dim))
        groups = self.num_heads // self.num_kv_heads
        k_KGSE, v_KGSE = kv.permute(1, 2, 3, 0, 4).expand(-1, -1, groups, -1, -1).unbind(0)
        q_KGQE = q_QHE.unflatten(1, (self.num_kv_heads, -1)).permute(1, 2, 0, 3)
        y_KGQE = F.scaled_dot_product_attention(
            q_KGQE, k_KGSE, v_KGSE, attn_mask=chunk.bias_QS, is_causal=chunk.bias_QS is None, scale=self.scale
        )
        return y_KGQE.permute(2, 0, 1, 3).reshape(chunk.stop - chunk.start, -1)
