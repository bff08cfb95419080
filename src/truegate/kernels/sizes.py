"""A layer as its expert kernels see it. P local experts, D hidden, F expert width."""

from dataclasses import dataclass
from functools import cache

from truegate.law.spec import Activation

OUT_BYTES = 200 << 20  # of the second product at a time: [N, D] would be most of what a long step holds
MOST_PARTS = 8  # of it: where few rows are local, narrower ones leave processors without a tile


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """What a launch needs to know of a layer beside its tensors."""

    num_slots: int  # P
    hidden: int  # D
    width: int  # F
    activation: Activation
    clamp: float | None
    at_input: bool  # the weight multiplies x, not the output
    weighs: bool = True  # False: somebody else multiplies by the weights
    sparse: bool = False  # most slots are some other rank's

    def weigh(self, *, first: bool) -> str:
        """Where a product multiplies by the weights: the first at its "input", the second at its "output", or "no"."""
        if not self.weighs or self.at_input != first:
            return "no"
        return "input" if first else "output"


def columns_at_once(num: int, hidden: int, element_size: int) -> list[slice]:
    """1, 2, 4 or up to MOST_PARTS parts of [num, hidden], multiples of 256 columns, of OUT_BYTES where so few can."""
    fitting = (step for step in _steps(hidden) if num * step * element_size <= OUT_BYTES)
    step = next(fitting, _steps(hidden)[-1])
    return [slice(first, min(first + step, hidden)) for first in range(0, hidden, step)]


@cache
def _steps(hidden: int) -> tuple[int, ...]:
    """Widths of a part, falling: few, since kernels are compiled for each."""
    blocks = -(-hidden // 256)
    halved = (-(-blocks // (1 << i)) * 256 for i in range(blocks.bit_length() + 1))
    return tuple(dict.fromkeys(min(step, hidden) for step in halved if -(-hidden // step) <= MOST_PARTS))
