"""docs/plan.md lists every backend, and says "runs" of exactly those whose contract says so."""

from pathlib import Path

from truegate.moe.backends import PARTS, load, names

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"


def test_the_backends_table_is_the_folders():
    rows = [
        [cell.strip() for cell in line.split("|")[1:4]]
        for line in PAGE.read_text().splitlines()
        if line.startswith("|")
    ]
    stated = {
        (part, name): state.startswith("runs")
        for part, name, state in rows
        if part in ("router", "experts", "dispatch")
    }
    part_of = {"routers": "router", "experts": "experts", "dispatch": "dispatch"}
    real = {(part_of[p], n): load(p, n).CONTRACT.status == "runs" for p in PARTS for n in names(p)}
    assert stated == real
