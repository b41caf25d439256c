"""This machine's limits as the plain numbers that a budget is checked against."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ziggurat.allocators.disk import DiskFacts
from ziggurat.allocators.limits import HostLimits
from ziggurat.residency.budget import MachineLimits
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.errors import ConfigError
from ziggurat.stores.pack import BUILDING_SUFFIX


def machine_limits(config: TiersConfig, packs: Iterable[Path]) -> MachineLimits:
    """What the machine has left now. `packs`: where the pack of each rank is or will be.

    Raises ConfigError for a device that no pool is built for yet and for a pack folder that cannot be looked at.
    """
    if config.tiers.device.device not in ("auto", "cpu"):
        raise ConfigError(
            f"tiers.device.device: there is no pool for {config.tiers.device.device} yet; set it to auto or cpu"
        )
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
    return MachineLimits(
        device="cpu",
        memory_available=host.memory_available,
        cgroup_headroom=None if host.cgroup is None else host.cgroup.headroom,
        memlock=host.memlock,
        disk_free=disk.free,
        disk_writable=disk.writable,
        packs_built=built,
        packs_building=building,
        direct_io=disk.direct_io,
    )
