"""Wrapping a method of vLLM exactly once per process."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

_MARKER = "__ziggurat_wrapped__"


def patch_once(owner: type[Any], name: str, wrap: Callable[[Any], Any]) -> None:
    """Replace ``owner.name`` by ``wrap(original)``; a second call does nothing."""
    original = getattr(owner, name)
    if getattr(original, _MARKER, False):
        return
    wrapped = functools.wraps(original)(wrap(original))
    setattr(wrapped, _MARKER, True)
    setattr(owner, name, wrapped)


def is_patched(owner: type[Any], name: str) -> bool:
    """True if :func:`patch_once` has wrapped ``owner.name``."""
    return bool(getattr(getattr(owner, name), _MARKER, False))
