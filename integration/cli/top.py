"""`ziggurat top`: what the tiers of a server do, live, from its /metrics page."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.observability.figures import Figures, figures
from ziggurat.integration.observability.page import Page, PageError, fetch, metrics_url
from ziggurat.integration.observability.recording import Recorder
from ziggurat.integration.observability.screen import History, Screen, glyphs_for
from ziggurat.residency.sizes import Size

DEFAULT_URL = "http://127.0.0.1:8000/metrics"


def register(app: typer.Typer) -> None:
    """Mount the command."""
    app.command("top")(top)


def top(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="Of a server's /metrics page, or host:port.")
    ] = DEFAULT_URL,
    interval: Annotated[
        float, typer.Option("--interval", min=0.1, max=3600.0, help="Seconds between two scrapes.")
    ] = 2.0,
    once: Annotated[bool, typer.Option("--once", help="Show one interval and end.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print figures as JSON, one object a line, instead of a screen.")
    ] = False,
    record: Annotated[
        Path | None,
        typer.Option("--record", help="Write all scrapes to a new file, for `ziggurat report`."),
    ] = None,
    count: Annotated[
        int,
        typer.Option(
            "--count",
            min=0,
            help="End after this many intervals; 0: go on, or one where there is no terminal.",
        ),
    ] = 0,
    link: Annotated[
        str,
        typer.Option("--link", help="What the link carries in a second, such as 55GB, if you measured it."),
    ] = "",
) -> None:
    """Show tiers, misses, fetches and heat of a running server."""
    watch = _Watch(_target(url), _link(link))
    try:
        watch.start(record)
        wanted = 1 if once else count
        if as_json:
            watch.run(interval, wanted, _print)
        elif watch.console.is_terminal and not once:
            watch.show(interval, wanted)
        else:
            watch.run(interval, wanted or 1, lambda new: None)
            watch.console.print(watch.screen())
    except KeyboardInterrupt:
        pass  # the way to end it
    except PageError as error:
        raise CliError(str(error)) from error
    except OSError as error:
        raise CliError(f"cannot write {error.filename or record}: {error.strerror or error}") from error
    finally:
        watch.close()


def _target(url: str) -> str:
    try:
        return metrics_url(url)
    except PageError as error:
        raise CliError(str(error)) from error


def _link(text: str) -> float | None:
    if not text:
        return None
    try:
        size = Size.parse(text)
    except ValueError as error:
        raise CliError(f"--link: {error}") from error
    if size.kind != "bytes" or size.amount <= 0:
        raise CliError(f"--link: {text} is no number of bytes; say for example 55GB")
    return float(size.amount)


def _print(new: Figures | None) -> None:
    if new is not None:
        typer.echo(json.dumps(new.to_json()))


class _Watch:
    """Scrapes at even distances. A server that stops answering is told, and asked again."""

    def __init__(self, url: str, link: float | None) -> None:
        self.url = url
        self.console = Console(highlight=False)
        self.history = History()
        self._link = link
        self._recorder: Recorder | None = None
        self._last: Page | None = None
        self._figures: Figures | None = None
        self._trouble = ""

    def start(self, record: Path | None) -> None:
        """The first scrape. PageError if there is nothing to watch."""
        self._last = fetch(self.url)
        if record is not None:
            self._recorder = Recorder(record, self.url, self._last.time)
            self._recorder.add(self._last)

    def close(self) -> None:
        if self._recorder is not None:
            self._recorder.close()

    def screen(self) -> Screen:
        """The newest frame."""
        assert self._last is not None
        shown = self._figures or figures(self._last, self._last)
        glyphs = glyphs_for(self.console.encoding)
        return Screen(self.url, shown, self.history, glyphs, self._trouble, self._link)

    def show(self, interval: float, count: int) -> None:
        """A live screen; `count` intervals, or until Ctrl-C. The last frame stays in the terminal."""
        try:
            with Live(self.screen(), console=self.console, screen=True, auto_refresh=False) as live:
                self.run(interval, count, lambda new: live.update(self.screen(), refresh=True))
        finally:
            self.console.print(self.screen())

    def run(self, interval: float, count: int, seen: Callable[[Figures | None], None]) -> None:
        """Scrape every `interval` seconds and say each time what is new; None if nobody answered."""
        done, due = 0, time.monotonic()
        while not count or done < count:
            due = max(due + interval, time.monotonic())  # after a pause nobody wants the missed scrapes
            time.sleep(max(0.0, due - time.monotonic()))
            new = self._scrape(strict=bool(count) or not self.console.is_terminal)
            done += 1
            seen(new)

    def _scrape(self, *, strict: bool) -> Figures | None:
        """One more page. Without `strict` a server that does not answer is trouble to show, not an error."""
        try:
            page = fetch(self.url)
        except PageError as error:
            if strict:
                raise
            self._trouble = str(error)
            return None
        assert self._last is not None
        self._trouble, before, self._last = "", self._last, page
        if self._recorder is not None:
            self._recorder.add(page)
        self._figures = figures(before, page)
        self.history.add(self._figures)
        return self._figures
