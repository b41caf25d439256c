"""The demo's client against a server that speaks the same protocol."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from bench.completions import CompletionError, Prompt, call, complete_all, events

PROMPTS = [Prompt("a", "one", 3), Prompt("b", "two", 2)]
IDS = {"a": "id-a", "b": "id-b"}


class FakeEngine(ThreadingHTTPServer):
    """Answers completions only once it is resumed; remembers what came in which order."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[str] = []
        self.running = threading.Event()
        self.cut = ""  # request id whose stream ends early
        self.fail = ""  # request id that is answered with an error event
        self.short = ""  # request id that gets a token less than it asked for
        self.refuse = ""  # request id that is answered with status 500


class Handler(BaseHTTPRequestHandler):
    server: FakeEngine

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._reply(200, "{}")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path != "/v1/completions":
            self.server.seen.append(self.path)
            if self.path == "/resume":
                self.server.running.set()
            self._reply(200, "{}")
            return
        name = self.headers["X-Request-Id"]
        self.server.seen.append(name)
        if name == self.server.refuse:
            self._reply(500, "no such expert")
            return
        self._stream(name, json.loads(body))

    def _stream(self, name: str, asked: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        assert self.server.running.wait(30)
        for number in range(asked["max_tokens"] - (name == self.server.short)):
            self._event({"choices": [{"text": f"{name}{number} ", "token_ids": [number]}]})
        if name == self.server.fail:
            self._event({"error": {"message": "expert 3 of layer 5 is unreadable"}})
        self._event({"choices": [], "usage": {"prompt_tokens": 7}})
        if name != self.server.cut:
            self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, content: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(content)}\n\n".encode())

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())


@pytest.fixture
def engine() -> Iterator[FakeEngine]:
    server = FakeEngine()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.running.set()
        server.shutdown()
        server.server_close()


def run(engine: FakeEngine) -> tuple[list[Any], dict[str, str]]:
    heard: dict[str, str] = {"a": "", "b": ""}

    def listen(tag: str, text: str) -> None:
        heard[tag] += text

    return complete_all(engine.server_address[1], PROMPTS, IDS, listen), heard


def test_requests_wait_until_all_have_arrived(engine: FakeEngine) -> None:
    done, heard = run(engine)
    assert engine.seen == ["/pause?mode=keep", "id-a", "id-b", "/resume"]
    assert [completion.tokens for completion in done] == [[0, 1, 2], [0, 1]]
    assert [completion.text for completion in done] == ["id-a0 id-a1 id-a2 ", "id-b0 id-b1 "]
    assert heard == {"a": done[0].text, "b": done[1].text}
    assert [completion.processed_tokens for completion in done] == [7 + 3 - 1, 7 + 2 - 1]


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("cut", "request b: the stream ended early"),
        ("fail", "request b: expert 3 of layer 5 is unreadable"),
        ("refuse", "request b: status 500: no such expert"),
    ],
)
def test_a_failed_request_is_named(engine: FakeEngine, what: str, message: str) -> None:
    setattr(engine, what, "id-b")
    with pytest.raises(CompletionError, match=message):
        run(engine)
    assert engine.seen[-1] == "/resume"  # nobody is left waiting


def test_too_few_tokens_are_noticed(engine: FakeEngine) -> None:
    engine.short = "id-b"
    with pytest.raises(CompletionError, match="request b: 1 tokens came, 2 were asked for"):
        run(engine)


def test_nobody_listening_is_one_line() -> None:
    with pytest.raises(CompletionError, match="GET /metrics: "):
        call(1, "GET", "/metrics")


def test_events_skip_comments_and_stop_at_done() -> None:
    lines = [b": keep-alive\n", b"\n", b'data: {"x": 1}\r\n', b"data: [DONE]\n", b'data: {"x": 2}\n']
    assert list(events(iter(lines))) == [{"x": 1}]
    with pytest.raises(CompletionError, match="ended early"):
        list(events(iter(lines[:3])))
