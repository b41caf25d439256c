"""Memory that goes back when it should, and a refusal that carries its numbers."""

from __future__ import annotations

import pickle
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ziggurat.allocators.errors import AllocationError
from ziggurat.allocators.pageable import PageableArena
from ziggurat.allocators.pages import PageRows
from ziggurat.allocators.pool import CpuPool


def mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = line.split()[0].split("-")
        if int(first, 16) <= address < int(last, 16):
            return True
    return False


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_memory_goes_back_when_closed_and_the_last_view_is_gone() -> None:
    rows = PageRows("rows", 4096, 1 << 20)  # 4 GiB of address space, which no other allocation falls into
    address = rows.tensor.data_ptr()
    view = rows.view(4095)
    rows.close()
    assert mapped(address)
    view.release()
    del view
    assert not mapped(address)


def test_memory_is_only_taken_as_it_is_touched() -> None:
    before = resident()
    pool = CpuPool(4096, 1 << 20)
    assert resident() - before < 1 << 28
    assert int(pool.row(4095).sum()) == 0
    pool.close()


def test_more_than_an_address_space_is_refused_with_the_numbers() -> None:
    for rows in (1 << 35, 1 << 60):
        with pytest.raises(
            AllocationError, match=r"host arena: [0-9]+ bytes refused by the kernel"
        ) as caught:
            PageableArena(rows, 1 << 20)
        error = caught.value
        assert error.wanted == rows << 20
        assert error.have is not None
        assert error.have > 0
        assert str(pickle.loads(pickle.dumps(error))) == str(error)


def test_a_limit_on_address_space_is_reported() -> None:
    code = (
        "import resource, torch\n"
        "from ziggurat.allocators.errors import AllocationError\n"
        "from ziggurat.allocators.pool import CpuPool\n"
        "resource.setrlimit(resource.RLIMIT_AS, (64 << 30, 64 << 30))\n"
        "try: CpuPool(1 << 17, 1 << 20)\n"
        "except AllocationError as error: print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.startswith("device pool: 137438953472 bytes refused by the kernel")
