"""Windows of the held-out text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from bench.heldout_loss import DEFAULT_MODEL, TARGETS, TEXT
from bench.heldout_text import ALL_WINDOWS, DOCUMENT_START, WINDOW, cut_windows, read_documents, token_stream


@given(st.lists(st.text(st.characters(min_codepoint=1, max_codepoint=300))), st.integers(1, 3))
def test_stream_has_a_start_before_each_document_and_nothing_lost(documents: list[str], width: int) -> None:
    stream = token_stream(documents, lambda text: [ord(c) for c in text for _ in range(width)])
    expected = [
        code for text in documents for code in [DOCUMENT_START, *(ord(c) for c in text for _ in range(width))]
    ]
    assert stream == expected


@given(st.integers(0, 4 * WINDOW), st.integers(-1, 5))
def test_windows_lie_side_by_side(length: int, count: int) -> None:
    stream = range(length)
    have = length // WINDOW
    if not 1 <= count <= have:
        with pytest.raises(ValueError, match=f"holds {have} windows"):
            cut_windows(stream, count)
        return
    windows = cut_windows(stream, count)
    assert all(len(window) == WINDOW for window in windows)
    assert [token for window in windows for token in window] == list(range(count * WINDOW))


def test_documents_are_separated_by_nul(tmp_path: Path) -> None:
    import lzma

    path = tmp_path / "text.xz"
    with lzma.open(path, "wt", encoding="utf-8") as file:
        file.write("first\0zweites ü\0")
    assert read_documents(path) == ["first", "zweites ü", ""]


def test_the_demo_text_holds_all_windows() -> None:
    tokenizer = Tokenizer.from_file(str(DEFAULT_MODEL / "tokenizer.json"))
    stream = token_stream(
        read_documents(TEXT), lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )
    windows = cut_windows(stream, ALL_WINDOWS)
    assert windows[0][0] == DOCUMENT_START
    assert max(max(window) for window in windows) < 8192


def test_targets_accept_what_is_near_and_nothing_else() -> None:
    target = TARGETS["demo-moe-fp8"]["w2"]
    assert target.holds(1.5424)
    assert target.holds(1.5361)
    assert not target.holds(1.5359)
    assert not target.holds(1.5481)
    assert not target.holds(float("nan"))
