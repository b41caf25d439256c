"""Traces of other shapes. Each importer says what it recognises and what is lost.

topk_ids [sequence, position, layer, k]     our own format
ids      [sequence, position, layer, k]     the same under another name; `layers`, `num_experts` beside
ids      [token, k]                         one layer; tokens in the order they were computed, of unknown sequences
counts   [example, layer, expert]           tokens per expert of whole examples: no order, so no trace. Refused
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ziggurat.residency.simulation.errors import TraceError
from ziggurat.residency.simulation.trace import Trace, from_members, make_trace, read_members


def import_trace(path: Path) -> Trace:
    """Read a trace of any known shape. TraceError says what the file holds instead."""
    members = read_members(path)
    if "topk_ids" in members:
        return from_members(members, path.name)
    if "ids" in members:
        return _from_ids(members, path.name)
    requests = {key: array for key, array in members.items() if key.startswith("routed_experts")}
    if requests:
        return _from_requests(requests, path.name)
    if "counts" in members:
        raise TraceError(
            f"{path.name} holds how many tokens of an example went to each expert, but not in what order: no policy "
            "can be simulated on it"
        )
    raise TraceError(
        f"{path.name} holds {', '.join(sorted(members)) or 'nothing'}, but neither topk_ids nor ids"
    )


def _from_ids(members: Mapping[str, npt.NDArray[Any]], name: str) -> Trace:
    ids = members["ids"]
    metadata: dict[str, Any] = {"imported": name}
    if ids.ndim == 2:
        ids = ids[None, :, None, :]
        metadata["order"] = "tokens of unknown sequences, as they were computed"
    layers = members.get("layers")
    if layers is not None and layers.dtype.kind in "iu" and layers.ndim == 1:
        metadata["layers"] = layers.tolist()
    return make_trace(ids, experts=_number(members, "num_experts", name), metadata=metadata, name=name)


def _from_requests(requests: Mapping[str, npt.NDArray[Any]], name: str) -> Trace:
    """Requests in the order of their names, numbers by size."""
    ranked = sorted(requests, key=lambda key: (len(key), key))
    arrays = [requests[key] for key in ranked]
    for key, array in zip(ranked, arrays, strict=True):
        if array.dtype.kind not in "iu" or array.ndim != 3 or array.shape[1:] != arrays[0].shape[1:]:
            raise TraceError(
                f"{name}: {key} is {array.dtype} {list(array.shape)}, expected integers [token, layer, k] with the "
                f"layers and k of {ranked[0]}"
            )
    lengths = [len(array) for array in arrays]
    ids = np.zeros((len(arrays), max(lengths), *arrays[0].shape[1:]), dtype=np.int64)
    for sequence, array in enumerate(arrays):
        ids[sequence, : len(array)] = array
    return make_trace(ids, lengths=lengths, metadata={"imported": name}, name=name)


def _number(members: Mapping[str, npt.NDArray[Any]], key: str, name: str) -> int | None:
    if key not in members:
        return None
    value = members[key]
    if value.dtype.kind not in "iu" or value.size != 1:
        raise TraceError(f"{name}: {key} is {value.dtype} {list(value.shape)}, not one number")
    return int(np.asarray(value).reshape(-1)[0])
