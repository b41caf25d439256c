"""Loads a completions server: several greedy requests at once, answered in one piece each."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.completions import TIMEOUT_SECONDS, CompletionError
from bench.heldout_text import read_documents
from bench.served import HOST

PROMPT_CHARACTERS = 160


@dataclass(frozen=True, slots=True)
class Load:
    """streams: requests at once. tokens: to generate for each, always all of them."""

    streams: int
    tokens: int


def prompts_from(path: Path, count: int) -> list[str]:
    """The beginnings of `count` different documents of a held-out text; ValueError if it has fewer."""
    found = [text[:PROMPT_CHARACTERS] for text in read_documents(path) if len(text) >= PROMPT_CHARACTERS]
    if len(found) < count:
        raise ValueError(f"{path.name} has {len(found)} documents that are long enough, not {count}")
    return found[:count]


def run_load(port: int, load: Load, prompts: Sequence[str]) -> list[list[int]]:
    """Send the first `load.streams` prompts at once; the generated ids of each. CompletionError if one failed."""
    results: list[list[int] | Exception] = [CompletionError("no answer")] * load.streams

    def send(number: int) -> None:
        try:
            results[number] = _complete(port, prompts[number], load.tokens)
        except (CompletionError, OSError, ValueError, http.client.HTTPException) as error:
            results[number] = error

    threads = [threading.Thread(target=send, args=(number,), daemon=True) for number in range(load.streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT_SECONDS * 2)
    tokens = []
    for number, result in enumerate(results):
        if isinstance(result, Exception):
            raise CompletionError(f"request {number}: {result or type(result).__name__}")
        if len(result) != load.tokens:
            raise CompletionError(f"request {number}: {len(result)} tokens came, not {load.tokens}")
        tokens.append(result)
    return tokens


def _complete(port: int, prompt: str, tokens: int) -> list[int]:
    body = {
        "model": "demo",
        "prompt": prompt,
        "max_tokens": tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    connection = http.client.HTTPConnection(HOST, port, timeout=TIMEOUT_SECONDS)
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read().decode("utf-8", errors="replace")
    finally:
        connection.close()
    if response.status != 200:
        raise CompletionError(f"status {response.status}: {text[:500]}")
    return [int(token) for token in json.loads(text)["choices"][0]["token_ids"]]
