"""Line plots as PNG files, drawn with Pillow."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ziggurat.integration.cli.failures import CliError

# Okabe and Ito's colours, which people who see colours differently can tell apart, and black for bounds.
_COLOURS: Final = (
    "#0072B2",
    "#E69F00",
    "#009E73",
    "#CC79A7",
    "#56B4E9",
    "#D55E00",
    "#8C6D1F",
    "#7B5FA8",
    "#555555",
    "#A0B000",
    "#B03060",
    "#20808D",
)
_SCALE: Final = 2  # pixels per unit, so that text stays sharp on dense screens
_WIDTH, _HEIGHT = 560, 400
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 20, 44, 56
_LEGEND = 150


@dataclass(frozen=True, slots=True)
class Line:
    """points: (x, y), x rising."""

    name: str
    points: tuple[tuple[float, float], ...]
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    title: str
    x_label: str
    y_label: str
    lines: tuple[Line, ...]


def draw_panels(path: Path, title: str, panels: Sequence[Panel]) -> None:
    """Write panels side by side, with one legend. CliError if Pillow is not there or the file cannot be written."""
    try:
        image_module: Any = importlib.import_module("PIL.Image")
        draw_module: Any = importlib.import_module("PIL.ImageDraw")
        font_module: Any = importlib.import_module("PIL.ImageFont")
    except ImportError as error:
        raise CliError("--plot needs Pillow, which is not installed: pip install pillow") from error
    size = (_SCALE * (_WIDTH * len(panels) + _LEGEND), _SCALE * _HEIGHT)
    image = image_module.new("RGB", size, "white")
    canvas = _Canvas(draw_module.Draw(image), font_module)
    canvas.text(_LEFT, 8, title, 15)
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines))
    colours = {name: _COLOURS[i % len(_COLOURS)] for i, name in enumerate(names)}
    for number, panel in enumerate(panels):
        _draw_panel(canvas, panel, _WIDTH * number, colours)
    dashed = {line.name for panel in panels for line in panel.lines if line.dashed}
    for i, name in enumerate(names):
        x, y = _WIDTH * len(panels), _TOP + 18 * i
        canvas.line([(x, y + 7), (x + 22, y + 7)], _colour(name, colours, dashed), dashed=name in dashed)
        canvas.text(x + 28, y, name, 12)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path, format="PNG")
    except OSError as error:
        raise CliError(f"{path} cannot be written: {error.strerror or error}") from error


class _Canvas:
    """Drawing in units of which `_SCALE` pixels make one."""

    def __init__(self, draw: Any, fonts: Any) -> None:
        self._draw = draw
        self._fonts = {size: fonts.load_default(size * _SCALE) for size in (11, 12, 13, 15)}

    def line(
        self, points: list[tuple[float, float]], colour: str, *, dashed: bool = False, width: int = 2
    ) -> None:
        scaled = [(x * _SCALE, y * _SCALE) for x, y in points]
        if not dashed:
            self._draw.line(scaled, fill=colour, width=width * _SCALE // 2, joint="curve")
            return
        for (x0, y0), (x1, y1) in itertools.pairwise(scaled):
            length = max(1.0, ((x1 - x0) ** 2 + (y1 - y0) ** 2) ** 0.5)
            for start in range(0, int(length), 14):
                a, b = start / length, min(1.0, (start + 8) / length)
                ends = [(x0 + a * (x1 - x0), y0 + a * (y1 - y0)), (x0 + b * (x1 - x0), y0 + b * (y1 - y0))]
                self._draw.line(ends, fill=colour, width=width * _SCALE // 2)

    def dot(self, x: float, y: float, colour: str) -> None:
        box = [((x - 2.5) * _SCALE, (y - 2.5) * _SCALE), ((x + 2.5) * _SCALE, (y + 2.5) * _SCALE)]
        self._draw.ellipse(box, fill=colour)

    def text(self, x: float, y: float, text: str, size: int, *, anchor: str = "la") -> None:
        self._draw.text((x * _SCALE, y * _SCALE), text, fill="#222222", font=self._fonts[size], anchor=anchor)


def _colour(name: str, colours: dict[str, str], dashed: set[str]) -> str:
    return "#000000" if name in dashed else colours[name]


def _draw_panel(canvas: _Canvas, panel: Panel, offset: int, colours: dict[str, str]) -> None:
    points = [point for line in panel.lines for point in line.points]
    x_low, x_high = min(x for x, _ in points), max(x for x, _ in points)
    y_low, y_high = _round_range([y for _, y in points])
    x_span = (x_high - x_low) or 1.0
    left, right = offset + _LEFT, offset + _WIDTH - _RIGHT
    top, bottom = _TOP, _HEIGHT - _BOTTOM

    def place(x: float, y: float) -> tuple[float, float]:
        return (
            left + (x - x_low) / x_span * (right - left),
            bottom - (y - y_low) / (y_high - y_low) * (bottom - top),
        )

    canvas.text(left, top - 16, panel.title, 13)
    step = (y_high - y_low) / 5
    for i in range(6):
        y = y_low + step * i
        canvas.line([place(x_low, y), (right, place(x_low, y)[1])], "#DDDDDD", width=1)
        canvas.text(left - 6, place(x_low, y)[1], f"{y:g}", 11, anchor="rm")
    for x in sorted({x for x, _ in points}):
        canvas.line([place(x, y_low), place(x, y_high)], "#EEEEEE", width=1)
        canvas.text(place(x, y_low)[0], bottom + 6, f"{x:g}", 11, anchor="ma")
    canvas.text((left + right) / 2, bottom + 26, panel.x_label, 12, anchor="ma")
    canvas.text(offset + 6, top - 16, panel.y_label.split(",")[-1].strip(), 12)
    for line in panel.lines:
        colour = "#000000" if line.dashed else colours[line.name]
        spots = [place(x, y) for x, y in line.points]
        canvas.line(spots, colour, dashed=line.dashed)
        for x, y in spots:
            canvas.dot(x, y, colour)


def _round_range(values: Sequence[float]) -> tuple[float, float]:
    """From a multiple of ten to a multiple of ten."""
    low = 10 * int(min(values) // 10)
    high = 10 * int(-(-max(values) // 10))
    return float(low), float(max(high, low + 10))
