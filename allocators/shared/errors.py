"""What can go wrong between an engine and the process that keeps its arena."""

from __future__ import annotations

from ziggurat.allocators.errors import AllocatorError

__all__ = ["ArenaRefusedError", "ArenaUnreachableError", "ProtocolError", "SharedArenaError"]


class SharedArenaError(AllocatorError):
    """No shared arena, for a reason that the text gives; an engine goes on with an arena of its own."""


class ArenaUnreachableError(SharedArenaError):
    """Nobody answers on the socket, or somebody who is not this user."""


class ArenaRefusedError(SharedArenaError):
    """The arena process answered, and said no."""


class ProtocolError(SharedArenaError):
    """A message that is truncated, malformed, or not what was expected at this point."""
