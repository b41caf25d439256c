"""The directory of a shared arena: which row is in which place, in memory that outlives whoever wrote it.

    word 0       magic with the layout's version
    words 1..3   places, stride, number of changes so far
    words 4..7   digest of the arena's key, 32 bytes
    word 512 on  a state for each place, then a checksum for each place

A word is 8 bytes, aligned, in the machine's order, and is written by one store, so nobody ever sees half of it. The
state of a place is FREE, FILLING (bytes are on their way), LOST (they were when their writer died, and may still
arrive), or PUBLISHED plus the tag of the row in it. A row is published after all its bytes and its checksum are there,
and its place is vacated before the next bytes are asked for. So a writer that is killed between any two stores leaves
only whole rows to be found.

There is one writer. The keeper of the memory writes only while there is none.
"""

from __future__ import annotations

from collections.abc import Iterator

from ziggurat.allocators.shared.errors import ProtocolError

__all__ = ["Directory", "directory_bytes"]

_MAGIC = int.from_bytes(b"ZGARENA1", "little")
_PLACES, _STRIDE, _CHANGES, _KEY = 1, 2, 3, 4
_KEY_WORDS = 4
_HEADER_WORDS = 512
_WORD = 8
_FREE, _FILLING, _LOST, _PUBLISHED = 0, 1, 2, 3


def directory_bytes(places: int) -> int:
    """Bytes of the directory of so many places."""
    return (_HEADER_WORDS + 2 * places) * _WORD


class Directory:
    """A directory in `memory` (u8, at least `directory_bytes(places)`), which was set up by `create`.

    key: 64 hex digits. ProtocolError if the memory is the directory of something else.
    """

    def __init__(self, memory: memoryview, key: str, places: int, stride: int) -> None:
        nbytes = directory_bytes(places)
        if memory.nbytes < nbytes:
            raise ProtocolError(f"a directory of {places} places has {nbytes} bytes, not {memory.nbytes}")
        self._words = memory[:nbytes].cast("Q")
        found = (self._words[0], self._words[_PLACES], self._words[_STRIDE])
        if found != (_MAGIC, places, stride) or self._key() != key:
            raise ProtocolError(
                f"the directory is not of {places} places of {stride} bytes under this key: {found}"
            )
        self.places = places
        self._states = self._words[_HEADER_WORDS : _HEADER_WORDS + places]
        self._checksums = self._words[_HEADER_WORDS + places :]

    @classmethod
    def create(cls, memory: memoryview, key: str, places: int, stride: int) -> Directory:
        """Set up a directory in memory that is all zeros: every place is free."""
        words = memory[: directory_bytes(places)].cast("Q")
        words[_PLACES], words[_STRIDE] = places, stride
        for i in range(_KEY_WORDS):
            words[_KEY + i] = int(key[16 * i : 16 * i + 16], 16)
        words[0] = _MAGIC
        return cls(memory, key, places, stride)

    def _key(self) -> str:
        return "".join(f"{word:016x}" for word in self._words[_KEY : _KEY + _KEY_WORDS])

    @property
    def changes(self) -> int:
        """A number that grows with every row that is published."""
        return self._words[_CHANGES]

    def published(self) -> Iterator[tuple[int, int, int]]:
        """(place, tag, checksum) of every published row, by place."""
        for place, state in enumerate(self._states.tolist()):
            if state >= _PUBLISHED:
                yield place, state - _PUBLISHED, self._checksums[place]

    def count(self) -> int:
        """Published rows."""
        return sum(state >= _PUBLISHED for state in self._states.tolist())

    def free(self) -> list[int]:
        """Free places."""
        return self._where(_FREE)

    def lost(self) -> list[int]:
        """Places that a writer was filling when it died."""
        return self._where(_LOST)

    def _where(self, wanted: int) -> list[int]:
        return [place for place, state in enumerate(self._states.tolist()) if state == wanted]

    # -- for the writer ----------------------------------------------------------------------------------------

    def fill(self, place: int) -> None:
        """Bytes will be written to the place, which holds no row."""
        self._states[place] = _FILLING

    def publish(self, place: int, tag: int, checksum: int) -> None:
        """All bytes of row `tag` (0 or more) are in the place."""
        self._checksums[place] = checksum
        self._states[place] = _PUBLISHED + tag
        self._words[_CHANGES] += 1

    def vacate(self, place: int) -> None:
        """The place holds no row any more, and nothing is on its way into it."""
        self._states[place] = _FREE

    # -- for the keeper, while there is no writer --------------------------------------------------------------

    def abandon(self) -> int:
        """The writer is gone: what it was filling is lost. How many places are."""
        for place in self._where(_FILLING):
            self._states[place] = _LOST
        return len(self.lost())

    def release(self) -> None:
        """Let go of the memory, so that its mapping can be closed."""
        self._states.release()
        self._checksums.release()
        self._words.release()
