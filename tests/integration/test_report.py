"""`ziggurat report`: charts hold what they were given, pages load nothing, and the LRU curve is right."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from support.metric_pages import page_text, served_metrics, ten_steps
from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.main import app
from ziggurat.integration.observability.page import Page
from ziggurat.integration.observability.recording import Recorder
from ziggurat.integration.observability.report.from_recording import MOST_COLUMNS
from ziggurat.integration.observability.report.html import Figure, Report, table
from ziggurat.integration.observability.report.lru import lru_curve
from ziggurat.integration.observability.report.svg import (
    LEVELS,
    Line,
    amount,
    bar_chart,
    heat_map,
    line_chart,
    percent,
    plain,
    shade_of,
    ticks,
)

ROOT = Path(__file__).resolve().parents[2]
DEMO = ROOT / "bench" / "traces" / "demo_moe.npz"


def run(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["report", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


class Checked(HTMLParser):
    """Fails on a page that is not balanced or asks for anything."""

    LEAVES = ("line", "circle", "rect", "polyline", "path")

    def __init__(self, page: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.headings: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag not in ("script", "link", "img", "iframe", "object", "use", "image")
        assert not {"src", "href", "xlink:href", "onload"} & {name for name, _ in attrs}
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.LEAVES

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)


def checked(path: Path) -> Checked:
    page = path.read_text(encoding="utf-8")
    # Words may name an address; nothing may be fetched from one.
    assert not re.search(r"url\(|@import|@font-face|src=|href=", page)
    assert "nan" not in page.lower().replace("nano", "")
    return Checked(page)


# -- LRU -------------------------------------------------------------------------------------------------------------


def by_hand(tokens: np.ndarray, slots: int) -> np.ndarray:
    """Event-atomic LRU of each layer, one list at a time: hits [steps, L, k]."""
    steps, layers, _ = tokens.shape
    hits = np.zeros(tokens.shape, dtype=bool)
    for layer in range(layers):
        order: list[int] = []  # most recent last
        for step in range(steps):
            ids = tokens[step, layer].tolist()
            hits[step, layer] = [expert in order for expert in ids]
            for expert in ids:
                if expert in order:
                    order.remove(expert)
                order.append(expert)
            del order[: max(0, len(order) - slots)]
    return hits


@settings(max_examples=60, deadline=None)
@given(data=st.data(), experts=st.integers(4, 9), top_k=st.integers(1, 3))
def test_the_curve_is_lru_at_every_size(data: st.DataObject, experts: int, top_k: int) -> None:
    seed = data.draw(st.integers(0, 2**16))
    random = np.random.default_rng(seed)
    tokens = np.stack(
        [
            [random.permutation(experts)[:top_k] for _ in range(2)]
            for _ in range(data.draw(st.integers(1, 30)))
        ]
    )
    curve = lru_curve(tokens, experts)
    for slots in range(top_k, experts + 1):
        hits = by_hand(tokens, slots)
        assert curve.hit_ratio(slots) == hits.mean()
        assert curve.zero_miss_ratio(slots) == hits.all(axis=(1, 2)).mean()
        assert curve.misses_per_step(slots).tolist() == (~hits).sum(axis=2).mean(axis=0).tolist()


def test_an_expert_is_missed_the_first_time_in_a_pool_of_any_size() -> None:
    curve = lru_curve(np.array([[[0, 1]], [[2, 1]], [[0, 2]]]), 3)
    assert curve.ranks.tolist() == [[[3, 3]], [[3, 0]], [[2, 1]]]
    assert curve.hit_ratio(3) == 0.5


# -- charts ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("most", "marks"),
    [
        (1.0, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (7.0, [0, 2, 4, 6, 8]),
        (0.0, [0, 1]),
        (float("nan"), [0, 1]),
        (1200.0, [0, 250, 500, 750, 1000, 1250]),
    ],
)
def test_ticks_are_round_and_reach_the_end(most: float, marks: list[float]) -> None:
    assert ticks(most) == pytest.approx(marks)


def test_a_line_has_gaps_where_there_is_no_value() -> None:
    line = Line("a <b>", [0, 1, 2, 3, 4], [0.1, 0.2, None, 0.4, 0.5], 2)
    chart = line_chart("t", [line], x_label="x", marks=True)
    assert chart.count("<polyline") == 2
    assert chart.count("<circle") == 4
    assert "a &lt;b&gt;: 1, 0.2" in chart
    Checked(chart)


def test_stacked_bars_stand_on_one_another() -> None:
    chart = bar_chart("t", ["p", "q"], {"one": [1.0, 0.0], "two": [3.0, 4.0]}, x_label="x")
    bars = [
        (float(y), float(height))
        for y, height in re.findall(r'y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', chart)
    ]
    assert len(bars) == 3, "nothing has no bar"
    (first, below), (second, above), (whole, tall) = bars
    assert second + above == pytest.approx(first, abs=0.2)
    assert below + above == pytest.approx(tall, abs=0.3)
    assert second == whole
    Checked(chart)


def test_a_heat_map_has_every_cell_in_its_shade() -> None:
    values = [[0.0, 1.0, 8.0], [4.0, 0.5, 0.0]]
    chart = heat_map("t", ["a", "b"], values, x_label="x", x_ends=("0", "2"))
    found = {
        int(shade): path.count("M") for shade, path in re.findall(r'<path class="s(\d)" d="([^"]*)"', chart)
    }
    assert sum(found.values()) == 6
    assert found == {0: 2, 1: 2, 4: 1, LEVELS - 1: 1}
    Checked(chart)
    assert [shade_of(value, 1.0) for value in (0.0, 1e-9, 0.5, 1.0, 2.0, float("nan"))] == [0, 1, 4, 8, 8, 0]
    assert shade_of(1.0, 0.0) == 0


def test_charts_of_nothing_are_charts() -> None:
    for chart in (
        line_chart("t", [], x_label="x"),
        line_chart("t", [Line("a", [], [])], x_label="x"),
        bar_chart("t", [], {"one": []}, x_label="x"),
        heat_map("t", [], [], x_label="x", x_ends=("", "")),
    ):
        Checked(chart)


def test_numbers_are_short() -> None:
    assert [plain(value) for value in (0.12345, 999.0, 1234.5)] == ["0.123", "999", "1 234"]
    assert [percent(value) for value in (0.0, 0.98765, 1.0)] == ["0 %", "98.8 %", "100 %"]
    assert [amount(value) for value in (12.0, 1500.0, 2.5e6, 6.3e10)] == ["12 B", "1.5 kB", "2.5 MB", "63 GB"]


def test_text_of_a_page_is_text() -> None:
    page = Report("<t>", "&", [("<n>", "<v>")], [Figure("<f>", "<c>", table(["<h>"], [["<x>"]]))]).html()
    Checked(page)
    for letter in "tnvfchx":
        assert f"<{letter}>" not in page


# -- pages -----------------------------------------------------------------------------------------------------------


def test_a_report_of_a_trace(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert "Routing of demo_moe.npz" in run(str(DEMO), "-o", str(page), "--row-size", "1MiB", "--link", "10")
    found = checked(page)
    assert found.headings[1:] == ["Coverage", "Misses by layer", "Time of a step", "In numbers", "Heat map"]
    text = page.read_text(encoding="utf-8")
    assert "rows of 1.00 MiB over 10 GB/s" in text
    # 16 of 32 slots under LRU, as `bench` counts it; a golden value.
    assert "<td>50 %, 16 of 32</td><td>80.8 %</td><td>3.63 %</td>" in text


def recording(path: Path, scrapes: int, layers: int = 43) -> Path:
    metrics = served_metrics(layers)
    recorder = Recorder(path, "http://127.0.0.1:8000/metrics", 1000.0)
    for scrape in range(scrapes):
        recorder.add(Page.parse(page_text(metrics), 1000.0 + scrape))
        ten_steps(metrics, layers)
    recorder.close()
    return path


@pytest.mark.parametrize(("scrapes", "layers"), [(2, 1), (5, 43), (MOST_COLUMNS * 2 + 7, 6)])
def test_a_report_of_a_recording(tmp_path: Path, scrapes: int, layers: int) -> None:
    page = tmp_path / "page.html"
    run(str(recording(tmp_path / "run.jsonl", scrapes, layers)), "-o", str(page))
    found = checked(page)
    assert len(found.headings) == 9
    text = page.read_text(encoding="utf-8")
    assert "<b>60 %</b><span>zero-miss steps</span>" in text
    assert "<b>96 %</b><span>hits in the pool</span>" in text
    assert f"{layers} layers × 256 experts" in text
    cells = sum(path.count("M") for path in re.findall(r'<path class="s\d" d="([^"]*)"', text))
    assert cells % layers == 0
    assert 0 < cells // layers <= MOST_COLUMNS


def test_a_recording_in_which_nothing_happened(tmp_path: Path) -> None:
    path = tmp_path / "idle.jsonl"
    recorder = Recorder(path, "http://127.0.0.1:8000/metrics", 0.0)
    for at in (0.0, 1.0):
        recorder.add(Page.parse(page_text(served_metrics()), at))
    recorder.close()
    run(str(path), "-o", str(tmp_path / "page.html"))
    checked(tmp_path / "page.html")


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"other": np.zeros(3)}, "neither topk_ids nor ids"),
        ({"topk_ids": np.zeros((2, 3, 4), dtype=np.uint8)}, r"not integers \[sequence, position, layer, k\]"),
        ({"topk_ids": np.zeros((1, 1, 1, 1))}, "not integers"),
        ({"topk_ids": np.zeros((0, 1, 1, 1), dtype=np.uint8)}, "not integers"),
        (
            {"topk_ids": np.zeros((2, 3, 1, 1), dtype=np.uint8), "lengths": np.array([1, 4])},
            "lengths do not fit",
        ),
        ({"topk_ids": np.full((2, 3, 1, 1), -1)}, "not integers"),
        (
            {"topk_ids": np.zeros((2, 3, 1, 1), dtype=np.uint8), "metadata": np.frombuffer(b"{", np.uint8)},
            "is no trace",
        ),
    ],
)
def test_files_that_are_no_traces_are_refused(
    tmp_path: Path, arrays: dict[str, np.ndarray], message: str
) -> None:
    path = tmp_path / "trace.npz"
    np.savez(path, **arrays)  # type: ignore[arg-type]  # numpy's stub takes the first name for an option
    with pytest.raises(CliError, match=message):
        run(str(path), "-o", str(tmp_path / "page.html"))
    assert not (tmp_path / "page.html").exists()


def test_padding_of_a_trace_is_left_out(tmp_path: Path) -> None:
    ids = np.zeros((2, 5, 1, 1), dtype=np.uint8)
    ids[0, 3:] = ids[1, 1:] = 1
    metadata = np.frombuffer(b'{"layers": [17]}', dtype=np.uint8)
    np.savez(tmp_path / "trace.npz", topk_ids=ids, lengths=np.array([3, 1]), metadata=metadata)
    run(str(tmp_path / "trace.npz"), "-o", str(tmp_path / "page.html"))
    text = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "<b>4</b><span>tokens</span>" in text
    assert "<b>1</b><span>experts of a layer</span>" in text
    assert ">17</text>" in text, "the model's own number of the layer"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("no-such-file",), "cannot read no-such-file"),
        ((str(ROOT / "README.md"),), r"README\.md is no trace"),
        ((str(DEMO), "--row-size", "25%"), "is no number of bytes"),
        ((str(DEMO), "--row-size", "big"), "--row-size"),
        ((str(DEMO), "-o", "no/such/folder/page.html"), "cannot write no/such/folder"),
    ],
)
def test_what_cannot_be_done_is_said(arguments: tuple[str, ...], message: str) -> None:
    with pytest.raises(CliError, match=message):
        run(*arguments)
