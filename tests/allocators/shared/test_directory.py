"""The directory of a shared arena: what is found in it after its writer was stopped anywhere."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from ziggurat.allocators.shared.directory import Directory, directory_bytes
from ziggurat.allocators.shared.errors import ProtocolError

KEY = "0123456789abcdef" * 4
PLACES, STRIDE = 6, 8192


def fresh() -> memoryview:
    memory = memoryview(bytearray(directory_bytes(PLACES)))
    Directory.create(memory, KEY, PLACES, STRIDE)
    return memory


def test_a_new_one_has_only_free_places() -> None:
    directory = Directory(fresh(), KEY, PLACES, STRIDE)
    assert directory.free() == list(range(PLACES))
    assert (list(directory.published()), directory.lost(), directory.count()) == ([], [], 0)


def test_rows_are_found_by_another_who_opens_it() -> None:
    memory = fresh()
    writer, reader = (
        Directory(memory, KEY, PLACES, STRIDE),
        Directory(memory.toreadonly(), KEY, PLACES, STRIDE),
    )
    before = reader.changes
    writer.fill(4)
    assert list(reader.published()) == []
    assert reader.free() == [0, 1, 2, 3, 5]
    writer.publish(4, 0, (1 << 64) - 1)
    writer.fill(1)
    writer.publish(1, 1 << 40, 7)
    assert list(reader.published()) == [(1, 1 << 40, 7), (4, 0, (1 << 64) - 1)]
    assert reader.changes == before + 2
    writer.vacate(4)
    assert list(reader.published()) == [(1, 1 << 40, 7)]
    assert reader.free() == [0, 2, 3, 4, 5]


def test_what_was_being_filled_is_lost_when_its_writer_is_gone() -> None:
    directory = Directory(fresh(), KEY, PLACES, STRIDE)
    for place in (2, 3):
        directory.fill(place)
    directory.publish(3, 9, 1)
    assert directory.abandon() == 1
    assert directory.lost() == [2]
    assert 2 not in directory.free()
    assert directory.abandon() == 1, "the same ones"
    directory.vacate(2)
    assert 2 in directory.free()


@pytest.mark.parametrize(
    "spoil",
    [
        lambda words: words.__setitem__(0, 1),
        lambda words: words.__setitem__(1, PLACES + 1),
        lambda words: words.__setitem__(2, 4096),
        lambda words: words.__setitem__(5, 0),
    ],
)
def test_the_directory_of_something_else_is_refused(spoil: Callable[[memoryview], None]) -> None:
    memory = fresh()
    spoil(memory.cast("Q"))
    with pytest.raises(ProtocolError, match="directory"):
        Directory(memory, KEY, PLACES, STRIDE)


def test_one_that_is_too_short_is_refused() -> None:
    with pytest.raises(ProtocolError, match="has"):
        Directory(fresh()[:-8], KEY, PLACES, STRIDE)
    with pytest.raises(ProtocolError, match="key"):
        Directory(fresh(), "f" * 64, PLACES, STRIDE)


class _StoppedError(Exception):
    pass


class _Stopping:
    """Words of memory whose n-th store and all later ones do not happen: the writer was killed before it."""

    def __init__(self, words: memoryview, stores: int) -> None:
        self._words, self._left = words, stores

    def __getitem__(self, at: int) -> int:
        return self._words[at]

    def __setitem__(self, at: int, value: int) -> None:
        if self._left == 0:
            raise _StoppedError
        self._left -= 1
        self._words[at] = value


def test_wherever_a_writer_is_stopped_only_whole_rows_are_found() -> None:
    """Bytes and directory are stored to in the order of the program; every prefix of the stores is looked at."""
    dice = random.Random(1)
    stores = 0
    while True:
        memory, rows = (
            fresh(),
            [0] * PLACES,
        )  # the content of a place: tag + 1 of a whole row, or -1 in between
        directory = Directory(memory, KEY, PLACES, STRIDE)
        stopping = _Stopping(memory.cast("Q"), stores)
        for name, first in (("_states", 512), ("_checksums", 512 + PLACES), ("_words", 0)):
            setattr(directory, name, _Shifted(stopping, first))
        dice.seed(7)
        try:
            for _ in range(40):
                place, tag = dice.randrange(PLACES), dice.randrange(100)
                directory.vacate(place)
                directory.fill(place)
                rows[place] = -1
                rows[place] = tag + 1
                directory.publish(place, tag, 1000 + tag)
            return
        except _StoppedError:
            pass
        for place, tag, checksum in Directory(memory, KEY, PLACES, STRIDE).published():
            assert (rows[place], checksum) == (tag + 1, 1000 + tag), f"after {stores} stores"
        stores += 1


class _Shifted:
    def __init__(self, words: _Stopping, first: int) -> None:
        self._words, self._first = words, first

    def __getitem__(self, at: int) -> int:
        return self._words[self._first + at]

    def __setitem__(self, at: int, value: int) -> None:
        self._words[self._first + at] = value
