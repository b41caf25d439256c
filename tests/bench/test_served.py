"""The demo's server process: ready, failed, and ended with everything it started."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

from bench.served import Server, ServerError, free_port

SERVING = """
import http.server, signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN) if "deaf" in sys.argv else None
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
print("child", child.pid, flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def start(code: str, tmp_path: Path, *arguments: str) -> Server:
    port = free_port()
    return Server([sys.executable, "-c", code, str(port), *arguments], os.environ, port, tmp_path / "log")


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("manner", ["polite", "deaf"])
def test_the_whole_group_ends(tmp_path: Path, manner: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.served._PATIENCE_SECONDS", 1.0)
    with start(SERVING, tmp_path, manner) as server:
        assert server.wait_ready(60, lambda waited: None) > 0
        child = int(server.tail().split("child ")[1].split()[0])
        assert alive(child)
    assert not alive(child)
    server.stop()


def test_an_early_end_shows_the_log(tmp_path: Path) -> None:
    with (
        start("print('pool below the floor'); raise SystemExit(3)", tmp_path) as server,
        pytest.raises(ServerError, match=r"(?s)status 3 before it was ready.*pool below the floor"),
    ):
        server.wait_ready(60, lambda waited: None)


def test_waiting_is_bounded(tmp_path: Path) -> None:
    told: list[float] = []
    with (
        start("import signal; signal.pause()", tmp_path) as server,
        pytest.raises(ServerError, match="not ready within 0 s"),
    ):
        server.wait_ready(0.3, told.append)
    assert told
