"""What traces and simulations refuse."""

from __future__ import annotations

from ziggurat.residency.errors import ResidencyError


class TraceError(ResidencyError):
    """A file that is no trace, or holds what no model can have routed; or a trace that cannot be written."""


class SimulationError(ResidencyError):
    """A simulation that cannot be run: an unknown policy, a pool too small for a step, an empty trace."""
