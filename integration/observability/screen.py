"""The screen of `ziggurat top`: 80 columns and 24 lines are enough for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, RenderResult
from rich.text import Text

from ziggurat.integration.observability.figures import Figures, Latency, TierFigures, duration
from ziggurat.residency.sizes import format_bytes

HISTORY = 400
"""Intervals that the sparklines remember; as many are shown as the terminal is wide."""

_WIDTHS = (72, 160)  # least and most columns that the screen is laid out for
_LABEL = 11


@dataclass(frozen=True, slots=True)
class Glyphs:
    """Characters for heights of a column, empty to full, and for the full and the empty part of a bar."""

    levels: str
    full: str
    empty: str


BLOCKS = Glyphs(" ▁▂▃▄▅▆▇█", "█", "░")
ASCII = Glyphs(" .:-=+*%#", "#", ".")
_PLAIN = str.maketrans("·×–µ…", "-x-u.")
"""Characters of our words that a terminal with ASCII alone lacks."""


def glyphs_for(encoding: str) -> Glyphs:
    """Blocks where the terminal's encoding has them."""
    try:
        (BLOCKS.levels + BLOCKS.empty).encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return ASCII
    return BLOCKS


@dataclass(slots=True)
class History:
    """The last intervals' ratios, oldest first; None where nothing happened. peak: the most bytes a second so far."""

    zero_miss: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY))
    hits: deque[float | None] = field(default_factory=lambda: deque(maxlen=HISTORY))
    peak: float = 0.0

    def add(self, figures: Figures) -> None:
        self.zero_miss.append(figures.zero_miss_ratio)
        self.hits.append(figures.hit_ratio)
        self.peak = max(self.peak, sum(figures.fetched_bytes_per_s.values()))


def sparkline(values: Sequence[float | None], width: int, glyphs: Glyphs) -> str:
    """The last `width` values between 0 and 1 as columns, right-aligned; nothing where there was no value."""
    return "".join(_level(value, glyphs) for value in list(values)[-width:]).rjust(width)


def _level(value: float | None, glyphs: Glyphs) -> str:
    """Anything above nothing is visible, and only what is full looks full."""
    if value is None:
        return " "
    steps = len(glyphs.levels) - 1
    return glyphs.levels[min(steps, max(1, int(value * steps)))]


def bar(share: float, width: int, glyphs: Glyphs) -> tuple[str, str]:
    """The full and the empty part of a bar."""
    filled = round(min(1.0, max(0.0, share)) * width)
    if share > 0 and not filled:
        filled = 1
    return glyphs.full * filled, glyphs.empty * (width - filled)


@dataclass(slots=True)
class Screen:
    """One frame. trouble: what is wrong with the server now, shown in place of the hint at the bottom."""

    url: str
    figures: Figures
    history: History
    glyphs: Glyphs = BLOCKS
    trouble: str = ""
    link: float | None = None  # bytes a second that the operator says the link can carry

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = max(_WIDTHS[0], min(_WIDTHS[1], options.max_width)) - 1
        for line in self.lines(width):
            line.truncate(options.max_width)
            if self.glyphs is ASCII:
                line.plain = line.plain.translate(_PLAIN)
            yield line

    def lines(self, width: int) -> list[Text]:
        """The frame's lines, each of at most `width` characters."""
        return [
            *self._head(width),
            *self._tiers(width),
            Text(),
            *self._steps(width),
            Text(),
            *self._fetches(width),
            Text(),
            *self._heat(width),
            Text(),
            self._errors(),
            self._foot(width),
        ]

    # -- parts ---------------------------------------------------------------------------------------------------

    def _head(self, width: int) -> list[Text]:
        f, setup = self.figures, self.figures.setup
        ranks = "" if f.ranks == 1 else f" · {f.ranks} ranks"
        model = (
            f"{setup['codec']} rows on {setup['device']} · {setup['layers']} layers × {setup['experts']} experts,"
            f" top {setup['top_k']}{ranks} · {setup['eviction']}"
        )
        title = Text.assemble(
            ("Ziggurat ", "bold"), (f"{setup['version']} ", "bold"), (f"· {self.url}", "dim")
        )
        lines = [title, Text(model, style="dim")]
        for line in lines:
            line.truncate(width, overflow="ellipsis")
        return lines

    def _tiers(self, width: int) -> list[Text]:
        return [self._tier(tier, width) for tier in self.figures.tiers]

    def _tier(self, tier: TierFigures, width: int) -> Text:
        if not tier.capacity_rows:
            return _labelled(tier.name, Text("none", style="dim"))
        amount = f" {tier.used_rows:.0f}/{tier.capacity_rows:.0f} rows · {format_bytes(int(tier.used_bytes))}"
        hits = f" · hits {_percent(tier.hit_ratio)} · out {tier.evictions_per_s:.0f}/s"
        full, empty = bar(
            tier.used_rows / tier.capacity_rows, max(8, width - _LABEL - len(amount) - len(hits)), self.glyphs
        )
        text = Text.assemble((full, "cyan"), (empty, "dim"), amount, (hits, _grade(tier.hit_ratio, 0.9, 0.7)))
        return _labelled(tier.name, text)

    def _steps(self, width: int) -> list[Text]:
        f, room = self.figures, width - _LABEL - 8
        tokens = " + ".join(f"{rate:.0f} {phase}" for phase, rate in f.tokens_per_s.items() if rate > 0)
        repeated = sum(f.outcomes_per_s.get(name, 0.0) for name in ("replayed", "exact"))
        again = f.steps_per_s and repeated / f.steps_per_s
        counts = f"{f.steps_per_s:.1f}/s · {tokens or 'no'} tokens/s · repeated {_percent(again)}"
        if f.missed_per_step is not None:
            counts += f" · {f.missed_per_step:.1f} misses each"
        lines = [
            _labelled("steps", Text(counts)),
            self._spark("zero-miss", f.zero_miss_ratio, self.history.zero_miss, room, (0.8, 0.5)),
            self._spark("hits", f.hit_ratio, self.history.hits, room, (0.95, 0.8)),
        ]
        if f.step_parts:
            lines.append(_labelled("step time", self._parts(width - _LABEL)))
        return lines

    def _spark(
        self,
        name: str,
        now: float | None,
        values: Sequence[float | None],
        room: int,
        good: tuple[float, float],
    ) -> Text:
        line = Text.assemble(
            (f"{_percent(now):>7} ", _grade(now, *good)), (sparkline(values, room, self.glyphs), "green")
        )
        return _labelled(name, line)

    def _parts(self, room: int) -> Text:
        """The parts of a mean step as one bar, and how long steps take."""
        parts = self.figures.step_parts
        styles = {"first_pass": "green", "repeated_passes": "yellow", "fetch": "red"}
        names = {"first_pass": "first", "repeated_passes": "again", "fetch": "fetch"}
        total = sum(parts.values()) or 1.0
        said = f" {_latency(self.figures.step_seconds)}"
        legend = "".join(f" {names[name]} {value / total:.0%}" for name, value in parts.items())
        size = max(8, room - len(said) - len(legend))
        text = Text()
        for name, value in parts.items():
            text.append(self.glyphs.full * round(value / total * size), style=styles[name])
        text.truncate(size)
        text.pad_right(max(0, size - len(text)))
        return text.append(said).append(legend, style="dim")

    def _fetches(self, width: int) -> list[Text]:
        f = self.figures
        moved = sum(f.fetched_bytes_per_s.values())
        link = self.link or f.link_bytes_per_s
        peak, of = (link, "the link's") if link else (self.history.peak, "the most so far,")
        words = f" {_rate(moved)} of {of} {_rate(peak)}"
        full, empty = bar(moved / peak if peak else 0.0, max(8, width - _LABEL - len(words)), self.glyphs)
        style = "red" if link and moved > 0.7 * link else "cyan"
        sources = [
            f"{source} {_rate(rate)}, 99 % of the rows in {duration(f.fetch_seconds[source].p99)}"
            for source, rate in f.fetched_bytes_per_s.items()
            if rate > 0
        ]
        lines = [
            _labelled("fetch", Text.assemble((full, style), (empty, "dim"), words)),
            *(_labelled("", Text(source, style="dim")) for source in sources),
        ]
        said = []
        if f.prompt_fetch_ratio:
            said.append(f"{_percent(f.prompt_fetch_ratio)} of the rows for steps with prompts")
        if f.fetching_rows:
            said.append(f"{f.fetching_rows:.0f} rows on their way")
        return [*lines, _labelled("", Text(" · ".join(said)))] if said else lines

    def _heat(self, width: int) -> list[Text]:
        f = self.figures
        served = f"the pool serves {_percent(f.pool_heat)} of recent routings, at best {_percent(f.pool_heat_best)}"
        hottest = " ".join(f"{name} {_percent(share)}" for name, share in f.hottest.items() if share)
        room = width - _LABEL
        busiest = max((layer.fetched_per_s for layer in f.layers), default=0.0) or 1.0
        rows = {
            "in pool": [layer.pool_share for layer in f.layers],
            "top tenth": [layer.hottest_tenth_share for layer in f.layers],
            "fetches": [layer.fetched_per_s / busiest for layer in f.layers],
        }
        lines = [_labelled("heat", Text(served))]
        if hottest:
            lines.append(_labelled("", Text(f"hottest experts: {hottest}", style="dim")))
        if not f.layers:
            return lines
        each = max(1, min(3, room // len(f.layers)))
        for name, values in rows.items():
            cells = "".join(_level(value, self.glyphs) * each for value in fold(values, room))
            lines.append(_labelled(name, Text(cells, style="red" if name == "fetches" else "magenta")))
        first, last = f.layers[0].layer, f.layers[-1].layer
        span = min(room, each * len(f.layers))
        ruler = f"{first}{last.rjust(span - len(first))}" if span > len(first) + len(last) else first
        return [*lines, _labelled("layer", Text(ruler, style="dim"))]

    def _errors(self) -> Text:
        errors = {name: count for name, count in self.figures.errors.items() if count}
        if not errors:
            return _labelled("errors", Text("none", style="green"))
        names = {
            "reads": "rows not read",
            "checksums": "of them damaged",
            "tokens": "tokens failed",
            "reread": "read twice",
            "rebuilt": "rebuilt",
        }
        healed = errors.keys() <= {"reread", "rebuilt"}  # nobody has noticed
        said = " · ".join(f"{count:.0f} {names[name]}" for name, count in errors.items())
        return _labelled("errors", Text(said, "yellow" if healed else "bold red"))

    def _foot(self, width: int) -> Text:
        if self.trouble:
            return Text(self.trouble[:width], style="bold red")
        interval = self.figures.seconds
        when = f"every {round(interval, 1):g} s" if interval > 0.01 else "waiting for the next scrape"
        return Text(f"{when} · Ctrl-C ends", style="dim")


def fold(values: Sequence[float], room: int) -> list[float]:
    """At most `room` values: neighbours share a place where there are more, the largest of them shows."""
    each = -(-len(values) // max(1, room))
    return [max(values[start : start + each]) for start in range(0, len(values), max(1, each))]


def _labelled(label: str, text: Text) -> Text:
    return Text(label.ljust(_LABEL), style="bold").append_text(_reset(text))


def _reset(text: Text) -> Text:
    """`text` without the label's weight."""
    whole = Text.assemble((text.plain, "not bold"))
    for span in text.spans:
        whole.stylize(span.style, span.start, span.end)
    if text.style:
        whole.stylize(text.style)
    return whole


def _percent(ratio: float | None) -> str:
    if ratio is None:
        return "–"
    # Only what is whole is called so.
    if 0.999 < ratio < 1.0:
        return "99.9 %"
    return f"{ratio * 100:.1f} %" if 0.0 < ratio < 1.0 else f"{ratio * 100:.0f} %"


def _grade(ratio: float | None, good: float, fair: float) -> str:
    if ratio is None:
        return "dim"
    return "green" if ratio >= good else "yellow" if ratio >= fair else "red"


def _rate(bytes_per_s: float) -> str:
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if bytes_per_s >= scale:
            return f"{bytes_per_s / scale:.3g} {unit}/s"
    return f"{bytes_per_s:.0f} B/s"


def _latency(latency: Latency) -> str:
    return f"{duration(latency.median)} (99 %: {duration(latency.p99)})" if latency.p99 is not None else "–"
