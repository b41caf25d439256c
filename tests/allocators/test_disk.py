"""What a folder's filesystem offers, tried on real folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ziggurat.allocators.disk import DiskFacts
from ziggurat.allocators.mounts import mount_of, read_mounts

MOUNTINFO = r"""22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
23 22 0:21 / /proc rw - proc proc rw
40 22 259:1 / /nvme rw,noatime - xfs /dev/nvme0n1 rw,attr2
41 40 0:50 /sub /nvme/with\040blank ro - nfs4 host:/x ro,vers=4.2
42 40 0:51 / /nvme rw - btrfs /dev/sdb rw
broken line
"""


def test_a_folder_that_can_be_written_and_leaves_no_trace(tmp_path: Path) -> None:
    facts = DiskFacts.probe(tmp_path)
    assert facts.exists
    assert facts.writable
    assert facts.probed == tmp_path.resolve()
    assert facts.free > 0
    assert facts.fs_type
    assert facts.direct_io is not None
    assert facts.direct_alignment in ((512, 4096) if facts.direct_io else (None,))
    assert list(tmp_path.iterdir()) == []


def test_direct_io_is_what_an_aligned_read_of_this_filesystem_says(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    path.write_bytes(bytes(8192))
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
        supported = True
    except OSError:
        supported = False
    assert DiskFacts.probe(tmp_path).direct_io is supported


def test_a_folder_that_does_not_exist_yet_is_judged_by_its_nearest_ancestor(tmp_path: Path) -> None:
    facts = DiskFacts.probe(tmp_path / "a" / "b")
    assert not facts.exists
    assert facts.probed == tmp_path.resolve()
    assert facts.writable
    assert not (tmp_path / "a").exists()


def test_a_read_only_folder_is_not_writable() -> None:
    # proc cannot be written by anybody, root included, whatever its mode bits say
    facts = DiskFacts.probe(Path("/proc/self/fdinfo"))
    assert facts.fs_type == "proc"
    assert not facts.writable
    assert facts.direct_io is None


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes whatever the mode bits say")
def test_a_folder_without_write_permission(tmp_path: Path) -> None:
    (tmp_path / "rows").write_bytes(bytes(8192))
    tmp_path.chmod(0o500)
    facts = DiskFacts.probe(tmp_path)
    assert not facts.writable
    assert facts.direct_io is not None  # tried on the file that is there


def test_a_file_or_a_dangling_link_in_the_way_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for wrong in ("file", "file/packs"):
        with pytest.raises(NotADirectoryError):
            DiskFacts.probe(tmp_path / wrong)
    with pytest.raises(FileNotFoundError):
        DiskFacts.probe(tmp_path / "link" / "packs")


@pytest.mark.parametrize(
    ("path", "fstype"),
    [
        ("/home", "ext4"),
        ("/nvme/packs", "btrfs"),
        ("/nvme/with blank/x", "nfs4"),
        ("/nvmex", "ext4"),
        ("/proc/1", "proc"),
    ],
)
def test_the_mount_of_a_path_is_the_deepest_and_last(tmp_path: Path, path: str, fstype: str) -> None:
    (tmp_path / "mountinfo").write_text(MOUNTINFO)
    mounts = read_mounts(tmp_path / "mountinfo")
    assert len(mounts) == 5
    found = mount_of(Path(path), mounts)
    assert found is not None
    assert found.fstype == fstype


def test_no_mount_table(tmp_path: Path) -> None:
    assert read_mounts(tmp_path / "none") == ()
    assert DiskFacts.probe(tmp_path, mountinfo=tmp_path / "none").fs_type is None
