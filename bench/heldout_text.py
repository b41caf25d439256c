"""Windows of held-out text, as the loss of the demo models is defined on them (bench/models/README.md)."""

from __future__ import annotations

import lzma
from collections.abc import Callable, Sequence
from pathlib import Path

WINDOW = 513
"""Tokens of a window: the first is given, the other 512 are predicted."""
DOCUMENT_START = 0
"""The token before each document."""
ALL_WINDOWS = 192


def read_documents(path: Path) -> list[str]:
    """The documents of an xz-compressed UTF-8 file in which NUL separates them."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        return file.read().split("\0")


def token_stream(documents: Sequence[str], encode: Callable[[str], Sequence[int]]) -> list[int]:
    """All documents in one list of tokens, ``DOCUMENT_START`` before each; ``encode`` adds no special tokens."""
    stream: list[int] = []
    for document in documents:
        stream.append(DOCUMENT_START)
        stream.extend(encode(document))
    return stream


def cut_windows(stream: Sequence[int], count: int) -> list[list[int]]:
    """The first ``count`` windows, side by side (window i starts at token 513 i); ValueError if there are fewer."""
    have = len(stream) // WINDOW
    if not 1 <= count <= have:
        raise ValueError(f"the text holds {have} windows of {WINDOW} tokens; asked for {count}")
    return [list(stream[i * WINDOW : (i + 1) * WINDOW]) for i in range(count)]
