"""The service's numbers in a buffer of fixed layout, so that another process can read them without asking.

`METRICS` is the single source: exporters and the README table are made from it, and a cell's place in the buffer
follows from its order. One process writes; readers take no lock. A sequence number that is odd while a group of
cells is being written lets a reader take a copy in which the counts add up.
"""

from __future__ import annotations

import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import numpy as np
import numpy.typing as npt

from ziggurat.residency.metric_specs import METRICS, MetricSpec
from ziggurat.residency.runtime_errors import MetricsBufferError

SCHEMA_VERSION = 1
_MAGIC = b"ZIGMETR1"
_HEADER = struct.Struct("<8sQQQ")  # magic, schema version, digest of the layout, bytes in use
_SEQUENCE = _HEADER.size // 8  # index of the sequence number among the buffer's 8-byte words
_FIRST_CELL = 8  # the header takes 64 bytes


@dataclass(frozen=True, slots=True)
class Sample:
    """One decoded series. For a histogram `value` is its sum and `buckets` are (upper bound, count up to it)."""

    spec: MetricSpec
    labels: tuple[tuple[str, str], ...]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()


def _layout(specs: Sequence[MetricSpec]) -> tuple[dict[tuple[str, tuple[str, ...]], int], int]:
    """(name, label values) -> index of the first 8-byte word of its cells; and words in use."""
    cells: dict[tuple[str, tuple[str, ...]], int] = {}
    word = _FIRST_CELL
    for spec in specs:
        for values in product(*(choices for _, choices in spec.labels)):
            cells[spec.name, values] = word
            word += spec.words
    return cells, word


_CELLS, _WORDS = _layout(METRICS)
_DIGEST = zlib.crc32(repr([(s.name, s.kind, s.labels, s.bounds) for s in METRICS]).encode())
BUFFER_BYTES = _WORDS * 8
_SPECS = {spec.name: spec for spec in METRICS}

Buffer = bytearray | memoryview


class TierMetrics:
    """Writes the cells. The buffer must be writable and at least BUFFER_BYTES long; it is cleared.

    Any thread of the writing process may write, inside `writing()`.
    """

    def __init__(self, buffer: Buffer | None = None) -> None:
        buffer = bytearray(BUFFER_BYTES) if buffer is None else buffer
        view = memoryview(buffer).cast("B")
        if view.readonly or view.nbytes < BUFFER_BYTES:
            raise MetricsBufferError(
                f"a metrics buffer must be writable and have {BUFFER_BYTES} bytes; this one has {view.nbytes}"
            )
        self.buffer = view[:BUFFER_BYTES]
        self._counts: npt.NDArray[np.uint64] = np.frombuffer(self.buffer, dtype=np.uint64)
        self._values: npt.NDArray[np.float64] = np.frombuffer(self.buffer, dtype=np.float64)
        self._lock = threading.Lock()
        self._counts[:] = 0
        # the magic goes in last: a reader that finds it finds the rest of the header, too
        self.buffer[8 : _HEADER.size] = _HEADER.pack(_MAGIC, SCHEMA_VERSION, _DIGEST, BUFFER_BYTES)[8:]
        self.buffer[:8] = _MAGIC

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A group of cells that readers see all of or nothing of."""
        with self._lock:
            self._counts[_SEQUENCE] += np.uint64(1)
            try:
                yield
            finally:
                self._counts[_SEQUENCE] += np.uint64(1)

    def add(self, name: str, amount: int, *labels: str) -> None:
        """Increase a counter."""
        cell = self._cell(name, "counter", labels)
        if amount:
            self._counts[cell] += np.uint64(amount)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._values[self._cell(name, "gauge", labels)] = value

    def observe(self, name: str, values: Sequence[float], *labels: str) -> None:
        """Add observations to a histogram."""
        if not values:
            return
        cell = self._cell(name, "histogram", labels)
        bounds = _SPECS[name].bounds
        buckets = np.searchsorted(bounds, values, side="left")
        found = np.bincount(buckets, minlength=len(bounds) + 1).astype(np.uint64)
        self._counts[cell : cell + len(found)] += found
        self._values[cell + len(found)] += float(sum(values))

    def samples(self) -> list[Sample]:
        """What a reader of the buffer sees now."""
        return read_samples(self.buffer)

    def value(self, name: str, *labels: str) -> float:
        """A counter's or gauge's value; a histogram's number of observations."""
        spec = _SPECS[name]
        cell = self._cell(name, spec.kind, labels)
        if spec.kind == "gauge":
            return float(self._values[cell])
        width = 1 if spec.kind == "counter" else len(spec.bounds) + 1
        return int(self._counts[cell : cell + width].sum())

    def _cell(self, name: str, kind: str, labels: tuple[str, ...]) -> int:
        if _SPECS[name].kind != kind:
            raise MetricsBufferError(f"{name} is a {_SPECS[name].kind}, not a {kind}")
        return _CELLS[name, labels]


def read_samples(buffer: bytes | Buffer, attempts: int = 1000) -> list[Sample]:
    """Decode a buffer that another process may be writing to.

    MetricsBufferError if it is not one, or of another schema version. After `attempts` copies that were each caught
    in the middle of a write the last one is decoded as it is: every single number in it is still right.
    """
    if len(buffer) < _HEADER.size or bytes(buffer[:8]) != _MAGIC:
        raise MetricsBufferError("this is not a metrics buffer, or its writer has not started yet")
    _, version, digest, size = _HEADER.unpack(bytes(buffer[: _HEADER.size]))
    if (version, digest, size) != (SCHEMA_VERSION, _DIGEST, BUFFER_BYTES) or len(buffer) < size:
        raise MetricsBufferError(
            f"the buffer has metrics schema {version}/{digest:08x}, this program reads {SCHEMA_VERSION}/{_DIGEST:08x}"
        )
    copy = bytes(buffer[:size])
    for _ in range(attempts):
        before = _sequence(copy)
        if before % 2 == 0 and before == _sequence(buffer):
            break
        copy = bytes(buffer[:size])
    return _decode(copy)


def _sequence(data: bytes | Buffer) -> int:
    return int.from_bytes(bytes(data[_SEQUENCE * 8 : _SEQUENCE * 8 + 8]), "little")


def _decode(data: bytes) -> list[Sample]:
    counts = np.frombuffer(data, dtype=np.uint64)
    values = np.frombuffer(data, dtype=np.float64)
    samples = []
    for (name, labels), cell in _CELLS.items():
        spec = _SPECS[name]
        named = tuple(zip((label for label, _ in spec.labels), labels, strict=True))
        if spec.kind == "counter":
            samples.append(Sample(spec, named, float(counts[cell])))
        elif spec.kind == "gauge":
            samples.append(Sample(spec, named, float(values[cell])))
        else:
            width = len(spec.bounds) + 1
            up_to = np.cumsum(counts[cell : cell + width]).tolist()
            buckets = tuple(zip((*spec.bounds, float("inf")), map(int, up_to), strict=True))
            samples.append(Sample(spec, named, float(values[cell + width]), buckets))
    return samples
