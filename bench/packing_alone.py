"""Parts of packing on their own: lanes that only read, only quantize or only write; or read and write.

A module of its own, since processes that a build starts have to import them.
"""

from __future__ import annotations

from ziggurat.stores.chunks import Chunk, Digests, Lane
from ziggurat.stores.stored import StoredExpert


class ReadAlone(Lane):
    """Reads each chunk, and does nothing with it."""

    def build(self, chunk: Chunk) -> Digests:
        self._loader.load(chunk.layer, chunk.experts, self._memory)
        return [dict.fromkeys(missing, 1) for missing in chunk.missing]


class QuantizeAlone(Lane):
    """Reads one chunk and quantizes it again and again."""

    _experts: list[StoredExpert] | None = None

    def build(self, chunk: Chunk) -> Digests:
        if self._experts is None:
            self._experts = self._loader.load(chunk.layer, chunk.experts, self._memory)
        self.encode((self._experts * len(chunk.experts))[: len(chunk.experts)])
        return [dict.fromkeys(missing, 1) for missing in chunk.missing]


class WriteAlone(Lane):
    """Checksums and writes the rows that are in its buffers."""

    def build(self, chunk: Chunk) -> Digests:
        return [
            self._write(place, chunk.layer, chunk.experts, frozenset(missing))
            for place, missing in enumerate(chunk.missing)
        ]


class Copy(Lane):
    """Reads each chunk, and checksums and writes the rows that are in its buffers."""

    def build(self, chunk: Chunk) -> Digests:
        self._loader.load(chunk.layer, chunk.experts, self._memory)
        return [
            self._write(place, chunk.layer, chunk.experts, frozenset(missing))
            for place, missing in enumerate(chunk.missing)
        ]


ALONE: dict[str, type[Lane]] = {"read": ReadAlone, "quantize": QuantizeAlone, "write": WriteAlone}
PARTS: dict[str, type[Lane]] = {**ALONE, "copy": Copy}
