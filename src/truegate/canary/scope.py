"""Under which conditions a fault shows: phases, batch sizes, rows, positions, and since when.

Invariant: says only what the counts say; a condition is named when it separates wrong from right.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from truegate.canary.cells import Sight, phases_in_order

Mask = NDArray[np.bool_]


def describe_scope(sights: Sequence[Sight], wrong: Mask, right: Mask) -> str:
    """One line: where it is wrong, and where the same was right."""
    phases = phases_in_order(sights)
    counts = {p: _count(sights, wrong, p) for p in phases}
    bad, good = [p for p in phases if counts[p][0]], [p for p in phases if not counts[p][0]]
    total = f"{int(wrong.sum())} of {len(sights)} answers"
    if not good:
        return f"in every phase ({total}){_rows(sights, wrong, right)}"
    parts = []
    if len(bad) > 1 and phases[phases.index(bad[0]) :] == bad and len(phases) - len(bad) >= 2:
        parts.append(f"right until {phases[phases.index(bad[0]) - 1]}, wrong from {bad[0]} on ({total})")
    else:
        parts.append(f"wrong in {_names(bad)} ({total}), right in {_names(good)}")
    sizes = _sizes(sights, wrong, right)
    return "; ".join([*parts, *([sizes] if sizes else [])]) + _rows(sights, wrong, right)


def _count(sights: Sequence[Sight], wrong: Mask, phase: str) -> tuple[int, int]:
    mine = np.array([s.phase == phase for s in sights])
    return int((mine & wrong).sum()), int(mine.sum())


def _names(phases: Sequence[str]) -> str:
    """single, decode, batches 3, 5, 7"""
    sizes = [p.removeprefix("batch ") for p in phases if p.startswith("batch ")]
    other = [p for p in phases if not p.startswith("batch ")]
    batches = [f"batch{'es of' if len(sizes) > 1 else ' of'} {', '.join(sizes)}"] if sizes else []
    return ", ".join([*other, *batches]) or "none"


def _sizes(sights: Sequence[Sight], wrong: Mask, right: Mask) -> str:
    """Batch sizes, when they separate wrong from right."""
    bad = sorted({s.batch for s, w in zip(sights, wrong, strict=True) if w})
    good = sorted({s.batch for s in sights} - set(bad))
    if not bad or not good:
        return ""

    def listed(sizes: Sequence[int]) -> str:
        return ", ".join(map(str, sizes))

    line = f"batch sizes wrong {listed(bad)}, right {listed(good)}"
    if len(bad) > 2 and all(b % 8 for b in bad) and any(g % 8 == 0 for g in good):
        return line + ": only off the grid of multiples of 8"
    if min(good) > max(bad):
        return line + f": only up to {max(bad)} rows"
    if max(good) < min(bad):
        return line + f": only from {min(bad)} rows on"
    return line


def _rows(sights: Sequence[Sight], wrong: Mask, right: Mask) -> str:
    """Rows or positions, when they separate wrong from right."""
    batched = [(s, w) for s, w in zip(sights, wrong, strict=True) if s.batch > 1]
    bad = [s for s, w in batched if w]
    if bad and len(bad) < len(batched):
        if all(s.place == s.batch - 1 for s in bad):
            return "; only the last row of a batch"
        if all(s.place == 0 for s in bad):
            return "; only the first row of a batch"
    positions_bad = {s.position for s, w in zip(sights, wrong, strict=True) if w}
    positions_ok = {s.position for s, r in zip(sights, right, strict=True) if r}
    if positions_bad and min(positions_bad) > 0 and 0 in positions_ok:
        return f"; only beyond position {min(positions_bad) - 1}"
    if positions_bad == {0} and len(positions_ok) > 1:
        return "; only at position 0"
    return ""
