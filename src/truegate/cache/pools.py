"""Paged key/value pools: what attention layers write to and read from.

Invariant: page 0 belongs to nobody; padded rows write there and nothing reads it. A slot is page * page_size + offset.
L layers, P pages, B page size (tokens), H key/value heads, C latent width, R rotary width, T rows, S slots read.
"""

import torch

from truegate.errors import UserError


class Pool:
    """One tensor [L, P, B, width]: a token's row holds everything its layer's attention will read again."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        if num_pages < 2 or page_size < 1:
            raise UserError(
                f"a pool of {num_pages} pages of {page_size} tokens: page 0 is a sink, give at least 2 pages"
            )
        self.num_pages, self.page_size, self.width = num_pages, page_size, width
        # uninitialised: nothing is read before it is written, and a CPU then pays only for pages in use
        self.data = torch.empty(num_layers, num_pages, page_size, width, dtype=dtype, device=device)
        self._scratch_buf = torch.empty(0, width, dtype=dtype, device=device)
        self._rows = [layer.view(num_pages * page_size, width) for layer in self.data.unbind(0)]

    @property
    def num_bytes(self) -> int:
        return self.data.numel() * self.data.element_size()

    def rows(self, layer: int) -> torch.Tensor:
        """The layer's rows [P * B, width], indexed by slot."""
        return self._rows[layer]

    def write(self, layer: int, slots_T: torch.Tensor, rows_TW: torch.Tensor) -> None:
        self._rows[layer].index_copy_(0, slots_T, rows_TW)

    def read(self, layer: int, slots_S: torch.Tensor) -> torch.Tensor:
        """rows_SW, gathered."""
        return self._rows[layer].index_select(0, slots_S)

    def borrow(self, layer: int, slots_S: torch.Tensor | slice) -> torch.Tensor:
        """rows_SW: the pool's own where they are neighbours, else gathered into a buffer that stays in the cache.

        The next `borrow` overwrites it.
        """
        if isinstance(slots_S, slice):
            return self._rows[layer][slots_S]
        count = slots_S.shape[0]
        if count > self._scratch_buf.shape[0]:
            self._scratch_buf = self._scratch_buf.new_empty(2 * count, self.width)
        return torch.index_select(self._rows[layer], 0, slots_S, out=self._scratch_buf[:count])


class MHAPool(Pool):
    """Row: the token's H keys (rotated), then its H values; width = 2 * H * head_dim."""


class MLAPool(Pool):
    """Row: the token's normed latent (C), then its rotated key part (R), shared by all heads; width = C + R."""
