"""What captured steps stand on and a CPU can test: the grid of sizes, and the copy of the page table."""

import numpy as np

from truegate.cache.pages import PageTable
from truegate.engine.graphs import grid


def test_the_grid_ends_at_the_largest_batch_and_never_pads_more_than_half():
    for largest in (1, 2, 3, 7, 21, 64, 100, 128, 200, 256):
        sizes = grid(largest)
        assert sizes == sorted(set(sizes))
        assert sizes[-1] == largest
        for rows in range(1, largest + 1):
            size = next(size for size in sizes if size >= rows)
            assert size - rows <= rows, (largest, rows, size)


def test_a_copy_that_takes_the_writes_is_the_page_table():
    table, rng, width = PageTable(3, 5), np.random.default_rng(0), 16
    table.write(1, 0, [9, 8])
    copy = np.zeros((3, width), dtype=np.int64)
    copy[:, :5] = table.array
    table.record_writes()
    for _ in range(20):
        for _ in range(rng.integers(0, 4)):
            start = int(rng.integers(0, 4))
            table.write(int(rng.integers(0, 3)), start, rng.integers(1, 99, 5 - start).tolist())
        places = table.take_writes(width)
        assert len(places) == len(set(places.tolist()))
        copy.reshape(-1)[places] = table.array[places // width, places % width]
        assert (copy[:, :5] == table.array).all()
    assert not len(table.take_writes(width))
