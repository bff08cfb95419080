"""Two results on the same canary: which verdicts and which coefficients differ.

Invariant: coefficients are compared where both runs read them, in the first phase; a difference within bf16 is none.
"""

from collections.abc import Mapping
from typing import Any

from truegate.canary.read import ABS_TOLERANCE, REL_TOLERANCE
from truegate.errors import UserError


def diff(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Findings on one side only, phases judged differently, and coefficients further apart than the tolerance."""
    if a["digest"] != b["digest"]:
        raise UserError("the two results are of different canaries; run both on the same one")
    only = [
        [f["title"] for f in x["findings"] if f["title"] not in {g["title"] for g in y["findings"]}]
        for x, y in ((a, b), (b, a))
    ]
    phases = []
    for layer in a["grid"]:
        for phase, (wrong, _) in a["grid"][layer].items():
            other = b["grid"].get(layer, {}).get(phase)
            if other is not None and bool(wrong) != bool(other[0]):
                phases.append({"layer": int(layer), "phase": phase, "wrong_a": wrong, "wrong_b": other[0]})
    compared, apart = _coefficients(a["matrices"], b["matrices"])
    return {"only_a": only[0], "only_b": only[1], "phases": phases, "compared": compared, "coefficients": apart}


def _coefficients(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    compared, apart = 0, []
    for layer, left in a.items():
        right = b.get(layer, {"probes": [], "measured": []})
        rows = dict(zip(right["probes"], right["measured"], strict=True))
        for name, values in zip(left["probes"], left["measured"], strict=True):
            for column, (x, y) in enumerate(zip(values, rows.get(name, []), strict=False)):
                if x is None or y is None:
                    continue
                compared += 1
                if abs(x - y) > 2 * (REL_TOLERANCE * max(abs(x), abs(y)) + ABS_TOLERANCE):
                    apart.append({"layer": int(layer), "probe": name, "column": column, "a": x, "b": y})
    return compared, apart


def print_diff(found: Mapping[str, Any], console: Any) -> None:
    """The terminal form."""
    from rich.markup import escape

    for side, titles in (("A", found["only_a"]), ("B", found["only_b"])):
        for title in titles:
            console.print(f"[bold]only {side}[/]  {escape(title)}", soft_wrap=True)
    for p in found["phases"][:40]:
        console.print(f"layer {p['layer']}, {p['phase']}: {p['wrong_a']} wrong in A, {p['wrong_b']} in B")
    apart = found["coefficients"]
    console.print(f"{len(apart):,} of {found['compared']:,} coefficients differ by more than bf16 explains")
    for e in sorted(apart, key=lambda e: -abs(e["a"] - e["b"]))[:10]:
        console.print(f"  layer {e['layer']}, probe {e['probe']}, column {e['column']}: A {e['a']:.4g}, B {e['b']:.4g}")
