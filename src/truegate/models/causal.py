"""The decoder that all supported families share: embedding, blocks of attention and MLP, norm, head.

Invariant: x <- x + attention(norm(x)); x <- x + mlp(norm(x)), where mlp is a `GatedMLP` or a `MoELayer`.
T rows, D hidden, M rows whose logits are wanted, V vocabulary, X positions.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from truegate.cache.pools import Pool
from truegate.kernels.matrix import matrix
from truegate.layers.layout import StepLayout, step_layout
from truegate.layers.linear import GatedMLP
from truegate.layers.norm import RMSNorm
from truegate.layers.paged import PagedStep, paged_step
from truegate.layers.rope import RopeSpec, rope_table
from truegate.moe.layer import MoELayer
from truegate.types import Batch


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What the shared decoder needs of a config; everything else belongs to a family's attention."""

    num_layers: int
    hidden: int
    vocab_size: int
    max_position: int
    norm_eps: float
    tied: bool  # the head is the embedding
    pool: type[Pool]
    pool_width: int  # numbers a token keeps per layer

    def with_pool(self, width: int) -> "Sizes":
        return replace(self, pool_width=width)


class Block(nn.Module):
    """One decoder layer."""

    def __init__(self, attention: nn.Module, mlp: GatedMLP | MoELayer, norms: tuple[RMSNorm, RMSNorm]) -> None:
        super().__init__()
        self.attention, self.mlp = attention, mlp
        self.attention_norm, self.mlp_norm = norms
        self.is_moe = isinstance(mlp, MoELayer)

    def forward(self, x_TD: torch.Tensor, batch: Batch, step: StepLayout, pool: Pool) -> torch.Tensor:
        x_TD = self.attention(self.attention_norm(x_TD), x_TD, step, pool)
        h_TD = self.mlp_norm(x_TD)
        return x_TD + self.mlp(h_TD, batch) if self.is_moe else self.mlp(h_TD, x_TD)

    def fused(
        self, x_TD: torch.Tensor | None, residual_TD: torch.Tensor, batch: Batch, step: PagedStep, pool: Pool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The same through the kernels, from (x, residual) to (x, residual), whose sum is the row's state.

        Both are overwritten, or, for one row, replaced.
        """
        x_TD, residual_TD = self.attention.paged(self.attention_norm, x_TD, residual_TD, step, pool)
        if self.is_moe:
            return self.mlp.normed(self.mlp_norm, x_TD, residual_TD, batch)
        return self.mlp.fused(self.mlp_norm, x_TD, residual_TD)


class CausalLM(nn.Module):
    """`models.load.LoadedModel`: see there for what the attributes and methods mean."""

    def __init__(
        self,
        config: Mapping[str, Any],
        sizes: Sizes,
        rope: RopeSpec,
        attention: Callable[[int], nn.Module],
        mlp: Callable[[int], GatedMLP | MoELayer],
        *,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        place = {"dtype": dtype, "device": device}
        self.config, self.sizes, self.dtype, self.device = dict(config), sizes, dtype, device
        self.num_layers, self.vocab_size, self.max_position = sizes.num_layers, sizes.vocab_size, sizes.max_position
        self.bytes_per_token = sizes.num_layers * sizes.pool_width * dtype.itemsize

        def norm() -> RMSNorm:
            return RMSNorm((sizes.hidden,), sizes.norm_eps, **place)

        self.embedding = nn.Buffer(torch.empty(sizes.vocab_size, sizes.hidden, **place))
        self.blocks = nn.ModuleList(Block(attention(i), mlp(i), (norm(), norm())) for i in range(sizes.num_layers))
        self.norm = norm()
        self.head = self.embedding if sizes.tied else nn.Buffer(matrix(sizes.vocab_size, sizes.hidden, **place))
        self.rotations_XR = rope_table(rope, sizes.max_position, device)
        self.cosines_XR = torch.view_as_real(self.rotations_XR).flatten(1)  # as the kernels read them
        self.uses_kernels = torch.device(device).type == "cuda"  # Triton for attention, norms and what lies between
        self.num_splits: int | None = None  # of every decode context; None: as many as fill the device

    @property
    def moe_layers(self) -> list[MoELayer]:
        return [block.mlp for block in self.blocks if isinstance(block.mlp, MoELayer)]

    def make_pool(self, num_pages: int, page_size: int) -> Pool:
        return self.sizes.pool(
            num_layers=self.num_layers, num_pages=num_pages, page_size=page_size, width=self.sizes.pool_width,
            dtype=self.dtype, device=self.device)  # fmt: skip

    def step_bytes(self, num_rows: int, expanded: int) -> int:
        """Bytes that a step of so many rows holds at a time, where latent attention expands so many slots: an estimate.

        The residual, what goes in and out of a layer, and which experts ran; and the part of a layer that holds most.
        """
        chosen = num_rows * sum(layer.spec.top_k for layer in self.moe_layers) * (8 + 4)  # ids int64, weights fp32
        parts = [max(b.attention.values(num_rows, expanded), b.mlp.values(num_rows)) for b in self.blocks]
        return chosen + self.dtype.itemsize * (num_rows * 3 * self.sizes.hidden + max(parts))

    @torch.inference_mode()
    def forward(self, batch: Batch, pool: Pool) -> torch.Tensor:
        if self.uses_kernels:
            return self._fused(batch, pool)
        step = step_layout(batch, pool, self.rotations_XR)
        x_TD = F.embedding(batch.token_ids_T, self.embedding)
        for block in self.blocks:
            x_TD = block(x_TD, batch, step, pool)
        return self.norm(x_TD)

    def _fused(self, batch: Batch, pool: Pool) -> torch.Tensor:
        step = batch.paged or paged_step(batch, pool, self.cosines_XR, num_splits=self.num_splits)
        residual_TD, x_TD = F.embedding(batch.token_ids_T, self.embedding), None
        for block in self.blocks:
            x_TD, residual_TD = block.fused(x_TD, residual_TD, batch, step, pool)
        return self.norm.fused(x_TD, residual_TD)

    @torch.inference_mode()
    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_MD, self.head).float()
