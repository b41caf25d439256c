"""What the kernels of a layer cannot compute is refused before a GPU is looked for."""

from __future__ import annotations

import pytest
import torch

from ziggurat.kernels.cuda.errors import LayerError
from ziggurat.kernels.cuda.layer import CudaLayerKernels
from ziggurat.kernels.geometry import ExpertGeometry


@pytest.mark.parametrize(
    ("codec", "sizes", "experts", "top_k", "dtype", "message"),
    [
        (
            "bf16",
            (80, 64),
            8,
            2,
            torch.bfloat16,
            "hidden size of each rank must be a multiple of 32 .*, not 80",
        ),
        (
            "bf16",
            (64, 48),
            8,
            2,
            torch.bfloat16,
            "intermediate size .* not 48: choose another tensor parallel",
        ),
        ("bf16", (64, 64), 8, 2, torch.float16, "bf16 experts need bfloat16 .* not torch.float16"),
        ("w2", (64, 64), 8, 2, torch.float32, "w2 experts need bfloat16 or float16 .* not torch.float32"),
        ("w2", (64, 64), 2000, 2, torch.bfloat16, "2000 experts with top-2: at most 1024"),
        ("fp4", (64, 64), 8, 9, torch.bfloat16, "8 experts with top-9"),
    ],
)
def test_refusals(
    codec: str, sizes: tuple[int, int], experts: int, top_k: int, dtype: torch.dtype, message: str
) -> None:
    with pytest.raises(LayerError, match=message):
        CudaLayerKernels(
            codec,
            ExpertGeometry(*sizes),
            experts,
            top_k,
            dtype=dtype,
            device=torch.device("cuda", 0),
            max_tokens=16,
        )
