"""NUMA nodes from sysfs trees, and GPUs if this machine has any."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from ziggurat.allocators.errors import NumaError
from ziggurat.allocators.opening import arena_node
from ziggurat.allocators.topology import (
    Gpu,
    GpuSurvey,
    NodeChoice,
    NumaNode,
    choose_node,
    gpus,
    node_of_bus,
    numa_nodes,
    visible_gpus,
)


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


def test_page_cache_of_a_node_can_be_taken(tmp_path: Path) -> None:
    put_node(tmp_path, 0, "0", 4096, 100)
    meminfo = tmp_path / "devices/system/node/node0/meminfo"
    meminfo.write_text(meminfo.read_text() + "Node 0 Active(file):    30 kB\nNode 0 Inactive(file):   12 kB\n"
                       "Node 0 Active(anon):   999 kB\n")  # fmt: skip
    (node,) = numa_nodes(tmp_path)
    assert (node.page_cache, node.available) == (42 << 10, 142 << 10)
    assert NumaNode(3, (5,), None, None).available is None


def put_gpu(sysfs: Path, bus: str, node: int) -> None:
    folder = sysfs / "bus/pci/devices" / bus
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{node}\n")


def test_the_node_of_a_gpu_is_its_pci_devices(tmp_path: Path) -> None:
    put_gpu(tmp_path, "0000:1b:00.0", 1)
    put_gpu(tmp_path, "0000:9a:00.0", -1)
    assert node_of_bus("00000000:1b:00.0", tmp_path) == 1  # as NVML writes it
    assert node_of_bus("0000:1b:00.0", tmp_path) == 1  # as CUDA writes it
    assert node_of_bus("0000:9a:00.0", tmp_path) is None
    assert node_of_bus("0000:00:00.0", tmp_path) is None


def test_gpu_local_is_the_node_of_the_gpu(tmp_path: Path) -> None:
    put_node(tmp_path, 0, "0-3", 4096)
    put_node(tmp_path, 1, "4-7", 4096)
    put_node(tmp_path, 2, "8", 0)
    put_gpu(tmp_path, "0000:1b:00.0", 1)
    put_gpu(tmp_path, "0000:9a:00.0", -1)
    assert arena_node("gpu-local", 0, sysfs=tmp_path, bus="0000:1b:00.0") == NodeChoice(1)
    assert arena_node("none", 0, sysfs=tmp_path) == NodeChoice(None)
    assert arena_node(0, 0, sysfs=tmp_path) == NodeChoice(0)
    unknown = arena_node("gpu-local", 0, sysfs=tmp_path, bus="0000:9a:00.0")
    assert unknown.node is None
    assert unknown.note == (
        "tiers.host.numa: gpu-local binds nothing, since the firmware does not say which node the GPU is on"
    )
    for wanted in (2, 3):
        with pytest.raises(
            NumaError, match=f"tiers.host.numa: there is no node {wanted} with memory; nodes here: 0, 1"
        ):
            arena_node(wanted, 0, sysfs=tmp_path)


def test_a_machine_with_one_node_or_none(tmp_path: Path) -> None:
    assert "shows no NUMA nodes" in (choose_node("gpu-local", None, ()).note or "")
    put_node(tmp_path, 0, "0-3", 4096)
    assert choose_node("gpu-local", None, numa_nodes(tmp_path)) == NodeChoice(0)


def gpu(index: int) -> Gpu:
    return Gpu(index, "NVIDIA H200", f"GPU-{index}abc", f"00000000:{index:02x}:00.0", None, 1, 1, (9, 0))


@pytest.mark.parametrize(
    ("wanted", "indices"),
    [
        (None, [0, 1, 2]),
        ("", []),
        ("2,0", [2, 0]),
        (" 1 , 2 ", [1, 2]),
        ("1,7,0", [1]),
        ("1,1", [1]),
        ("-1", []),
        ("GPU-2,GPU-0a", [2, 0]),
        ("GPU-", []),
        ("MIG-1", []),
    ],
)
def test_the_gpus_that_a_process_may_see(wanted: str | None, indices: list[int]) -> None:
    survey = GpuSurvey((gpu(0), gpu(1), gpu(2)), "580", None)
    environment = {} if wanted is None else {"CUDA_VISIBLE_DEVICES": wanted}
    assert [one.index for one in visible_gpus(survey, environment)] == indices


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
