"""A real `ziggurat serve` on the loopback interface."""

from __future__ import annotations

import http.client
import json
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.processes import Child, running

START_SECONDS = 300.0
Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    wanted = set(labels.items())
    return sum(value for (found, its), value in samples.items() if found == name and wanted <= its)


class Server:
    """Talks HTTP to one server."""

    def __init__(self, child: Child, port: int) -> None:
        self.child = child
        self.port = port
        self._salts = 0

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

    def ask(self, prompt: str, tokens: int) -> tuple[int, dict[str, Any]]:
        """`complete` that shares nothing with earlier requests, with log-probabilities."""
        self._salts += 1
        return self.complete(prompt, tokens, logprobs=2, cache_salt=f"number {self._salts}")

    def answer(self, prompt: str, tokens: int = 6) -> dict[str, Any]:
        """The reply to `ask`: text and the bits of its log-probabilities."""
        status, reply = self.ask(prompt, tokens)
        assert status == 200, reply
        choice: dict[str, Any] = reply["choices"][0]
        return choice

    def begin(self, prompt: str, tokens: int) -> http.client.HTTPConnection:
        """A greedy streamed completion, whose first piece has not been waited for. Closing it hangs up."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120.0)
        body = {"model": "demo", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True}
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/completions", json.dumps({**body, "ignore_eos": True}), headers)
        return connection

    def metrics(self) -> Samples:
        """Every sample of `/metrics` whose name begins like ours or vLLM's."""
        status, text = self.get("/metrics")
        assert status == 200
        return {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith(("ziggurat_", "vllm:"))
        }

    def total(self, name: str, **labels: str) -> float:
        """A metric now, summed over the series with these labels."""
        return total(self.metrics(), name, **labels)

    def wait_until(self, name: str, holds: Callable[[float], bool]) -> None:
        """Until a metric's total is as wanted."""
        deadline = time.monotonic() + START_SECONDS
        while not holds(value := self.total(name)):
            assert time.monotonic() < deadline, f"{name} stays at {value}:\n{self.child.tail()}"
            time.sleep(0.02)

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
def serving(model: Path, config: Path, *vllm_arguments: str, options: Sequence[str] = ()) -> Iterator[Server]:
    """Starts the command a user would type, waits until it is ready, and ends it. options: of `ziggurat serve`."""
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
        *options,
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
    # Compiling what log-probabilities are ranked with would take most of a test's time.
    with running(command, {**offline_environment(), "TORCHDYNAMO_DISABLE": "1"}) as child:
        server = Server(child, port)
        server.wait_ready()
        yield server
