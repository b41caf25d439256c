"""What the kernels of a layer can compute and what they keep between them: known before a GPU is touched."""

from __future__ import annotations

from typing import Final

from ziggurat.kernels.codecs.layout import TILE_K
from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.geometry import ExpertGeometry

#: Contributions that a workspace aims to hold; larger batches are computed in parts, and every part reads (or, where
#: they are streamed, fetches) all weights once more. It is only as large as the largest batch asks for.
PARTIAL_BYTES: Final = 1 << 30
#: Pairs of a call up to which one small block makes the list of work.
SMALL_ROUTE_PAIRS: Final = 256
#: Pairs of an entry of the decode GEMMs: columns of a matrix instruction.
DECODE_PAIRS: Final = 8
#: Tokens that a part has at least, if the largest batch has as many.
LEAST_PART: Final = 256

#: Experts of a layer that the kernel which sorts pairs has shared memory for.
MOST_EXPERTS: Final = 1024


def check_shape(geometry: ExpertGeometry, experts: int, top_k: int) -> None:
    """Raises LayerError for sizes that the kernels would cut short. `geometry` is one rank's."""
    for label, size in (("hidden", geometry.hidden), ("intermediate", geometry.intermediate)):
        if size % TILE_K:
            raise LayerError(
                f"the {label} size of each rank must be a multiple of {TILE_K} on a GPU, not {size}: "
                "choose another tensor parallel size, or set tiers.device.device to cpu"
            )
    if not 1 <= experts <= MOST_EXPERTS or not 1 <= top_k <= experts:
        raise LayerError(
            f"{experts} experts with top-{top_k}: at most {MOST_EXPERTS} experts, of which a token uses 1 or more"
        )


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
        "entry_count": (2, 4),
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
