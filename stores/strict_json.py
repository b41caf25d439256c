"""JSON that may be damaged or hostile: one object, whose memory follows the bytes it really has."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

# A tensor's entry holds one object and two lists in at least 50 bytes. A text that packs them closer is made to fill
# memory: an empty list takes 2 bytes in a file and 56 in memory.
_BYTES_PER_CONTAINER = 8
_STRING_OR_OPENING = re.compile(rb'"(?:[^"\\]++|\\.)*+"|[\[{]', re.DOTALL)


class JsonError(Exception):
    """What is wrong with a text. No ValueError, which is what the JSON library raises."""


def parse_object(raw: bytes, what: str) -> dict[str, Any]:
    """The object that `raw` is, in UTF-8, without a key that stands twice. what: names the text in errors.

    Takes at most forty times the memory of `raw`. Raises JsonError.
    """
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as e:
        raise JsonError(f"the {what} is not UTF-8 (byte {e.start})") from e
    _check_density(raw, what)
    if not text.startswith("{"):
        raise JsonError(f"the {what} starts with {text[:1]!r} instead of '{{'")

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) < len(pairs):
            doubled = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise JsonError(f"{shortened(doubled)} stands twice in the {what}")
        return out

    try:
        entries = json.loads(text, object_pairs_hook=unique)
    except (ValueError, RecursionError) as e:
        raise JsonError(f"the {what} is not JSON: {e}") from e
    assert isinstance(entries, dict)  # it starts with a brace
    return entries


def is_unicode(text: str) -> bool:
    """JSON can name half a surrogate pair, which no Unicode text holds."""
    return text.isascii() or not any("\ud800" <= char <= "\udfff" for char in text)


def shortened(value: Any) -> str:
    """A value for an error message, at most 200 characters."""
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."


def _check_density(raw: bytes, what: str) -> None:
    limit = 16 + len(raw) // _BYTES_PER_CONTAINER
    if raw.count(b"{") + raw.count(b"[") <= limit:
        return
    containers = sum(raw[found.start()] != ord('"') for found in _STRING_OR_OPENING.finditer(raw))
    if containers > limit:
        raise JsonError(f"{containers} objects and lists in a {what} of {len(raw)} bytes")
