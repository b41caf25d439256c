"""`ziggurat top`: pages, figures, the screen, recordings, and what it says to servers that are none of ours."""

from __future__ import annotations

import fcntl
import io
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from support.fake_moe import FakeModel, make_packs
from support.metric_pages import STRIDE, http_pages, page_text, served_metrics, ten_steps
from support.server import free_port
from support.serving_tiers import serving_tiers
from ziggurat.integration.cli.failures import CliError
from ziggurat.integration.cli.main import app
from ziggurat.integration.observability.figures import Figures, duration, figures, quantile
from ziggurat.integration.observability.page import Page, PageError, fetch, metrics_url
from ziggurat.integration.observability.recording import Recorder, is_recording, read_recording
from ziggurat.integration.observability.screen import (
    ASCII,
    BLOCKS,
    Glyphs,
    History,
    Screen,
    bar,
    fold,
    glyphs_for,
    sparkline,
)


def pages(ranks: int = 1, layers: int = 43, seconds: float = 2.0) -> tuple[Page, Page]:
    """Two scrapes with ten steps between them."""
    metrics = served_metrics(layers)
    before = Page.parse(page_text(metrics, ranks), 100.0)
    ten_steps(metrics, layers)
    return before, Page.parse(page_text(metrics, ranks), 100.0 + seconds)


def run(*arguments: str) -> str:
    """The command's output; what it raises goes through."""
    result = CliRunner().invoke(app, ["top", *arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.stdout


# -- pages -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000/metrics"),
        ("http://host:1", "http://host:1/metrics"),
        ("https://host/", "https://host/metrics"),
        ("http://host:1/own/path", "http://host:1/own/path"),
    ],
)
def test_urls(given: str, asked: str) -> None:
    assert metrics_url(given) == asked


def test_a_url_of_another_kind_is_refused() -> None:
    with pytest.raises(PageError, match="over http or https"):
        metrics_url("file:///etc/passwd")


def test_labels_are_read_as_prometheus_writes_them() -> None:
    page = Page.parse('ziggurat_x{a="q\\"\\\\\\n{}, b=\\"",le="+Inf"} 1.5e3 1700000000\nother 1\n', 0.0)
    (only,) = page.series
    assert only.labels == {"a": 'q"\\\n{}, b="', "le": "+Inf"}
    assert only.value == 1500.0
    assert page.ranks == 0


@pytest.mark.parametrize("line", ["ziggurat_x{ 1", "ziggurat_x{} many"])
def test_lines_of_no_format_are_named(line: str) -> None:
    with pytest.raises(PageError, match="ziggurat_x"):
        Page.parse(line, 0.0)


# -- figures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 4])
def test_figures_of_an_interval(ranks: int) -> None:
    found = figures(*pages(ranks))
    assert (found.ranks, found.seconds, found.steps_per_s) == (ranks, 2.0, 5.0)
    assert found.tokens_per_s == {"prefill": 0.0, "decode": 20.0, "untold": 0.0}
    assert found.outcomes_per_s["replayed"] == 1.5
    assert (found.zero_miss_ratio, found.hit_ratio, found.missed_per_step) == (0.6, 0.96, 4.0)
    assert found.passes_per_step == 1.5
    pool, arena = found.tiers
    assert (pool.used_rows, pool.capacity_rows, pool.floor_rows) == (2000 * ranks, 2752 * ranks, 256 * ranks)
    assert (pool.hit_ratio, arena.hit_ratio) == (0.96, 0.75)
    assert pool.evictions_per_s == 20.0 * ranks
    assert found.fetched_bytes_per_s == {"arena": 15 * STRIDE * ranks, "pack": 5 * STRIDE * ranks}
    assert found.link_bytes_per_s == 63e9 * ranks
    assert found.step_parts == pytest.approx({"first_pass": 0.012, "repeated_passes": 0.006, "fetch": 0.002})
    assert found.pool_heat == pytest.approx(0.9)
    assert found.hottest["25%"] == pytest.approx(0.8)
    assert [layer.layer for layer in found.layers] == [str(layer) for layer in range(3, 46)]
    assert found.layers[1].fetched_per_s == 0.5 * ranks
    assert found.layers[-1].pool_share == pytest.approx(1.0)
    assert found.setup["codec"] == "w2"
    assert found.setup["version"] == "0.1.0"


def test_an_idle_interval_has_no_ratios() -> None:
    _, page = pages()
    found = figures(page, Page(page.time + 1.0, page.series))
    assert found.steps_per_s == 0
    assert found.zero_miss_ratio is None
    assert found.hit_ratio is None
    assert found.step_seconds.median is None
    assert found.step_parts == {}
    json.dumps(found.to_json(), allow_nan=False)


def test_a_server_that_started_anew_is_counted_from_zero() -> None:
    before, after = pages()
    found = figures(after, Page(after.time + 2.0, after.series))
    assert found.steps_per_s == 0
    grown = Page(before.time, tuple(one for one in after.series))
    assert figures(grown, Page(after.time, after.series)).steps_per_s == 0
    doubled = Page.parse("\n".join(f'ziggurat_steps_total{{rank="0",outcome="{o}"}} 50' for o in "ab"), 1.0)
    fewer = Page.parse('ziggurat_steps_total{rank="0",outcome="a"} 4', 3.0)
    assert figures(doubled, fewer).steps_per_s == 2.0


def test_quantiles_are_those_of_prometheus() -> None:
    buckets = {"1": 2.0, "2": 6.0, "4": 8.0, "+Inf": 10.0}
    assert quantile(0.5, buckets) == pytest.approx(1.75)
    assert quantile(0.2, buckets) == 1.0
    assert quantile(0.7, buckets) == pytest.approx(3.0)
    assert quantile(0.99, buckets) == 4.0
    assert quantile(0.5, {"1": 0.0, "+Inf": 0.0}) is None
    assert quantile(0.5, {}) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(None, "–"), (2.5e-6, "2.5 µs"), (0.0123, "12.3 ms"), (0.99999, "1 s"), (75, "75 s")],
)
def test_durations(seconds: float | None, text: str) -> None:
    assert duration(seconds) == text


# -- screen ----------------------------------------------------------------------------------------------------------


def frame(found: Figures, width: int = 80, glyphs: Glyphs = BLOCKS, **more: Any) -> list[str]:
    history = History()
    history.add(found)
    shown = io.StringIO()
    console = Console(width=width, height=24, file=shown, color_system=None, legacy_windows=False)
    console.print(Screen("http://127.0.0.1:8000/metrics", found, history, glyphs, **more))
    return shown.getvalue().rstrip("\n").split("\n")


@pytest.mark.parametrize("layers", [1, 6, 43, 61, 75, 128])
@pytest.mark.parametrize("width", [72, 80, 133, 300])
def test_the_screen_fits(layers: int, width: int) -> None:
    lines = frame(figures(*pages(8, layers)), width)
    assert 15 < len(lines) <= 24
    assert max(map(len, lines)) <= width


def test_the_screen_says_what_the_figures_say() -> None:
    text = "\n".join(frame(figures(*pages()), trouble=""))
    for words in (
        "w2 rows on cuda:0 · 43 layers × 256 experts, top 6",
        "2000/2752 rows",
        "hits 96.0 %",
        "5.0/s · 20 decode tokens/s · repeated 40.0 % · 4.0 misses each",
        "60.0 %",
        "first 60% again 30% fetch 10%",
        "20 MiB/s of the link's 58.7 GiB/s",
        "arena 15 MiB/s",
        "the pool serves 90.0 % of recent routings, at best 95.0 %",
        "hottest experts: 1% 10.0 % 5% 30.0 %",
        "errors     none",
    ):
        assert words in text, words


def test_errors_and_trouble_are_on_the_screen() -> None:
    metrics = served_metrics()
    before = Page.parse(page_text(metrics), 0.0)
    metrics.add("ziggurat_io_errors_total", 2)
    metrics.add("ziggurat_failed_tokens_total", 9)
    lines = frame(figures(before, Page.parse(page_text(metrics), 1.0)), trouble="cannot be reached: refused")
    assert "2 rows not read · 9 tokens failed" in "\n".join(lines)
    metrics.add("ziggurat_verification_failures_total", 1)
    metrics.add("ziggurat_reread_rows_total", 5)
    metrics.add("ziggurat_rebuilt_rows_total", 3, "yes")
    metrics.add("ziggurat_rebuilt_rows_total", 1, "no")
    full = frame(figures(before, Page.parse(page_text(metrics), 1.0)))
    said = "errors     2 rows not read · 1 of them damaged · 9 tokens failed · 5 read twice · 4 rebuilt"
    assert said[:79].rstrip() in "\n".join(full)
    assert lines[-1].strip() == "cannot be reached: refused"


def test_a_terminal_without_blocks_gets_ascii() -> None:
    assert glyphs_for("utf-8") is BLOCKS
    assert glyphs_for("ascii") is glyphs_for("no such encoding") is ASCII
    lines = frame(figures(*pages()), glyphs=ASCII)
    assert "".join(lines).isascii()
    assert "43 layers x 256 experts" in lines[1]


def test_the_links_speed_can_be_said() -> None:
    assert "of the link's 18.6 GiB/s" in "\n".join(frame(figures(*pages()), link=20e9))


def test_sparklines_show_small_values_and_gaps() -> None:
    assert sparkline([None, 0.0, 0.001, 0.5, 0.999, 1.0], 8, BLOCKS) == "   ▁▁▄▇█"
    assert sparkline([0.0, 1.0, 1.0], 2, ASCII) == "##"


def test_bars_and_folds() -> None:
    assert bar(0.001, 10, ASCII) == ("#", ".........")
    assert bar(2.0, 4, ASCII) == ("####", "")
    assert bar(0.0, 4, ASCII) == ("", "....")
    assert fold([1, 5, 2, 3, 4], 2) == [5, 4]
    assert fold([1, 2], 9) == [1, 2]
    assert fold([], 5) == []


# -- recordings ------------------------------------------------------------------------------------------------------


def test_a_recording_holds_what_was_scraped(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    recorder = Recorder(path, "http://x/metrics", 100.0)
    for page in pages():
        recorder.add(page)
    recorder.close()
    assert is_recording(path)
    again = read_recording(path)
    assert again.url == "http://x/metrics"
    assert figures(*again.pages).to_json() == figures(*pages()).to_json()
    cut = path.read_text(encoding="utf-8")
    path.write_text(cut + cut.splitlines()[-1][:50], encoding="utf-8")
    assert len(read_recording(path).pages) == 2


HEAD = '{"format":"ziggurat-recording","version":1}\n'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1 is not JSON"),
        ("[1]\n", "line 1 is not a JSON object"),
        ("{}\n", "is not a recording"),
        ('{"format":"ziggurat-recording","version":9}\n', "has version 9; this program reads 1"),
        (HEAD, "holds 0 scrapes"),
        (HEAD + "nonsense\n", "line 2 is not JSON"),
        (HEAD + '{"time":1}\n', "line 2: a scrape has"),
        (HEAD + '{"time":1,"samples":{"ziggurat_x":"a"}}\n', "no number"),
    ],
)
def test_files_that_are_no_recordings_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "file"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(PageError, match=message):
        read_recording(path)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving_tiers(make_packs(tmp_path_factory.mktemp("packs")), FakeModel.make()) as served:
        yield served


def test_once_as_json(url: str) -> None:
    (line,) = run(url, "--once", "--json", "--interval", "0.3").splitlines()
    found = json.loads(line)
    assert found["setup"]["experts"] == "12"
    assert len(found["layers"]) == 4
    assert found["tiers"][0]["capacity_rows"] == 24
    assert found["link_bytes_per_s"] == pytest.approx(63e9, rel=1e-3)


def test_a_recorded_run_shows_a_frame_at_the_end(url: str, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    shown = run(url, "--interval", "0.2", "--count", "3", "--record", str(path))
    assert "4 layers × 12 experts, top 3" in shown
    recorded = read_recording(path)
    assert len(recorded.pages) == 4
    times = [page.time for page in recorded.pages]
    assert times == sorted(times)
    assert recorded.pages[-1].total("ziggurat_passes_total") > 0


def test_a_server_that_is_not_there_is_named() -> None:
    port = free_port()
    with pytest.raises(CliError, match=rf"http://127\.0\.0\.1:{port}/metrics cannot be reached: .*refused"):
        run(f"127.0.0.1:{port}", "--once")


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (200, "vllm:num_requests_running 1\n", "has none of Ziggurat's metrics; is it a server started with"),
        (200, "<html></html>", "has none of Ziggurat's metrics"),
        (404, "", "answers 404"),
    ],
)
def test_a_server_of_somebody_else_is_named(status: int, text: str, message: str) -> None:
    with http_pages(lambda path: (status, text)) as host, pytest.raises(CliError, match=message):
        run(host, "--once", "--json")


def test_a_server_that_goes_away_ends_a_counted_run() -> None:
    answers = [page_text(served_metrics())]

    def answer(path: str) -> tuple[int, str]:
        return (200, answers.pop()) if answers else (503, "")

    with http_pages(answer) as host, pytest.raises(CliError, match="answers 503"):
        run(host, "--count", "2", "--interval", "0.1")


def test_the_page_is_asked_for_at_its_path() -> None:
    asked: list[str] = []

    def answer(path: str) -> tuple[int, str]:
        asked.append(path)
        return 200, page_text(served_metrics())

    with http_pages(answer) as host:
        assert fetch(host).ranks == 1
        assert fetch(f"http://{host}/own").ranks == 1
    assert asked == ["/metrics", "/own"]


@pytest.mark.parametrize("link", ["fast", "25%", "3 rows", "0"])
def test_a_link_that_is_no_number_of_bytes_is_refused(link: str) -> None:
    with pytest.raises(CliError, match="--link"):
        run("127.0.0.1:1", "--link", link)


def test_a_recording_that_cannot_be_written_is_refused(url: str, tmp_path: Path) -> None:
    with pytest.raises(CliError, match="cannot write"):
        run(url, "--once", "--record", str(tmp_path / "no" / "folder"))


class Terminal:
    """The command in a terminal of 80 x 24, as over ssh."""

    def __init__(self, *arguments: str) -> None:
        self.screen, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        command = [sys.executable, "-m", "ziggurat.integration.cli.main", "top", *arguments]
        environment = {**os.environ, "TERM": "xterm-256color", "LANG": "C.UTF-8", "PYTHONUTF8": "1"}
        for name in ("COLUMNS", "LINES", "NO_COLOR"):
            environment.pop(name, None)
        # Ctrl-C works in a terminal, also if these tests were started in the background, where it is ignored.
        self.process = subprocess.Popen(
            command,
            stdin=inside,
            stdout=inside,
            stderr=inside,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        )
        os.close(inside)
        self.seen = ""

    def wait_for(self, text: str) -> None:
        """Read until the text has been shown; fails if the command ends before."""
        found = self.seen.find(text)
        while found < 0:
            self.seen += self._read()
            found = self.seen.find(text)
        self.seen = self.seen[found + len(text) :]

    def end(self) -> str:
        """What came after; the command must have ended well."""
        while True:
            try:
                self.seen += self._read()
            except EOFError:
                break
        assert self.process.wait(60) == 0, self.seen
        os.close(self.screen)
        return self.seen

    def _read(self) -> str:
        ready, _, _ = select.select([self.screen], [], [], 60.0)
        assert ready, f"nothing for a minute: {self.seen[-2000:]}"
        try:
            data = os.read(self.screen, 1 << 16)
        except OSError:  # how a terminal says that nobody is inside any more
            data = b""
        if not data:
            raise EOFError(self.seen)
        return data.decode("utf-8", errors="replace")


def test_a_live_screen_outlives_its_server_and_ends_by_ctrl_c() -> None:
    metrics = served_metrics()
    healthy = threading.Event()
    healthy.set()

    def answer(path: str) -> tuple[int, str]:
        ten_steps(metrics)
        return (200, page_text(metrics)) if healthy.is_set() else (503, "")

    with http_pages(answer) as host:
        terminal = Terminal(host, "--interval", "0.1")
        terminal.wait_for("\x1b[?1049h")  # the screen of its own
        terminal.wait_for("43 layers × 256 experts")
        terminal.wait_for("zero-miss")
        healthy.clear()
        terminal.wait_for("answers 503")
        healthy.set()
        terminal.wait_for("Ctrl-C ends")
        os.kill(terminal.process.pid, signal.SIGINT)
        rest = terminal.end()
    after = rest.split("\x1b[?1049l")[-1]
    assert "43 layers × 256 experts" in after, "the last frame stays"
    assert "Traceback" not in rest


def test_a_counted_live_screen_ends_by_itself(url: str) -> None:
    terminal = Terminal(url, "--interval", "0.2", "--count", "2")
    terminal.wait_for("4 layers × 12 experts")
    assert "errors" in terminal.end()
