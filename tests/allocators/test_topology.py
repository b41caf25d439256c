"""NUMA nodes from sysfs trees, and GPUs if this machine has any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ziggurat.allocators.topology import NumaNode, gpus, numa_nodes


def put_node(sysfs: Path, number: int, cpus: str, total: int | None, free: int = 0) -> None:
    folder = sysfs / f"devices/system/node/node{number}"
    folder.mkdir(parents=True)
    (folder / "cpulist").write_text(f"{cpus}\n")
    if total is not None:
        (folder / "meminfo").write_text(
            f"Node {number} MemTotal:       {total} kB\nNode {number} MemFree:        {free} kB\n"
            f"Node {number} MemUsed:        {total - free} kB\n"
        )


def test_nodes_with_memory_or_cpus_by_number(tmp_path: Path) -> None:
    put_node(tmp_path, 10, "", 2048, 1024)  # memory only, as CXL and HBM nodes are
    put_node(tmp_path, 2, "4-7,12", 4096)
    put_node(tmp_path, 0, "0-3,8", 4096, 100)
    put_node(tmp_path, 3, "5", None)
    put_node(tmp_path, 4, "", 0)  # neither: a possible node that is not there
    (tmp_path / "devices/system/node/nodeX").mkdir()
    (tmp_path / "devices/system/node/online").write_text("0,2\n")
    assert numa_nodes(tmp_path) == (
        NumaNode(0, (0, 1, 2, 3, 8), 4096 << 10, 100 << 10),
        NumaNode(2, (4, 5, 6, 7, 12), 4096 << 10, 0),
        NumaNode(3, (5,), None, None),
        NumaNode(10, (), 2048 << 10, 1024 << 10),
    )


def test_a_kernel_without_numa(tmp_path: Path) -> None:
    assert numa_nodes(tmp_path) == ()


def test_this_machine() -> None:
    cpus = {cpu for node in numa_nodes() for cpu in node.cpus}
    if not cpus:
        pytest.skip("this kernel shows no NUMA nodes")
    assert os.sched_getaffinity(0) <= cpus


def test_a_machine_without_gpus_says_why() -> None:
    survey = gpus()
    assert (survey.reason is None) == bool(survey.gpus)


@pytest.mark.gpu
def test_gpus_of_this_machine() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    survey = gpus()
    assert survey.gpus
    assert survey.driver
    for gpu in survey.gpus:
        assert 0 < gpu.memory_free <= gpu.memory_total
        assert gpu.name
        assert gpu.pci_bus_id
