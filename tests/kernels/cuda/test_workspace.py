"""What the kernels of a layer keep on a device, told without one."""

from __future__ import annotations

import pytest

from ziggurat.kernels.cuda.workspace import PARTIAL_BYTES, part_tokens, workspace_bytes, workspace_items
from ziggurat.kernels.geometry import ExpertGeometry

DS4 = ExpertGeometry(4096, 2048)
DEMO = ExpertGeometry(256, 128)


@pytest.mark.parametrize(
    ("geometry", "top_k", "max_tokens", "tokens"),
    [
        (DEMO, 4, 512, 512),
        (DS4, 6, 8192, 8192),
        (DS4, 6, 32768, 10752),
        (DS4, 6, 1, 1),
        (ExpertGeometry(65536, 64), 64, 8192, 256),
    ],
)
def test_a_part_is_the_whole_batch_or_as_much_as_fits(
    geometry: ExpertGeometry, top_k: int, max_tokens: int, tokens: int
) -> None:
    assert part_tokens(geometry, top_k, max_tokens) == tokens


def test_contributions_of_a_part_keep_to_the_aim() -> None:
    count, size = workspace_items(DS4, 256, 6, part_tokens(DS4, 6, 32768))["partial"]
    assert PARTIAL_BYTES * 3 // 4 < count * size <= PARTIAL_BYTES


def test_more_tokens_never_take_less_and_stop_taking_more() -> None:
    sizes = [workspace_bytes(DS4, 256, 6, tokens) for tokens in (1, 16, 256, 8192, 10752, 32768, 65536)]
    assert sizes == sorted(sizes)
    assert sizes[-3:] == [sizes[-1]] * 3


def test_lists_have_room_for_the_worst_routing() -> None:
    """Every expert of every token in an entry of its own, or all pairs of a small call."""
    for tokens in (1, 7, 64, 512):
        items = workspace_items(DEMO, 32, 4, tokens)
        assert items["entries"][0] >= 4 * min(tokens * 4, 32 + tokens * 4 // 8)
        assert items["pairs"][0] >= 2 * max(tokens * 4, 256 * 8)
        assert items["done"][0] == tokens * 4
