"""The page allocator: which pages of the key/value pool are free.

Invariant: every page but page 0 (nobody's, the sink of padded rows) is free or held once; freeing a free page raises.
"""

import numpy as np


class PageAllocator:
    """Pages 1..num_pages-1 of a pool, handed out lowest first while fresh and last-freed first after that."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages - 1
        self._free = list(range(num_pages - 1, 0, -1))
        self._held = bytearray(num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """`count` pages; the caller has made sure that they are there."""
        if count > len(self._free):
            raise RuntimeError(f"{count} pages asked, {len(self._free)} free")
        split = len(self._free) - count
        pages = self._free[split:][::-1]
        del self._free[split:]
        for page in pages:
            self._held[page] = 1
        return pages

    def give(self, pages: list[int]) -> None:
        for page in pages:
            if not self._held[page]:
                raise RuntimeError(f"page {page} was given back twice")
            self._held[page] = 0
        self._free.extend(reversed(pages))


class PageTable:
    """table_NP: the pages of the sequence in row `slot`, in order; entries past its end are stale or 0, never read."""

    def __init__(self, num_slots: int, max_pages: int) -> None:
        self.array = np.zeros((num_slots, max_pages), dtype=np.int64)
        self._free = list(range(num_slots - 1, -1, -1))
        self._writes: list[tuple[int, int, int]] | None = None

    def record_writes(self) -> None:
        """From now on remember what `write` changes, for a copy on a device."""
        self._writes = []

    def take_writes(self, width: int) -> np.ndarray:
        """Places (slot * width + page) written since the last call, each once, ascending; int64."""
        writes, self._writes = self._writes, []
        return np.unique([slot * width + at for slot, start, end in writes for at in range(start, end)]).astype(
            np.int64
        )

    def take_slot(self) -> int:
        return self._free.pop()

    def give_slot(self, slot: int) -> None:
        self._free.append(slot)

    def write(self, slot: int, start: int, pages: list[int]) -> None:
        self.array[slot, start : start + len(pages)] = pages
        if self._writes is not None:
            self._writes.append((slot, start, start + len(pages)))
