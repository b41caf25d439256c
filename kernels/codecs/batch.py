"""Quantizing many experts at once with tensor operations, as a GPU wants it.

The rows are those of `Codec.encode`, byte for byte, on every device (pieces.py says why); the experts that no fast path
covers go through that.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import torch

from ziggurat.kernels.codecs import lanes
from ziggurat.kernels.codecs.base import ExpertSource
from ziggurat.kernels.codecs.expert import opened_expert
from ziggurat.kernels.codecs.pieces import Group, Piece, open_group
from ziggurat.kernels.codecs.quantize import zeros_alternate
from ziggurat.kernels.codecs.tiled import TiledCodec
from ziggurat.kernels.codecs.words import e2m1_words, level_words, write_scales, write_words
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.sources import SourceArrays

#: Weights of a piece: long operations, which take about 30 bytes of the GPU's memory a weight.
PIECE_WEIGHTS: Final = 1 << 23

#: rank -> rows uint8 [experts, row_bytes]
Outs = Mapping[int, torch.Tensor]


class TiledBatch:
    """The w2 and fp4 codecs on one device. Safe for concurrent use: each thread has a stream of its own."""

    def __init__(self, codec: TiledCodec, device: torch.device, piece_weights: int = PIECE_WEIGHTS) -> None:
        """piece_weights: weights of a piece, about; 16 rows at least."""
        self._codec, self._device = codec, device
        self._weights = piece_weights
        self._of_thread = threading.local()
        self._guess = [False, False, False]  # the zero mode of the last w1, w3, w2

    def encode_to_host(self, experts: Sequence[ExpertSource], tp_size: int, outs: Outs) -> list[int]:
        """As `encode`, with `outs` in host memory whatever the device."""
        if self._device.type == "cpu":
            return self.encode(experts, tp_size, outs)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream()):
            rows = {}
            for rank, out in outs.items():
                padded = -(-out.shape[1] // lanes.UNIT_BYTES) * lanes.UNIT_BYTES
                whole = torch.empty(len(out), padded, dtype=torch.uint8, device=self._device)
                rows[rank] = whole[:, : out.shape[1]]
            odd = self.encode(experts, tp_size, rows)
            for rank, out in outs.items():
                out.copy_(rows[rank])
            return odd

    def _stream(self) -> torch.cuda.Stream:
        if not hasattr(self._of_thread, "stream"):
            self._of_thread.stream = torch.cuda.Stream(self._device)
        found: torch.cuda.Stream = self._of_thread.stream
        return found

    def encode(self, experts: Sequence[ExpertSource], tp_size: int, outs: Outs) -> list[int]:
        """Fill `outs`: rank -> uint8 [experts, row_bytes] on this device, each row contiguous and 16 bytes aligned.

        Returns the places of experts that it cannot do; what their rows hold is then undefined.

        Raises CodecError, NonFiniteWeightError (a scale that is not finite).
        """
        opened = [opened_expert(expert) for expert in experts]
        geometry = opened[0][1].shard(tp_size)
        odd: set[int] = set()
        for place, name in enumerate(("w1", "w3", "w2")):
            sources = [each[place] for each, _ in opened]
            weights = [getattr(expert, name) for expert in experts]
            group = open_group(sources, weights, self._codec.grid, self._device)
            if group is None:
                return list(range(len(experts)))
            odd.update(i for i, is_odd in enumerate(group.odd) if is_odd)
            planes = {rank: self._planes(out, place, geometry) for rank, out in outs.items()}
            odd |= self._matrix(group, sources[0], place, planes, geometry, odd)
        return sorted(odd)

    def _planes(
        self, out: torch.Tensor, place: int, geometry: ExpertGeometry
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Code and scale planes of one matrix in a rank's rows: uint8 [experts, …]."""
        sections = self._codec.sections(geometry)[2 * (place == 2) :][:2]
        parts = []
        for section in sections:
            nbytes = section.nbytes if place == 2 else section.nbytes // 2
            begin = section.offset + (nbytes if place == 1 else 0)
            parts.append(out[:, begin : begin + nbytes])
        return parts[0], parts[1]

    def _matrix(
        self,
        group: Group,
        source: SourceArrays,
        place: int,
        planes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        geometry: ExpertGeometry,
        skip: set[int],
    ) -> set[int]:
        """Encode the tensors of a group that are not to be skipped; returns those that turned out to be odd."""
        count = len(group.odd)
        modes = [self._guess[place]] * count
        zeros = torch.zeros(count, 2, dtype=torch.int64)
        odd = torch.zeros(count, dtype=torch.bool)
        again: list[tuple[slice, slice]] = []
        todo = list(_pieces(source.rows, source.cols, count, skip, self._weights))
        for tensors, rows in todo:
            piece = group.piece(tensors, rows)
            odd[tensors] |= piece.odd.cpu()
            found = self._write(piece, group, source, tensors, rows, modes, planes, place, geometry)
            if found is not None:
                zeros[tensors] += found.cpu()
                again.append((tensors, rows))
        if again:
            right = [zeros_alternate(*pair) for pair in zeros.tolist()]
            wrong = {i for i in range(count) if right[i] != modes[i] and zeros[i].any()}
            for tensors, rows in again:
                if wrong.intersection(range(tensors.start, tensors.stop)):
                    piece = group.piece(tensors, rows)
                    self._write(piece, group, source, tensors, rows, right, planes, place, geometry)
            self._guess[place] = right[-1]
        return set(odd.nonzero().view(-1).tolist())

    def _write(
        self,
        piece: Piece,
        group: Group,
        source: SourceArrays,
        tensors: slice,
        rows: slice,
        modes: Sequence[bool],
        planes: Mapping[int, tuple[torch.Tensor, torch.Tensor]],
        place: int,
        geometry: ExpertGeometry,
    ) -> torch.Tensor | None:
        """Write a piece's codes and scales into every rank's planes; returns its zeros by sign as `_signs` does."""
        count, height = tensors.stop - tensors.start, rows.stop - rows.start
        signs, zeros = self._signs(piece, group, count, modes[tensors])
        join = level_words if self._codec.grid.words == 1 else e2m1_words
        words = join(signs, piece.codes, count * height).unflatten(2, (count, -1))
        scales = piece.scale_bytes.view(count, height, -1)
        for rank, (codes_out, scales_out) in planes.items():
            if place == 2:
                tiles = geometry.intermediate // lanes.BLOCK
                own, k_tiles = slice(0, height), slice(rank * tiles, (rank + 1) * tiles)
                begin, total = rows.start, source.rows
            else:
                low = rank * geometry.intermediate
                begin = max(rows.start, low)
                end = min(rows.stop, low + geometry.intermediate)
                if begin >= end:
                    continue
                own, k_tiles = slice(begin - rows.start, end - rows.start), slice(None)
                begin, total = begin - low, geometry.intermediate
            tile_rows = slice(own.start // 16, own.stop // 16)
            span = (begin, begin + own.stop - own.start, total)
            write_words(_rows_of(codes_out[tensors], span), words[:, :, :, tile_rows, :, k_tiles])
            write_scales(_rows_of(scales_out[tensors], span), scales[:, own, k_tiles])
        return zeros

    def _signs(
        self, piece: Piece, group: Group, count: int, modes: Sequence[bool]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The sign bits int64 [units, …], and how many exact zeros each tensor has: int64 [tensors, 2], + and -.

        None where zeros need no care or there are none.
        """
        signs = lanes.signs_of(piece.lanes)
        if self._codec.grid.has_zero or not group.has_zero_mode or bool(piece.magnitudes.amin() != 0):
            return signs, None
        width = lanes.width_of(piece.lanes)
        zero = lanes.zero_lanes(piece.magnitudes)
        negative = lanes.count_signs(zero & signs, width, count)
        positive = lanes.count_signs(zero, width, count) - negative
        if all(modes):
            lanes.alternate(signs, zero, width)
        elif any(modes):
            share = signs.shape[1] // count
            for i in (i for i, mode in enumerate(modes) if mode):
                mine = slice(i * share, (i + 1) * share)
                lanes.alternate(signs[:, mine], zero[:, mine], width)
        return signs, torch.stack([positive, negative], -1)


def _rows_of(planes: torch.Tensor, span: tuple[int, int, int]) -> torch.Tensor:
    """Bytes of rows begin..end of `total` in planes uint8 [tensors, …]."""
    begin, end, total = span
    width = planes.shape[1] // total
    return planes[:, begin * width : end * width]


def _pieces(rows: int, cols: int, count: int, skip: set[int], weights: int) -> Iterator[tuple[slice, slice]]:
    """Pieces of about that many weights: rows (a multiple of 16) of one tensor, or several whole tensors."""
    step = max(16, weights // cols // 16 * 16)
    together = max(1, weights // (rows * cols))
    at = 0
    while at < count:
        if at in skip:
            at += 1
            continue
        end = at + 1
        while end < count and end - at < together and end not in skip:
            end += 1
        for first in range(0, rows, step):
            yield slice(at, end), slice(first, min(first + step, rows))
        at = end
