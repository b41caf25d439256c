"""The codecs by name. A new one is a module beside this and a line here."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Final

from ziggurat.kernels.codecs.base import Codec
from ziggurat.kernels.codecs.bf16 import Bf16Codec
from ziggurat.kernels.codecs.fp4 import Fp4Codec
from ziggurat.kernels.codecs.w2 import W2Codec
from ziggurat.kernels.errors import CodecError

_CODECS: Final[tuple[Codec, ...]] = (
    W2Codec(),
    Fp4Codec(),
    Bf16Codec(),
)
_BY_NAME: Final[dict[str, Codec]] = {codec.name: codec for codec in _CODECS}


def codec_names() -> tuple[str, ...]:
    """The names that get_codec knows, in order of size."""
    return tuple(_BY_NAME)


def get_codec(name: str) -> Codec:
    """The codec of that name.

    Raises:
        CodecError: no such codec; the message offers the nearest name.
    """
    if name in _BY_NAME:
        return _BY_NAME[name]
    nearest = get_close_matches(name, _BY_NAME, n=1, cutoff=0.0)
    raise CodecError(f"unknown codec {name!r}, did you mean {nearest[0]!r}? Known: {', '.join(_BY_NAME)}")
