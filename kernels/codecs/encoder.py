"""A codec bound to one model's sizes: what a pack builder calls for each expert."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from ziggurat.kernels.codecs.base import Codec, ExpertSource
from ziggurat.kernels.geometry import ExpertGeometry


class RowEncoder:
    """Encodes the experts of one model with one codec.

    Attributes:
        name, version: the codec's.
    """

    def __init__(self, codec: Codec, model: ExpertGeometry) -> None:
        """``model`` holds the whole model's sizes, before tensor parallelism divides them."""
        self._codec = codec
        self._model = model

    @property
    def name(self) -> str:
        return self._codec.name

    @property
    def version(self) -> str:
        return self._codec.version

    def row_bytes(self, tp_size: int) -> int:
        """Payload bytes of one rank's row.

        Raises:
            CodecError: the model does not divide by ``tp_size``, or not into sizes that the codec can hold.
        """
        geometry = self._model.shard(tp_size)
        self._codec.check(geometry)
        return self._codec.row_bytes(geometry)

    def encode(self, expert: ExpertSource, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        """As Codec.encode."""
        self._codec.encode(expert, tp_size, outs)
