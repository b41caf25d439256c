"""The MXFP4 codec: e2m1 values times a power of two for 32 weights; 4.25 bits a weight."""

from __future__ import annotations

from ziggurat.kernels.codecs.grid import FP4_GRID
from ziggurat.kernels.codecs.quantizers import quantizer_of
from ziggurat.kernels.codecs.tiled import Quantizer, TiledCodec
from ziggurat.kernels.sources import SourceArrays


class Fp4Codec(TiledCodec):
    """Rows of e2m1 nibbles; an MXFP4 source's nibbles and scales are kept verbatim."""

    name = "fp4"
    version = "e2m1-half-even-exact-1/f4e5-1"
    grid = FP4_GRID

    def quantizer(self, source: SourceArrays) -> Quantizer:
        return quantizer_of(source)
