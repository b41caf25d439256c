"""This machine's limits as the plain numbers that a budget is checked against."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ziggurat.allocators.disk import DiskFacts
from ziggurat.allocators.errors import NumaError
from ziggurat.allocators.limits import HostLimits
from ziggurat.allocators.memlock_trial import registration_counts
from ziggurat.allocators.shared.errors import SharedArenaError
from ziggurat.allocators.shared.lease import ask_status
from ziggurat.allocators.topology import Gpu, GpuSurvey, choose_node, gpus, numa_nodes, visible_gpus
from ziggurat.integration.device import resolve_device
from ziggurat.kernels.cuda.units import MINIMUM_DRIVER, OLDEST_CAPABILITY
from ziggurat.residency.budget import MachineLimits, memory_reserve
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import ConfigError
from ziggurat.residency.ledger import arena_key
from ziggurat.residency.sizes import format_bytes
from ziggurat.stores.pack import BUILDING_SUFFIX
from ziggurat.stores.packformat import PackHeader

__all__ = ["machine_limits"]


def machine_limits(
    config: TiersConfig,
    packs: Iterable[Path],
    *,
    tp_size: int = 1,
    rank: int | None = None,
    workspace: int = 0,
    headers: Iterable[PackHeader] = (),
) -> MachineLimits:
    """What the machine has left now. `packs`: where the pack of each rank is or will be.

    rank: look at the device of this rank of `tp_size` alone, None at those of all. workspace: bytes of a device that
    kernels take beside the pool. Makes no CUDA context. Raises ConfigError for a device or NUMA node that is not here
    and for a pack folder that cannot be looked at.
    """
    device = resolve_device(config.tiers.device.device, tp_size)
    host = HostLimits.read()
    try:
        disk = DiskFacts.probe(config.tiers.disk.path)
    except OSError as error:
        raise ConfigError(f"tiers.disk.path: {config.tiers.disk.path}: {error.strerror or error}") from error
    built, building = 0, 0
    for pack in packs:
        unfinished = pack.with_name(pack.name + BUILDING_SUFFIX)
        if pack.is_file():
            built += 1
        elif unfinished.is_file():
            building += unfinished.stat().st_blocks * 512  # the file has its full size from the start
    cuda = None if device == "cpu" else _Cuda(config, device, tp_size, rank, host)
    return MachineLimits(
        device=device if cuda is None else cuda.device,
        memory_available=host.memory_available,
        memory_may_grow=host.memory_may_grow,
        cgroup_headroom=None if host.cgroup is None else host.cgroup.headroom,
        memlock=host.memlock if cuda is None else cuda.memlock,
        arena_room=_arena_room(config, headers),
        device_free=None if cuda is None else cuda.free,
        device_workspace=0 if cuda is None else workspace,
        nodes=() if cuda is None else cuda.nodes,
        node_available=() if cuda is None else cuda.node_available,
        notes=() if cuda is None else tuple(cuda.notes),
        disk_free=disk.free,
        disk_writable=disk.writable,
        packs_built=built,
        packs_building=building,
        direct_io=disk.direct_io,
    )


def _arena_room(config: TiersConfig, headers: Iterable[PackHeader]) -> int | None:
    """What the arena process can give to these packs' arenas, with what they have there; None if there is none."""
    if config.tiers.host.share is None:
        return None
    try:
        found = ask_status(config.tiers.host.share)
    except SharedArenaError:
        return None
    keys = {arena_key(header) for header in headers}
    ours = sum(one.bytes for one in found.arenas if one.idle or one.key in keys)
    room = found.limit - sum(one.bytes for one in found.arenas) + ours
    have = found.allocatable
    if have is None:
        return max(0, room)
    # Reserved huge pages are not among what is available, and nobody else could use them.
    return max(0, min(room, max(have - memory_reserve(have), found.huge_pages) + ours))


class _Cuda:
    """The limits that matter where the pool is on GPUs."""

    def __init__(
        self, config: TiersConfig, device: str, tp_size: int, rank: int | None, host: HostLimits
    ) -> None:
        self.notes: list[str] = []
        survey = gpus()
        first = int(device.removeprefix("cuda:"))
        self.device = device if rank is None else f"cuda:{first + rank}"
        used = [_at(visible_gpus(survey), first + one) for one in range(tp_size)]
        for gpu in used:
            if gpu is not None:
                _check_kernels(gpu, survey.driver)
        self.free = self._free(survey, used if rank is None else [used[rank]])
        self.nodes = self._nodes(config, used)
        self.node_available = _node_available()
        self.memlock = self._memlock(host)

    def _free(self, survey: GpuSurvey, used: list[Gpu | None]) -> int | None:
        known = [gpu.memory_free for gpu in used if gpu is not None]
        if len(known) < len(used):
            reason = survey.reason or "CUDA_VISIBLE_DEVICES names something else than whole GPUs"
            self.notes.append(f"device memory is not checked: {reason}")
            return None
        return min(known)

    def _nodes(self, config: TiersConfig, used: list[Gpu | None]) -> tuple[int | None, ...]:
        chosen: list[int | None] = []
        for gpu in used:
            try:
                choice = choose_node(
                    config.tiers.host.numa, None if gpu is None else gpu.numa_node, numa_nodes()
                )
            except NumaError as error:
                raise ConfigError(str(error)) from error
            if choice.note is not None:
                self.notes.append(choice.note)
            chosen.append(choice.node)
        return tuple(chosen)

    def _memlock(self, host: HostLimits) -> int | None:
        if host.memlock is None or registration_counts() is False:
            return None
        self.notes.append(
            f"the locked-memory limit of {format_bytes(host.memlock)} is taken to count memory registered with CUDA"
        )
        return host.memlock


def _check_kernels(gpu: Gpu, driver: str | None) -> None:
    """ConfigError for a GPU or a driver that no kernel of ours runs on."""
    major, minor = gpu.compute_capability
    if (major, minor) < OLDEST_CAPABILITY:
        raise ConfigError(
            f"tiers.device.device: GPU {gpu.index}, {gpu.name} (sm_{major}{minor}), is older than the kernels, which "
            f"need sm_{OLDEST_CAPABILITY[0]}{OLDEST_CAPABILITY[1]} or newer; set it to cpu or to another GPU"
        )
    branch = (driver or "").partition(".")[0]
    if branch.isdecimal() and int(branch) < int(MINIMUM_DRIVER):
        raise ConfigError(
            f"tiers.device.device: driver {driver} cannot load the kernels, which need {MINIMUM_DRIVER} or newer; "
            "update the driver or set tiers.device.device to cpu"
        )


def _at(found: tuple[Gpu, ...], index: int) -> Gpu | None:
    return found[index] if index < len(found) else None


def _node_available() -> tuple[tuple[int, int], ...]:
    """What can be taken from each node; nothing if there is one node only: then it is the machine's memory."""
    nodes = [one for one in numa_nodes() if one.memory_total]
    if len(nodes) < 2:
        return ()
    return tuple((one.node, one.available) for one in nodes if one.available is not None)
