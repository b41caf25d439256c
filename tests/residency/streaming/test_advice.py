"""How large the chunks of a prompt should be, by arithmetic that is written down."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.residency.streaming.advice import advise
from ziggurat.residency.streaming.sizing import auto_rows, ring_of

#: DeepSeek-V4-Flash in w2 at 19 % coverage, a link of 55 GB/s and kernels of 400 TFLOP/s.
DS4: dict[str, Any] = {
    "absent_rows": 256 * 0.81,
    "stride": 7077888,
    "experts": 256,
    "top_k": 6,
    "hidden": 4096,
    "intermediate": 2048,
    "link": 55e9,
    "compute": 400e12,
    "part_tokens": 100_000,
}


def test_computing_the_advised_chunk_takes_as_long_as_streaming() -> None:
    advice = advise(**DS4)
    assert advice is not None
    assert advice.stream_ms == pytest.approx(256 * 0.81 * 7077888 / 55e9 * 1e3)
    assert advice.compute_ms >= advice.stream_ms
    one_less = replace(advice, tokens=advice.tokens - 256)
    assert one_less.tokens * advice.compute_ms / advice.tokens < advice.stream_ms
    assert advice.tokens == 35584
    assert advice.line().startswith("prompts: --max-num-batched-tokens 35584: ")


def test_kernels_that_take_fewer_tokens_at_once_bound_the_chunk() -> None:
    advice = advise(**{**DS4, "part_tokens": 8192})
    assert advice is not None
    assert (advice.tokens, advice.limited) == (8192, 8192)
    assert advice.compute_ms == pytest.approx(6.185, abs=1e-3)
    assert "kernels compute at most 8192 tokens at once" in advice.line()


def test_a_fast_link_leaves_what_a_blind_pass_needs() -> None:
    advice = advise(**{**DS4, "link": 1e15})
    assert advice is not None
    assert advice.tokens == 256
    assert advice.tokens * 6 >= 3 * 256


def test_a_pool_with_every_row_needs_no_advice() -> None:
    assert advise(**{**DS4, "absent_rows": 0}) is None


@given(rows=st.integers(2, 10_000), experts=st.integers(1, 1024))
def test_a_ring_stays_within_its_rows_and_a_layer(rows: int, experts: int) -> None:
    ring = ring_of(rows, experts)
    assert ring.parts >= 2
    assert 1 <= ring.rows <= experts
    assert ring.total <= rows
    assert ring.total > rows - ring.parts or ring.rows == experts


@given(stride=st.integers(1, 1 << 30), memory=st.none() | st.integers(0, 1 << 40))
def test_auto_is_bounded(stride: int, memory: int | None) -> None:
    rows = auto_rows(stride, memory)
    assert rows == 2 or rows * stride <= 384 << 20
    assert memory is None or rows == 2 or rows * stride * 16 <= memory
