"""The thread that books late: nothing put off is forgotten, and it ends when told to, whatever it is doing."""

from __future__ import annotations

import threading

import pytest

from ziggurat.residency.late_books import LateBooks

SOON = 60.0  # only a test that has already failed waits this long


def test_what_is_put_off_is_booked_until_nothing_is_left() -> None:
    left = [3]
    done = threading.Event()

    def book() -> bool:
        left[0] -= 1
        if left[0] == 0:
            done.set()
        return left[0] > 0

    books = LateBooks(book)
    books.nudge()
    assert done.wait(SOON)
    books.close()
    books.close()
    assert left == [0]


def test_an_end_that_comes_while_the_thread_wakes_is_not_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The end is announced after the thread has looked for it and before it clears what woke it."""
    books = LateBooks(lambda: False)
    clear = books._wake.clear

    def announce_and_clear() -> None:
        books._stop.set()
        books._wake.set()
        clear()

    monkeypatch.setattr(books._wake, "clear", announce_and_clear)
    books.nudge()
    assert books._thread is not None
    books._thread.join(SOON)
    assert not books._thread.is_alive()


def test_an_error_is_kept_for_who_asks_and_the_thread_can_be_ended() -> None:
    tried = threading.Event()

    def book() -> bool:
        tried.set()
        raise OSError("no")

    books = LateBooks(book)
    books.nudge()
    assert tried.wait(SOON)
    books.close()
    with pytest.raises(OSError, match="no"):
        books.raise_error()
    books.raise_error()
