"""A start whose packs do not fit the disk: refused before, or ended in the middle, with one line and nothing left."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support.checkpoints import SizeArgs, write_checkpoint
from support.disks import fill_disk, free_disk, tmpfs
from ziggurat.integration.cli import main as cli
from ziggurat.integration.cli.progress import RowProgress

Serve = Callable[[], tuple[int, str]]
SIZES: SizeArgs = {"layers": 4, "experts": 8, "hidden": 64, "intermediate": 64}
DISK = 2 << 20
PACK = 4 * 8 * 3 * 64 * 64 * 2  # bytes of rows


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with tmpfs(tmp_path / "disk", str(DISK)) as place:
        if place is None:
            pytest.skip("needs the right to mount a tmpfs")
        yield place


@pytest.fixture
def serve(
    disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Serve:
    """`ziggurat serve` up to where vLLM would take over: status and what it says on standard error."""
    write_checkpoint(tmp_path / "model", kind="qwen3", **SIZES)
    config = tmp_path / "tiers.yaml"
    tiers = {
        "disk": {"path": str(disk / "packs"), "readers": 2},
        "host": {"size": "25%"},
        "device": {"size": "25%", "device": "cpu"},
    }
    config.write_text(yaml.safe_dump({"tiers": tiers, "codecs": {"base": "bf16"}}), encoding="utf-8")

    class TakenOverError(Exception):
        pass

    def execv(*_: object) -> None:
        raise TakenOverError

    monkeypatch.setattr("os.execv", execv)
    monkeypatch.setattr(sys, "argv", ["ziggurat", "serve", str(tmp_path / "model"), "-c", str(config)])

    def run() -> tuple[int, str]:
        try:
            cli.main()
        except TakenOverError:
            return 0, ""
        except SystemExit as end:
            status = end.code
        (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("ziggurat:")]
        assert isinstance(status, int)
        return status, line

    return run


def test_a_disk_that_is_too_small_from_the_start(serve: Serve, disk: Path) -> None:
    fill_disk(disk)
    status, line = serve()
    assert status == 1
    assert "tiers.disk.path" in line
    assert "disk space" in line
    assert [file.name for file in disk.iterdir()] == ["filler"]
    free_disk(disk)
    assert serve() == (0, "")


def test_a_disk_that_fills_up_while_the_packs_are_built(
    serve: Serve, disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = RowProgress.start

    def start(progress: RowProgress, total_rows: int, total_bytes: int) -> None:
        real(progress, total_rows, total_bytes)
        assert total_bytes == PACK
        fill_disk(disk)

    monkeypatch.setattr(RowProgress, "start", start)
    status, line = serve()
    assert status == 1
    assert "not enough disk space" in line
    assert "choose another folder (tiers.disk.path" in line
    left = {str(file.relative_to(disk)) for file in disk.rglob("*") if file.is_file()}
    assert {name for name in left if not name.endswith(".lock")} == {"filler"}
    free_disk(disk)
    monkeypatch.setattr(RowProgress, "start", real)
    assert serve() == (0, "")
