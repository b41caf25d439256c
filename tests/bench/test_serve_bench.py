"""The serving benchmark's command lines, its load, and what it makes of a round's numbers."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from bench import serve
from bench.completions import CompletionError
from bench.serve_setups import SETUPS, commands
from bench.serving_load import Load, prompts_from, run_load
from ziggurat.residency.config import load_config
from ziggurat.residency.sizes import Size

EXPERT_BYTES = 2 * 3 * 6 * 32 * 256 * 128


class Handler(BaseHTTPRequestHandler):
    """Answers as many tokens as were asked for, or one too few for a prompt that says so."""

    seen: list[dict[str, object]]

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        if body["prompt"] == "refuse":
            self.send_error(503, "busy")
            return
        count = body["max_tokens"] - (body["prompt"] == "short")
        answer = json.dumps({"choices": [{"token_ids": list(range(count))}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Tests print nothing."""


@pytest.fixture
def port() -> Iterator[int]:
    Handler.seen = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server.server_address[1]
    server.shutdown()
    thread.join()
    server.server_close()


def test_a_load_sends_its_prompts_and_counts_tokens(port: int) -> None:
    tokens = run_load(port, Load(3, 5), ["a", "b", "c", "d"])
    assert tokens == [[0, 1, 2, 3, 4]] * 3
    assert sorted(str(body["prompt"]) for body in Handler.seen) == ["a", "b", "c"]
    assert all(body["ignore_eos"] is True and body["temperature"] == 0.0 for body in Handler.seen)


@pytest.mark.parametrize(("prompt", "message"), [("short", "4 tokens came, not 5"), ("refuse", "503")])
def test_a_load_that_is_not_served_whole_fails(port: int, prompt: str, message: str) -> None:
    with pytest.raises(CompletionError, match=f"request 1: .*{message}"):
        run_load(port, Load(2, 5), ["a", prompt])


def test_prompts_are_different_documents() -> None:
    prompts = prompts_from(serve.HELDOUT, 32)
    assert len(set(prompts)) == 32
    with pytest.raises(ValueError, match="documents"):
        prompts_from(serve.HELDOUT, 10**6)


@pytest.mark.parametrize("name", SETUPS)
def test_commands(name: str, tmp_path: Path) -> None:
    command = commands(SETUPS[name], tmp_path / "demo", tmp_path, 1234, EXPERT_BYTES, 6)
    assert command[command.index("--port") + 1] == "1234"
    assert "--enforce-eager" not in command
    if SETUPS[name].coverage is None:
        assert command[1:4] == ["-m", "vllm.entrypoints.cli.main", "serve"]
        return
    config = load_config(tmp_path / f"{name}.yaml")
    mode, percent = name.split("-")[:2]
    assert config.tiers.device.size == Size.parse(f"{percent}%")
    assert config.miss.mode == {"tiers": "auto"}.get(mode, mode)
    assert config.codecs.base == ("w2" if name.endswith("-w2") else "bf16")
    assert config.tiers.disk.path.is_dir()


def test_offloading_peers_keep_at_least_a_quarter_on_the_gpu() -> None:
    for name in ("inline-25", "uva", "prefetch"):
        assert SETUPS[name].resident_bytes(EXPERT_BYTES, 6) >= EXPERT_BYTES // 4
    for name in ("replay-50", "uva-50", "prefetch-50"):
        assert SETUPS[name].resident_bytes(EXPERT_BYTES, 6) == EXPERT_BYTES // 2
    assert SETUPS["inline-50-w2"].resident_bytes(EXPERT_BYTES, 6) == round(EXPERT_BYTES / 2 * 2.25 / 16)
    assert SETUPS["prefetch-50"].arguments(EXPERT_BYTES, 6)[:4][-1] == "4"
    uva = SETUPS["uva"].arguments(EXPERT_BYTES, 6)
    assert float(uva[1]) * 2**30 == pytest.approx(0.75 * EXPERT_BYTES, rel=1e-3)
    assert SETUPS["prefetch"].arguments(EXPERT_BYTES, 6)[:4] == [
        "--offload-group-size",
        "6",
        "--offload-num-in-group",
        "5",
    ]
    assert SETUPS["stock"].resident_bytes(EXPERT_BYTES, 6) == EXPERT_BYTES


def test_a_ratio_is_the_median_of_rounds() -> None:
    assert serve._ratios({"1": [50.0, 90.0, 80.0]}, {"1": [100.0, 100.0, 100.0]}) == {"1": 0.8}
    assert serve._ratios({"1": []}, {"1": [1.0]}) == {}


def test_groups_of_servers_are_up_together() -> None:
    assert serve.groups(["a", "b", "c"], 2) == [["a", "b"], ["c"]]
    assert serve.groups(["a", "b", "c"], 1) == [["a"], ["b"], ["c"]]


def result_of(measured: dict[str, tuple[list[float], list[int]]], tmp_path: Path) -> dict[str, Any]:
    """What the benchmark makes of tokens a second and generated tokens, by server."""
    bench = object.__new__(serve.Bench)
    bench.measured = {name: {"tokens_per_s": {"1": speeds}} for name, (speeds, _) in measured.items()}
    bench.failures, bench.skipped = {}, []
    bench._tokens = {name: tokens for name, (_, tokens) in measured.items()}
    bench._model, bench._loads, bench._rounds = tmp_path, (Load(1, 4),), 2
    bench._expert_bytes, bench._layers = EXPERT_BYTES, 6
    return bench.result()


def test_inline_is_compared_with_replay_of_the_same_pool(tmp_path: Path) -> None:
    found = result_of(
        {
            "stock": ([100.0, 100.0], [1]),
            "inline-25": ([60.0, 66.0], [2]),
            "replay-25": ([30.0, 33.0], [2]),
            "inline-25-w2": ([90.0, 90.0], [3]),
        },
        tmp_path,
    )
    servers = found["servers"]
    assert servers["inline-25"]["ratio_to_replay"] == {"1": 2.0}
    assert servers["inline-25"]["ratio_to_stock"] == {"1": 0.63}
    assert "ratio_to_replay" not in servers["inline-25-w2"]
    assert found["tiers_gave_the_same_tokens"] is True


def test_tokens_are_compared_among_servers_with_the_same_rows(tmp_path: Path) -> None:
    speeds = [1.0]
    alone = {"tiers-100": (speeds, [1]), "tiers-100-w2": (speeds, [2]), "stock": (speeds, [3])}
    assert result_of(alone, tmp_path)["tiers_gave_the_same_tokens"] is None
    wrong = {**alone, "inline-50-w2": (speeds, [1])}
    assert result_of(wrong, tmp_path)["tiers_gave_the_same_tokens"] is False
