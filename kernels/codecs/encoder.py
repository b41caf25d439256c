"""A codec bound to one model's sizes and a device: what a pack builder calls for some experts at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from ziggurat.kernels.codecs.base import Codec, ExpertSource
from ziggurat.kernels.codecs.batch import TiledBatch
from ziggurat.kernels.codecs.tiled import TiledCodec
from ziggurat.kernels.geometry import ExpertGeometry


class RowEncoder:
    """Encodes the experts of one model with one codec. Can be pickled, and gives the same bytes on every device.

    Attributes:
        name, version: the codec's.
        device: where quantizing happens: "cpu", by the codec itself, or a GPU, for the codecs that know how; experts
            that no fast path covers go through the codec itself.
    """

    def __init__(self, codec: Codec, model: ExpertGeometry, device: str = "cpu") -> None:
        """``model`` holds the whole model's sizes, before tensor parallelism divides them."""
        self._codec = codec
        self._model = model
        self.device = device if can_use_gpu(codec) else "cpu"
        self._batch: TiledBatch | None = None
        if self.device != "cpu" and isinstance(codec, TiledCodec):
            self._batch = TiledBatch(codec, torch.device(self.device))

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

    def encode_many(
        self, experts: Sequence[ExpertSource], tp_size: int, outs: Mapping[int, torch.Tensor]
    ) -> None:
        """Fill `outs`: rank -> CPU uint8 [experts, row_bytes], each row contiguous. Raises what Codec.encode does."""
        left: Sequence[int] = range(len(experts))
        if self._batch is not None:
            left = self._batch.encode_to_host(experts, tp_size, outs)
        for place in left:
            self._codec.encode(experts[place], tp_size, {rank: rows[place] for rank, rows in outs.items()})


def can_use_gpu(codec: Codec) -> bool:
    """Whether a GPU can quantize with this codec."""
    return isinstance(codec, TiledCodec)
