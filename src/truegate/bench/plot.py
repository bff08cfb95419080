"""A page with the distributions of a run, drawn as SVG: no plotting library, no script, nothing loaded from elsewhere.

Invariant: every curve is drawn from the outcomes themselves; axes start at zero.
"""

import html
from collections.abc import Sequence
from typing import Any

import numpy as np

from truegate.bench.load import Outcome
from truegate.bench.measure import as_table, series, tokens_of

WIDTH, HEIGHT, MARGIN = 420, 240, 44
LABELS = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "itl": "Inter-token latency",
    "e2e_latency": "End-to-end latency",
}
_STYLE = """body{font:14px system-ui,sans-serif;margin:2em auto;max-width:960px;color:#222}pre{background:#f6f6f6;
padding:1em;overflow:auto}figure{display:inline-block;margin:0 12px 20px 0}text{font-size:11px;fill:#444}
.axis{stroke:#999}.curve{fill:none;stroke:#1668b8;stroke-width:2}.mark{stroke:#c33;stroke-dasharray:4 3}"""


def page(result: dict[str, Any], outcomes: Sequence[Outcome]) -> str:
    """An HTML document: the table, one cumulative distribution per latency, and tokens per second over time."""
    done = [one for one in outcomes if one.ok]
    figures = [
        _cumulative(LABELS[name], 1000.0 * np.sort(np.asarray(values)))
        for name, values in series(done).items()
        if values
    ]
    if done:
        figures.append(_over_time(done, result["duration"]))
    title = html.escape(f"{result['model']} at {result['base_url']}")
    return (
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{title}</title><style>{_STYLE}</style>"
        f"<h1>{title}</h1><pre>{html.escape(as_table(result))}</pre>{''.join(figures)}</html>\n"
    )


def _cumulative(label: str, values: np.ndarray) -> str:
    """Share of measurements at or below x; dashed at the median and the 99th percentile."""
    top = float(values[-1]) or 1.0
    shares = np.arange(1, len(values) + 1) / len(values)
    if len(values) > 400:  # as many points as can be seen
        keep = np.linspace(0, len(values) - 1, 400).astype(int)
        values, shares = values[keep], shares[keep]
    marks = [(float(np.interp(q, shares, values)), name) for q, name in ((0.5, "p50"), (0.99, "p99"))]
    return _figure(f"{label} (ms)", [0.0, *values], [0.0, *shares], top, 1.0, marks)


def _over_time(done: Sequence[Outcome], duration: float) -> str:
    """Generated tokens per second, each answer's tokens spread over the times its chunks came."""
    bins = max(2, min(60, int(duration)))
    counts = np.zeros(bins)
    for one in done:
        if one.ttft is None:
            continue
        moments = one.start + one.ttft + np.concatenate([[0.0], np.cumsum(one.itl)])
        places = np.minimum((moments / duration * bins).astype(int), bins - 1)
        np.add.at(counts, places, tokens_of(one) / len(moments))
    rates = counts / (duration / bins)
    middles = (np.arange(bins) + 0.5) * duration / bins
    return _figure("Output tokens per second, over time (s)", middles, rates, duration, float(rates.max()) or 1.0, [])


def _figure(
    title: str,
    xs: Sequence[float],
    ys: Sequence[float],
    x_top: float,
    y_top: float,
    marks: Sequence[tuple[float, str]],
) -> str:
    def x_of(value: float) -> float:
        return MARGIN + value / x_top * (WIDTH - 2 * MARGIN)

    def y_of(value: float) -> float:
        return HEIGHT - MARGIN - value / y_top * (HEIGHT - 2 * MARGIN)

    points = " ".join(f"{x_of(x):.1f},{y_of(y):.1f}" for x, y in zip(xs, ys, strict=True))
    bottom, left, right, top = y_of(0), MARGIN, WIDTH - MARGIN, MARGIN
    parts = [
        _line(left, bottom, right, bottom, "axis"),
        _line(left, bottom, left, top, "axis"),
        f'<polyline class="curve" points="{points}"/>',
    ]
    for share in (0.0, 0.5, 1.0):
        parts.append(_text(x_of(share * x_top), bottom + 16, f"{share * x_top:.4g}", "middle"))
        parts.append(_text(left - 6, y_of(share * y_top) + 4, f"{share * y_top:.4g}", "end"))
    for value, name in marks:
        parts.append(_line(x_of(value), bottom, x_of(value), top, "mark"))
        parts.append(_text(x_of(value) + 3, top - 4, f"{name} {value:.4g}", "start"))
    head = f'<svg width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" xmlns="http://www.w3.org/2000/svg">'
    return f"<figure><figcaption>{html.escape(title)}</figcaption>{head}{''.join(parts)}</svg></figure>"


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'
