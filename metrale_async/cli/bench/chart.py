"""The ladder as a picture: an SVG small enough to write by hand, so that no plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

WIDTH: Final = 1080
HEIGHT: Final = 400
_COLOURS: Final = ("#2563eb", "#ea580c", "#059669", "#7c3aed", "#dc2626", "#475569")
_TOP, _BOTTOM, _LEFT, _GAP = 64, 56, 64, 36
_PANELS: Final = 3


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel; a point is (concurrency, value)."""

    label: str
    points: Sequence[tuple[float, float]]
    dashed: bool = False
    colour: int = 0


@dataclass(frozen=True, slots=True)
class Panel:
    """One set of axes: concurrency on a log2 scale, the value from zero."""

    title: str
    unit: str
    series: Sequence[Series]


def ladder_chart(title: str, panels: Sequence[Panel]) -> str:
    """The panels side by side under one title, as SVG text."""
    width = (WIDTH - _GAP) / max(_PANELS, len(panels))
    drawn = "".join(_panel(panel, _GAP / 2 + index * width, width) for index, panel in enumerate(panels))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        f'font-family="system-ui, sans-serif" font-size="12" fill="#0f172a">'
        f'<rect width="100%" height="100%" fill="#ffffff"/>'
        f'<text x="{WIDTH / 2}" y="24" text-anchor="middle" font-size="15" font-weight="600">{escape(title)}</text>'
        f"{drawn}</svg>\n"
    )


def _panel(panel: Panel, x: float, width: float) -> str:
    points = [point for series in panel.series for point in series.points]
    if not points:
        return ""
    left, right = x + _LEFT, x + width - 8
    top, bottom = _TOP, HEIGHT - _BOTTOM
    low, high = (math.log2(edge(p[0] for p in points)) for edge in (min, max))
    ticks = _ticks(max(value for _, value in points))

    def place(concurrency: float, value: float) -> tuple[float, float]:
        share = (math.log2(concurrency) - low) / ((high - low) or 1)
        return left + share * (right - left), bottom - value / ticks[-1] * (bottom - top)

    parts = [f'<text x="{left}" y="{top - 14}" font-weight="600">{escape(panel.title)}</text>']
    for tick in ticks:
        y = place(2**low, tick)[1]
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{tick:g}</text>')
    for concurrency in sorted({point[0] for point in points}):
        at = place(concurrency, 0)[0]
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{concurrency:g}</text>')
    parts.append(f'<text x="{(left + right) / 2}" y="{bottom + 38}" text-anchor="middle">streams at once</text>')
    parts.append(f'<text x="{left - 6}" y="{top - 14}" text-anchor="end" fill="#64748b">{escape(panel.unit)}</text>')
    for index, series in enumerate(panel.series):
        parts += _line(series, [place(*point) for point in series.points])
        parts.append(_legend(series, left + 10, top + 6 + 16 * index))
    return "".join(parts)


def _line(series: Series, places: Sequence[tuple[float, float]]) -> list[str]:
    colour = _COLOURS[series.colour % len(_COLOURS)]
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    line = f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dash}/>'
    return [line, *(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colour}"/>' for x, y in places)]


def _legend(series: Series, x: float, y: float) -> str:
    colour = _COLOURS[series.colour % len(_COLOURS)]
    dash = ' stroke-dasharray="5 4"' if series.dashed else ""
    return (
        f'<line x1="{x}" x2="{x + 18}" y1="{y}" y2="{y}" stroke="{colour}" stroke-width="2"{dash}/>'
        f'<text x="{x + 24}" y="{y + 4}">{escape(series.label)}</text>'
    )


def _ticks(largest: float) -> list[float]:
    """Round values from zero to at least ``largest``, four to six of them."""
    if largest <= 0:
        return [0.0, 1.0]
    raw = largest / 4
    step = next(
        factor * 10.0 ** math.floor(math.log10(raw))
        for factor in (1, 2, 2.5, 5, 10)
        if factor * 10.0 ** math.floor(math.log10(raw)) >= raw
    )
    return [step * index for index in range(math.ceil(largest / step) + 1)]
