"""Inline SVG plots for the report page: plain strings, colours from the page's CSS classes, no scripts.

Invariant: every text that comes from outside is escaped.
"""

import math
from collections.abc import Sequence
from html import escape

from truegate.evals.report import OUTCOME_LABELS, percent
from truegate.evals.score import OUTCOMES
from truegate.evals.summary import Summary

WIDTH = 720
LEFT = 52
RIGHT = 24
PLOT = WIDTH - LEFT - RIGHT
BINS = 36


def _svg(height: float, body: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(title)}">' + "".join(body) + "</svg>"
    )


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{kind}"/>'


def _rect(x: float, y: float, width: float, height: float, kind: str, tip: str = "") -> str:
    inside = f"<title>{escape(tip)}</title>" if tip else ""
    size = f'width="{max(0.0, width):.1f}" height="{max(0.0, height):.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} class="{kind}">{inside}</rect>'


def accuracy_plot(runs: Sequence[tuple[str, Summary]]) -> str:
    """A dot and its 95% interval for each run, on an axis cut to what is shown."""
    lows = [s.accuracy_ci[0] for _, s in runs]
    highs = [s.accuracy_ci[1] for _, s in runs]
    low, high = max(0.0, min(lows) - 0.02), min(1.0, max(highs) + 0.02)
    step = _nice((high - low) / 6)
    low, high = max(0.0, math.floor(low / step) * step), min(1.0, math.ceil(high / step) * step)

    def at(share: float) -> float:
        return LEFT + (share - low) / (high - low) * PLOT

    top, gap = 14, 40
    bottom = top + gap * len(runs)
    body = []
    for i in range(round((high - low) / step) + 1):
        tick = low + i * step
        body += [_line(at(tick), top, at(tick), bottom, "grid")]
        body += [_text(at(tick), bottom + 16, percent(tick, 0 if step >= 0.01 else 1), "small", "middle")]
    for i, (name, s) in enumerate(runs):
        y = top + gap * (i + 0.5)
        body += [
            _text(LEFT - 12, y + 4, name, "name", "end"),
            _line(at(s.accuracy_ci[0]), y, at(s.accuracy_ci[1]), y, f"whisker run{i}"),
            f'<circle cx="{at(s.accuracy):.1f}" cy="{y:.1f}" r="5.5" class="run{i}"/>',
            _text(at(s.accuracy), y - 11, percent(s.accuracy), "value", "middle"),
        ]
    return _svg(bottom + 24, body, "Accuracy with 95% intervals")


def length_plot(runs: Sequence[tuple[str, Sequence[int]]], unit: str) -> str:
    """A histogram of answer lengths for each run, one below the other on the same axes."""
    top_value = max((max(lengths, default=0) for _, lengths in runs), default=0) or 1
    step = _nice(top_value / 6)
    size = math.ceil(top_value / step) * step / BINS
    counts = []
    for _, lengths in runs:
        bins = [0] * BINS
        for length in lengths:
            bins[min(BINS - 1, int(length / size))] += 1
        counts.append(bins)
    tallest = max(max(bins) for bins in counts) or 1
    panel, gap, top = 84, 34, 20
    body, y = [], float(top)
    width = PLOT / BINS
    for i, ((name, lengths), bins) in enumerate(zip(runs, counts, strict=True)):
        base = y + panel
        body += [_text(LEFT - 12, y + panel / 2 + 4, name, "name", "end"), _line(LEFT, base, LEFT + PLOT, base, "axis")]
        for j, count in enumerate(bins):
            height = count / tallest * panel
            tip = f"{j * size:,.0f} to {(j + 1) * size:,.0f} {unit}: {count}"
            if count:
                body.append(
                    _rect(LEFT + j * width + 0.75, base - height, width - 1.5, max(height, 1.5), f"run{i}", tip)
                )
        if lengths:
            x = LEFT + sum(lengths) / len(lengths) / size * width
            body += [
                _line(x, y - 8, x, base, "mean"),
                _text(x + 5, y - 6, f"mean {sum(lengths) / len(lengths):,.0f}", "small"),
            ]
        y = base + gap
    y -= gap
    for k in range(round(size * BINS / step) + 1):
        x = LEFT + k * step / size * width
        body += [_line(x, y, x, y + 4, "axis"), _text(x, y + 17, f"{k * step:,.0f}", "small", "middle")]
    body.append(_text(LEFT + PLOT, y + 33, f"{unit} per answer", "small", "end"))
    return _svg(y + 40, body, "Lengths of the answers")


def outcome_plot(runs: Sequence[tuple[str, Summary]]) -> str:
    """One bar a run, split into outcomes, with the shares that fit written inside."""
    top, bar, gap = 8, 30, 16
    body, y = [], float(top)
    for name, s in runs:
        x = float(LEFT)
        body.append(_text(LEFT - 12, y + bar / 2 + 4, name, "name", "end"))
        for outcome in OUTCOMES:
            share = s.outcomes[outcome] / s.answers if s.answers else 0.0
            width = share * PLOT
            if width:
                body.append(
                    _rect(x, y, width, bar, f"o-{outcome}", f"{OUTCOME_LABELS[outcome]}: {s.outcomes[outcome]}")
                )
            if width > 44:
                body.append(_text(x + width / 2, y + bar / 2 + 4, percent(share), "inside", "middle"))
            x += width
        y += bar + gap
    seen = [o for o in OUTCOMES if any(s.outcomes[o] for _, s in runs)]
    x = float(LEFT)
    for outcome in seen:
        body += [_rect(x, y, 11, 11, f"o-{outcome}"), _text(x + 16, y + 10, OUTCOME_LABELS[outcome], "small")]
        x += 34 + 6.6 * len(OUTCOME_LABELS[outcome])
    return _svg(y + 20, body, "Outcomes")


def _nice(step: float) -> float:
    """The next of 1, 2, 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(step)) if step > 0 else 1.0
    return next(m * power for m in (1, 2, 5, 10) if m * power >= step * 0.999)
