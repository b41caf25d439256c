"""Checkpoint formats and the exact numbers they stand for."""

from __future__ import annotations

from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.kernels.errors import CodecError, NonFiniteWeightError
from ziggurat.kernels.formats import E2M1_VALUES, E4M3_VALUES, E8M0_VALUES, F64, U8

FORMATS: Final = ("bf16", "f16", "f32", "fp8_block", "nvfp4", "mxfp4")

Index = npt.NDArray[np.intp]
_ELEMENT_DTYPES: Final = {
    "bf16": torch.bfloat16,
    "f16": torch.float16,
    "f32": torch.float32,
    "fp8_block": torch.float8_e4m3fn,
    "nvfp4": torch.uint8,
    "mxfp4": torch.uint8,
}
_SCALE_DTYPES: Final = {
    "fp8_block": (torch.float32, torch.bfloat16, torch.float8_e8m0fnu),
    "nvfp4": (torch.float8_e4m3fn,),
    "mxfp4": (torch.uint8, torch.float8_e8m0fnu),
}


class SourceWeight(Protocol):
    """One expert matrix as a checkpoint stores it.

    ========== ============================== ==================================== =====================
    format     data                           scale (multiplies)                   scale_2 (multiplies)
    ========== ============================== ==================================== =====================
    bf16       bfloat16 [N, K]                none                                 none
    f16        float16 [N, K]                 none                                 none
    f32        float32 [N, K]                 none                                 none
    fp8_block  float8_e4m3fn [N, K]           f32, bf16 or e8m0                    none
                                              [ceil(N/bn), ceil(K/bk)]
    nvfp4      uint8 [N, K/2], e2m1 pairs     float8_e4m3fn [N, K/16]              f32, one element
    mxfp4      uint8 [N, K/2], e2m1 pairs     uint8 or e8m0 [N, K/32]              none
    ========== ============================== ==================================== =====================

    Pairs hold the even k in the low nibble. ``name`` is the tensor's name, for errors; ``shape`` the
    logical (N, K); ``block`` the fp8_block shape (bn, bk).
    """

    @property
    def name(self) -> str: ...

    @property
    def format(self) -> str: ...

    @property
    def shape(self) -> tuple[int, int]: ...

    @property
    def data(self) -> torch.Tensor: ...

    @property
    def scale(self) -> torch.Tensor | None: ...

    @property
    def scale_2(self) -> torch.Tensor | None: ...

    @property
    def block(self) -> tuple[int, int] | None: ...


class SourceArrays:
    """A source weight with its parts checked and laid open as numpy arrays, without a copy where they are contiguous.

    Attributes:
        name, format, rows (N), cols (K): of the weight.
        bits: the elements as unsigned integers: uint16 (bf16, f16), uint32 (f32) or uint8 [N, K]; packed formats
            uint8 [N, K/2].
        scale_bits: the scales as they are stored, for nvfp4 and mxfp4: uint8 [N, K/16] or [N, K/32].
        scales: the scales' values, float64, for fp8_block; already known to be finite.
        global_scale: ``scale_2`` of nvfp4, else 1.
        block: (bn, bk) of fp8_block, else (1, scale width).

    Raises:
        CodecError: a part is missing, or its dtype or shape is wrong.
        NonFiniteWeightError: a scale is NaN or infinite. Elements are checked when they are read.
    """

    def __init__(self, weight: SourceWeight) -> None:
        self.name, self.format = weight.name, weight.format
        self.rows, self.cols = weight.shape
        if self.format not in FORMATS:
            raise CodecError(
                f"tensor {self.name}: unknown format {self.format!r}; known: {', '.join(FORMATS)}"
            )
        packed = self.format in ("nvfp4", "mxfp4")
        self._expect(
            "data", weight.data, (_ELEMENT_DTYPES[self.format],), (self.rows, self._packed_cols(packed))
        )
        self.bits = unsigned_bits(weight.data)
        self.block = (1, 1)
        self.scale_bits: U8 = np.zeros((0, 0), np.uint8)
        self.scales: F64 = np.ones((1, 1))
        self.global_scale = 1.0
        if self.format == "fp8_block":
            self._open_fp8_block(weight)
        elif packed:
            self._open_packed(weight)

    def _packed_cols(self, packed: bool) -> int:
        width = {"nvfp4": 16, "mxfp4": 32}.get(self.format, 1)
        if self.cols % width:
            raise CodecError(
                f"tensor {self.name}: {self.format} needs K to be a multiple of {width}, not {self.cols}"
            )
        return self.cols // 2 if packed else self.cols

    def _expect(
        self, part: str, tensor: torch.Tensor, dtypes: tuple[torch.dtype, ...], shape: tuple[int, int]
    ) -> None:
        if tensor.dtype not in dtypes or tuple(tensor.shape) != shape:
            wanted = " or ".join(str(d).removeprefix("torch.") for d in dtypes)
            raise CodecError(
                f"tensor {self.name}: {part} of a {self.format} weight of shape [{self.rows}, {self.cols}] must be "
                f"{wanted} {list(shape)}, not {str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
            )

    def _need(self, part: str, tensor: torch.Tensor | None) -> torch.Tensor:
        if tensor is None:
            raise CodecError(f"tensor {self.name}: a {self.format} weight needs its {part}")
        return tensor

    def _open_fp8_block(self, weight: SourceWeight) -> None:
        if weight.block is None or min(weight.block) < 1:
            raise CodecError(
                f"tensor {self.name}: fp8_block needs a positive block shape, not {weight.block}"
            )
        self.block = bn, bk = weight.block
        scale = self._need("scale", weight.scale)
        self._expect("scale", scale, _SCALE_DTYPES["fp8_block"], (-(-self.rows // bn), -(-self.cols // bk)))
        if scale.dtype == torch.float8_e8m0fnu:
            self.scales = E8M0_VALUES[unsigned_bits(scale)]
        else:
            self.scales = scale.double().numpy()
        self._refuse_scales(~np.isfinite(self.scales))

    def _open_packed(self, weight: SourceWeight) -> None:
        width = 16 if self.format == "nvfp4" else 32
        self.block = (1, width)
        scale = self._need("scale", weight.scale)
        self._expect("scale", scale, _SCALE_DTYPES[self.format], (self.rows, self.cols // width))
        self.scale_bits = unsigned_bits(scale)
        if self.format == "mxfp4":
            self._refuse_scales(self.scale_bits == 255)
            return
        self._refuse_scales((self.scale_bits & 0x7F) == 0x7F)
        scale_2 = self._need("scale_2", weight.scale_2)
        if scale_2.numel() != 1 or scale_2.dtype != torch.float32:
            raise CodecError(
                f"tensor {self.name}: scale_2 must be one float32, not {scale_2.numel()} of {scale_2.dtype}"
            )
        self.global_scale = float(scale_2.item())
        if not np.isfinite(self.global_scale):
            raise NonFiniteWeightError(self.name, f"its scale_2 is {self.global_scale}")

    def _refuse_scales(self, bad: npt.NDArray[np.bool_]) -> None:
        if bad.any():
            row, col = np.argwhere(bad)[0]
            raise NonFiniteWeightError(self.name, f"its scale [{row}, {col}] is not a finite number")

    def refuse_elements(self, start: int, bad: npt.NDArray[np.bool_]) -> None:
        """Raise NonFiniteWeightError if any of ``bad`` [rows from ``start``, K] is set."""
        if bad.any():
            row, col = np.argwhere(bad)[0]
            raise NonFiniteWeightError(
                self.name, f"its element [{start + row}, {col}] is not a finite number"
            )

    def values(self, start: int, stop: int) -> F64:
        """The exact numbers of rows start..stop, float64 [stop - start, K]."""
        bits = self.bits[start:stop]
        if self.format in ("bf16", "f16", "f32"):
            values = self._floats(bits)
            self.refuse_elements(start, ~np.isfinite(values))
        elif self.format == "fp8_block":
            values = E4M3_VALUES[bits]
            self.refuse_elements(start, np.isnan(values))
            values *= self._row_scales(start, stop)
        else:
            values = np.empty((stop - start, self.cols))
            values[:, 0::2] = E2M1_VALUES[bits & 15]
            values[:, 1::2] = E2M1_VALUES[bits >> 4]
            values *= self._row_scales(start, stop)
        return values

    def _floats(self, bits: U8) -> F64:
        if self.format == "bf16":
            floats = (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            floats = bits.view(np.float16 if self.format == "f16" else np.float32)
        with np.errstate(invalid="ignore"):  # signalling NaN; the caller refuses them all
            return floats.astype(np.float64)

    def _row_scales(self, start: int, stop: int) -> F64:
        bn, bk = self.block
        if self.format == "fp8_block":
            scales = self.scales[np.arange(start, stop) // bn]
        elif self.format == "nvfp4":
            scales = E4M3_VALUES[self.scale_bits[start:stop]] * self.global_scale
        else:
            scales = E8M0_VALUES[self.scale_bits[start:stop]]
        return np.repeat(scales, bk, axis=1)[:, : self.cols]


def unsigned_bits(tensor: torch.Tensor) -> U8:
    """A CPU tensor's bits as uint8, uint16 or uint32 of the same shape; shares memory when contiguous."""
    tensor = tensor.detach().contiguous()
    view = {1: torch.uint8, 2: torch.uint16, 4: torch.uint32}[tensor.element_size()]
    return tensor.view(view).numpy()


def dequantize_source(weight: SourceWeight) -> torch.Tensor:
    """The exact numbers of a source weight, float64 [N, K].

    Every product of an element and its scales has at most 30 significant bits, so none is rounded.

    Raises:
        CodecError: a part is missing or misshapen.
        NonFiniteWeightError: an element or a scale is NaN or infinite; the error names the tensor.
    """
    arrays = SourceArrays(weight)
    return torch.from_numpy(arrays.values(0, arrays.rows))
