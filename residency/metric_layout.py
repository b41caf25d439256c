"""Where each number lies in a metrics buffer, and how a copy of one is read.

    header | counts of the thread that runs steps | counts of threads behind it | gauges | texts

Counters and histograms stand twice, once for each side that may write them, and are added up by the reader; so
neither side waits for the other. Gauges stand once: a single aligned word is never seen half written. Texts are the
values of info metrics and the numbers of the layers, as JSON, set at start.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, product
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ziggurat.residency.metric_specs import METRICS, MetricSpec

SCHEMA_VERSION = 2
MAGIC = b"ZIGMETR1"
HEADER = struct.Struct("<8sQQQ")  # magic, schema version, digest of the layout, bytes in use
SEQUENCES = (4, 5)  # words of the header: odd while that side writes a group
_HEADER_WORDS = 8
TEXT_BYTES = 8192
"""Room for the texts, with their length in front."""


class Sample(NamedTuple):
    """One decoded series. For a histogram `value` is its sum and `buckets` are (upper bound, count up to it)."""

    spec: MetricSpec
    labels: tuple[tuple[str, str], ...]
    value: float
    buckets: tuple[tuple[float, int], ...] = ()


@dataclass(frozen=True, slots=True)
class _Block:
    """The cells of one combination of label values: `words` of them from `word` on, counted within its section."""

    spec: MetricSpec
    values: tuple[str, ...]
    word: int


def _blocks(specs: Sequence[MetricSpec]) -> tuple[list[_Block], int, int]:
    """All blocks in the order of the list; words of the counts and of the gauges."""
    blocks, used = [], {"counts": 0, "gauges": 0}
    for spec in specs:
        section = "gauges" if spec.kind == "gauge" else "counts"
        for values in product(*(choices for _, choices in spec.labels)) if spec.kind != "info" else [()]:
            blocks.append(_Block(spec, values, used[section]))
            used[section] += spec.words
    return blocks, used["counts"], used["gauges"]


_BLOCKS, COUNT_WORDS, GAUGE_WORDS = _blocks(METRICS)
_ROLES = {block.spec.role for block in _BLOCKS}
CELLS = {
    role: {(one.spec.name, one.values): one.word for one in _BLOCKS if one.spec.role == role}
    for role in _ROLES
}
"""Role -> (name, values of the labels) -> where the cells begin, counted within their section."""
SPECS = {spec.name: spec for spec in METRICS}
DIGEST = zlib.crc32(repr([(s.name, s.kind, s.labels, s.bounds, s.per_layer) for s in METRICS]).encode())
COUNTS_AT = tuple(_HEADER_WORDS + side * COUNT_WORDS for side in (0, 1))
GAUGES_AT = _HEADER_WORDS + 2 * COUNT_WORDS
TEXTS_AT = (GAUGES_AT + GAUGE_WORDS) * 8
BUFFER_BYTES = TEXTS_AT + TEXT_BYTES


@dataclass(frozen=True, slots=True)
class Texts:
    """What is set once: the layers' numbers in the model, and the labels of info metrics by the metrics' names."""

    layers: tuple[int, ...]
    infos: Mapping[str, Mapping[str, str]]

    def pack(self) -> bytes:
        """As it stands in the buffer. ValueError if there is no room for it."""
        data = json.dumps({"layers": self.layers, "infos": self.infos}).encode()
        if len(data) > TEXT_BYTES - 8:
            raise ValueError(f"{len(data)} bytes of texts; there is room for {TEXT_BYTES - 8}")
        return len(data).to_bytes(8, "little") + data

    @classmethod
    def unpack(cls, data: bytes) -> Texts:
        length = int.from_bytes(data[:8], "little")
        if not length:
            return cls((), {})
        content = json.loads(data[8 : 8 + length])
        return cls(tuple(content["layers"]), content["infos"])


@dataclass(frozen=True, slots=True)
class _Series:
    """One series: where its value lies, counted within its section."""

    spec: MetricSpec
    labels: tuple[tuple[str, str], ...]
    word: int


@lru_cache(maxsize=64)
def _series(texts: bytes) -> tuple[_Series, ...]:
    """All series that a buffer with these texts has, in the order of the list."""
    known = Texts.unpack(texts)
    found = []
    for block in _BLOCKS:
        labels = tuple(zip((label for label, _ in block.spec.labels), block.values, strict=False))
        if block.spec.kind == "info":
            if block.spec.name in known.infos:
                texts_of = tuple(known.infos[block.spec.name].items())
                found.append(_Series(block.spec, texts_of, 0))
        elif block.spec.per_layer:
            found += [
                _Series(block.spec, (*labels, ("layer", str(layer))), block.word + index)
                for index, layer in enumerate(known.layers)
            ]
        else:
            found.append(_Series(block.spec, labels, block.word))
    return tuple(found)


def decode(data: bytes) -> list[Sample]:
    """The series of a copy, in the order of the list."""
    sides = [np.frombuffer(data, dtype=np.uint64, count=COUNT_WORDS, offset=at * 8) for at in COUNTS_AT]
    counts: list[int] = (sides[0] + sides[1]).tolist()
    sums: list[float] = (sides[0].view(np.float64) + sides[1].view(np.float64)).tolist()
    gauges: list[float] = np.frombuffer(data, np.float64, GAUGE_WORDS, GAUGES_AT * 8).tolist()
    samples: list[Sample] = []
    for one in _series(data[TEXTS_AT:BUFFER_BYTES]):
        spec, word = one.spec, one.word
        if spec.kind == "gauge":
            value = gauges[word]
            if not (spec.optional and value != value):  # not a number: never set
                samples.append(Sample(spec, one.labels, value))
        elif spec.kind == "counter":
            samples.append(
                Sample(spec, one.labels, sums[word] if spec.role == "seconds" else float(counts[word]))
            )
        elif spec.kind == "info":
            samples.append(Sample(spec, one.labels, 1.0))
        else:
            last = word + len(spec.bounds) + 1
            up_to = accumulate(counts[word:last])
            samples.append(
                Sample(
                    spec, one.labels, sums[last], tuple(zip((*spec.bounds, float("inf")), up_to, strict=True))
                )
            )
    return samples


def views(
    buffer: memoryview,
) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.float64]]:
    """A buffer's words, as whole numbers and as floating point numbers."""
    words = buffer[:BUFFER_BYTES]
    return np.frombuffer(words, dtype=np.uint64), np.frombuffer(words, dtype=np.float64)
