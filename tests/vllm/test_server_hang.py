"""A server whose disk hangs: who needs a row gets an error in time, the server lives, and it can be ended."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
import yaml

from support.engines import BATCH, SINGLE
from support.hanging_disk import HangingDisk, hanging_disk
from support.server import Server, serving
from ziggurat.integration.packing import ensure_packs
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.checkpoint import Checkpoint

TiersFactory = Callable[..., TiersConfig]
LIMIT = 2.0


@pytest.fixture(scope="module", params=["io_uring", "pread"])
def reader(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture(scope="module")
def disk(
    demo_model: Path, make_tiers: TiersFactory, reader: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[HangingDisk]:
    packs = tmp_path_factory.mktemp("packs-behind-the-disk")
    with Checkpoint.open(demo_model) as checkpoint:
        ensure_packs(checkpoint, make_tiers(folder=packs), 1)
    for extra in packs.glob("*.lock"):
        extra.unlink()
    with hanging_disk(packs, tmp_path_factory.mktemp("disk")) as made:
        if made is None:
            pytest.skip("needs FUSE and the right to mount")
        yield made


@pytest.fixture(scope="module")
def server(
    demo_model: Path,
    make_tiers: TiersFactory,
    disk: HangingDisk,
    reader: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    # Few places and small pools: nearly every request reads.
    tiers = make_tiers(
        pool="25%",
        arena="0",
        folder=disk.folder,
        disk={"reader": reader, "read_timeout": LIMIT, "verify": "always"},
    )
    config = tmp_path_factory.mktemp("config") / "tiers.yaml"
    config.write_text(yaml.safe_dump(tiers.model_dump(mode="json")), encoding="utf-8")
    try:
        with serving(demo_model, config) as running:
            yield running
            disk.answer()
    finally:
        disk.answer()  # or no process that waits could be ended


def test_a_disk_that_hangs_and_comes_back(server: Server, disk: HangingDisk) -> None:
    prompts = (SINGLE, *BATCH)
    expected = [server.answer(prompt) for prompt in prompts]
    disk.hang()
    begun = time.monotonic()
    status, reply = server.ask(BATCH[1], 6)
    first = time.monotonic() - begun
    assert status == 500, reply
    said = json.dumps(reply)
    assert "expert" in said
    assert "layer" in said
    assert "not returned" in said
    assert server.get("/health")[0] == 200
    assert server.total("ziggurat_failed_reads_total", reason="timeout") > 0
    assert server.total("ziggurat_failed_reads_total", reason="io") == 0
    assert server.total("ziggurat_rebuilt_rows_total") == 0
    assert server.total("ziggurat_stuck_rows") > 0
    assert disk.held > 0
    # Those that follow do not wait: nothing is begun on such a disk.
    for _ in range(3):
        server.ask(SINGLE, 6)
    begun = time.monotonic()
    assert server.ask(BATCH[2], 6)[0] == 500
    assert time.monotonic() - begun < max(LIMIT, first)
    disk.answer()
    deadline = time.monotonic() + 60
    while disk.held:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert [server.answer(prompt) for prompt in prompts] == expected
    assert server.total("ziggurat_stuck_rows") == 0
    assert server.get("/health")[0] == 200


def test_a_server_can_be_ended_while_its_disk_is_gone(server: Server, disk: HangingDisk) -> None:
    """As with a file server that is gone: who waits for it can be killed."""
    server.answer(SINGLE)
    family = psutil.Process(server.child.process.pid).children(recursive=True)
    disk.freeze()
    connection = server.begin(BATCH[0], 200)
    time.sleep(LIMIT / 2)
    begun = time.monotonic()
    server.child.process.send_signal(signal.SIGTERM)
    time.sleep(1)
    connection.close()  # a server waits for its clients, whatever its disk does
    server.child.process.wait(60)
    _, alive = psutil.wait_procs(family, 60)
    took = time.monotonic() - begun
    assert not alive, [(one.pid, one.status(), one.name()) for one in alive]
    assert took < 45, server.child.tail()
