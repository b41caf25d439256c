"""Streamed completions from an OpenAI-compatible server, several at once, with the standard library alone."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.served import HOST

TIMEOUT_SECONDS = 120.0
Listener = Callable[[str, str], None]


class CompletionError(Exception):
    """A request failed, or its stream ended early."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """tag: names the request in texts, logs and captures. tokens: how many to generate, always all of them."""

    tag: str
    text: str
    tokens: int


@dataclass(slots=True)
class Completion:
    """tokens: generated ids. prompt_tokens: length of the prompt as the server counted it."""

    prompt: Prompt
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    prompt_tokens: int = 0
    error: str | None = None

    @property
    def processed_tokens(self) -> int:
        """Tokens the model computed: the last generated one is never fed back."""
        return self.prompt_tokens + len(self.tokens) - 1


def complete_all(
    port: int, prompts: Sequence[Prompt], request_ids: Mapping[str, str], listen: Listener
) -> list[Completion]:
    """Send all prompts, then let the engine start on them together; wait for all; CompletionError if one failed.

    The scheduler is paused while the requests arrive, one after the other, so that the batches of two runs are made
    up alike. It needs vLLM's development endpoints. request_ids: tag -> X-Request-Id. listen: called with
    (tag, new text) from several threads, one at a time.
    """
    lock = threading.Lock()
    done = [Completion(prompt) for prompt in prompts]
    threads = []
    call(port, "POST", "/pause?mode=keep")
    try:
        for completion in done:
            connection, response = _send(port, completion.prompt, request_ids[completion.prompt.tag])
            thread = threading.Thread(
                target=_read, args=(connection, response, completion, listen, lock), daemon=True
            )
            thread.start()
            threads.append(thread)
            # A round trip to the engine goes through the same queue behind the request.
            call(port, "GET", "/is_paused")
    finally:
        call(port, "POST", "/resume")
    for thread in threads:
        thread.join(TIMEOUT_SECONDS * 2)
    for completion, thread in zip(done, threads, strict=True):
        if thread.is_alive() or completion.error is not None:
            raise CompletionError(f"request {completion.prompt.tag}: {completion.error or 'timed out'}")
    return done


def call(port: int, method: str, path: str) -> str:
    """The body of a small request's answer; CompletionError unless the status is 200."""
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request(method, path)
        response = connection.getresponse()
        body = response.read().decode("utf-8", errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise CompletionError(f"{method} {path}: {error or type(error).__name__}") from error
    finally:
        connection.close()
    if response.status != 200:
        raise CompletionError(f"{method} {path}: status {response.status}: {body[:500]}")
    return body


def _send(
    port: int, prompt: Prompt, request_id: str
) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
    body = {
        "model": "demo",
        "prompt": prompt.text,
        "max_tokens": prompt.tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), headers)
        response = connection.getresponse()
    except (OSError, http.client.HTTPException) as error:
        connection.close()
        raise CompletionError(f"request {prompt.tag}: {error or type(error).__name__}") from error
    if response.status != 200:
        text = response.read().decode("utf-8", errors="replace")
        connection.close()
        raise CompletionError(f"request {prompt.tag}: status {response.status}: {text[:500]}")
    return connection, response


def _read(
    connection: http.client.HTTPConnection,
    response: http.client.HTTPResponse,
    completion: Completion,
    listen: Listener,
    lock: threading.Lock,
) -> None:
    try:
        for event in events(iter(response.readline, b"")):
            _take(event, completion, listen, lock)
    except (OSError, http.client.HTTPException, CompletionError, ValueError) as error:
        completion.error = str(error) or type(error).__name__
    else:
        if len(completion.tokens) != completion.prompt.tokens:
            completion.error = (
                f"{len(completion.tokens)} tokens came, {completion.prompt.tokens} were asked for"
            )
    finally:
        connection.close()


def events(lines: Iterator[bytes]) -> Iterator[dict[str, Any]]:
    """JSON objects of a server-sent event stream; CompletionError if it ends without ``[DONE]``."""
    for line in lines:
        name, _, payload = line.decode("utf-8").strip().partition(":")
        if name != "data":
            continue
        if payload.strip() == "[DONE]":
            return
        yield json.loads(payload)
    raise CompletionError("the stream ended early")


def _take(event: dict[str, Any], completion: Completion, listen: Listener, lock: threading.Lock) -> None:
    if "error" in event:
        raise CompletionError(str(event["error"].get("message", event["error"])))
    if event.get("usage"):
        completion.prompt_tokens = int(event["usage"]["prompt_tokens"])
    for choice in event.get("choices", ()):
        completion.tokens += choice.get("token_ids") or []
        completion.text += choice["text"]
        with lock:
            listen(completion.prompt.tag, choice["text"])
