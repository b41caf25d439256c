"""The pictures in the docs: drawn from a recording, small, and loading nothing."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from bench import pictures
from support.metric_pages import page_text, served_metrics, ten_steps
from ziggurat.integration.observability.page import Page
from ziggurat.integration.observability.recording import Recording


def test_the_capture_shows_the_last_frame_and_loads_nothing() -> None:
    metrics, pages = served_metrics(), []
    for scrape in range(4):
        pages.append(Page.parse(page_text(metrics), float(scrape)))
        ten_steps(metrics)
    svg = pictures.capture(Recording("http://127.0.0.1:8000/metrics", pages))
    assert svg.startswith("<svg")
    assert "zero-miss" in svg
    assert [word for word in ("@font-face", "url(http", "<image", "href=") if word in svg] == []
    assert pictures.capture(Recording("http://127.0.0.1:8000/metrics", pages)) == svg


def test_without_a_browser_nothing_is_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(pictures.PictureError, match=r"chromium.* is on the PATH; `apt-get install chromium`"):
        pictures.make(tmp_path / "work", 1)
    assert not (tmp_path / "work").exists()


def test_the_committed_pictures_are_small() -> None:
    report = pictures.IMAGES / "report.png"
    data = report.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == pictures.WINDOW
    for name in ("report.png", "top.svg"):
        assert (pictures.IMAGES / name).stat().st_size < pictures.MOST_BYTES
    assert "@font-face" not in (pictures.IMAGES / "top.svg").read_text(encoding="utf-8")
