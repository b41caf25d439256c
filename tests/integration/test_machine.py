"""The machine's limits: of this one on the CPU, and of GPUs that only a test has."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.shared.messages import Status
from ziggurat.allocators.topology import Gpu, GpuSurvey, NumaNode
from ziggurat.integration import device, machine
from ziggurat.integration.device import resolve_device
from ziggurat.integration.machine import machine_limits
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import ConfigError

GIB = 1 << 30


def config(folder: Path, **device_tier: Any) -> TiersConfig:
    host = {"numa": device_tier.pop("numa", "gpu-local")}
    return TiersConfig.from_mapping(
        {"tiers": {"disk": {"path": folder}, "host": host, "device": device_tier}}
    )


def gpu(index: int, node: int | None, free: int) -> Gpu:
    return Gpu(
        index, "NVIDIA H200", f"GPU-{index}", f"00000000:{index:02x}:00.0", node, 140 * GIB, free, (9, 0)
    )


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs on two nodes, a locked-memory limit of 8 MiB, and a driver that does not count against it."""
    survey = GpuSurvey((gpu(0, 1, 100 * GIB), gpu(1, 0, 50 * GIB)), "580", None)
    nodes = (NumaNode(0, (0,), 64 * GIB, 10 * GIB, GIB), NumaNode(1, (1,), 64 * GIB, 20 * GIB))
    limits = HostLimits(128 * GIB, 120 * GIB, None, 8 << 20, 8 << 20, False)
    monkeypatch.setattr(machine, "gpus", lambda: survey)
    monkeypatch.setattr(machine, "numa_nodes", lambda: nodes)
    monkeypatch.setattr(HostLimits, "read", lambda: limits)
    monkeypatch.setattr(machine, "registration_counts", lambda: False)
    monkeypatch.setattr(
        machine, "resolve_device", lambda wanted, size: resolve_device(wanted, size, lambda: 2)
    )
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def test_without_gpus_auto_is_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "cuda_devices", lambda: 0)
    monkeypatch.setattr(
        machine, "resolve_device", lambda wanted, size: resolve_device(wanted, size, lambda: 0)
    )
    found = machine_limits(config(tmp_path), [])
    assert (found.device, found.device_free, found.nodes, found.notes) == ("cpu", None, (), ())
    assert found.memory_available == pytest.approx(HostLimits.read().memory_available, rel=0.5)


@pytest.mark.parametrize(
    ("wanted", "size", "count", "result"),
    [("cpu", 1, 8, "cpu"), ("auto", 1, 0, "cpu"), ("auto", 1, 1, "cuda:0"), ("auto", 4, 4, "cuda:0"),
     ("cuda:0", 2, 2, "cuda:0"), ("cuda:1", 1, 2, "cuda:1")],
)  # fmt: skip
def test_devices(wanted: str, size: int, count: int, result: str) -> None:
    assert resolve_device(wanted, size, lambda: count) == result


@pytest.mark.parametrize(
    ("wanted", "size", "count", "said"),
    [
        ("cuda:0", 1, 0, r"there is no cuda:0 .*\(here: none\)"),
        ("cuda:2", 1, 2, r"there is no cuda:2 .*\(here: cuda:0 to cuda:1\)"),
        ("auto", 4, 2, "there is no cuda:3"),
        ("cuda:1", 2, 8, "2 tensor-parallel ranks, which vLLM puts on devices 0 to 1"),
    ],
)
def test_devices_that_cannot_be(wanted: str, size: int, count: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        resolve_device(wanted, size, lambda: count)


def test_a_cpu_build_of_vllm_computes_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    monkeypatch.setattr("torch.cuda.device_count", lambda: 8)
    monkeypatch.setattr(device, "_vllm_runs_on_cuda", lambda: False)
    assert device.cuda_devices() == 0
    monkeypatch.setattr(device, "_vllm_runs_on_cuda", lambda: True)
    assert device.cuda_devices() == 8
    monkeypatch.setattr("torch.version.cuda", None)
    assert device.cuda_devices() == 0


@pytest.mark.usefixtures("two_gpus")
def test_the_fullest_device_and_the_node_of_each(tmp_path: Path) -> None:
    found = machine_limits(config(tmp_path), [], tp_size=2, workspace=7)
    assert (found.device, found.device_free, found.device_workspace) == ("cuda:0", 50 * GIB, 7)
    assert found.nodes == (1, 0)
    assert found.node_available == ((0, 11 * GIB), (1, 20 * GIB))
    assert (found.memlock, found.notes) == (None, ())
    one = machine_limits(config(tmp_path), [], tp_size=2, rank=0)
    assert (one.device, one.device_free, one.nodes) == ("cuda:0", 100 * GIB, (1, 0))
    other = machine_limits(config(tmp_path), [], tp_size=2, rank=1)
    assert (other.device, other.device_free) == ("cuda:1", 50 * GIB)
    alone = machine_limits(config(tmp_path, device="cuda:1"), [])
    assert (alone.device, alone.device_free, alone.nodes) == ("cuda:1", 50 * GIB, (0,))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    ("capability", "driver", "message"),
    [
        ((7, 5), "580.1", r"GPU 0, NVIDIA H200 \(sm_75\), is older than the kernels, which need sm_80"),
        ((9, 0), "570.211.01", r"driver 570.211.01 cannot load the kernels, which need 580 or newer"),
    ],
)
def test_a_gpu_or_driver_that_no_kernel_runs_on_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], driver: str, message: str
) -> None:
    old = dataclasses.replace(gpu(0, 1, GIB), compute_capability=capability)
    monkeypatch.setattr(machine, "gpus", lambda: GpuSurvey((old, gpu(1, 0, GIB)), driver, None))
    with pytest.raises(ConfigError, match=message):
        machine_limits(config(tmp_path), [])
    if capability < (8, 0):
        assert machine_limits(config(tmp_path, device="cuda:1"), []).device == "cuda:1"
    assert machine_limits(config(tmp_path, device="cpu"), []).device == "cpu"


@pytest.mark.usefixtures("two_gpus")
def test_cuda_visible_devices_says_which_is_which(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0")
    found = machine_limits(config(tmp_path), [])
    assert (found.device_free, found.nodes) == (50 * GIB, (0,))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "MIG-1")
    unknown = machine_limits(config(tmp_path), [])
    assert unknown.device_free is None
    assert "device memory is not checked: CUDA_VISIBLE_DEVICES" in unknown.notes[0]
    assert "gpu-local binds nothing" in unknown.notes[1]


@pytest.mark.usefixtures("two_gpus")
def test_numa_as_configured(tmp_path: Path) -> None:
    assert machine_limits(config(tmp_path, numa="none"), [], tp_size=2).nodes == (None, None)
    assert machine_limits(config(tmp_path, numa=0), [], tp_size=2).nodes == (0, 0)
    with pytest.raises(ConfigError, match=r"tiers.host.numa: there is no node 5 .*nodes here: 0, 1"):
        machine_limits(config(tmp_path, numa=5), [])


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("counts", [True, None])
def test_a_locked_memory_limit_binds_unless_it_is_known_not_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, counts: bool | None
) -> None:
    monkeypatch.setattr(machine, "registration_counts", lambda: counts)
    found = machine_limits(config(tmp_path), [])
    assert found.memlock == 8 << 20
    assert "8.00 MiB is taken to count memory registered with CUDA" in found.notes[0]


@pytest.mark.parametrize(
    ("allocatable", "huge", "room"),
    [
        (40 * GIB, 0, 38 * GIB),  # what is available, but for what a machine keeps for itself
        (3 * GIB, 12 * GIB, 12 * GIB),  # reserved huge pages are not among what is available
        (40 * GIB, 12 * GIB, 38 * GIB),  # an arena is of one kind of pages
        (90 * GIB, 0, 60 * GIB),  # the arena process's own limit
        (None, 12 * GIB, 60 * GIB),  # it does not know what is available
    ],
)
def test_what_an_arena_process_can_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allocatable: int | None, huge: int, room: int
) -> None:
    status = Status(1, 60 * GIB, allocatable, (), huge)
    monkeypatch.setattr(machine, "ask_status", lambda path: status)
    monkeypatch.setattr(machine, "memory_reserve", lambda available: 2 * GIB)
    tiers = TiersConfig.from_mapping(
        {"tiers": {"disk": {"path": tmp_path}, "host": {"share": str(tmp_path / "socket")}}}
    )
    assert machine_limits(tiers, []).arena_room == room
