"""Rings with reads that were given up: each has a thread of its own until the kernel has answered them."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from threading import Thread

from ziggurat.stores.readers import ring as io
from ziggurat.stores.readers.late import LateRead
from ziggurat.stores.readers.operations import Operation

LateOperations = dict[int, tuple[Operation, LateRead, object]]
"""By user_data: what the kernel may still write to, and what it may still read (kept alive)."""

_waited_for: list[tuple[io.Ring, LateOperations]] = []  # keeps their memory from being used otherwise


def await_late(ring: io.Ring, late: LateOperations) -> None:
    """Wait in a thread for reads that nobody else waits for, then close the ring, which is the thread's from now on."""

    def wait_for_them() -> None:
        try:
            while late:
                ring.enter(True)
                reap_late(ring.reap(), late)
        except OSError:
            return  # the ring is broken: nobody can know when these are over, so they never are
        _waited_for.remove((ring, late))
        ring.close()

    _waited_for.append((ring, late))
    with suppress(RuntimeError):  # no more threads: the interpreter is on its way out
        Thread(target=wait_for_them, name="ziggurat-late", daemon=True).start()


def reap_late(found: Iterable[io.Completion], late: LateOperations) -> None:
    """End those that the kernel has answered."""
    for number, _ in found:
        if number in late:
            late.pop(number)[1].finish()
