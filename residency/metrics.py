"""The service's numbers in a buffer of fixed layout, so that another process can read them without asking.

`METRICS` is the single source: exporters and the table of docs/metrics.md are made from it, and a number's place in the
buffer follows from its order. One process writes; readers take no lock, and neither does the thread that runs steps.
Sequence numbers that are odd while a group of cells is being written let a reader take a copy in which the counts add
up.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from ziggurat.residency.metric_layout import (
    BUFFER_BYTES,
    CELLS,
    COUNT_WORDS,
    COUNTS_AT,
    DIGEST,
    GAUGES_AT,
    HEADER,
    MAGIC,
    SCHEMA_VERSION,
    SEQUENCES,
    SPECS,
    TEXT_BYTES,
    TEXTS_AT,
    Sample,
    Texts,
    decode,
    views,
)
from ziggurat.residency.metric_specs import MAX_LAYERS, METRICS
from ziggurat.residency.runtime_errors import MetricsBufferError

__all__ = ["BUFFER_BYTES", "SCHEMA_VERSION", "MetricWriter", "Sample", "TierMetrics", "read_samples"]

Buffer = bytearray | memoryview


class MetricWriter:
    """Writes the counts of one side, and the gauges. side: 0 = the thread that runs steps, 1 = all others."""

    def __init__(self, buffer: memoryview, side: int) -> None:
        first = COUNTS_AT[side] * 8
        self._words, self._floats = views(buffer)
        self._counts = self._words[COUNTS_AT[side] : COUNTS_AT[side] + COUNT_WORDS]
        self._sums = self._floats[COUNTS_AT[side] : COUNTS_AT[side] + COUNT_WORDS]
        self._gauges = self._floats[GAUGES_AT:]
        # The same memory without numpy, which takes longer for a single number.
        self._count = buffer[first : first + COUNT_WORDS * 8].cast("Q")
        self._gauge = buffer[GAUGES_AT * 8 : TEXTS_AT].cast("d")
        self._header = buffer[: COUNTS_AT[0] * 8].cast("Q")
        self._sequence = SEQUENCES[side]

    @contextmanager
    def writing(self) -> Iterator[None]:
        """A group of cells that readers see all of or nothing of."""
        self._header[self._sequence] += 1
        try:
            yield
        finally:
            self._header[self._sequence] += 1

    def add(self, name: str, amount: int, *labels: str) -> None:
        """Increase a counter."""
        cell = _cell(name, "counter", labels)
        if amount:
            self._count[cell] += amount

    def add_seconds(self, name: str, seconds: float, *labels: str) -> None:
        """Increase a counter of seconds."""
        self._sums[_cell(name, "seconds", labels)] += seconds

    def add_layers(self, name: str, amounts: npt.NDArray[np.integer], *labels: str) -> None:
        """Increase a counter of every layer, int [layers]."""
        cell = _cell(name, "layer counter", labels)
        shown = amounts[:MAX_LAYERS]
        self._counts[cell : cell + len(shown)] += shown.astype(np.uint64)

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge."""
        self._gauge[_cell(name, "gauge", labels)] = value

    def set_layers(self, name: str, values: npt.NDArray[np.generic], *labels: str) -> None:
        """Set a gauge of every layer, [layers]."""
        cell = _cell(name, "layer gauge", labels)
        shown = values[:MAX_LAYERS]
        self._gauges[cell : cell + len(shown)] = shown

    def observe(self, name: str, values: Sequence[float], *labels: str) -> None:
        """Add observations to a histogram."""
        if not values:
            return
        cell = _cell(name, "histogram", labels)
        bounds = SPECS[name].bounds
        buckets = np.searchsorted(bounds, values, side="left")
        found = np.bincount(buckets, minlength=len(bounds) + 1).astype(np.uint64)
        self._counts[cell : cell + len(found)] += found
        self._sums[cell + len(found)] += float(sum(values))


class TierMetrics(MetricWriter):
    """Writes the cells of one process. The buffer must be writable and at least BUFFER_BYTES long; it is cleared.

    This object is for the thread that runs steps, which never waits here. Whatever other threads have to say goes
    through `behind`, inside its `writing()`, which lets one of them in at a time.
    """

    def __init__(self, buffer: Buffer | None = None) -> None:
        buffer = bytearray(BUFFER_BYTES) if buffer is None else buffer
        view = memoryview(buffer).cast("B")
        if view.readonly or view.nbytes < BUFFER_BYTES:
            raise MetricsBufferError(
                f"a metrics buffer must be writable and have {BUFFER_BYTES} bytes; this one has {view.nbytes}"
            )
        self.buffer = view[:BUFFER_BYTES]
        super().__init__(self.buffer, 0)
        self._words[:] = 0
        for spec in METRICS:
            if spec.optional:
                first = min(word for (name, _), word in CELLS["gauge"].items() if name == spec.name)
                self._gauges[first : first + spec.series(1)] = np.nan
        self.behind = _Behind(self.buffer)
        # the magic goes in last: a reader that finds it finds the rest of the header, too
        self.buffer[8 : HEADER.size] = HEADER.pack(MAGIC, SCHEMA_VERSION, DIGEST, BUFFER_BYTES)[8:]
        self.buffer[:8] = MAGIC

    def describe(self, layers: Sequence[int], infos: Mapping[str, Mapping[str, str]]) -> None:
        """Set the numbers of the model's MoE layers and the labels of info metrics, by the metrics' names.

        MetricsBufferError if a metric or a label is not in the list, or if there is no room.
        """
        for name, labels in infos.items():
            spec = SPECS.get(name)
            if spec is None or spec.kind != "info":
                raise MetricsBufferError(f"there is no info metric {name}")
            wanted = [label for label, _ in spec.labels]
            if list(labels) != wanted:
                raise MetricsBufferError(f"{name} is described by {wanted}, not by {list(labels)}")
        try:
            data = Texts(tuple(layers[:MAX_LAYERS]), infos).pack()
        except ValueError as error:
            raise MetricsBufferError(str(error)) from error
        with self.writing():
            self.buffer[TEXTS_AT : TEXTS_AT + TEXT_BYTES] = data.ljust(TEXT_BYTES, b"\0")

    def samples(self) -> list[Sample]:
        """What a reader of the buffer sees now."""
        return read_samples(self.buffer)

    def value(self, name: str, *labels: str) -> float:
        """A counter's or gauge's value; a histogram's number of observations."""
        spec = SPECS[name]
        cell = _cell(name, spec.role, labels)
        if spec.kind == "gauge":
            return self._gauge[cell]
        if spec.role == "seconds":
            return float(self._sums[cell] + self.behind._sums[cell])
        width = 1 if spec.kind == "counter" else len(spec.bounds) + 1
        return int(self._counts[cell : cell + width].sum() + self.behind._counts[cell : cell + width].sum())


class _Behind(MetricWriter):
    """The side of all threads that do not run steps; they take turns."""

    def __init__(self, buffer: memoryview) -> None:
        super().__init__(buffer, 1)
        self._lock = threading.Lock()

    @contextmanager
    def writing(self) -> Iterator[None]:
        with self._lock, super().writing():
            yield


def _cell(name: str, role: str, labels: tuple[str, ...]) -> int:
    """Where a metric's cells begin, counted within its section. MetricsBufferError if it is not of that role."""
    try:
        return CELLS[role][name, labels]
    except KeyError:
        spec = SPECS.get(name)
        if spec is None or spec.role == role:
            raise MetricsBufferError(f"there is no series {name}{list(labels)}") from None
        raise MetricsBufferError(f"{name} is a {spec.role}, not a {role}") from None


def read_samples(buffer: bytes | Buffer, attempts: int = 1000) -> list[Sample]:
    """Decode a buffer that another process may be writing to.

    MetricsBufferError if it is not one, or of another schema version. After `attempts` copies that were each caught
    in the middle of a write the last one is decoded as it is: every single number in it is still right.
    """
    if len(buffer) < HEADER.size or bytes(buffer[:8]) != MAGIC:
        raise MetricsBufferError("this is not a metrics buffer, or its writer has not started yet")
    _, version, digest, size = HEADER.unpack(bytes(buffer[: HEADER.size]))
    if (version, digest, size) != (SCHEMA_VERSION, DIGEST, BUFFER_BYTES) or len(buffer) < size:
        raise MetricsBufferError(
            f"the buffer has metrics schema {version}/{digest:08x}, this program reads {SCHEMA_VERSION}/{DIGEST:08x}"
        )
    copy = bytes(buffer[:size])
    for _ in range(attempts):
        before = _sequences(copy)
        if not any(number % 2 for number in before) and before == _sequences(buffer):
            break
        copy = bytes(buffer[:size])
    return decode(copy)


def _sequences(data: bytes | Buffer) -> list[int]:
    return [int.from_bytes(bytes(data[word * 8 : word * 8 + 8]), "little") for word in SEQUENCES]
