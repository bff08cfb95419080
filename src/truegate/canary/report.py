"""One result, four forms: the terminal, JSON, JUnit XML for any engine's CI, and one HTML page without outside parts.

Invariant: every form says the same headline and the same findings; nothing is computed here that JSON does not hold.
"""

import base64
import json
import struct
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from numpy.typing import NDArray

from truegate.canary.read import REL_TOLERANCE
from truegate.errors import EXIT_FAULT, EXIT_INVALID, EXIT_OK, EXIT_UNDECIDED, UserError

_WORDS = {EXIT_OK: "right", EXIT_FAULT: "fault", EXIT_UNDECIDED: "not judged", EXIT_INVALID: "invalid run"}
_DOC = "docs/faults.md"
_EXAMPLES_SHOWN = 3


def verdict_word(data: Mapping[str, Any]) -> str:
    return _WORDS[data["exit"]]


def not_in_headline(data: Mapping[str, Any]) -> list[str]:
    """What was not judged and is not said by the headline, which tells faults first."""
    return [line for line in data["undecided"] if line not in data["headline"]]


def print_result(data: Mapping[str, Any], console: Any) -> None:
    """The terminal: headline, findings with their conditions and numbers, a grid of phases, what it covers."""
    from rich.markup import escape
    from rich.table import Table

    colour = {EXIT_OK: "green", EXIT_FAULT: "red"}.get(data["exit"], "yellow")
    console.print(f"\n[bold {colour}]{verdict_word(data)}[/]  {escape(data['headline'])}", soft_wrap=True)
    for number, f in enumerate(data["findings"], 1):
        console.print(f"\n[bold red]{number}[/] [bold]{escape(f['title'])}[/]", soft_wrap=True)
        console.print(f"  [dim]name[/]   {' + '.join(f['names'])}  [dim]({_DOC}#{f['names'][0]})[/]", soft_wrap=True)
        console.print(f"  [dim]where[/]  {escape(f['scope'])}", soft_wrap=True)
        if f["alternatives"]:
            others = ", ".join(" + ".join(a) for a in f["alternatives"][:4])
            console.print(f"  [dim]or[/]     {others}: these read the same here", soft_wrap=True)
        for e in f["examples"][:_EXAMPLES_SHOWN]:
            console.print(f"  [dim]e.g.[/]   {escape(example_line(e))}", soft_wrap=True)
    for line in not_in_headline(data):
        console.print(f"[yellow]not judged[/]  {escape(line)}", soft_wrap=True)
    if data["grid"]:
        table = Table(box=None, pad_edge=False, header_style="dim")
        table.add_column("phase")
        for layer in data["grid"]:
            table.add_column(f"layer {layer}", justify="right")
        table.add_column("seconds", justify="right")
        for phase in data["phases"]:
            cells = [_cell(data["grid"][layer].get(phase)) for layer in data["grid"]]
            table.add_row(phase, *cells, f"{data['seconds'].get(phase, 0):.1f}")
        console.print()
        console.print(table)
    for line in [*data["notes"], *data["covers"]]:
        console.print(f"[dim]- {escape(line)}[/]", soft_wrap=True)
    errors = data["errors"]
    if errors:
        accuracy = f"relative error at most {errors['max']:.1e}, median {errors['median']:.1e}"
        counts = f"{data['right']:,} of {data['read']:,} coefficients read are right"
        console.print(f"[dim]- {counts}; {accuracy}; {data['requests']} requests[/]", soft_wrap=True)


def _cell(counts: list[int] | tuple[int, int] | None) -> str:
    if counts is None:
        return "[dim]-[/]"
    wrong, asked = counts
    return f"[red]{wrong} of {asked} wrong[/]" if wrong else f"[green]{asked} right[/]"


def example_line(e: Mapping[str, Any]) -> str:
    """layer 1, probe row 3 (plain), expert 7: 0.131, should be 0.327; in batch 7, row 6 of 7"""
    where = f"in {e['phase']}"
    if e["batch"] > 1:
        where += f", row {e['place'] + 1} of {e['batch']}"
    if e["position"]:
        where += f", position {e['position']}"
    return (f"layer {e['layer']}, probe row {e['row']} ({e['kind']}), {e['column']}: {e['measured']:.4g}, "
            f"should be {e['expected']:.4g}; {where}")  # fmt: skip


def write_json(data: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(data, separators=(",", ":")) + "\n")


def read_json(path: Path) -> dict[str, Any]:
    """A result written by `write_json`."""
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; give the file that `canary run --json` wrote") from None
    except ValueError:
        raise UserError(f"{path}: not JSON; give the file that `canary run --json` wrote") from None
    if not isinstance(data, dict) or "headline" not in data or "manifest" not in data:
        raise UserError(f"{path}: not a result of `canary run --json`")
    return data


def write_junit(data: Mapping[str, Any], path: Path) -> None:
    """One test case per layer and phase; a finding fails those that it shows in, a lost server is an error."""
    cases = [(int(layer), phase, counts) for layer, found in data["grid"].items() for phase, counts in found.items()]
    failed = sum(bool(c[0]) for _, _, c in cases)
    other = [f for f in data["findings"] if not f["phases"]]
    problems = [*data["undecided"], *([data["lost"]] if data["lost"] else [])]
    suite = ElementTree.Element("testsuite", name="truegate canary", tests=str(len(cases) + len(other) + len(problems)),
                                failures=str(failed + len(other)), errors=str(len(problems)))  # fmt: skip
    for layer, phase, (wrong, asked) in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=f"canary.{data['family']}.layer {layer}", name=phase)
        if wrong:
            mine = [f for f in data["findings"] if layer in f["layers"]]
            text = "\n".join(f"{f['title']} ({f['scope']})" for f in mine)
            failure = ElementTree.SubElement(case, "failure", message=f"{wrong} of {asked} answers are wrong")
            failure.text = text
    for f in other:
        case = ElementTree.SubElement(suite, "testcase", classname=f"canary.{data['family']}", name=f["names"][0])
        ElementTree.SubElement(case, "failure", message=f["title"])
    for problem in problems:
        case = ElementTree.SubElement(suite, "testcase", classname=f"canary.{data['family']}", name="judged")
        ElementTree.SubElement(case, "error", message=problem)
    ElementTree.indent(suite)
    ElementTree.ElementTree(suite).write(path, encoding="utf-8", xml_declaration=True)


def write_html(data: Mapping[str, Any], path: Path) -> None:
    """The page: explanation on top, grid of phases, per layer expected, measured and difference."""
    from jinja2 import Environment, PackageLoader, select_autoescape

    env = Environment(loader=PackageLoader("truegate.canary"), autoescape=select_autoescape(default=True))
    env.filters["example"] = example_line
    page = env.get_template("report.html").render(
        data=data,
        word=verdict_word(data),
        undecided=not_in_headline(data),
        doc=_DOC,
        maps=[_maps(layer, m) for layer, m in data["matrices"].items()],
        sizes=sorted({int(n) for found in data.get("sizes", {}).values() for n in found}),
    )
    path.write_text(page)


def _maps(layer: str, matrix: Mapping[str, Any]) -> dict[str, Any]:
    """Three pictures of a layer; one pixel a coefficient, scaled by the browser."""
    want = np.array(matrix["expected"], dtype=float)
    got = np.array([[np.nan if v is None else v for v in row] for row in matrix["measured"]], dtype=float)
    if not want.size:
        return {"layer": layer, "probes": 0}
    top = float(max(np.nanmax(want), 1e-9))
    known = np.isfinite(got)
    difference = np.where(known, got - want, 0.0)
    bad = known & (np.abs(difference) > REL_TOLERANCE * np.abs(want) + 2e-3 * top)
    return {
        "layer": layer, "phase": matrix["phase"],
        "probes": len(want), "columns": want.shape[1], "top": top, "wrong": int(bad.sum()),
        "expected": _png(_blues(want / top)), "measured": _png(_blues(np.where(known, got, np.nan) / top)),
        "difference": _png(_signed(difference / top, known)), "names": json.dumps(matrix["probes"]),
        "want_json": json.dumps(matrix["expected"]), "got_json": json.dumps(matrix["measured"]),
    }  # fmt: skip


def _blues(x: NDArray[np.float64]) -> NDArray[np.uint8]:
    """0 white to 1 dark blue, by the square root so that small coefficients show; unknown is grey."""
    known = np.isfinite(x)
    t = np.sqrt(np.clip(np.where(known, x, 0), 0, 1))[..., None]
    rgb = (1 - t) * np.array([250, 250, 252.0]) + t * np.array([16, 52, 118.0])
    return np.where(known[..., None], rgb, 205).astype(np.uint8)


def _signed(x: NDArray[np.float64], known: NDArray[np.bool_]) -> NDArray[np.uint8]:
    """White where right, red too much, blue too little."""
    t = np.clip(np.sqrt(np.abs(x) * 2), 0, 1)[..., None]
    colour = np.where(x[..., None] > 0, np.array([200, 30, 40.0]), np.array([30, 80, 200.0]))
    rgb = (1 - t) * np.array([250, 250, 252.0]) + t * colour
    return np.where(known[..., None], rgb, 205).astype(np.uint8)


def _png(rgb: NDArray[np.uint8]) -> str:
    """A data URI of an [h, w, 3] picture."""
    height, width, _ = rgb.shape
    raw = b"".join(b"\0" + row.tobytes() for row in rgb)

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    head = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(data).decode()
