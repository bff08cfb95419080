"""Multi-head latent attention (DeepSeek-V2/V3) over a paged pool of latents.

Invariant: the pool holds (latent_C normed | k_rope_R rotated) per token; every head's key is (W_uk latent | k_rope) and
its value W_uv latent. Two orders of the same products: expanded (keys and values per head) and absorbed (W_uk moved to
the query, W_uv to the output, so that all heads share one key); the cheaper is chosen from the sizes of each part.
T rows, Q rows of a sequence, N sequences, S slots, H heads, C latent, R rotary, U nope, V value size, D hidden.
"""

import torch
from torch import nn
from torch.nn import functional as F

from truegate.cache.pools import Pool
from truegate.layers.layout import Chunk, Decodes, StepLayout
from truegate.layers.linear import Linear
from truegate.layers.norm import RMSNorm
from truegate.layers.paged import Expanded, PagedDecodes, PagedStep
from truegate.layers.rope import rotate_


class MLA(nn.Module):
    """Projections are stacked so that one view holds what is rotated together and another what the pool keeps.

    With a query latent: `down` rows (q latent | latent C | k_rope R), `up` rows (q_nope H*U | q_rope H*R). Without:
    `down` rows (q_nope H*U | latent C | k_rope R | q_rope H*R), no `up`.
    """

    def __init__(
        self,
        *,
        layer: int,
        hidden: int,
        num_heads: int,
        q_rank: int | None,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        scale: float,
        bias: bool,
        norm_eps: float,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.layer, self.num_heads, self.q_rank, self.kv_rank = layer, num_heads, q_rank, kv_rank
        self.nope_dim, self.rope_dim, self.value_dim, self.scale = nope_dim, rope_dim, value_dim, scale
        q_rows = num_heads * (nope_dim + rope_dim)
        self.down = Linear(hidden, (q_rank or q_rows) + kv_rank + rope_dim, bias=bias, **place)
        self.up = Linear(q_rank, q_rows, **place) if q_rank else None
        self.q_norm = RMSNorm((q_rank,), norm_eps, **place) if q_rank else None
        self.kv_norm = RMSNorm((kv_rank,), norm_eps, **place)
        self.kv_up = nn.Buffer(torch.empty(num_heads, nope_dim + value_dim, kv_rank, **place))
        self.out = Linear(num_heads * value_dim, hidden, bias=bias, **place)
        self._key_up_HUC, self._value_up_HVC = self.kv_up.split((nope_dim, value_dim), dim=1)
        self._no_bias = torch.zeros(1, 1, 1, **place)

    def forward(self, x_TD: torch.Tensor, residual_TD: torch.Tensor, step: StepLayout, pool: Pool) -> torch.Tensor:
        q_nope, q_rope, latent = self._project(x_TD, step)
        pool.write(self.layer, step.slots_T, latent)
        return self.out(self._attend(q_nope, q_rope, latent, step, pool), residual_TD)

    def values(self, num_rows: int, expanded: int) -> int:
        """Numbers that a step holds here at a time beside what goes in and out, where it expands so many slots."""
        up = 0 if self.up is None else self.up.weight.shape[0]
        slot = self.num_heads * (self.nope_dim + self.value_dim) + self.kv_rank + self.rope_dim
        return num_rows * (self.down.weight.shape[0] + up + self.out.weight.shape[1]) + expanded * slot

    def paged(
        self, before: RMSNorm, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, step: PagedStep, pool: Pool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As Attention.paged: decodes absorbed, chunks expanded."""
        from truegate.kernels import norm

        down, residual_TD = self.down.normed(before, x_TD, residual_TD)
        out_TD = torch.empty_like(residual_TD) if x_TD is None else x_TD  # which holds the norm, read by now
        q_nope, q_rope, latent = self._split(down)
        weights = self.kv_norm.weight, self.kv_norm.eps
        norm.store_latent(latent, q_rope, weights, step.rotations_XR, step, pool.rows(self.layer))
        shape = down.shape[0], self.num_heads, self.value_dim
        if step.whole:
            y_THV = down.new_empty(shape)
            self._paged_decodes(q_nope, q_rope, step.decodes, pool, y_THV)
            return self.out.into(y_THV.flatten(1), out_TD), residual_TD
        y_THV = step.rows_of(down, *shape[1:])
        if step.decodes is not None:
            size = step.decodes.size
            self._paged_decodes(q_nope[:size], q_rope[:size], step.decodes, pool, y_THV[:size])
        for part in step.expanded:
            self._paged_chunks(q_nope, q_rope, part, pool, y_THV)
        return self.out.into(y_THV.flatten(1), out_TD), residual_TD

    def _paged_decodes(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, decodes: PagedDecodes, pool: Pool, y_DHV: torch.Tensor
    ) -> None:
        from truegate.kernels import attention

        rows_S1W = pool.rows(self.layer)[:, None]
        latent, k_rope = rows_S1W.split((self.kv_rank, self.rope_dim), dim=-1)
        q_HDC = torch.bmm(q_nope.transpose(0, 1), self._key_up_HUC)
        q = q_HDC.transpose(0, 1), q_rope
        mixed_DHC = attention.decode(q, (latent, k_rope, latent), decodes, scale=self.scale)
        torch.bmm(mixed_DHC.transpose(0, 1), self._value_up_HVC.transpose(1, 2), out=y_DHV.transpose(0, 1))

    def _paged_chunks(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, part: Expanded, pool: Pool, y_THV: torch.Tensor
    ) -> None:
        from truegate.kernels import attention

        latent, k_rope = pool.read(self.layer, part.slots_S).split((self.kv_rank, self.rope_dim), dim=-1)
        kv_SHX = F.linear(latent, self.kv_up.flatten(0, 1)).unflatten(1, (self.num_heads, -1))
        k_nope, v = kv_SHX.split((self.nope_dim, self.value_dim), dim=-1)
        keys = k_nope, k_rope[:, None].expand(-1, self.num_heads, -1), v
        attention.prefill((q_nope, q_rope), keys, part.chunks, y_THV, scale=self.scale)

    def _split(self, down_TX: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_nope_THU, q_rope_THR and latent_TW as projected: not yet normed or rotated."""
        heads, nope, rope = self.num_heads, self.num_heads * self.nope_dim, self.num_heads * self.rope_dim
        width = self.kv_rank + self.rope_dim
        if self.up is None:
            q_nope, latent, q_rope = down_TX.split((nope, width, rope), dim=-1)
        else:
            q_latent, latent = down_TX.split((self.q_rank, width), dim=-1)
            q_nope, q_rope = self.up(self.q_norm.fused(None, q_latent)).split((nope, rope), dim=-1)
        return q_nope.unflatten(1, (heads, -1)), q_rope.unflatten(1, (heads, -1)), latent

    def _project(self, x_TD: torch.Tensor, step: StepLayout) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q_nope_THU, q_rope_THR and the pool's rows_TW (views of the fused projections, normed and rotated there)."""
        nope, kv, rope, num_rows = self.num_heads * self.nope_dim, self.kv_rank, self.rope_dim, step.num_rows
        down = self.down(x_TD)
        if self.up is None:
            q_nope, latent, rotated = down[:, :nope], down[:, nope : nope + kv + rope], down[:, nope + kv :]
            rotated = rotated.view(num_rows, self.num_heads + 1, rope)  # k_rope, then the heads' q_rope
            rotate_(rotated, step.rotations_T1R)
            q_rope = rotated[:, 1:]
        else:
            q_latent, latent = down[:, : self.q_rank], down[:, self.q_rank :]
            up = self.up(self.q_norm(q_latent))
            q_nope, q_rope = up[:, :nope], up[:, nope:].view(num_rows, self.num_heads, rope)
            rotate_(q_rope, step.rotations_T1R)
            rotate_(latent[:, kv:].view(num_rows, 1, rope), step.rotations_T1R)
        self.kv_norm.apply_(latent[:, :kv])
        return q_nope.view(num_rows, self.num_heads, self.nope_dim), q_rope, latent

    def _attend(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, latent: torch.Tensor, step: StepLayout, pool: Pool
    ) -> torch.Tensor:
        if isinstance(step.whole, Decodes):
            return self._decode(q_nope, q_rope, step.whole, pool)
        if isinstance(step.whole, Chunk):
            return self._chunk(q_nope, q_rope, latent, step.whole, pool)
        y_TX = q_nope.new_zeros(step.num_rows, self.num_heads * self.value_dim)  # padded rows stay 0
        if step.decodes is not None:
            rows = step.decodes.rows
            y_TX[rows] = self._decode(q_nope[rows], q_rope[rows], step.decodes, pool)
        for chunk in step.chunks:
            rows = slice(chunk.start, chunk.stop)
            y_TX[rows] = self._chunk(q_nope[rows], q_rope[rows], latent[rows], chunk, pool)
        return y_TX

    def _decode(self, q_nope: torch.Tensor, q_rope: torch.Tensor, decodes: Decodes, pool: Pool) -> torch.Tensor:
        """Absorbed: the H queries of a sequence are rows of one attention over its latents."""
        q_NHW = self._absorb(q_nope, q_rope)
        mixed = []
        for group in decodes.groups:
            q = q_NHW if group.stop - group.start == decodes.size else q_NHW[group.start : group.stop]
            rows_NSW = pool.borrow(self.layer, group.slots_S).view(len(q), group.length, -1)
            bias, beta = (self._no_bias, 0) if group.bias_N1S is None else (group.bias_N1S, 1)
            scores_NHS = torch.baddbmm(bias, q, rows_NSW.transpose(1, 2), beta=beta, alpha=self.scale)
            mixed.append(torch.bmm(scores_NHS.softmax(-1), rows_NSW[..., : self.kv_rank]))
        mixed_NHC = mixed[0] if len(mixed) == 1 else torch.cat(mixed)
        return self._values(mixed_NHC.transpose(0, 1))

    def _absorb(self, q_nope_THU: torch.Tensor, q_rope_THR: torch.Tensor) -> torch.Tensor:
        """q_THW = (q_nope W_uk | q_rope): scores against the pool's rows as they are."""
        q_HTC = torch.bmm(q_nope_THU.transpose(0, 1), self._key_up_HUC)
        return torch.cat((q_HTC.transpose(0, 1), q_rope_THR), dim=-1)

    def _values(self, mixed_HTC: torch.Tensor) -> torch.Tensor:
        """y_TX = concat_h W_uv mixed."""
        y_HTV = torch.bmm(mixed_HTC, self._value_up_HVC.transpose(1, 2))
        return y_HTV.transpose(0, 1).reshape(mixed_HTC.shape[1], -1)

    def _chunk(
        self, q_nope: torch.Tensor, q_rope: torch.Tensor, latent_QW: torch.Tensor, chunk: Chunk, pool: Pool
    ) -> torch.Tensor:
        rows_SW = latent_QW if chunk.slots_S is None else pool.read(self.layer, chunk.slots_S)
        if self.prefers_absorbed(chunk.stop - chunk.start, chunk.context):
            q_HQW = self._absorb(q_nope, q_rope).transpose(0, 1)
            keys = rows_SW.expand(1, self.num_heads, -1, -1)
            # values as wide as keys keep the fused kernel; the rotary tail of the mix is dropped
            y_HQW = self._attention(q_HQW.unsqueeze(0), keys, keys, chunk)
            return self._values(y_HQW[..., : self.kv_rank])
        kv_SHX = F.linear(rows_SW[:, : self.kv_rank], self.kv_up.flatten(0, 1)).unflatten(1, (self.num_heads, -1))
        q_QHE = torch.cat((q_nope, q_rope), dim=-1)
        k_rope = rows_SW[:, None, self.kv_rank :].expand(-1, self.num_heads, -1)
        k_SHE = torch.cat((kv_SHX[..., : self.nope_dim], k_rope), dim=-1)
        width = max(self.nope_dim + self.rope_dim, self.value_dim)  # the fused kernel wants one head size
        parts = (q_QHE, k_SHE, kv_SHX[..., self.nope_dim :])
        q, k, v = (_widen(part, width).transpose(0, 1).unsqueeze(0) for part in parts)
        y_HQE = self._attention(q, k, v, chunk)
        return y_HQE[..., : self.value_dim].transpose(0, 1).reshape(chunk.stop - chunk.start, -1)

    def _attention(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, chunk: Chunk) -> torch.Tensor:
        bias = chunk.bias_QS
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=bias is None, scale=self.scale)
        return y.squeeze(0)

    def prefers_absorbed(self, num_rows: int, context: int) -> bool:
        """Multiply-adds of the two orders, per head, for `num_rows` queries over `context` slots."""
        width = self.nope_dim + self.rope_dim
        expanded = context * self.kv_rank * (self.nope_dim + self.value_dim) + num_rows * context * 2 * width
        absorbed = num_rows * self.kv_rank * (self.nope_dim + self.value_dim)
        absorbed += num_rows * context * 2 * (self.kv_rank + self.rope_dim)
        return absorbed < expanded


def _widen(x: torch.Tensor, width: int) -> torch.Tensor:
    """Zeros appended to the last dimension: they change neither scores nor the values that are kept."""
    return x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1]))
