"""Charts as inline SVG: lines, bars, stacked bars, heat maps. Colours and fonts come from the page's style sheet.

Every chart is `WIDTH` units wide, a heat map `WIDE`, and as high as it needs; a page shows it at any size. Marks carry
a title, which browsers show when the pointer rests on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Format = Callable[[float], str]

WIDTH = 560
WIDE = 1160
_LEFT, _RIGHT, _TOP, _BOTTOM = 66, 14, 12, 40
_HEIGHT = 240
LEVELS = 9
"""Shades of a heat map, the lightest for nothing at all."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line; y is None where there is no value, and the line has a gap there. kind: its style, 0 to 5."""

    name: str
    x: Sequence[float]
    y: Sequence[float | None]
    kind: int = 0


def plain(value: float) -> str:
    """Three digits that matter."""
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}".replace(",", " ")


def amount(value: float) -> str:
    """Bytes, short, in thousands."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return f"{value:.0f} B"


def percent(value: float) -> str:
    """A ratio."""
    return f"{value * 100:.3g} %"


def ticks(most: float, wanted: int = 5) -> list[float]:
    """Round numbers from 0 up to the first one that is not below `most`."""
    if not most > 0 or not math.isfinite(most):
        return [0.0, 1.0]
    rough = most / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * nice for nice in (1, 2, 2.5, 5, 10) if power * nice >= rough * 0.999)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


class _Frame:
    """Axes of a chart: a plot area with ticks at the left and a label below."""

    def __init__(self, y_most: float, y_format: Format, height: int = _HEIGHT) -> None:
        self.height = height
        self.left, self.right, self.top, self.bottom = _LEFT, WIDTH - _RIGHT, _TOP, height - _BOTTOM
        marks = ticks(y_most)
        self.y_most = marks[-1]
        self.parts: list[str] = []
        for mark in marks:
            y = self.y(mark)
            self.parts.append(
                f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            )
            self.text(self.left - 6, y + 4, y_format(mark), "end")

    def y(self, value: float) -> float:
        return self.bottom - (self.bottom - self.top) * min(1.0, max(0.0, value / self.y_most))

    def text(self, x: float, y: float, words: str, anchor: str = "middle") -> None:
        self.parts.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(words)}</text>')

    def below(self, label: str) -> None:
        self.text((self.left + self.right) / 2, self.height - 6, label)

    def svg(self, title: str) -> str:
        return _svg(title, self.height, self.parts)


def _svg(title: str, height: float, parts: Sequence[str], width: int = WIDTH) -> str:
    return (
        f'<svg viewBox="0 0 {width} {height:.0f}" role="img" aria-label="{escape(title, quote=True)}">'
        f"<title>{escape(title)}</title>{''.join(parts)}</svg>"
    )


def line_chart(
    title: str,
    lines: Sequence[Line],
    *,
    x_label: str,
    x_format: Format = plain,
    y_format: Format = plain,
    y_most: float | None = None,
    marks: bool = False,
) -> str:
    """Lines over a common x axis that begins at 0.

    y_most: the axis's end; None: what the values need. marks: a dot for each value.
    """
    values = [y for line in lines for y in line.y if y is not None]
    xs = [x for line in lines for x in line.x]
    frame = _Frame(max(values, default=1.0) if y_most is None else y_most, y_format)
    high = max(xs, default=1.0) or 1.0

    def place(x: float) -> float:
        return frame.left + (frame.right - frame.left) * x / high

    for mark in ticks(high, 6):
        if mark <= high * 1.0001:
            near_the_edge = place(mark) > frame.right - 14
            frame.text(
                frame.right if near_the_edge else place(mark),
                frame.bottom + 16,
                x_format(mark),
                "end" if near_the_edge else "middle",
            )
    for line in lines:
        for run in _runs(line):
            points = " ".join(f"{place(x):.1f},{frame.y(y):.1f}" for x, y in run)
            frame.parts.append(f'<polyline class="line k{line.kind}" points="{points}"/>')
        if marks:
            for x, y in zip(line.x, line.y, strict=True):
                if y is not None:
                    said = escape(f"{line.name}: {x_format(x)}, {y_format(y)}")
                    frame.parts.append(
                        f'<circle class="dot k{line.kind}" cx="{place(x):.1f}" cy="{frame.y(y):.1f}" r="3">'
                        f"<title>{said}</title></circle>"
                    )
    frame.below(x_label)
    return frame.svg(title) + legend([(line.name, line.kind) for line in lines])


def _runs(line: Line) -> list[list[tuple[float, float]]]:
    """The stretches of a line without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(line.x, line.y, strict=True):
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def bar_chart(
    title: str,
    labels: Sequence[str],
    parts: Mapping[str, Sequence[float]],
    *,
    x_label: str,
    y_format: Format = plain,
    kinds: Sequence[int] = (0, 1, 2, 3, 4, 5),
) -> str:
    """Bars, stacked if there is more than one part. parts: name -> a value for each label."""
    totals = [sum(values) for values in zip(*parts.values(), strict=True)]
    frame = _Frame(max(totals, default=1.0), y_format)
    each = (frame.right - frame.left) / max(1, len(labels))
    width = max(0.5, each * 0.8 if each > 4 else each * 0.95)
    every = max(1, math.ceil(len(labels) * (max(map(len, labels), default=1) * 6.5 + 6) / (WIDTH - _LEFT)))
    for index, label in enumerate(labels):
        x, base = frame.left + each * index + (each - width) / 2, 0.0
        for (name, values), kind in zip(parts.items(), kinds, strict=False):
            value = values[index]
            if value > 0:
                top, low = frame.y(base + value), frame.y(base)
                said = escape(f"{label}{', ' + name if len(parts) > 1 else ''}: {y_format(value)}")
                frame.parts.append(
                    f'<rect class="fill k{kind}" x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" '
                    f'height="{low - top:.1f}"><title>{said}</title></rect>'
                )
            base += value
        if index % every == 0:
            frame.text(x + width / 2, frame.bottom + 16, label)
    frame.below(x_label)
    named = [(name, kind) for name, kind in zip(parts, kinds, strict=False)] if len(parts) > 1 else []
    return frame.svg(title) + legend(named)


def heat_map(
    title: str,
    rows: Sequence[str],
    values: Sequence[Sequence[float]],
    *,
    x_label: str,
    x_ends: tuple[str, str],
    most: float | None = None,
    scale: Format = plain,
) -> str:
    """A row of cells for each entry of `rows`, from the top, in `LEVELS` shades from 0 to `most` (None: the largest).

    Cells of one shade are one path, so that a map of ten thousand cells stays small.
    """
    columns = max((len(row) for row in values), default=1)
    highest = max((max(row, default=0.0) for row in values), default=0.0) if most is None else most
    area = WIDE - _LEFT - _RIGHT
    cell_x, cell_y = area / max(1, columns), min(16.0, max(3.0, 320 / max(1, len(rows))))
    height = _TOP + cell_y * len(rows) + _BOTTOM
    shades: list[list[str]] = [[] for _ in range(LEVELS)]
    for y, row in enumerate(values):
        for x, value in enumerate(row):
            shade = shade_of(value, highest)
            shades[shade].append(
                f"M{_LEFT + x * cell_x:.1f} {_TOP + y * cell_y:.1f}h{cell_x:.2f}v{cell_y:.2f}h-{cell_x:.2f}z"
            )
    parts = [f'<path class="s{shade}" d="{"".join(cells)}"/>' for shade, cells in enumerate(shades) if cells]
    every = max(1, math.ceil(13 / cell_y))
    for y, name in enumerate(rows):
        if y % every == 0:
            parts.append(
                f'<text x="{_LEFT - 6}" y="{_TOP + y * cell_y + cell_y / 2 + 4:.1f}" text-anchor="end">'
                f"{escape(name)}</text>"
            )
    bottom = _TOP + cell_y * len(rows) + 16
    parts.append(f'<text x="{_LEFT}" y="{bottom:.1f}">{escape(x_ends[0])}</text>')
    parts.append(f'<text x="{WIDE - _RIGHT}" y="{bottom:.1f}" text-anchor="end">{escape(x_ends[1])}</text>')
    parts.append(
        f'<text x="{(_LEFT + WIDE - _RIGHT) / 2}" y="{height - 6:.1f}" text-anchor="middle">'
        f"{escape(x_label)}</text>"
    )
    return _svg(title, height, parts, WIDE) + _scale(scale(0.0), scale(highest))


def shade_of(value: float, most: float) -> int:
    """0 for nothing; the others in equal steps."""
    if not value > 0 or not most > 0:
        return 0
    return min(LEVELS - 1, 1 + int(value / most * (LEVELS - 1) * (1 - 1e-9)))


def _scale(low: str, high: str) -> str:
    """The shades from nothing to the most, as a strip."""
    cells = "".join(f'<i class="s{shade}"></i>' for shade in range(LEVELS))
    return f'<p class="legend scale">{escape(low)} {cells} {escape(high)}</p>'


def legend(entries: Sequence[tuple[str, int]]) -> str:
    """What the colours mean; nothing for no entries."""
    if not entries:
        return ""
    inner = "".join(f'<span><i class="key k{kind}"></i>{escape(name)}</span>' for name, kind in entries)
    return f'<p class="legend">{inner}</p>'
