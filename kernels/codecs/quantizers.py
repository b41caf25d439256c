"""Which quantizer serves a source."""

from __future__ import annotations

from ziggurat.kernels.codecs.exact import exact_chunks
from ziggurat.kernels.codecs.packed import mxfp4_chunks
from ziggurat.kernels.codecs.tiled import Quantizer
from ziggurat.kernels.sources import SourceArrays


def quantizer_of(source: SourceArrays) -> Quantizer:
    """The quickest quantizer that is right for every weight of this source."""
    if source.format == "mxfp4":
        return mxfp4_chunks
    return exact_chunks
