"""A recording of metrics: JSON lines, one object each.

The first line is `{"format": "ziggurat-recording", "version": 1, "url": …, "begun": seconds since the epoch}`. Every
other line is a scrape: `{"time": seconds since the epoch, "samples": {"name{label=\\"value\\",…}": value, …}}`, with
all of Ziggurat's series of the page and no others. A last line that was cut off is passed over.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from ziggurat.integration.observability.page import Page, PageError

FORMAT = "ziggurat-recording"
VERSION = 1


@dataclass(frozen=True, slots=True)
class Recording:
    """url: what was scraped. pages: in order of time, at least two."""

    url: str
    pages: Sequence[Page]


class Recorder:
    """Writes a new recording; each scrape is on disk when `add` returns. OSError if it cannot be written."""

    def __init__(self, path: Path, url: str, begun: float) -> None:
        self._file: IO[str] = path.open("w", encoding="utf-8")
        self._write({"format": FORMAT, "version": VERSION, "url": url, "begun": begun})

    def add(self, page: Page) -> None:
        samples = {
            _name(one.name, sorted(one.labels.items())): one.value
            for one in page.series
            if math.isfinite(one.value)
        }
        self._write({"time": page.time, "samples": samples})

    def close(self) -> None:
        self._file.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(line, separators=(",", ":"), allow_nan=False) + "\n")
        self._file.flush()


def _name(name: str, labels: Sequence[tuple[str, str]]) -> str:
    """As in Prometheus's text format."""
    inner = ",".join(f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in labels)
    return f"{name}{{{inner}}}" if labels else name


def is_recording(path: Path) -> bool:
    """Whether a file begins as a recording does. OSError if it cannot be read."""
    with path.open("rb") as file:
        head = file.read(200)
    return head.startswith(b"{") and FORMAT.encode() in head


def read_recording(path: Path) -> Recording:
    """PageError, with the line, if it is not a recording of this version with at least two scrapes."""
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    head = _object(path, 1, lines[0])
    if head.get("format") != FORMAT:
        raise PageError(f"{path} is not a recording made by `ziggurat top --record`")
    if head.get("version") != VERSION:
        raise PageError(f"{path} has version {head.get('version')}; this program reads {VERSION}")
    pages = list(_pages(path, lines[1:]))
    if len(pages) < 2:
        raise PageError(f"{path} holds {len(pages)} scrapes; there have to be two at least")
    return Recording(str(head.get("url", "")), pages)


def _pages(path: Path, lines: Sequence[str]) -> Iterator[Page]:
    for number, line in enumerate(lines, start=2):
        if not line:
            continue
        if number == len(lines) + 1:  # the last line has no newline: its writer was stopped within it
            return
        content = _object(path, number, line)
        samples, at = content.get("samples"), content.get("time")
        if not isinstance(samples, dict) or not isinstance(at, int | float):
            raise PageError(f"{path}, line {number}: a scrape has `time` and `samples`")
        yield Page.parse("\n".join(f"{name} {value}" for name, value in samples.items()), float(at))


def _object(path: Path, number: int, line: str) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise PageError(f"{path}, line {number} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise PageError(f"{path}, line {number} is not a JSON object")
    return content
