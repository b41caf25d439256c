"""A real `ziggurat serve` on the loopback interface."""

from __future__ import annotations

import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.processes import Child, running

START_SECONDS = 300.0


class Server:
    """Talks HTTP to one server."""

    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.port = port

    def get(self, path: str, timeout: float = 10.0) -> tuple[int, str]:
        return self._send(urllib.request.Request(f"http://127.0.0.1:{self.port}{path}"), timeout)

    def post(self, path: str, body: dict[str, Any], timeout: float = 120.0) -> tuple[int, str]:
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}{path}",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        return self._send(request, timeout)

    def complete(self, prompt: str, tokens: int = 8, **more: Any) -> tuple[int, dict[str, Any]]:
        """A greedy completion: status and parsed reply."""
        body = {
            "model": "demo",
            "prompt": prompt,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }
        status, text = self.post("/v1/completions", body)
        reply: dict[str, Any] = json.loads(text)
        return status, reply

    def _send(self, request: urllib.request.Request, timeout: float) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(request, timeout=timeout) as reply:
                return reply.status, reply.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def wait_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if self.child.process.poll() is not None:
                raise AssertionError("the server ended:\n" + self.child.tail())
            try:
                if self.get("/health", 2.0)[0] == 200:
                    return
            except OSError:
                time.sleep(0.25)
        raise AssertionError("the server was not ready in time:\n" + self.child.tail())


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextmanager
def serving(model: Path, config: Path, *vllm_arguments: str) -> Iterator[Server]:
    """Starts the command a user would type, waits until it is ready, and ends it."""
    from ziggurat.integration.determinism.environment import offline_environment

    port = free_port()
    command = [
        sys.executable,
        "-m",
        "ziggurat.integration.cli.main",
        "serve",
        str(model),
        "-c",
        str(config),
        "--",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "demo", "--enforce-eager"]
    command += [
        "--max-model-len",
        "1024",
        "--max-num-batched-tokens",
        "256",
        "--max-num-seqs",
        "8",
        *vllm_arguments,
    ]
    with running(command, offline_environment()) as child:
        server = Server(child, port)
        server.wait_ready()
        yield server
