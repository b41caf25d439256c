"""Which quantizer serves a source."""

from __future__ import annotations

from ziggurat.kernels.codecs.exact import exact_chunks
from ziggurat.kernels.codecs.floats import float_chunks
from ziggurat.kernels.codecs.fp8 import fp8_chunks, is_fast_fp8
from ziggurat.kernels.codecs.mxfp4 import mxfp4_chunks
from ziggurat.kernels.codecs.nvfp4 import is_fast_nvfp4, nvfp4_chunks
from ziggurat.kernels.codecs.tiled import Quantizer
from ziggurat.kernels.sources import SourceArrays


def quantizer_of(source: SourceArrays) -> Quantizer:
    """The quickest quantizer that is right for every weight of this source."""
    if source.format == "mxfp4":
        return mxfp4_chunks
    if source.format in ("bf16", "f16", "f32"):
        return float_chunks
    if source.format == "fp8_block" and is_fast_fp8(source):
        return fp8_chunks
    if source.format == "nvfp4" and is_fast_nvfp4(source):
        return nvfp4_chunks
    return exact_chunks
