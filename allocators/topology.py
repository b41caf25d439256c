"""What hangs where: NUMA nodes as sysfs shows them, GPUs as NVML shows them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import pynvml

__all__ = ["Gpu", "GpuSurvey", "NumaNode", "gpus", "numa_nodes"]


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node; memory in bytes (None if the kernel does not say), `cpus` may be empty."""

    node: int
    cpus: tuple[int, ...]
    memory_total: int | None
    memory_free: int | None


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU by its NVML index, which is by PCI bus and knows nothing of CUDA_VISIBLE_DEVICES. Memory in bytes."""

    index: int
    name: str
    uuid: str
    pci_bus_id: str
    numa_node: int | None
    memory_total: int
    memory_free: int
    compute_capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class GpuSurvey:
    """The GPUs of this machine; if there are none, `reason` says why. `driver` is the driver's version."""

    gpus: tuple[Gpu, ...]
    driver: str | None
    reason: str | None


def numa_nodes(sysfs: Path = Path("/sys")) -> tuple[NumaNode, ...]:
    """Every online node with memory or CPUs, by number; empty on a kernel without NUMA."""
    found = []
    for folder in (sysfs / "devices/system/node").glob("node*"):
        if match := re.fullmatch(r"node([0-9]+)", folder.name):
            memory = dict(_memory(_text(folder / "meminfo")))
            node = NumaNode(
                node=int(match[1]),
                cpus=_numbers(_text(folder / "cpulist")),
                memory_total=memory.get("MemTotal"),
                memory_free=memory.get("MemFree"),
            )
            if node.cpus or node.memory_total:
                found.append(node)
    return tuple(sorted(found, key=lambda one: one.node))


def gpus(sysfs: Path = Path("/sys")) -> GpuSurvey:
    """Asks NVML, without making a CUDA context. A machine without a driver is an answer, not an error."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return GpuSurvey((), None, str(error))
    try:
        count = pynvml.nvmlDeviceGetCount()
        found = tuple(_gpu(index, sysfs) for index in range(count))
        return GpuSurvey(
            found, str(pynvml.nvmlSystemGetDriverVersion()), None if found else "no GPU is visible"
        )
    except pynvml.NVMLError as error:
        return GpuSurvey((), None, str(error))
    finally:
        pynvml.nvmlShutdown()


def _gpu(index: int, sysfs: Path) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    bus = str(pynvml.nvmlDeviceGetPciInfo(handle).busId).lower()
    return Gpu(
        index=index,
        name=str(pynvml.nvmlDeviceGetName(handle)),
        uuid=str(pynvml.nvmlDeviceGetUUID(handle)),
        pci_bus_id=bus,
        numa_node=_numa_of(bus, sysfs),
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
    )


def _numa_of(bus: str, sysfs: Path) -> int | None:
    # NVML writes the PCI domain with eight digits, sysfs with four.
    domain, _, rest = bus.partition(":")
    text = _text(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").strip()
    return int(text) if text.isdecimal() else None  # -1: the firmware does not say


def _memory(text: str) -> Iterable[tuple[str, int]]:
    for match in re.finditer(r"^Node [0-9]+ ([A-Za-z]+): +([0-9]+) kB$", text, re.MULTILINE):
        yield match[1], int(match[2]) * 1024


def _numbers(text: str) -> tuple[int, ...]:
    """The numbers of a kernel list such as `0-3,8`."""
    found: list[int] = []
    for part in text.strip().split(","):
        if match := re.fullmatch(r"([0-9]+)(?:-([0-9]+))?", part):
            found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(found)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
