"""What hangs where: NUMA nodes as sysfs shows them, GPUs as NVML shows them."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml

from ziggurat.allocators.errors import NumaError

__all__ = [
    "Gpu",
    "GpuSurvey",
    "NodeChoice",
    "NumaNode",
    "PcieLink",
    "choose_node",
    "gpus",
    "node_of_bus",
    "numa_nodes",
    "visible_gpus",
]


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node; memory in bytes (None if the kernel does not say), `cpus` may be empty.

    `page_cache` is memory that holds files: the kernel takes it back before it refuses memory.
    """

    node: int
    cpus: tuple[int, ...]
    memory_total: int | None
    memory_free: int | None
    page_cache: int = 0

    @property
    def available(self) -> int | None:
        """Bytes that can be taken from this node, None if the kernel does not say."""
        return None if self.memory_free is None else self.memory_free + self.page_cache


@dataclass(frozen=True, slots=True)
class PcieLink:
    """A PCI Express link: what it runs at now (links of idle GPUs slow down) and what card and slot can do."""

    generation: int
    width: int
    max_generation: int
    max_width: int


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
    link: PcieLink | None = None


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
                page_cache=memory.get("Active(file)", 0) + memory.get("Inactive(file)", 0),
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
        numa_node=node_of_bus(bus, sysfs),
        memory_total=int(memory.total),
        memory_free=int(memory.free),
        compute_capability=tuple(pynvml.nvmlDeviceGetCudaComputeCapability(handle)),
        link=_link(handle),
    )


def _link(handle: Any) -> PcieLink | None:
    try:
        return PcieLink(
            generation=int(pynvml.nvmlDeviceGetCurrPcieLinkGeneration(handle)),
            width=int(pynvml.nvmlDeviceGetCurrPcieLinkWidth(handle)),
            max_generation=int(pynvml.nvmlDeviceGetMaxPcieLinkGeneration(handle)),
            max_width=int(pynvml.nvmlDeviceGetMaxPcieLinkWidth(handle)),
        )
    except pynvml.NVMLError:
        return None  # a virtual machine may hide the link


def node_of_bus(bus: str, sysfs: Path = Path("/sys")) -> int | None:
    """The NUMA node of the PCI device at `bus` (`0000:1b:00.0`), None if the firmware or the machine does not say."""
    # NVML writes the PCI domain with eight digits, sysfs with four.
    domain, _, rest = bus.partition(":")
    text = _text(sysfs / "bus/pci/devices" / f"{domain[-4:]}:{rest}" / "numa_node").strip()
    return int(text) if text.isdecimal() else None  # -1: the firmware does not say


def visible_gpus(survey: GpuSurvey, environment: Mapping[str, str] = os.environ) -> tuple[Gpu, ...]:
    """The GPUs that CUDA shows this process, in the order of their CUDA numbers, without asking CUDA.

    As CUDA does, the list in CUDA_VISIBLE_DEVICES ends at the first entry that is no GPU. Numbers are taken to be in
    PCI order, which is certain only with CUDA_DEVICE_ORDER=PCI_BUS_ID or GPUs of one model.
    """
    wanted = environment.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return survey.gpus
    found: list[Gpu] = []
    for entry in (one.strip() for one in wanted.split(",")):
        matches = [gpu for gpu in survey.gpus if _is_named(gpu, entry)]
        if len(matches) != 1 or matches[0] in found:
            break
        found += matches
    return tuple(found)


def _is_named(gpu: Gpu, entry: str) -> bool:
    if entry.isdecimal():
        return gpu.index == int(entry)
    return entry.startswith("GPU-") and gpu.uuid.startswith(entry)


@dataclass(frozen=True, slots=True)
class NodeChoice:
    """The node to bind an arena to (None: bind nothing), and what there is to say about it."""

    node: int | None
    note: str | None = None


def choose_node(wanted: str | int, gpu_node: int | None, nodes: Sequence[NumaNode]) -> NodeChoice:
    """What `tiers.host.numa` means here. wanted: "gpu-local", "none" or a node. gpu_node: the GPU's, if known.

    NumaError for a number that is no node with memory of this machine.
    """
    if wanted == "none":
        return NodeChoice(None)
    if isinstance(wanted, int):
        known = [one.node for one in nodes if one.memory_total != 0]
        if wanted not in known:
            here = ", ".join(map(str, known)) or "none"
            raise NumaError(f"tiers.host.numa: there is no node {wanted} with memory; nodes here: {here}")
        return NodeChoice(wanted)
    if gpu_node is not None:
        return NodeChoice(gpu_node)
    if len(nodes) == 1:
        return NodeChoice(nodes[0].node)  # wherever the GPU is, there is no other
    reason = (
        "the kernel shows no NUMA nodes"
        if not nodes
        else "the firmware does not say which node the GPU is on"
    )
    return NodeChoice(None, f"tiers.host.numa: gpu-local binds nothing, since {reason}")


def _memory(text: str) -> Iterable[tuple[str, int]]:
    for match in re.finditer(r"^Node [0-9]+ ([A-Za-z()]+): +([0-9]+) kB$", text, re.MULTILINE):
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
