"""Layers without slots: whose rows kernels read in place, from an arena that is mapped into the device's memory.

Every row of such a layer has a place of its own in the arena for the life of the service. To the kernels the arena is
a pool, and the places are slots, so that the layer is launched like any other, captured in graphs, and never misses.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from ziggurat.residency.errors import ConfigError
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.host_cache import HostCache
from ziggurat.residency.inline.choice import MappedArena
from ziggurat.residency.passes import BoolArray
from ziggurat.residency.ports import LayerKernels
from ziggurat.residency.runtime_errors import UnsupportedDeviceError


def direct_indices(wanted: Sequence[int], layer_ids: Sequence[int]) -> tuple[int, ...]:
    """Indices of the layers that the configuration names by the model's own numbers, ascending.

    ConfigError for a number that is no MoE layer.
    """
    unknown = [one for one in wanted if one not in layer_ids]
    if unknown:
        raise ConfigError(
            f"tiers.device.direct_layers: layer {unknown[0]} has no routed experts; the layers that do are "
            f"{_ranges(layer_ids)}"
        )
    return tuple(sorted(layer_ids.index(one) for one in wanted))


def _ranges(numbers: Sequence[int]) -> str:
    """Ascending numbers for people: 3..45, 47."""
    spans: list[list[int]] = []
    for one in sorted(numbers):
        if spans and one == spans[-1][-1] + 1:
            spans[-1] = [spans[-1][0], one]
        else:
            spans.append([one])
    return ", ".join(str(span[0]) if len(span) == 1 else f"{span[0]}..{span[1]}" for span in spans)


def _readable(kernels: LayerKernels | None, arena: MappedArena | None) -> torch.Tensor:
    """The arena as `kernels` read it. UnsupportedDeviceError if they cannot."""
    if kernels is None:
        raise UnsupportedDeviceError(
            "tiers.device.direct_layers: layers that a CPU computes read host memory anyway; take it out"
        )
    if arena is None or arena.view is None:
        reason = "nobody offered the arena to the device" if arena is None else arena.reason
        raise UnsupportedDeviceError(
            f"tiers.device.direct_layers: kernels cannot read the arena in place: {reason}; set tiers.host.size and "
            "tiers.host.on_limit so that it is page-locked, or take the layers out"
        )
    return arena.view


class DirectLayers:
    """indices: of the layers. arena: uint8 [places, stride] as the device sees it.

    places: row key -> place, for every row of these layers; they never change.
    """

    def __init__(
        self,
        geometry: ServiceGeometry,
        indices: Sequence[int],
        arena: torch.Tensor,
        places: Mapping[int, int],
        device: torch.device,
    ) -> None:
        self.arena = arena
        self.keys = frozenset(places)
        #: bool [L, 1], to be combined with slot tables
        self.mask: BoolArray = np.zeros((geometry.layers, 1), dtype=np.bool_)
        self.mask[list(indices)] = True
        found = [
            [places[geometry.key(layer, expert)] for expert in range(geometry.experts)] for layer in indices
        ]
        with torch.inference_mode(False):
            tables = torch.tensor(found, dtype=torch.int32, device=device)
        self._slots = dict(zip(indices, tables.unbind(0), strict=True))

    def slots_of(self, layer: int) -> torch.Tensor | None:
        """int32 [E]: the places of a layer, or None if it is not direct. The same memory at every call."""
        return self._slots.get(layer)


def open_direct(
    wanted: Sequence[int],
    geometry: ServiceGeometry,
    kernels: LayerKernels | None,
    arena: MappedArena | None,
    cache: HostCache,
    device: torch.device,
) -> DirectLayers | None:
    """Read the rows of the layers `wanted`, by the model's own numbers, into fixed places of `cache`; None for none.

    ConfigError for a number that is no MoE layer, UnsupportedDeviceError if `kernels` cannot read the arena,
    HostCacheError if it has too few places or a row cannot be read.
    """
    indices = direct_indices(wanted, geometry.layer_ids)
    if not indices:
        return None
    view = _readable(kernels, arena)
    keys = [geometry.key(layer, expert) for layer in indices for expert in range(geometry.experts)]
    return DirectLayers(geometry, indices, view, cache.fix(keys), device)
