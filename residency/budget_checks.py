"""What a plan is checked against, and the checks that need nothing but that."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ziggurat.residency.budget_plan import ArenaKind, Check
from ziggurat.residency.config import DiskTierConfig
from ziggurat.residency.sizes import format_bytes

# Header and padding of a pack file are one or a few 4 KiB pages; its checksums are 8 bytes a row.
_PACK_HEADER_ALLOWANCE = 64 << 10
_CHECKSUM_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLimits:
    """What the machine can give, in bytes. None: not known, or no limit; no check is made against it.

    `cgroup_headroom` is the tightest limit of the process's control groups less what they use; `memory_may_grow`
    whether a virtual machine's memory may read low until it is used; `memlock` the locked-memory limit that binds
    what is locked here; `device_free` the free memory of the fullest of the devices (on the CPU the pool is host
    memory) and `device_workspace` what kernels take of it beside the pool; `nodes` the NUMA node that each rank's
    arena is bound to (None, or a rank that is not listed: to none) and `node_available` what can be taken from each
    node; `arena_room` what the process at `tiers.host.share` can still give to this model's arenas, or has given to
    them already (None: there is none); `notes` what the machine's limits leave to say; `packs_built` how many ranks'
    packs are complete, and `packs_building` the bytes that unfinished builds of the others take on disk already;
    `packs_buildable` whether they can be built here at all.
    """

    device: str = "cpu"
    memory_available: int | None = None
    memory_may_grow: bool = False
    cgroup_headroom: int | None = None
    memlock: int | None = None
    device_free: int | None = None
    device_workspace: int = 0
    nodes: tuple[int | None, ...] = ()
    node_available: tuple[tuple[int, int], ...] = ()
    arena_room: int | None = None
    notes: tuple[str, ...] = ()
    disk_free: int | None = None
    disk_writable: bool = True
    packs_built: int = 0
    packs_building: int = 0
    packs_buildable: bool = True
    direct_io: bool | None = None


def direct_check(rows: int, kind: ArenaKind, *, on_cpu: bool) -> Check:
    """Whether layers can be read in place. rows: of these layers. kind: of the arena."""
    if on_cpu:
        detail = "layers that a CPU computes read host memory anyway"
        advice = "take tiers.device.direct_layers out"
    else:
        detail = f"{rows} rows are read in place from a pinned arena"
        detail += {"pinned": "", "pageable": ", and the arena is pageable", "none": ", and there is none"}[
            kind
        ]
        advice = "set tiers.host.size and tiers.host.on_limit so that it is, or take tiers.device.direct_layers out"
    able = not on_cpu and kind == "pinned"
    return Check("direct layers", 1, int(able), "support", "tiers.device.direct_layers", advice, detail)


def lookahead_check(guesses: int, mode: str, kind: ArenaKind, *, on_cpu: bool) -> Check:
    """Whether rows can be fetched ahead. guesses, mode: `miss.lookahead` and `miss.mode`. kind: of the arena."""
    detail, advice = f"{guesses} guesses a token, fetched from a pinned arena", "set miss.lookahead to 0"
    if on_cpu:
        detail = "a CPU computes with host memory and fetches nothing ahead"
    elif mode == "replay":
        detail = "only layers that fetch their own rows look ahead, and miss.mode is replay"
        advice += ", or miss.mode to auto"
    elif kind != "pinned":
        detail += ", and the arena is pageable" if kind == "pageable" else ", and there is none"
        advice += ", or set tiers.host.size and tiers.host.on_limit so that it is"
    able = not on_cpu and mode != "replay" and kind == "pinned"
    return Check("look-ahead", 1, int(able), "support", "miss.lookahead", advice, detail)


def disk_checks(
    disk: DiskTierConfig, machine: MachineLimits, packs: int, pack_bytes: int, rows: int
) -> Iterable[Check]:
    """Whether `packs` packs of `rows` rows have room, and are read as the configuration wants."""
    each = pack_bytes + _CHECKSUM_BYTES * rows + _PACK_HEADER_ALLOWANCE
    missing = max(0, each * max(0, packs - machine.packs_built) - machine.packs_building)
    if missing > 0 and not machine.packs_buildable:
        absent = packs - machine.packs_built
        yield Check(
            "packs",
            1,
            0,
            "support",
            "tiers.disk.path",
            "bring them with `ziggurat import FOLDER MODEL -c FILE` from what `ziggurat export` wrote, or run "
            "`ziggurat pack` where the whole checkpoint is",
            f"{absent} of {packs} are not in {disk.path}, and the model's folder holds no experts to make them from",
        )
    elif missing > 0 and not machine.disk_writable:
        yield Check(
            "pack folder",
            1,
            0,
            "support",
            "tiers.disk.path",
            "make it writable or point tiers.disk.path elsewhere",
            f"{disk.path} is not writable and {format_bytes(missing)} of packs are not built",
        )
    elif machine.disk_free is not None:
        yield Check(
            "disk space",
            missing,
            machine.disk_free,
            "bytes",
            "tiers.disk.path",
            "free space there or point tiers.disk.path elsewhere",
            f"packs not yet built in {disk.path}",
        )
    if disk.direct == "always" and machine.direct_io is False:
        yield Check(
            "direct I/O",
            1,
            0,
            "support",
            "tiers.disk.direct",
            "set tiers.disk.direct to auto or point tiers.disk.path elsewhere",
            f"the filesystem of {disk.path} does not support it",
        )
