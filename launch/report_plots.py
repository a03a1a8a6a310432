"""Plots as SVG text: lines over hours, and a bar of shares. Plain, so that a page needs no script."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 600.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 58.0, 12.0, 12.0, 26.0
COLOURS = ("#3467a8", "#d9822b", "#2b7a3d", "#8e44ad", "#c0392b", "#16807a")
# More points than this cannot be seen; each group keeps its lowest and highest, so that a spike stays.
MAX_POINTS = 600
_TICKS = 4


@dataclass(frozen=True)
class Series:
    """A line: (hours, value) in order of time; None is a gap."""

    label: str
    points: Sequence[tuple[float, float | None]]


@dataclass(frozen=True)
class Mark:
    """Something that happened, `hours` after the start."""

    hours: float
    colour: str
    text: str


def thin(points: Sequence[tuple[float, float | None]], limit: int = MAX_POINTS) -> list[tuple[float, float | None]]:
    """Returns at most about `limit` points, with the extremes of each group and every gap's presence kept."""
    if len(points) <= limit:
        return list(points)
    size = math.ceil(2 * len(points) / limit)
    kept: list[tuple[float, float | None]] = []
    for start in range(0, len(points), size):
        group = points[start : start + size]
        finite = [(hours, value) for hours, value in group if value is not None]
        if not finite:
            kept.append(group[0])
            continue
        low, high = min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])
        kept += sorted({low, high})
    return kept


def ticks(low: float, high: float) -> list[float]:
    """Returns some round numbers from `low` to `high`."""
    span = high - low
    if not math.isfinite(span) or span <= 0:
        return [low]
    raw = span / _TICKS
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, first + 2 * _TICKS + 4) if step * number <= high + step * 1e-9]


def plot(series: Sequence[Series], marks: Sequence[Mark] = (), zero: bool = False) -> str:
    """Returns an SVG of the lines; `zero` begins the value axis there. Values that are not finite are gaps."""
    cleaned = [Series(s.label, [(x, y if _drawable(y) else None) for x, y in s.points]) for s in series]
    values = [y for s in cleaned for _, y in s.points if y is not None]
    hours = [x for s in cleaned for x, _ in s.points] + [mark.hours for mark in marks]
    if not values:
        return '<p class="soft">no finite values</p>'
    low, high = (min(0.0, *values) if zero else min(values)), max(values)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    low, high = (low if zero and low == 0 else low - margin), high + margin
    frame = _Frame(min(0.0, *hours), max(*hours, 1e-6), low, high)
    parts = [*_axes(frame), *_marks(frame, marks)]
    for index, line in enumerate(cleaned):
        parts.append(_line(frame, line, COLOURS[index % len(COLOURS)]))
    if len(cleaned) > 1:
        parts += _legend([line.label for line in cleaned])
    return _svg(parts)


def bars(shares: Mapping[str, float]) -> str:
    """Returns an SVG with one bar a share of 1, the value beside it."""
    if not shares:
        return '<p class="soft">known after two log intervals</p>'
    room = (HEIGHT - TOP - BOTTOM) / len(shares)
    parts = []
    for index, (name, share) in enumerate(shares.items()):
        top, width = TOP + index * room, max(1.0, share * (WIDTH - LEFT - RIGHT))
        colour = COLOURS[index % len(COLOURS)]
        parts.append(f'<text x="{LEFT}" y="{top + 12:.1f}">{html.escape(name)}: {share:.1%}</text>')
        parts.append(
            f'<rect x="{LEFT}" y="{top + 17:.1f}" width="{width:.1f}" height="{room - 24:.1f}" fill="{colour}" rx="2"/>'
        )
    return _svg(parts)


@dataclass(frozen=True)
class _Frame:
    first: float
    last: float
    low: float
    high: float

    def x(self, hours: float) -> float:
        return LEFT + (hours - self.first) / (self.last - self.first) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return HEIGHT - BOTTOM - (value - self.low) / (self.high - self.low) * (HEIGHT - TOP - BOTTOM)


def _axes(frame: _Frame) -> list[str]:
    parts = []
    for value in ticks(frame.low, frame.high):
        y = frame.y(value)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" stroke="#8883" />')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>')
    # Short runs are told in minutes: 0.02 h says nothing to a person.
    unit, scale = ("h", 1.0) if frame.last - frame.first >= 2 else ("min", 60.0)
    for value in ticks(frame.first * scale, frame.last * scale):
        x = frame.x(value / scale)
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="middle">{_number(value)} {unit}</text>')
    return parts


def _marks(frame: _Frame, marks: Sequence[Mark]) -> list[str]:
    return [
        f'<line x1="{frame.x(m.hours):.1f}" x2="{frame.x(m.hours):.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" '
        f'stroke="{m.colour}" stroke-dasharray="2 3"><title>{html.escape(m.text)}</title></line>'
        for m in marks
    ]


def _line(frame: _Frame, series: Series, colour: str) -> str:
    pieces: list[list[str]] = [[]]
    for hours, value in thin(series.points):
        if value is None:
            pieces.append([])
        else:
            pieces[-1].append(f"{frame.x(hours):.1f},{frame.y(value):.1f}")
    drawn = []
    for piece in pieces:
        if len(piece) == 1:
            x, y = piece[0].split(",")
            drawn.append(f'<circle cx="{x}" cy="{y}" r="2.5" fill="{colour}"/>')
        elif piece:
            drawn.append(f'<polyline points="{" ".join(piece)}" fill="none" stroke="{colour}" stroke-width="1.6"/>')
    return f"<g><title>{html.escape(series.label)}</title>{''.join(drawn)}</g>"


def _legend(labels: Sequence[str]) -> list[str]:
    parts, x = [], LEFT + 8
    for index, label in enumerate(labels):
        parts.append(f'<rect x="{x:.0f}" y="{TOP}" width="10" height="10" fill="{COLOURS[index % len(COLOURS)]}"/>')
        parts.append(f'<text x="{x + 14:.0f}" y="{TOP + 10}">{html.escape(label)}</text>')
        x += 26 + 6.6 * len(label)
    return parts


def _drawable(value: float | None) -> bool:
    # Beyond this the height of the plot itself would overflow.
    return value is not None and abs(value) < 1e300


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 10_000 or abs(value) < 0.001:
        for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
            if abs(value) >= size:
                return f"{value / size:.3g}{unit}"
        return f"{value:.1e}"
    return f"{value:.4g}"


def _svg(parts: Sequence[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH:.0f} {HEIGHT:.0f}" role="img">{"".join(parts)}</svg>'
