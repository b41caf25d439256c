"""Codecs whose rows are lane words and scale bytes: the row's sections, tensor-parallel slices, encode and decode."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise

import numpy as np
import torch

from ziggurat.kernels.codecs.base import DecodedExpert, ExpertSource, Section
from ziggurat.kernels.codecs.decode import decode_matrix
from ziggurat.kernels.codecs.expert import opened_expert, row_arrays, row_payload
from ziggurat.kernels.codecs.grid import Grid
from ziggurat.kernels.codecs.layout import (
    TILE_K,
    TILE_ROWS,
    write_scales,
    write_words,
)
from ziggurat.kernels.codecs.quantize import zeros_alternate
from ziggurat.kernels.codecs.tiles import Quantized
from ziggurat.kernels.errors import CodecError
from ziggurat.kernels.formats import U8
from ziggurat.kernels.geometry import ExpertGeometry
from ziggurat.kernels.sources import SourceArrays

#: source, first row, last row, alternate_zeros, grid -> pieces (first row, last row, quantized)
Quantizer = Callable[[SourceArrays, int, int, bool, Grid], Iterator[tuple[int, int, Quantized]]]

#: Rows of one task: one row of blocks of the usual 128 x 128 FP8 checkpoints.
_TASK_ROWS = 128
#: Rows of a tensor from which on a wrong zero mode is worth avoiding.
_GUESS_FROM = 512
#: Zeros that say something about those of the rest.
_GUESS_ZEROS = 64
#: One expert is quantized at a time, on its caller's thread. The pieces' numpy calls are so short that two threads lose
#: more to handing the interpreter lock over than the second core gives; threads that check and write rows run
#: beside it.
_ONE_AT_A_TIME = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Target:
    """Where a rank wants a part of a matrix.

    Attributes:
        row_start, row_stop: rows of the whole matrix, multiples of 16 apart.
        tile_start, tile_stop: its k-tiles.
        codes, scales: the rank's planes for those rows and k-tiles.
    """

    row_start: int
    row_stop: int
    tile_start: int
    tile_stop: int
    codes: U8
    scales: U8

    def write(self, first: int, last: int, part: Quantized) -> None:
        """Put rows first..last, which lie wholly inside or wholly outside this target."""
        if not (self.row_start <= first and last <= self.row_stop):
            return
        tiles = slice(self.tile_start, self.tile_stop)
        width = (self.tile_stop - self.tile_start) * TILE_K
        begin, end = first - self.row_start, last - self.row_start
        code_width = width * part.words.itemsize // 16
        write_words(self.codes[begin * code_width : end * code_width], part.words[..., tiles])
        write_scales(self.scales[begin * width // TILE_K : end * width // TILE_K], part.scales[:, tiles])


@dataclass(slots=True)
class _Job:
    """The work on one matrix.

    Attributes:
        encode: first row, last row, alternate_zeros -> how many weights of those rows are zero, by sign bit.
        pending: row ranges to do.
        alternate: the zero mode to do them in.
        zeros: what encode returned for each range.
    """

    encode: Callable[[int, int, bool], tuple[int, int]]
    pending: list[tuple[int, int]]
    alternate: bool
    zeros: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)


class TiledCodec(ABC):
    """w13 codes | w13 scales | w2 codes | w2 scales, with one UE8M0 scale byte for 32 weights along K.

    Attributes:
        grid: the values a code can stand for.
    """

    name: str
    version: str
    grid: Grid

    @abstractmethod
    def quantizer(self, source: SourceArrays) -> Quantizer:
        """The quickest quantizer that is right for this source."""

    def check(self, geometry: ExpertGeometry) -> None:
        for label, size in (("hidden", geometry.hidden), ("intermediate", geometry.intermediate)):
            if size % TILE_K:
                raise CodecError(
                    f"codec {self.name} needs the {label} size of each rank to be a multiple of {TILE_K}, not {size}"
                )

    def row_bytes(self, geometry: ExpertGeometry) -> int:
        last = self.sections(geometry)[-1]
        return last.offset + last.nbytes

    def sections(self, geometry: ExpertGeometry) -> tuple[Section, ...]:
        self.check(geometry)
        sections: list[Section] = []
        offset = 0
        for matrix, (rows, cols) in (("w13", geometry.w13_shape), ("w2", geometry.w2_shape)):
            for part, nbytes in (
                ("codes", rows * cols * self.grid.words // 4),
                ("scales", rows * cols // TILE_K),
            ):
                sections.append(Section(f"{matrix} {part}", offset, nbytes))
                offset += nbytes
        return tuple(sections)

    def encode(self, expert: ExpertSource, tp_size: int, outs: Mapping[int, torch.Tensor]) -> None:
        sources, whole = opened_expert(expert)
        rank_geometry = whole.shard(tp_size)
        rows = row_arrays(outs, tp_size, self.row_bytes(rank_geometry))
        targets = self._targets(rank_geometry, rows)
        quantizers = [self.quantizer(source) for source in sources]
        jobs: list[_Job] = []
        for source, quantizer, wanted in zip(sources, quantizers, targets, strict=True):
            guess = self._guess_zero_mode(source, quantizer)
            encode = partial(self._encode_rows, quantizer, source, targets=wanted)
            jobs.append(_Job(encode, list(_tasks(source.rows, wanted)), guess))
        while tasks := [partial(job.encode, *rows, job.alternate) for job in jobs for rows in job.pending]:
            with _ONE_AT_A_TIME:
                results = iter([task() for task in tasks])
            for job in jobs:
                zeros = {rows: next(results) for rows in job.pending}
                job.zeros.update(zeros)
                counts = np.array(list(job.zeros.values())).sum(axis=0).tolist()
                # A tensor's zeros are known only when it is done; after a wrong guess, rows with zeros are done again.
                wrong = self._alternates(*counts) != job.alternate
                job.pending = [rows for rows, count in zeros.items() if wrong and any(count)]
                job.alternate ^= wrong

    def _alternates(self, positive: int, negative: int) -> bool:
        return not self.grid.has_zero and zeros_alternate(positive, negative)

    def _guess_zero_mode(self, source: SourceArrays, quantizer: Quantizer) -> bool:
        """What the first rows of a large tensor say; a small one is quickly done again."""
        if self.grid.has_zero or source.rows < _GUESS_FROM:
            return False
        counts = self._encode_rows(quantizer, source, 0, TILE_ROWS, False, ())
        return sum(counts) >= _GUESS_ZEROS and self._alternates(*counts)

    def _encode_rows(
        self,
        quantizer: Quantizer,
        source: SourceArrays,
        start: int,
        stop: int,
        alternate: bool,
        targets: Sequence[_Target],
    ) -> tuple[int, int]:
        """Quantize rows into their targets; how many are exactly zero, by sign bit."""
        positive = negative = 0
        for first, last, part in quantizer(source, start, stop, alternate, self.grid):
            positive += part.positive_zeros
            negative += part.negative_zeros
            for target in targets:
                target.write(first, last, part)
        return positive, negative

    def _targets(self, geometry: ExpertGeometry, rows: Mapping[int, U8]) -> tuple[list[_Target], ...]:
        """Targets of w1, w3 and w2."""
        w1: list[_Target] = []
        w3: list[_Target] = []
        w2: list[_Target] = []
        inner, hidden = geometry.intermediate, geometry.hidden
        for rank, row in rows.items():
            codes13, scales13, codes2, scales2 = (
                row[s.offset : s.offset + s.nbytes] for s in self.sections(geometry)
            )
            for matrix, half in ((w1, 0), (w3, 1)):
                codes = codes13[half * codes13.size // 2 : (half + 1) * codes13.size // 2]
                scales = scales13[half * scales13.size // 2 : (half + 1) * scales13.size // 2]
                matrix.append(_Target(rank * inner, (rank + 1) * inner, 0, hidden // TILE_K, codes, scales))
            tiles = inner // TILE_K
            w2.append(_Target(0, hidden, rank * tiles, (rank + 1) * tiles, codes2, scales2))
        return w1, w3, w2

    def decode(self, row: torch.Tensor, geometry: ExpertGeometry) -> DecodedExpert:
        codes13, scales13, codes2, scales2 = (
            row_payload(row, self.row_bytes(geometry))[s.offset : s.offset + s.nbytes]
            for s in self.sections(geometry)
        )
        return DecodedExpert(
            w13=decode_matrix(codes13, scales13, *geometry.w13_shape, self.grid),
            w2=decode_matrix(codes2, scales2, *geometry.w2_shape, self.grid),
        )


def _tasks(rows: int, targets: Sequence[_Target]) -> Iterator[tuple[int, int]]:
    """Row ranges of about _TASK_ROWS that no target's border crosses."""
    borders = sorted({0, rows, *(t.row_start for t in targets), *(t.row_stop for t in targets)})
    for begin, end in pairwise(borders):
        for first in range(begin, end, _TASK_ROWS):
            yield first, min(first + _TASK_ROWS, end)
