"""Errors of the running service.

All of them are misuse or a broken set-up. A failed read of a row is not among them: that is data
(`ziggurat.residency.passes.RowFailure`), because raising between two collectives would hang the other ranks.
"""

from __future__ import annotations

from ziggurat.residency.errors import ResidencyError


class PolicyError(ResidencyError):
    """An eviction policy was asked about a key it does not hold, or given one it already holds."""


class UnknownPolicyError(ResidencyError):
    """The configuration names an eviction policy that is not registered."""


class SlotError(ResidencyError):
    """A slot or a slot table was used against its rules (published twice, not taken, foreign key)."""


class HostCacheError(ResidencyError):
    """The host cache cannot serve a request: too few places, or every place is held by the asking step."""


class GeometryMismatchError(ResidencyError):
    """Pack, codec, arena, pool and model do not describe the same rows."""


class RoutingError(ResidencyError):
    """A layer was called with routing the model cannot have produced (shape, expert id, layer index)."""


class StepError(ResidencyError):
    """The step protocol was entered twice, after close, or with arguments that contradict each other."""


class MetricsBufferError(ResidencyError):
    """A metrics buffer is too small, or was written by another schema version."""


class UnsupportedDeviceError(ResidencyError):
    """The configuration asks for a pool on a device that has no pool implementation."""
