"""Recognising how an expert matrix is stored, and checking its shapes, from header entries alone."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

from ziggurat.stores.headers import TensorInfo
from ziggurat.stores.stored import WeightFormat

_PLAIN: dict[str, WeightFormat] = {"BF16": "bf16", "F16": "f16", "F32": "f32"}
_BLOCK_SCALES = ("F32", "BF16", "F8_E8M0")
NVFP4_BLOCK = 16
MXFP4_BLOCK = 32


class FormatError(ValueError):
    """A matrix that is stored in no known way. `kind` groups messages; `tensor` is the one at fault."""

    def __init__(self, kind: str, tensor: str, detail: str = "") -> None:
        super().__init__(kind, tensor, detail)
        self.kind = kind
        self.tensor = tensor
        self.detail = detail


def recognise(weight: TensorInfo, scale: TensorInfo | None, scale_2: TensorInfo | None) -> WeightFormat:
    """The format of a matrix, from the dtypes of its tensors. Raises FormatError."""
    name, dtype = weight.name, weight.dtype
    if dtype in _PLAIN:
        for extra in (scale, scale_2):
            if extra is not None:
                raise FormatError("of unknown meaning", extra.name, f"{name} is {dtype} and needs no scale")
        return _PLAIN[dtype]
    if dtype not in ("F8_E4M3", "U8", "I8"):
        raise FormatError("of an unsupported format", name, f"dtype {dtype}")
    if scale is None:
        raise FormatError("without scale", name, f"{dtype} weights need one")
    if dtype == "F8_E4M3":
        if scale_2 is not None:
            raise FormatError("of unknown meaning", scale_2.name, f"{name} is {dtype}")
        if scale.dtype not in _BLOCK_SCALES:
            raise FormatError("of an unsupported format", scale.name, f"dtype {scale.dtype} as FP8 scale")
        return "fp8_block"
    if scale.dtype == "F8_E4M3":
        if scale_2 is None:
            raise FormatError("without second scale", name, "NVFP4 needs weight_scale_2")
        if scale_2.dtype != "F32":
            raise FormatError("of an unsupported format", scale_2.name, f"dtype {scale_2.dtype}, not F32")
        return "nvfp4"
    if scale.dtype in ("U8", "F8_E8M0"):
        if scale_2 is not None:
            raise FormatError("of unknown meaning", scale_2.name, f"{name} is MXFP4")
        return "mxfp4"
    raise FormatError(
        "of an unsupported format", scale.name, f"dtype {scale.dtype} as scale of {dtype} weights"
    )


def check_matrix(
    form: WeightFormat,
    shape: tuple[int, int],
    block: tuple[int, int] | None,
    weight: TensorInfo,
    scale: TensorInfo | None,
    scale_2: TensorInfo | None,
) -> None:
    """Check one matrix of logical shape (N, K) against its header entries. Raises FormatError."""
    n, k = shape
    if form in _PLAIN.values() or form == "fp8_block":
        expect_shape(weight, shape)
    else:
        group = NVFP4_BLOCK if form == "nvfp4" else MXFP4_BLOCK
        if k % group:
            raise FormatError("misshapen", weight.name, f"{k} columns are not a multiple of {group}")
        expect_shape(weight, (n, k // 2))
        expect_shape(cast(TensorInfo, scale), (n, k // group))
        if form == "nvfp4":
            second = cast(TensorInfo, scale_2)
            if second.shape not in ((), (1,)):
                raise FormatError("misshapen", second.name, f"{list(second.shape)}, not a single number")
    if form == "fp8_block":
        bn, bk = cast("tuple[int, int]", block)
        expect_shape(cast(TensorInfo, scale), (-(-n // bn), -(-k // bk)))


def expect_shape(tensor: TensorInfo, shape: tuple[int, ...]) -> None:
    """Raises FormatError unless the tensor has that shape."""
    if tensor.shape != shape:
        raise FormatError("misshapen", tensor.name, f"{list(tensor.shape)}, not {list(shape)}")


def infer_block(pairs: Iterable[tuple[tuple[int, int], TensorInfo]]) -> tuple[int, int]:
    """The FP8 block shape that explains all of `(logical shape, scale)`. Raises FormatError if none or several do."""
    pairs = list(pairs)
    name = pairs[0][1].name
    for (_, _), scale in pairs:
        if len(scale.shape) != 2 or 0 in scale.shape:
            detail = f"FP8 scale of shape {list(scale.shape)}, not one number per block"
            raise FormatError("of an unsupported format", scale.name, detail)
    rows = _infer_side([(shape[0], scale.shape[0]) for shape, scale in pairs], name)
    columns = _infer_side([(shape[1], scale.shape[1]) for shape, scale in pairs], name)
    return rows, columns


def _infer_side(sides: list[tuple[int, int]], name: str) -> int:
    """The block length b with ceil(size / b) == blocks for every (size, blocks).

    Where several b do, it is the one that divides all sizes or is a power of two; two such are an error.
    """
    low = max(-(-size // blocks) for size, blocks in sides)
    cut = [(size, blocks) for size, blocks in sides if blocks > 1]
    if not cut:
        return low
    # ceil(size / b) == blocks  <=>  size / blocks <= b < size / (blocks - 1)
    high = min(-(-size // (blocks - 1)) - 1 for size, blocks in cut)
    likely = {1 << i for i in range(low.bit_length() + 1) if low <= 1 << i <= high}
    if low == high or (low < high and all(size % low == 0 for size, _ in cut)):
        likely.add(low)
    if len(likely) == 1:
        return likely.pop()
    detail = f"block length not clear from {sides}; set quantization_config.weight_block_size in config.json"
    raise FormatError("with scales of an unknown block shape", name, detail)
