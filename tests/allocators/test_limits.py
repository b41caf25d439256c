"""Limits, read from trees that look like the machines and containers people have."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from ziggurat.allocators.limits import HostLimits

MEMINFO = """MemTotal:       16384000 kB
MemFree:         1024000 kB
MemAvailable:    8192000 kB
Cached:          4096000 kB
HugePages_Total:       0
"""
UNLIMITED = "9223372036854771712\n"
V2_MOUNT = "30 23 0:26 {source} /sys/fs/cgroup ro,nosuid - cgroup2 cgroup rw,nsdelegate\n"
V1_MOUNTS = (
    "31 23 0:28 / /sys/fs/cgroup ro - tmpfs tmpfs ro,mode=755\n"
    "32 31 0:29 {source} /sys/fs/cgroup/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    "33 31 0:30 {source} /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
)


def put(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def group_v2(
    limit: str, current: int, *, high: str = "max", inactive: int = 0, active: int = 0
) -> dict[str, str]:
    return {
        "memory.max": f"{limit}\n",
        "memory.high": f"{high}\n",
        "memory.current": f"{current}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive}\nactive_file {active}\n",
    }


def group_v1(limit: str, usage: int, *, inactive: int = 0, active: int = 0) -> dict[str, str]:
    return {
        "memory.limit_in_bytes": limit,
        "memory.usage_in_bytes": f"{usage}\n",
        "memory.stat": f"cache 7\ntotal_inactive_file {inactive}\ntotal_active_file {active}\n",
    }


def tree(root: Path, *, cgroup: str, mounts: str, groups: dict[str, dict[str, str]]) -> Path:
    put(root, {"proc/meminfo": MEMINFO, "proc/self/cgroup": cgroup, "proc/self/mountinfo": mounts})
    for folder, files in groups.items():
        put(root, {f"sys/fs/cgroup/{folder}/{name}": text for name, text in files.items()})
    return root


def test_no_control_groups(tmp_path: Path) -> None:
    put(tmp_path, {"proc/meminfo": MEMINFO})
    limits = HostLimits.read(tmp_path)
    assert (limits.memory_total, limits.memory_available) == (16384000 << 10, 8192000 << 10)
    assert limits.cgroup is None
    assert limits.allocatable == 8192000 << 10


def test_a_kernel_without_memavailable_and_a_machine_without_proc(tmp_path: Path) -> None:
    put(tmp_path, {"proc/meminfo": MEMINFO.replace("MemAvailable:    8192000 kB\n", "")})
    assert HostLimits.read(tmp_path).memory_available == (1024000 + 4096000) << 10
    nothing = HostLimits.read(tmp_path / "none")
    assert (nothing.memory_total, nothing.memory_available, nothing.cgroup, nothing.allocatable) == (
        None,
    ) * 4


def test_v2_counts_page_cache_as_free(tmp_path: Path) -> None:
    groups = {"a": group_v2("8000", 5000, inactive=1000, active=500)}
    found = HostLimits.read(
        tree(tmp_path, cgroup="0::/a\n", mounts=V2_MOUNT.format(source="/"), groups=groups)
    ).cgroup
    assert found is not None
    assert (found.version, found.limit, found.usage, found.reclaimable) == (2, 8000, 5000, 1500)
    assert found.headroom == 4500
    assert found.path == tmp_path / "sys/fs/cgroup/a"


@pytest.mark.parametrize(
    ("outer", "inner", "headroom"),
    [
        (group_v2("9000", 1000), group_v2("5000", 1000), 4000),
        (group_v2("3000", 2500), group_v2("5000", 1000), 500),
        (group_v2("9000", 1000), group_v2("max", 1000), 8000),
        (group_v2("max", 1000), group_v2("max", 1000), None),
        (group_v2("9000", 1000), group_v2("9000", 1000, high="2000"), 1000),
        (group_v2("9000", 1000), group_v2("500", 1000), 0),
    ],
)
def test_v2_takes_the_tightest_of_all_enclosing_groups(
    tmp_path: Path, outer: dict[str, str], inner: dict[str, str], headroom: int | None
) -> None:
    groups = {"a": outer, "a/b": {}, "a/b/c": inner}
    mounts = V2_MOUNT.format(source="/")
    found = HostLimits.read(tree(tmp_path, cgroup="0::/a/b/c\n", mounts=mounts, groups=groups)).cgroup
    assert (None if found is None else found.headroom) == headroom


def test_v2_in_a_namespace_sees_its_own_group_as_the_top(tmp_path: Path) -> None:
    groups = {".": group_v2("8000", 5000)}
    for path, source in (("/", "/"), ("/../..", "/../.."), ("/kube/pod", "/"), ("/kube/pod", "/kube/pod")):
        root = tmp_path / path.replace("/", "_") / source.replace("/", "_")
        found = HostLimits.read(
            tree(root, cgroup=f"0::{path}\n", mounts=V2_MOUNT.format(source=source), groups=groups)
        ).cgroup
        assert found is not None, (path, source)
        assert found.headroom == 3000


def test_v1_nested_with_a_hybrid_v2_beside_it(tmp_path: Path) -> None:
    groups = {
        "memory": group_v1(UNLIMITED, 100),
        "memory/docker": group_v1("7000\n", 6500, inactive=1000, active=100),
        "memory/docker/abc": group_v1("4000\n", 2000),
    }
    cgroup = "9:name=systemd:/\n5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n"
    mounts = V1_MOUNTS.format(source="/") + "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
    found = HostLimits.read(tree(tmp_path, cgroup=cgroup, mounts=mounts, groups=groups)).cgroup
    assert found is not None
    assert (found.version, found.limit, found.headroom) == (1, 7000, 1600)


def test_v1_in_a_container_whose_mount_shows_only_its_own_group(tmp_path: Path) -> None:
    found = HostLimits.read(
        tree(
            tmp_path,
            cgroup="4:memory:/docker/abc\n",
            mounts=V1_MOUNTS.format(source="/docker/abc"),
            groups={"memory": group_v1("4000\n", 1000)},
        )
    ).cgroup
    assert found is not None
    assert found.headroom == 3000


def test_v1_without_a_limit(tmp_path: Path) -> None:
    limits = HostLimits.read(
        tree(
            tmp_path,
            cgroup="4:memory:/\n",
            mounts=V1_MOUNTS.format(source="/"),
            groups={"memory": group_v1(UNLIMITED, 1000)},
        )
    )
    assert limits.cgroup is None


def test_the_tighter_of_machine_and_group_is_allocatable(tmp_path: Path) -> None:
    groups = {"a": group_v2("8000", 5000)}
    limits = HostLimits.read(
        tree(tmp_path, cgroup="0::/a\n", mounts=V2_MOUNT.format(source="/"), groups=groups)
    )
    assert limits.allocatable == 3000


@pytest.mark.parametrize(
    ("mask", "exempt"), [("000001ffffffffff", True), ("00000000a80425fb", False), ("0", False)]
)
def test_a_capability_lifts_the_locked_memory_limit(tmp_path: Path, mask: str, exempt: bool) -> None:
    put(tmp_path, {"proc/self/status": f"Name:\tx\nCapEff:\t{mask}\n"})
    limits = HostLimits.read(tmp_path)
    assert limits.memlock_exempt is exempt
    assert limits.memlock == (None if exempt else limits.memlock_soft)


def test_a_virtual_machine_whose_memory_may_grow(tmp_path: Path) -> None:
    assert not HostLimits.read(tmp_path).memory_may_grow
    put(
        tmp_path,
        {"sys/bus/virtio/drivers/virtio_balloon/bind": "", "sys/bus/virtio/drivers/virtio_mem/bind": ""},
    )
    assert not HostLimits.read(tmp_path).memory_may_grow
    put(tmp_path, {"sys/bus/virtio/drivers/virtio_balloon/virtio3/device": ""})
    assert HostLimits.read(tmp_path).memory_may_grow


def test_this_machine() -> None:
    limits = HostLimits.read()
    assert limits.memory_total is not None
    assert limits.memory_available is not None
    assert (
        0
        < limits.memory_available
        <= limits.memory_total
        == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )


def test_the_locked_memory_limit_is_this_processes() -> None:
    hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
    if hard != resource.RLIM_INFINITY and hard < 65536:
        pytest.skip("the hard limit is below what the test sets")
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_MEMLOCK, (4096, 65536))\n"
        "from ziggurat.allocators.limits import HostLimits\n"
        "limits = HostLimits.read(); print(limits.memlock_soft, limits.memlock_hard)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120
    )
    assert done.stdout.split() == ["4096", "65536"]
