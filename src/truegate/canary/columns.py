"""Columns of the measured matrix matched with columns of the expected one: experts lost, scaled, moved.

Invariant: a match must hold in every observation given, and a column without evidence is never named.
N observations, W = E + S columns.
"""

import math
from dataclasses import dataclass

import numpy as np

from truegate.canary.cells import Cells


@dataclass(frozen=True, kw_only=True)
class Match:
    """A fault named from columns."""

    name: str
    text: str
    columns: tuple[int, ...]


def factor(cells: Cells, columns: list[int]) -> float | None:
    """The one g with measured = g * expected in all these columns; None when there is none, or most are right."""
    low, high, want = cells.low[:, columns], cells.high[:, columns], cells.want[:, columns]
    on = want > 1e-6
    if not on.any() or (low[~on] > 0).any():
        return None
    lo, hi = float((low[on] / want[on]).max()), float((high[on] / want[on]).min())
    g = (lo + hi) / 2 if lo <= hi and math.isfinite(lo + hi) else None
    bounded = on & np.isfinite(high)
    wrong = (low > want) | (want > high)
    return None if g is None or abs(g) < 1e-3 or wrong[bounded].mean() < 0.5 else g


def wrong_columns(cells: Cells) -> list[int]:
    bad = ((cells.low > cells.want) | (cells.want > cells.high)).any(axis=0)
    return np.flatnonzero(bad).tolist()


def match_columns(cells: Cells, num_experts: int) -> Match | None:
    """One name for all wrong columns, or None when some stay unexplained."""
    bad = wrong_columns(cells)
    if not bad:
        return None
    lost = [j for j in bad if (cells.low[:, j] <= 0).all() and (cells.want[:, j] > 1e-6).any()]
    if len(lost) == len(bad):
        return _lost(bad, num_experts)
    if len(bad) == 2 and bad[1] < num_experts and _fits(cells, bad, bad[::-1]):
        return _moved(dict(zip(bad, bad[::-1], strict=True)), [], num_experts)
    moved = {j: i for j in bad if (i := _source(cells, j, num_experts)) is not None}
    scaled = {j: g for j in bad if j not in lost and (g := factor(cells, [j])) is not None}
    if len(scaled) == len(bad) and len(bad) <= max(1, num_experts // 8):
        return _scaled(scaled, num_experts)
    if set(moved) | set(lost) == set(bad):
        return _moved(moved, [j for j in lost if j not in moved], num_experts)
    return None


def _fits(cells: Cells, columns: list[int], sources: list[int]) -> bool:
    """Whether these columns show what those should."""
    want = cells.want[:, sources]
    return bool(((cells.low[:, columns] <= want) & (want <= cells.high[:, columns])).all())


def _source(cells: Cells, column: int, num_experts: int) -> int | None:
    """The expert whose expected column is seen here; None when none or several fit."""
    if column >= num_experts:
        return None
    low, high = cells.low[:, column, None], cells.high[:, column, None]
    want = cells.want[:, :num_experts]
    fits = ((low <= want) & (want <= high)).all(axis=0) & (want > 1e-6).any(axis=0)
    found = np.flatnonzero(fits)
    return int(found[0]) if len(found) == 1 else None


def _lost(bad: list[int], num_experts: int) -> Match:
    shared = [j for j in bad if j >= num_experts]
    if shared:
        return Match(name="shared-dropped" if len(shared) == len(bad) else "experts-dropped", columns=tuple(bad),
                     text=f"{_name(bad, num_experts)} counted nowhere")  # fmt: skip
    if len(bad) == 1:
        return Match(name="expert-dropped", columns=tuple(bad), text=f"expert {bad[0]} is dropped: it counts nowhere")
    block = bad == list(range(bad[0], bad[0] + len(bad)))
    if block and num_experts % len(bad) == 0 and bad[0] % len(bad) == 0:
        ranks = num_experts // len(bad)
        return Match(name="rank-missing", columns=tuple(bad),
                     text=f"experts {bad[0]} to {bad[-1]} count nowhere: rank {bad[0] // len(bad)} of {ranks} is "
                          f"missing from the sum")  # fmt: skip
    return Match(name="experts-dropped", columns=tuple(bad), text=f"{_name(bad, num_experts)} are dropped")


def _scaled(scaled: dict[int, float], num_experts: int) -> Match:
    columns, factors = tuple(scaled), list(scaled.values())
    shared = all(j >= num_experts for j in columns)
    same = max(factors) - min(factors) < 0.02 * abs(factors[0]) + 1e-3
    if len(columns) == 1 or same:
        if abs(factors[0] - 2) < 0.03:
            name = "shared-doubled" if shared else "expert-doubled"
            return Match(name=name, columns=columns, text=f"{_name(columns, num_experts)} counted twice")
        name = "shared-scaled" if shared else "expert-scaled"
        return Match(name=name, columns=columns,
                     text=f"{_name(columns, num_experts)} scaled by {factors[0]:.4g}, all else right")  # fmt: skip
    listed = ", ".join(f"{j}: {g:.4g}" for j, g in list(scaled.items())[:8])
    return Match(name="expert-scaled", columns=columns, text=f"experts scaled, each by its own factor ({listed})")


def _moved(moved: dict[int, int], lost: list[int], num_experts: int) -> Match:
    """Read-out j shows expert i's coefficient: what was routed to i was computed with the weights of j."""
    columns = tuple(sorted([*moved, *lost]))
    pairs = sorted(moved.items())
    if len(moved) == 2 and not lost and all(moved.get(i) == j for j, i in pairs):
        a, b = sorted(moved)
        return Match(name="experts-swapped", columns=columns, text=f"experts {a} and {b} are swapped")
    shifts = [(j - i) % num_experts for j, i in pairs]
    shift = max(set(shifts), key=shifts.count)
    if not lost and shifts.count(shift) == len(shifts) and len(shifts) > num_experts // 2:
        signed = shift if shift <= num_experts // 2 else shift - num_experts
        text = f"{len(shifts)} experts computed with another expert's weights, all shifted by {signed}"
        return Match(name="experts-rotated", columns=columns, text=text)
    listed = ", ".join(f"{i} by {j}" for j, i in pairs[:6]) + (", ..." if len(pairs) > 6 else "")
    more = f"; {_name(lost, num_experts)} count nowhere" if lost else ""
    return Match(name="experts-permuted", columns=columns,
                 text=f"{len(pairs)} experts computed with another expert's weights ({listed}){more}")  # fmt: skip


def _name(columns: list[int] | tuple[int, ...], num_experts: int) -> str:
    """experts 3, 5, 7; shared expert 0"""
    routed = [str(j) for j in columns if j < num_experts]
    shared = [str(j - num_experts) for j in columns if j >= num_experts]
    words = []
    if routed:
        words.append(f"expert{'s' * (len(routed) > 1)} {', '.join(routed[:8])}{', ...' * (len(routed) > 8)}")
    if shared:
        words.append(f"shared expert{'s' * (len(shared) > 1)} {', '.join(shared)}")
    return " and ".join(words)
