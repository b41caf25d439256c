"""Inferring FP8 block shapes; the other rules are tested through whole checkpoints."""

from __future__ import annotations

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ziggurat.stores.formats import FormatError, infer_block
from ziggurat.stores.headers import TensorInfo


def scale(shape: tuple[int, int], block: tuple[int, int]) -> tuple[tuple[int, int], TensorInfo]:
    blocks = tuple(-(-size // length) for size, length in zip(shape, block, strict=True))
    return shape, TensorInfo("some.scale", "F32", blocks, 0, 0)


def block_or_refusal(pairs: list[tuple[tuple[int, int], TensorInfo]]) -> tuple[int, int] | None:
    """The inferred block, or None when several fit; then the error says where to state it."""
    try:
        return infer_block(pairs)
    except FormatError as e:
        if "weight_block_size" not in e.detail:
            raise
        return None


@pytest.mark.parametrize(
    ("hidden", "intermediate", "block"),
    [
        (256, 128, (128, 128)),
        (192, 128, (128, 128)),
        (4096, 2048, (128, 128)),
        (4096, 1536, (64, 128)),
        (7168, 2048, (128, 256)),
        (320, 192, (64, 32)),
        (288, 96, (48, 48)),
        (256, 128, (1, 128)),
    ],
)
def test_known_blocks(hidden: int, intermediate: int, block: tuple[int, int]) -> None:
    pairs = [scale((intermediate, hidden), block), scale((hidden, intermediate), block)]
    assert infer_block(pairs) == block


@settings(max_examples=200, deadline=None)
@given(
    hidden=st.integers(1, 600),
    intermediate=st.integers(1, 600),
    block=st.tuples(st.integers(1, 700), st.integers(1, 700)),
)
def test_inferred_block_explains_the_scales(hidden: int, intermediate: int, block: tuple[int, int]) -> None:
    pairs = [scale((intermediate, hidden), block), scale((hidden, intermediate), block)]
    found = block_or_refusal(pairs)
    if found is None:
        return
    assert [scale(shape, found)[1].shape for shape, _ in pairs] == [info.shape for _, info in pairs]


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(2, 4096),
    power=st.integers(0, 8),
)
def test_a_power_of_two_is_found_or_refused(size: int, power: int) -> None:
    block = 1 << power
    assume(size > block)
    assert block_or_refusal([scale((size, size), (block, block))]) in (None, (block, block))


def test_a_single_number_is_not_a_block_scale() -> None:
    with pytest.raises(FormatError, match="unsupported format"):
        infer_block([((64, 64), TensorInfo("s", "F32", (), 0, 0))])
