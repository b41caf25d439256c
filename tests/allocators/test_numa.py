"""Binding and asking where pages lie, on node 0 of this machine; the audit against nodes that only a test has."""

from __future__ import annotations

import mmap
import pickle
from collections.abc import Sequence

import numpy as np
import pytest

from ziggurat.allocators import numa
from ziggurat.allocators.errors import NumaError, NumaPlacementError
from ziggurat.allocators.topology import numa_nodes

PAGE = mmap.PAGESIZE
needs_numa = pytest.mark.skipif(not numa_nodes(), reason="this kernel shows no NUMA nodes")


@pytest.fixture
def memory() -> tuple[np.ndarray, int]:
    array = np.frombuffer(
        mmap.mmap(-1, 64 * PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=np.uint8
    )
    return array, array.ctypes.data


@needs_numa
def test_pages_of_a_bound_range_come_from_its_node(memory: tuple[np.ndarray, int]) -> None:
    array, address = memory
    numa.bind(address, 64 * PAGE, 0)
    array[: 8 * PAGE] = 1
    pages = [address + PAGE * index for index in range(16)]
    assert numa.nodes_of(pages) == [0] * 8 + [None] * 8
    numa.audit("rows", address, 8 * PAGE, 0)


@needs_numa
def test_pages_that_are_not_in_memory_fail_the_audit(memory: tuple[np.ndarray, int]) -> None:
    array, address = memory
    array[: 8 * PAGE] = 1
    with pytest.raises(NumaPlacementError) as caught:
        numa.audit("rows", address, 16 * PAGE, 0)
    assert caught.value.pages == {0: 8, None: 8}


@needs_numa
def test_the_system_calls_say_the_same_without_libnuma(
    memory: tuple[np.ndarray, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    array, address = memory
    monkeypatch.setattr(numa, "_calls", numa.system_calls)
    numa.bind(address, 64 * PAGE, 0)
    array[:PAGE] = 1
    assert numa.nodes_of([address, address + PAGE]) == [0, None]
    with pytest.raises(NumaError, match="node 1000"):
        numa.bind(address, 64 * PAGE, 1000)


@needs_numa
@pytest.mark.parametrize("node", [-1, 1000, 1024])
def test_a_node_that_is_not_here_cannot_be_bound_to(memory: tuple[np.ndarray, int], node: int) -> None:
    with pytest.raises(NumaError, match=f"{node}.*tiers.host.numa|tiers.host.numa.*{node}"):
        numa.bind(memory[1], 64 * PAGE, node)


def test_a_processor_without_known_numbers_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    with pytest.raises(NumaError, match=r"riscv64.*libnuma"):
        numa.system_calls()


@pytest.mark.parametrize(
    ("nbytes", "count", "pages"),
    [(PAGE, 8, [0]), (3 * PAGE, 8, [0, 1, 2]), (3 * PAGE - 1, 8, [0, 1, 2]), (101 * PAGE, 3, [0, 50, 100]),
     (10 * PAGE, 1, [0]), (10 * PAGE, 2, [0, 9])],
)  # fmt: skip
def test_samples_are_spread_from_the_first_page_to_the_last(
    nbytes: int, count: int, pages: list[int]
) -> None:
    assert numa.sample_pages(1 << 30, nbytes, count) == [(1 << 30) + PAGE * page for page in pages]


def test_an_audit_counts_pages_by_node() -> None:
    def ask(pages: Sequence[int]) -> list[int | None]:
        return [1 if index % 4 else (None if index % 8 else 0) for index, _ in enumerate(pages)]

    with pytest.raises(NumaPlacementError) as caught:
        numa.audit("host arena", 1 << 30, 1 << 26, 1, count=64, ask=ask)
    error = caught.value
    assert error.pages == {1: 48, 0: 8, None: 8}
    assert str(error).startswith(
        "host arena: bound to NUMA node 1, but of 64 sampled pages 8 on node 0, 48 on node 1, 8 not in memory;"
    )
    assert "tiers.host.numa" in str(error)
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.pages) == (str(error), error.pages)


def test_an_audit_passes_only_if_every_page_is_there() -> None:
    numa.audit("host arena", 1 << 30, 1 << 26, 3, ask=lambda pages: [3] * len(pages))
    for other in (None, 0):
        with pytest.raises(NumaPlacementError):
            numa.audit("host arena", 1 << 30, 1 << 26, 3, ask=lambda pages: [3] * (len(pages) - 1) + [other])  # noqa: B023


def test_a_kernel_that_does_not_say_fails_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numa, "_calls", lambda: (lambda *_: -1, lambda *_: -1))
    with pytest.raises(NumaError, match=r"does not say where pages lie.*tiers.host.numa: none"):
        numa.nodes_of([1 << 30])
