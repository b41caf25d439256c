"""A /metrics page as an operator's tools read it: Ziggurat's samples, from one server, at one time."""

from __future__ import annotations

import re
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

PREFIX = "ziggurat_"
_LINE = re.compile(
    r"(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(?P<labels>.*)\})?\s+(?P<value>[^\s]+)(?:\s+-?[0-9]+)?"
)
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')
_ESCAPED = {r"\\": "\\", r"\"": '"', r"\n": "\n"}


class PageError(Exception):
    """A page that cannot be had, or is not one of Ziggurat's; the message says which and what to do."""


@dataclass(frozen=True, slots=True)
class Series:
    """One sample. labels: without those of other names than the page has."""

    name: str
    labels: Mapping[str, str]
    value: float


@dataclass(frozen=True, slots=True)
class Page:
    """Samples of one scrape, in the page's order. time: seconds since the epoch."""

    time: float
    series: tuple[Series, ...]

    @classmethod
    def parse(cls, text: str, at: float) -> Page:
        """Ziggurat's samples of a page in Prometheus's text format; all other lines are passed over."""
        found = []
        for line in text.splitlines():
            if line.startswith(PREFIX):
                match = _LINE.fullmatch(line.strip())
                if match is None:
                    raise PageError(f"a line that is not of Prometheus's text format: {line[:100]}")
                found.append(_series(match["name"], match["labels"] or "", match["value"]))
        return cls(at, tuple(found))

    def of(self, name: str, **labels: str) -> Iterable[Series]:
        """The series of a name that have these labels."""
        wanted = labels.items()
        return (one for one in self.series if one.name == name and wanted <= one.labels.items())

    def total(self, name: str, **labels: str) -> float:
        """Their sum; 0 if there are none."""
        return sum(one.value for one in self.of(name, **labels))

    def by(self, name: str, label: str, **labels: str) -> dict[str, float]:
        """Sums by the values of one label, in the page's order."""
        sums: dict[str, float] = {}
        for one in self.of(name, **labels):
            if label in one.labels:
                sums[one.labels[label]] = sums.get(one.labels[label], 0.0) + one.value
        return sums

    def text_of(self, name: str, label: str) -> str:
        """A label of an info metric; "?" if the page lacks it."""
        return next((one.labels.get(label, "?") for one in self.of(name)), "?")

    @property
    def ranks(self) -> int:
        """Tensor-parallel ranks on the page."""
        return len({one.labels.get("rank") for one in self.of("ziggurat_row_stride_bytes")})


def _series(name: str, labels: str, value: str) -> Series:
    try:
        number = float(value)
    except ValueError as error:
        raise PageError(f"{name} has the value {value[:40]}, which is no number") from error
    return Series(name, {key: _plain(text) for key, text in _LABEL.findall(labels)}, number)


def _plain(text: str) -> str:
    return re.sub(r"\\.", lambda match: _ESCAPED.get(match[0], match[0]), text) if "\\" in text else text


def metrics_url(url: str) -> str:
    """What to ask for: `host:port` is http, and a URL without a path means /metrics."""
    whole = url if "://" in url else f"http://{url}"
    scheme, _, rest = whole.partition("://")
    if scheme not in ("http", "https"):
        raise PageError(f"{url}: metrics are read over http or https")
    host, slash, path = rest.partition("/")
    return f"{scheme}://{host}/{path}" if slash and path else f"{scheme}://{host}/metrics"


def fetch(url: str, timeout: float = 5.0) -> Page:
    """Scrape a URL. PageError if nobody answers, or if the answer has nothing of Ziggurat's."""
    target = metrics_url(url)
    try:
        with urllib.request.urlopen(target, timeout=timeout) as reply:
            text = reply.read().decode("utf-8", errors="replace")
    except urllib.error.HTTPError as error:
        raise PageError(f"{target} answers {error.code} {error.reason}; is it a /metrics page?") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise PageError(f"{target} cannot be reached: {reason}") from error
    page = Page.parse(text, time.time())
    if not page.series:
        raise PageError(
            f"{target} answers, but has none of Ziggurat's metrics; is it a server started with `ziggurat serve`, "
            "and are its tiers open?"
        )
    return page
