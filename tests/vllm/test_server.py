"""The served product over HTTP: answers, metrics, and a disk that fails in the middle of serving."""

from __future__ import annotations

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.engines import BATCH, LONG, SINGLE
from support.packfiles import data_start
from support.server import Server, serving, total
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.metric_specs import METRICS

TiersFactory = Callable[..., TiersConfig]


def switch(faults: Path, *rules: dict[str, Any]) -> None:
    """Have these faults from the next batch of reads on."""
    aside = faults.with_suffix(".new")
    aside.write_text(json.dumps({"rules": rules}), encoding="utf-8")
    aside.rename(faults)


@pytest.fixture(scope="module")
def faults(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("faults") / "rules.json"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packs of this server alone, to be damaged."""
    return tmp_path_factory.mktemp("packs-of-the-server")


@pytest.fixture(scope="module")
def server(
    demo_model: Path,
    make_tiers: TiersFactory,
    faults: Path,
    folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Server]:
    # Without an arena every miss is a read, so that a fault meets the next request.
    tiers = make_tiers(
        pool="25%",
        arena="0",
        folder=folder,
        disk={"faults": str(faults), "rebuild": False, "verify": "always"},
    )
    config = tmp_path_factory.mktemp("config") / "tiers.yaml"
    config.write_text(yaml.safe_dump(tiers.model_dump(mode="json")), encoding="utf-8")
    with serving(demo_model, config) as running:
        yield running


def test_answers_and_metrics(server: Server) -> None:
    before = server.metrics()
    replies: list[tuple[int, dict[str, Any]]] = []
    threads = [
        threading.Thread(target=lambda p=prompt: replies.append(server.complete(p, 6))) for prompt in BATCH
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    replies.append(server.complete(LONG, 3))
    assert [status for status, _ in replies] == [200] * 5, replies
    after = server.metrics()
    for spec in METRICS:
        if spec.name == "ziggurat_link_bytes_per_second":
            continue  # there is no link without a GPU
        exported = f"{spec.name}_count" if spec.kind == "histogram" else spec.name
        assert any(name == exported for name, _ in after), f"{spec.name} is not on /metrics"
    for samples in (before, after):
        hits, misses = (
            total(samples, "ziggurat_hit_pairs_total"),
            total(samples, "ziggurat_missed_pairs_total"),
        )
        assert hits + misses == total(samples, "ziggurat_routed_pairs_total")
        rows, moved = (
            total(samples, "ziggurat_fetched_rows_total"),
            total(samples, "ziggurat_fetched_bytes_total"),
        )
        assert moved == rows * total(samples, "ziggurat_row_stride_bytes")
    assert total(after, "ziggurat_routed_pairs_total") > total(before, "ziggurat_routed_pairs_total")


def test_a_failing_read_fails_its_requests_only(server: Server, faults: Path) -> None:
    status, healthy = server.complete(SINGLE, 6)
    assert status == 200
    faults.write_text(json.dumps({"rules": [{"kind": "error"}]}), encoding="utf-8")
    try:
        status, broken = server.complete("class Zebra(Animal):\n    def stripes", 6)
        assert status == 500, broken
        assert "expert" in json.dumps(broken)
        assert "layer" in json.dumps(broken)
        status, stream = server.post(
            "/v1/completions",
            {
                "model": "demo",
                "prompt": "import zlib, wave",
                "max_tokens": 4,
                "stream": True,
                "temperature": 0,
            },
        )
        assert status in (200, 500)
        assert "expert" in stream, stream
    finally:
        faults.unlink()
    errors = total(server.metrics(), "ziggurat_io_errors_total")
    assert errors > 0
    status, again = server.complete(SINGLE, 6)
    assert status == 200
    assert again["choices"][0]["text"] == healthy["choices"][0]["text"]
    # The same prompt as the failed one must be computed anew: its spoiled KV blocks may not come from the prefix cache.
    status, retried = server.complete("class Zebra(Animal):\n    def stripes", 6)
    assert status == 200
    status, fresh = server.complete("class Zebra(Animal):\n    def stripes", 6, cache_salt="computed anew")
    assert status == 200
    assert retried["choices"][0]["text"] == fresh["choices"][0]["text"]
    assert total(server.metrics(), "ziggurat_io_errors_total") == errors


# Every test below leaves disk and pack as they were.


@pytest.fixture(scope="module")
def pack(server: Server, folder: Path) -> Path:
    """The pack that the server reads."""
    (path,) = folder.glob("*tp0of1.safetensors")
    return path


def test_a_lost_row_fails_who_needs_it_and_nobody_else(server: Server, faults: Path) -> None:
    healthy = server.answer(BATCH[1], 1)
    switch(faults, {"kind": "error"})
    try:
        needed = [needed_of_the_first_layer(server, prompt) for prompt in (LONG, BATCH[1])]
        lost = min(needed[0] - needed[1])
        switch(faults, {"kind": "error", "tags": [lost]})
        replies: dict[str, tuple[int, dict[str, Any]]] = {}
        threads = [
            threading.Thread(target=lambda p=prompt: replies.update({p: server.ask(p, 1)}))
            for prompt in (LONG, BATCH[1])
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        faults.unlink()
    status, reply = replies[LONG]
    assert status == 500
    assert f"expert {lost} of layer 0 " in json.dumps(reply)
    status, reply = replies[BATCH[1]]
    assert status == 200, reply
    assert reply["choices"][0] == healthy


def needed_of_the_first_layer(server: Server, prompt: str) -> set[int]:
    """Experts that are not in the pool, by a disk that refuses all of them."""
    status, reply = server.ask(prompt, 1)
    assert status == 500
    return {int(number) for number in re.findall(r"expert (\d+) of layer 0 ", json.dumps(reply))}


def test_a_disk_a_hundred_times_slower(server: Server, faults: Path) -> None:
    """Requests wait; health and metrics answer meanwhile, and all replies have the same bits."""
    expected = [server.answer(prompt) for prompt in BATCH]
    errors = server.total("ziggurat_io_errors_total")
    replies: dict[str, dict[str, Any]] = {}
    ask = lambda prompt: replies.update({prompt: server.answer(prompt)})  # noqa: E731
    switch(faults, {"kind": "delay", "seconds": 0.02})  # a row takes 0.1 to 0.2 ms here
    try:
        threads = [threading.Thread(target=ask, args=(prompt,)) for prompt in BATCH]
        for thread in threads:
            thread.start()
        server.wait_until("ziggurat_fetching_rows", lambda rows: rows > 0)
        assert server.get("/health")[0] == 200
        assert len(replies) < len(BATCH), "the disk was not slow"
        for thread in threads:
            thread.join()
    finally:
        faults.unlink()
    assert [replies[prompt] for prompt in BATCH] == expected
    assert server.total("ziggurat_io_errors_total") == errors


def test_a_client_that_hangs_up_on_a_slow_disk(server: Server, faults: Path) -> None:
    tokens = 400
    expected = server.answer(SINGLE)
    before = server.total("vllm:generation_tokens_total")
    switch(faults, {"kind": "delay", "seconds": 0.02})
    try:
        connection = server.begin(SINGLE, tokens)
        server.wait_until("vllm:num_requests_running", lambda running: running > 0)
        server.wait_until("ziggurat_fetching_rows", lambda rows: rows > 0)
        connection.close()
        server.wait_until("vllm:num_requests_running", lambda running: running == 0)
        made = server.total("vllm:generation_tokens_total") - before
        assert made < tokens, "the request ran to its end"
        assert server.answer(SINGLE) == expected
    finally:
        faults.unlink()


def test_a_pack_that_is_deleted_or_replaced(server: Server, pack: Path) -> None:
    """The open file goes on being read; nothing fails."""
    expected = [server.answer(prompt) for prompt in (*BATCH, LONG)]
    kept = pack.with_name("kept")
    kept.hardlink_to(pack)
    before = server.metrics()
    try:
        pack.unlink()
        assert [server.answer(prompt) for prompt in (*BATCH, LONG)] == expected
        pack.write_bytes(bytes(pack.parent.joinpath("kept").stat().st_size))
        assert [server.answer(prompt) for prompt in (*BATCH, LONG)] == expected
    finally:
        kept.replace(pack)
    after = server.metrics()
    name = "ziggurat_pack_read_bytes_total"
    assert total(after, name) > total(before, name)
    for name in ("ziggurat_failed_reads_total", "ziggurat_io_errors_total"):
        assert total(after, name) == total(before, name)


@pytest.mark.parametrize("what", ["truncated", "overwritten"])
def test_a_pack_that_is_spoiled_in_place(server: Server, pack: Path, what: str) -> None:
    """Requests that need its rows fail, with an expert's name; with the bytes back, answers are as before."""
    expected = server.answer(SINGLE)
    whole = pack.read_bytes()
    before = server.metrics()
    try:
        os.truncate(pack, data_start(pack))
        if what == "overwritten":
            os.truncate(pack, len(whole))  # zeros
        for prompt in BATCH:
            status, reply = server.complete(prompt, 4, cache_salt=what)
            assert status == 500
            assert "expert" in json.dumps(reply)
        assert server.get("/health")[0] == 200
    finally:
        with pack.open("r+b") as file:
            file.write(whole)
    after = server.metrics()
    reason = {"truncated": "io", "overwritten": "checksum"}[what]
    grown = {
        (name, labels): after[name, labels] - before[name, labels]
        for name, labels in after
        if name == "ziggurat_failed_reads_total"
    }
    assert {dict(labels)["reason"] for (_, labels), count in grown.items() if count} == {reason}
    lost = total(after, "ziggurat_io_errors_total") - total(before, "ziggurat_io_errors_total")
    damaged = total(after, "ziggurat_verification_failures_total") - total(
        before, "ziggurat_verification_failures_total"
    )
    assert lost > 0
    assert damaged == (0 if what == "truncated" else lost)
    assert server.answer(SINGLE) == expected
    for name in ("ziggurat_io_errors_total", "ziggurat_failed_reads_total"):
        assert server.total(name) == total(after, name)
