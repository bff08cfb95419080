"""Twin of kernels/permute.py, expert by expert."""

import torch


def permute(ids_TJ: torch.Tensor, num_slots: int, block_m: int) -> tuple[torch.Tensor, list[tuple[int, int]]]:
    """(numbers of the valid assignments, stably by expert; (expert, first place) of every tile of block_m rows)."""
    order, tiles, place = [], [], 0
    for e in range(num_slots):
        numbers = (ids_TJ.flatten() == e).nonzero()[:, 0]
        order.append(numbers.to(torch.int32))
        tiles += [(e, first) for first in range(place, place + len(numbers), block_m)]
        place += len(numbers)
    return torch.cat(order), tiles
