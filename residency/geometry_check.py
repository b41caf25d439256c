"""Whether the parts that a service is opened over speak of the same rows."""

from __future__ import annotations

from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.residency.consensus import Consensus
from ziggurat.residency.geometry import ServiceGeometry
from ziggurat.residency.ports import RowCodec, RowPack, RowPool
from ziggurat.residency.runtime_errors import GeometryMismatchError


def check_geometry(
    geometry: ServiceGeometry, codec: RowCodec, pack: RowPack, pool: RowPool, consensus: Consensus
) -> None:
    """GeometryMismatchError unless all parts speak of the same rows."""
    h = pack.header
    expert = ExpertGeometry(geometry.hidden, geometry.intermediate)
    facts = {
        "layers": (h.layers, geometry.layers),
        "experts": (h.experts, geometry.experts),
        "hidden": (h.hidden, geometry.hidden),
        "intermediate": (h.intermediate, geometry.intermediate * consensus.size),
        "layer_ids": (h.layer_ids, geometry.layer_ids),
        "tensor-parallel rank": (h.tp_rank, consensus.rank),
        "tensor-parallel size": (h.tp_size, consensus.size),
        "codec": (h.codec, codec.name),
        "row_bytes": (h.row_bytes, codec.row_bytes(expert)),
        "stride": (h.stride, pool.stride),
    }
    for name, (packed, wanted) in facts.items():
        if packed != wanted:
            raise GeometryMismatchError(f"the pack has {name} {packed}, this service needs {wanted}")
    if min(geometry.layers, geometry.experts, geometry.top_k) < 1:
        raise GeometryMismatchError(f"a model needs layers, experts and top_k of at least 1, not {geometry}")
