"""What is read from the trace of a graph whose layers fetch their rows."""

from __future__ import annotations

from bench.gpu_timing import Span, kernel_split
from bench.inline_gather import copying_us


def test_a_gather_that_waits_for_the_list_does_not_copy_meanwhile() -> None:
    spans = [
        Span("route_small_bf16", 0.0, 8.0),
        Span("gather_missing", 1.0, 107.0),  # starts beside the route kernel: copies from 8 to 108
        Span("combine_bf16", 120.0, 2.0),
        Span("route_small_bf16", 125.0, 5.0),
        Span("gather_missing", 131.0, 102.0),  # starts behind it
    ]
    assert copying_us(spans) == 101.0
    assert kernel_split(spans, 2)["gather_missing"] == 104.5


def test_a_trace_without_gathers_says_so() -> None:
    assert copying_us([Span("combine_bf16", 0.0, 1.0)]) is None
