"""A server that may mend its pack, on a disk that rots, fails and fills up: nobody notices but the metrics."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import yaml

from support.disks import fill_disk, free_disk, punch, tmpfs
from support.engines import BATCH, LONG, SINGLE
from support.packfiles import data_start, flip
from support.server import Server, serving, total
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.pack import Pack

TiersFactory = Callable[..., TiersConfig]
PROMPTS = (SINGLE, *BATCH)
RECORDED_AT_ONCE = 4096  # tokens after which the recording is written first


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "rules.json"


@pytest.fixture(scope="module")
def mounted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path | None]:
    with tmpfs(tmp_path_factory.mktemp("disks") / "disk", "96m") as place:
        yield place


@pytest.fixture(scope="module")
def disk(mounted: Path | None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small disk of its own with all that the server writes, or a folder where nobody may mount."""
    return mounted or tmp_path_factory.mktemp("disk")


@pytest.fixture(scope="module")
def server(
    demo_model: Path,
    make_tiers: TiersFactory,
    disk: Path,
    faults: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    # Without an arena, and with every read checked, each miss meets what the disk holds now.
    tiers = make_tiers(
        pool="25%",
        arena="0",
        folder=disk / "packs",
        disk={"faults": str(faults), "verify": "always"},
        heat={"path": str(disk / "heat"), "save_every_steps": 1},
    )
    config = tmp_path_factory.mktemp("config") / "tiers.yaml"
    config.write_text(yaml.safe_dump(tiers.model_dump(mode="json")), encoding="utf-8")
    with serving(demo_model, config, options=["--record-routing", str(disk / "recorded")]) as running:
        yield running


@pytest.fixture(scope="module")
def pack(server: Server, disk: Path) -> Path:
    (path,) = (disk / "packs").glob("*.safetensors")
    return path


@pytest.fixture(scope="module")
def sound(pack: Path) -> bytes:
    return pack.read_bytes()


@pytest.fixture(scope="module")
def expected(server: Server, sound: bytes) -> list[object]:
    """Answers while everything is well."""
    return [server.answer(prompt) for prompt in PROMPTS]


def rows_of(pack: Path) -> list[tuple[int, int]]:
    """Start and length of every row."""
    opened = Pack.open(pack, allow_absent=True)
    opened.close()
    start, header = data_start(pack), opened.header
    return [(start + i * header.stride, header.stride) for i in range(header.rows)]


class Watch:
    """What the counters of integrity have grown by."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._before = server.metrics()

    def grown(self, name: str, **labels: str) -> float:
        return self._server.total(name, **labels) - total(self._before, name, **labels)

    def nobody_noticed(self) -> None:
        for name in ("io_errors", "verification_failures", "failed_tokens"):
            assert self.grown(f"ziggurat_{name}_total") == 0
        assert self._server.get("/health")[0] == 200


def test_bits_that_flip_on_the_disk(server: Server, pack: Path, sound: bytes, expected: list[object]) -> None:
    """Rows are read again, made anew from the checkpoint, and put right on the disk."""
    watch = Watch(server)
    for number, (start, length) in enumerate(rows_of(pack)):
        flip(pack, start + number * 997 % length, number % 8)
    assert [server.answer(prompt) for prompt in PROMPTS] == expected
    watch.nobody_noticed()
    now = pack.read_bytes()
    mended = sum(now[at : at + n] == sound[at : at + n] for at, n in rows_of(pack))
    assert mended > 0
    assert watch.grown("ziggurat_rebuilt_rows_total", written_back="yes") == mended
    assert watch.grown("ziggurat_rebuilt_rows_total", written_back="no") == 0
    assert watch.grown("ziggurat_quarantined_rows_total") == mended
    assert watch.grown("ziggurat_reread_rows_total") == mended
    assert watch.grown("ziggurat_failed_reads_total", reason="checksum") == 2 * mended
    pack.write_bytes(sound)


def test_bits_that_flip_on_the_way(
    server: Server, faults: Path, pack: Path, sound: bytes, expected: list[object]
) -> None:
    """The disk is sound, and reading again is enough."""
    watch = Watch(server)
    faults.write_text(json.dumps({"rules": [{"kind": "flip", "times": 20}]}), encoding="utf-8")
    try:
        assert [server.answer(prompt) for prompt in PROMPTS] == expected
    finally:
        faults.unlink()
    watch.nobody_noticed()
    assert watch.grown("ziggurat_failed_reads_total", reason="checksum") == 20
    assert watch.grown("ziggurat_reread_rows_total") >= 10
    assert pack.read_bytes() == sound


def test_a_disk_that_fails(
    server: Server, faults: Path, pack: Path, sound: bytes, expected: list[object]
) -> None:
    """With the checkpoint there, rows come from it."""
    watch = Watch(server)
    faults.write_text(json.dumps({"rules": [{"kind": "error"}]}), encoding="utf-8")
    try:
        assert [server.answer(prompt) for prompt in PROMPTS[:2]] == expected[:2]
    finally:
        faults.unlink()
    watch.nobody_noticed()
    failed = watch.grown("ziggurat_failed_reads_total", reason="io")
    assert failed > 0
    assert watch.grown("ziggurat_rebuilt_rows_total") == failed
    assert pack.read_bytes() == sound


def test_a_disk_that_is_full(
    server: Server, mounted: Path | None, pack: Path, sound: bytes, expected: list[object]
) -> None:
    """Rows cannot be written back, heat cannot be saved, the recording ends; requests go on. Then there is room."""
    if mounted is None:
        pytest.skip("needs the right to mount a tmpfs")
    (heat,) = (mounted / "heat").glob("*.safetensors")
    rows = rows_of(pack)
    start = rows[0][0]
    watch = Watch(server)
    punch(pack, start, len(rows) * rows[0][1])
    fill_disk(mounted)
    assert [server.answer(prompt) for prompt in PROMPTS] == expected
    saved = heat.read_bytes()
    recorded = 0
    while recorded <= RECORDED_AT_ONCE:
        _, reply = server.ask(LONG, 1)
        recorded += reply["usage"]["total_tokens"]
    watch.nobody_noticed()
    assert watch.grown("ziggurat_rebuilt_rows_total", written_back="no") > 0
    assert watch.grown("ziggurat_rebuilt_rows_total", written_back="yes") == 0
    assert heat.read_bytes() == saved
    assert not any(pack.read_bytes()[start : start + 4096])
    said = "".join(server.child.lines)
    assert "cannot be written back: No space left on device" in said
    assert f"heat: {heat} cannot be written: No space left on device" in said
    assert "routing is no longer recorded" in said
    assert list((mounted / "recorded").iterdir()) == []

    free_disk(mounted)
    watch = Watch(server)
    assert [server.answer(prompt) for prompt in PROMPTS] == expected
    watch.nobody_noticed()
    mended = watch.grown("ziggurat_rebuilt_rows_total", written_back="yes")
    assert mended > 0
    assert watch.grown("ziggurat_rebuilt_rows_total", written_back="no") == 0
    now = pack.read_bytes()
    assert sum(now[at : at + n] == sound[at : at + n] for at, n in rows) == mended
    assert heat.read_bytes() != saved
