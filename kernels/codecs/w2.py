"""The 2-bit codec: levels -4, -1, 1, 4 times a power of two for 32 weights; 2.25 bits a weight."""

from __future__ import annotations

from ziggurat.kernels.codecs.grid import W2_GRID
from ziggurat.kernels.codecs.quantizers import quantizer_of
from ziggurat.kernels.codecs.tiled import Quantizer, TiledCodec
from ziggurat.kernels.sources import SourceArrays


class W2Codec(TiledCodec):
    """Rows of signed levels 1 and 4; exact zeros follow zero mode "auto" except those of MXFP4 sources."""

    name = "w2"
    version = "e2m1-half-even-exact-1/w2e5-1"
    grid = W2_GRID

    def quantizer(self, source: SourceArrays) -> Quantizer:
        return quantizer_of(source)
