"""Tilings of the expert kernels: measured ones from tuned.json, else by the expected rows an expert.

Invariant: a tiling changes speed, never what is computed. benchmarks/tune_experts.py writes the file.
T rows, J slots a row, P local experts, D hidden, F expert width.
"""

import json
import re
from dataclasses import asdict, dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_name("tuned.json")


@dataclass(frozen=True, kw_only=True)
class Product:
    """A grouped product's tile [BM, block_n], block_k deep; persistent: programs a processor, 0 for one a tile.

    stages: tiles on their way ahead of the product; 0, for path "rows" only, unrolls.
    """

    block_n: int
    block_k: int
    stages: int
    warps: int
    tma: bool = False  # read what is contiguous through the copy engine, where there is one
    persistent: int = 0
    halve: bool = False  # an expert's last tile, where half filled or less, is half as high
    split: bool = False  # warps that copy and warps that multiply, where kernels/grouped_hopper.py can: its own tiling


@dataclass(frozen=True, kw_only=True)
class Config:
    """path "rows": no tiles, block_n is units a program; "inline": each program finds its rows; "ordered": permute."""

    path: str
    block_m: int
    gate_up: Product
    down: Product


def _same(block_m: int, n: int, k: int, stages: int, warps: int, *, path: str = "ordered", **more: Any) -> Config:
    tiling = Product(block_n=n, block_k=k, stages=stages, warps=warps, **more)
    wider = Product(block_n=2 * n, block_k=k, stages=stages, warps=warps, **more)  # gated products hold two tiles
    return Config(path=path, block_m=block_m, gate_up=tiling, down=wider)


ROWS = Config(
    path="rows", block_m=1, gate_up=Product(block_n=4, block_k=512, stages=0, warps=4),
    down=Product(block_n=4, block_k=256, stages=0, warps=4),
)  # fmt: skip
INLINE_ASSIGNMENTS = 128  # above it, every program looking at all ids costs more than a launch


def default(num_rows: int, width: int, num_slots: int, share: float, element_size: int) -> Config:
    """A tiling by N and by rows an expert, N * share / P; share is the part of assignments that is local."""
    num = num_rows * width
    if num_rows == 1:
        return ROWS
    each = num * share / num_slots
    if element_size == 4:
        return _same(16, 32, 32, 2, 4)
    if num <= INLINE_ASSIGNMENTS:
        return _same(16, 32, 128, 4, 4, path="inline")
    if each <= 8:
        return _same(16 if each <= 4 else 32, 64, 128, 3, 4)
    if each <= 64:
        return _same(64, 64, 64, 3, 4)
    return _same(128, 128, 64, 3, 8, tma=True)


@cache
def _table() -> dict[str, Any]:
    return json.loads(TABLE.read_text()) if TABLE.exists() else {}


def shape_key(*, width: int, num_slots: int, hidden: int, expert_width: int, share: float) -> str:
    return f"P{num_slots} of {round(num_slots / share)} J{width} D{hidden} F{expert_width}"


def config_of(
    device: str, *, num_rows: int, width: int, num_slots: int, hidden: int, expert_width: int, share: float,
    element_size: int,
) -> Config:  # fmt: skip
    """The tiling tuned on that device for this D and F at the nearest rows an expert, for 2-byte values; else ours."""
    fallback = default(num_rows, width, num_slots, share, element_size)
    if element_size != 2:
        return fallback
    each, found = num_rows * width * share / num_slots, []
    for key, tuned in _table().get(device, {}).get("experts", {}).items():
        slots, total, tuned_width, *sizes = (int(n) for n in re.findall(r"\d+", key))
        if sizes != [hidden, expert_width]:
            continue
        for rows, entry in tuned.items():
            if (entry["path"] == "rows") == (num_rows == 1) and (entry["path"] == "inline") <= (
                num_rows * width <= 2 * INLINE_ASSIGNMENTS
            ):
                away = abs(log(int(rows) * tuned_width / total / each))
                found.append(((slots, total, tuned_width) != (num_slots, round(num_slots / share), width), away, entry))
    return from_json(min(found, key=lambda one: one[:2])[2]) if found else fallback


def router_rows(device: str, *, num_experts: int, num_rows: int) -> int:
    """Rows a program of the router kernel: as tuned for the nearest E and T on a log scale, where they divide T."""
    tuned = _table().get(device, {}).get("router", {})
    if not tuned:
        return 1
    table = tuned[min(tuned, key=lambda e: abs(log(int(e) / num_experts)))]
    rows = table[min(table, key=lambda t: abs(log(int(t) / num_rows)))]
    return rows if num_rows % rows == 0 else 1


def from_json(entry: dict[str, Any]) -> Config:
    products = {name: Product(**entry[name]) for name in ("gate_up", "down")}
    return Config(path=entry["path"], block_m=entry["block_m"], **products)


def to_json(config: Config) -> dict[str, Any]:
    """What `from_json` reads, without the fields that are off."""

    def set_fields(one: Product) -> dict[str, Any]:
        return {k: v for k, v in asdict(one).items() if v or k == "stages"}

    products = {name: set_fields(getattr(config, name)) for name in ("gate_up", "down")}
    return {"path": config.path, "block_m": config.block_m, **products}


def as_text(table: dict[str, Any]) -> str:
    """tuned.json with one line a row count."""
    devices = []
    for device, parts in table.items():
        shapes = []
        for shape, rows in parts["experts"].items():
            lines = ",\n".join(f'    "{t}": {json.dumps(rows[t])}' for t in sorted(rows, key=int))
            shapes.append(f'   "{shape}": {{\n{lines}\n   }}')
        shown = ",\n".join(shapes)
        devices.append(
            f' "{device}": {{\n  "router": {json.dumps(parts["router"])},\n  "experts": {{\n{shown}\n  }}\n }}'
        )
    return "{\n" + ",\n".join(devices) + "\n}\n"
