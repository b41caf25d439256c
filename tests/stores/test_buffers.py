"""Memory for rows: where it begins, what is in it, and whose it is."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest

from ziggurat.stores.buffers import LARGE_PAGE, aligned_buffer


@pytest.mark.parametrize("nbytes", [1, 4096, LARGE_PAGE - 1, LARGE_PAGE, 3 * LARGE_PAGE + 5])
def test_begins_on_a_page_and_is_zero(nbytes: int) -> None:
    buffer = aligned_buffer(nbytes)
    array = np.frombuffer(buffer, np.uint8)
    assert array.size == nbytes
    assert array.ctypes.data % (LARGE_PAGE if nbytes >= LARGE_PAGE else mmap.PAGESIZE) == 0
    assert not array.any()
    array[:] = 7
    assert buffer[0] == buffer[-1] == 7


def test_a_forked_process_has_its_own() -> None:
    buffer = aligned_buffer(LARGE_PAGE)
    child = os.fork()
    if child == 0:
        buffer[0] = 1
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert buffer[0] == 0
