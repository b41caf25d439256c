"""How much memory this process may take: of the machine, of its control groups, and locked.

Everything is read from /proc and /sys below a root that tests can put elsewhere.
"""

from __future__ import annotations

import resource
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from ziggurat.allocators.mounts import Mount, read_mounts

__all__ = ["CgroupLimit", "HostLimits"]

_CAP_IPC_LOCK = 14  # linux/capability.h
# cgroup v1 writes "no limit" as the largest multiple of the page size that its counter holds.
_V1_UNLIMITED = 1 << 62
_GROWING = ("virtio_mem", "virtio_balloon")


@dataclass(frozen=True, slots=True)
class CgroupLimit:
    """The memory limit of one control group. `path` is its folder; bytes.

    `reclaimable` is the part of `usage` that is page cache: the kernel takes it back before it refuses memory.
    """

    version: Literal[1, 2]
    path: Path
    limit: int
    usage: int
    reclaimable: int

    @property
    def headroom(self) -> int:
        """Bytes that can still be taken before the limit."""
        return max(0, self.limit - max(0, self.usage - self.reclaimable))


@dataclass(frozen=True, slots=True)
class HostLimits:
    """Limits of host memory in bytes. None means unknown for memory, no limit for the others.

    `cgroup` is the group with the least headroom among the process's own and all that enclose it.
    `memlock_exempt`: the process may lock memory above the limit (CAP_IPC_LOCK). `memory_may_grow`: this is a virtual
    machine whose host can add or return memory, so that total and available may read low until memory is used.
    """

    memory_total: int | None
    memory_available: int | None
    cgroup: CgroupLimit | None
    memlock_soft: int | None
    memlock_hard: int | None
    memlock_exempt: bool
    memory_may_grow: bool = False

    @classmethod
    def read(cls, root: Path = Path("/")) -> HostLimits:
        """The limits now. `root`: where proc/ and sys/ are (the memlock limit is always this process's)."""
        memory = _meminfo(root / "proc/meminfo")
        available = memory.get("MemAvailable")
        if available is None and "MemFree" in memory:
            available = memory["MemFree"] + memory.get("Cached", 0)
        soft, hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
        return cls(
            memory_total=memory.get("MemTotal"),
            memory_available=available,
            cgroup=_tightest_cgroup(root),
            memlock_soft=None if soft == resource.RLIM_INFINITY else soft,
            memlock_hard=None if hard == resource.RLIM_INFINITY else hard,
            memlock_exempt=bool(_capabilities(root / "proc/self/status") >> _CAP_IPC_LOCK & 1),
            memory_may_grow=any(
                any((root / "sys/bus/virtio/drivers" / driver).glob("virtio[0-9]*")) for driver in _GROWING
            ),
        )

    @property
    def memlock(self) -> int | None:
        """The locked-memory limit that binds this process, None if none does."""
        return None if self.memlock_exempt else self.memlock_soft

    @property
    def allocatable(self) -> int | None:
        """Bytes of memory that can be taken before the machine or a control group runs short; None if unknown."""
        known = [self.memory_available, None if self.cgroup is None else self.cgroup.headroom]
        return min((one for one in known if one is not None), default=None)


def _meminfo(path: Path) -> dict[str, int]:
    values = {}
    for line in _text(path).splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words and words[0].isdecimal():
            values[name] = int(words[0]) * (1024 if words[1:] == ["kB"] else 1)
    return values


def _capabilities(status: Path) -> int:
    for line in _text(status).splitlines():
        if line.startswith("CapEff:"):
            return int(line.split()[1], 16)
    return 0


def _tightest_cgroup(root: Path) -> CgroupLimit | None:
    limits: list[CgroupLimit] = []
    mounts = read_mounts(root / "proc/self/mountinfo")
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, controllers, group = (*line.split(":", 2), "", "")[:3]
        if "memory" in controllers.split(","):
            limits += _limits_from(root, mounts, PurePosixPath(group), 1)
        elif number == "0" and not controllers:
            limits += _limits_from(root, mounts, PurePosixPath(group), 2)
    return min(limits, key=lambda one: one.headroom, default=None)


def _limits_from(
    root: Path, mounts: tuple[Mount, ...], group: PurePosixPath, version: Literal[1, 2]
) -> list[CgroupLimit]:
    """Limits of the group and of every group around it, as far out as the mount shows them."""
    limits = []
    for mount in mounts:
        if mount.fstype != ("cgroup2" if version == 2 else "cgroup") or (
            version == 1 and "memory" not in mount.options
        ):
            continue
        top = root / mount.point.relative_to("/")
        # In a container without a cgroup namespace the group is named from the host's root, while the mount shows
        # only the part below its source; a name that is not below it means that the mount's top is our own group.
        inside = group.relative_to(mount.source) if group.is_relative_to(mount.source) else PurePosixPath()
        if ".." in inside.parts:
            inside = PurePosixPath()
        for folder in (top / inside, *(top / inside).parents):
            limit = _limit_of(folder, version)
            if limit is not None:
                limits.append(limit)
            if folder == top:
                break
    return limits


def _limit_of(folder: Path, version: Literal[1, 2]) -> CgroupLimit | None:
    if version == 2:
        # memory.high does not refuse memory but throttles whoever is above it to a standstill.
        bounds = [_number(folder / "memory.max"), _number(folder / "memory.high")]
        usage, cache = _number(folder / "memory.current"), ("inactive_file", "active_file")
    else:
        bounds = [_number(folder / "memory.limit_in_bytes")]
        usage, cache = _number(folder / "memory.usage_in_bytes"), ("total_inactive_file", "total_active_file")
    limit = min((one for one in bounds if one is not None and one < _V1_UNLIMITED), default=None)
    if limit is None or usage is None:
        return None
    counts = dict(line.split(" ", 1) for line in _text(folder / "memory.stat").splitlines() if " " in line)
    reclaimable = sum(int(counts[name]) for name in cache if counts.get(name, "").isdecimal())
    return CgroupLimit(version, folder, limit, usage, min(reclaimable, usage))


def _number(path: Path) -> int | None:
    text = _text(path).strip()
    return int(text) if text.isdecimal() else None


def _text(path: Path) -> str:
    # /proc and /sys show what this kernel and this container have; what is not there sets no limit.
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
