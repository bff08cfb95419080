"""From a checkpoint folder to a model that runs: `load_model`, the one door the engine uses.

Invariant: a model that is returned has consumed every tensor of the checkpoint, or ignored it by a stated rule.
T rows, D hidden, M rows whose logits are wanted, V vocabulary.
"""

from pathlib import Path
from typing import Any, Protocol

import torch

from truegate.types import Batch


class LoadedModel(Protocol):
    """What the engine may use of a model; `truegate.models.causal.CausalLM` is the one implementation."""

    config: dict[str, Any]  # config.json as read; never written to
    num_layers: int
    vocab_size: int
    max_position: int  # positions are 0..max_position - 1
    bytes_per_token: int  # of key/value pool, over all layers
    dtype: torch.dtype
    device: torch.device
    moe_layers: list[Any]  # moe.layer.MoELayer in layer order, dense layers left out

    def make_pool(self, num_pages: int, page_size: int) -> Any:
        """A key/value pool of `num_pages` pages, page 0 included; page 0 is the sink that padded rows write to."""
        ...

    def forward(self, batch: Batch, pool: Any) -> torch.Tensor:
        """hidden_TD after the last norm, having written the batch's keys and values to `pool` at `slots_T`.

        Sequence n holds rows sum(query_lens[:n]) .. sum(query_lens[:n + 1]); padded rows come after all sequences.
        Any mix of prefill, chunked prefill (context_lens > query_lens) and decode (query_lens == 1) is one batch.
        """
        ...

    def logits(self, hidden_MD: torch.Tensor) -> torch.Tensor:
        """logits_MV in fp32 of rows picked from `forward`'s output."""
        ...


def load_model(
    path: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    options: Any = None,
) -> LoadedModel:
    """The model in folder `path` (config.json, *.safetensors) in `dtype` on `device`; `options` go to its MoE layers."""
    raise NotImplementedError("the loader lands with the model files")
