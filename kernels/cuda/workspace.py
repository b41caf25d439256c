"""What the kernels of a layer keep between them: numbers that a plan can say before a GPU is touched."""

from __future__ import annotations

from typing import Final

from ziggurat.kernels.geometry import ExpertGeometry

#: Contributions that a workspace aims to hold; larger batches are computed in parts.
PARTIAL_BYTES: Final = 256 << 20
#: Pairs of a call up to which one small block makes the list of work.
SMALL_ROUTE_PAIRS: Final = 256
#: Pairs of an entry of the decode GEMMs: columns of a matrix instruction.
DECODE_PAIRS: Final = 8
#: Tokens that a part has at least, if the largest batch has as many.
LEAST_PART: Final = 256


def part_tokens(
    geometry: ExpertGeometry, top_k: int, max_tokens: int, partial_bytes: int = PARTIAL_BYTES
) -> int:
    """Tokens that are computed at once, of batches of up to `max_tokens`."""
    fitting = partial_bytes // (top_k * geometry.hidden * 4) // LEAST_PART * LEAST_PART
    return max(1, min(max_tokens, max(LEAST_PART, fitting)))


def workspace_items(
    geometry: ExpertGeometry, experts: int, top_k: int, tokens: int
) -> dict[str, tuple[int, int]]:
    """Buffers for parts of `tokens` tokens: name in `LayerParams` -> (elements, bytes of one)."""
    pairs = tokens * top_k
    entries = max(SMALL_ROUTE_PAIRS, experts + pairs // DECODE_PAIRS + 1)
    items = {
        "activations": (tokens * geometry.hidden, 2),
        "activation_scale": (tokens * -(-geometry.hidden // 128), 4),
        "entries": (entries * 4, 4),
        "entry_count": (1, 4),
        "pairs": (2 * max(pairs, SMALL_ROUTE_PAIRS * DECODE_PAIRS), 4),
        "done": (pairs, 1),
        "hidden": (pairs * geometry.intermediate, 2),
        "hidden_amax": (pairs, 4),
        "partial": (pairs * geometry.hidden, 4),
    }
    return {name: (max(1, count), size) for name, (count, size) in items.items()}


def workspace_bytes(geometry: ExpertGeometry, experts: int, top_k: int, max_tokens: int) -> int:
    """Device memory that `CudaLayerKernels` of batches up to `max_tokens` keeps; all layers of a service share it."""
    items = workspace_items(geometry, experts, top_k, part_tokens(geometry, top_k, max_tokens))
    return sum(count * size for count, size in items.values())
