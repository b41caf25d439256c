"""Collecting everything that is wrong with a checkpoint into one readable error."""

from __future__ import annotations

from pathlib import Path

from ziggurat.stores.errors import CheckpointError

_SHOWN = 3


class Problems:
    """Faults by kind, in order of first appearance; the error shows each kind's count and first few tensors."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._found: dict[str, list[tuple[str, str]]] = {}

    def add(self, kind: str, tensor: str, detail: str = "") -> None:
        self._found.setdefault(kind, []).append((tensor, detail))

    def raise_if_any(self) -> None:
        """Raises CheckpointError if anything was added."""
        if not self._found:
            return
        lines = []
        for kind, found in self._found.items():
            shown = ", ".join(
                tensor + (f" ({detail})" if detail else "") for tensor, detail in found[:_SHOWN]
            )
            more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
            plural = "tensor" if len(found) == 1 else "tensors"
            lines.append(f"{len(found)} expert {plural} {kind}: {shown}{more}")
        tensors = [tensor for found in self._found.values() for tensor, _ in found]
        raise CheckpointError(f"{self._folder}: {'; '.join(lines)}", tensors)
