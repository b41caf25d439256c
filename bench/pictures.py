"""Makes the pictures in docs/images: what `ziggurat top` and `ziggurat report` look like.

    python bench/pictures.py [--seconds 60] [--keep FOLDER]

A service on the CPU runs steps with the routing of bench/traces/demo_moe.npz, its layers repeated to 24, over small
random rows, most of them in the pool; `ziggurat top --record` watches it, `ziggurat report` makes a page of the
recording, and Chromium (the package `chromium`, or any of its kin on the PATH) takes the picture.
"""

from __future__ import annotations

import argparse
import io
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402
from PIL import Image  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.terminal_theme import MONOKAI  # noqa: E402

from bench.harness.measure import Tiers  # noqa: E402
from bench.harness.routing import recorded  # noqa: E402
from bench.harness.rows import MemoryPack  # noqa: E402
from bench.harness.stack import Forward, Stack  # noqa: E402
from bench.served import free_port  # noqa: E402
from bench.shapes import MoeShape  # noqa: E402
from ziggurat.integration.observability.endpoint import serve_metrics  # noqa: E402
from ziggurat.integration.observability.figures import figures  # noqa: E402
from ziggurat.integration.observability.recording import Recording, read_recording  # noqa: E402
from ziggurat.integration.observability.screen import History, Screen  # noqa: E402
from ziggurat.kernels.codecs.registry import get_codec  # noqa: E402
from ziggurat.residency.factory import open_service  # noqa: E402
from ziggurat.residency.geometry import ServiceGeometry  # noqa: E402
from ziggurat.residency.service import ExpertService, StepTokens  # noqa: E402

IMAGES = ROOT / "docs" / "images"
REPEATED = 4
SEQUENCES = 1
CODEC = "bf16"
HIDDEN, INTERMEDIATE = 64, 64
POOL, ARENA = 0.85, 0.5
"""Parts of the experts."""
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
WINDOW = (1240, 2060)
MOST_BYTES = 200_000


class PictureError(Exception):
    """A picture cannot be made."""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description="Make the pictures in docs/images.")
    parser.add_argument("--seconds", type=int, default=60, help="how long the service is watched")
    parser.add_argument("--keep", type=Path, help="leave recording and page in this folder")
    options = parser.parse_args(arguments)
    try:
        with tempfile.TemporaryDirectory(prefix="ziggurat-pictures-") as scratch:
            work = options.keep or Path(scratch)
            work.mkdir(parents=True, exist_ok=True)
            make(work, options.seconds)
    except PictureError as error:
        print(f"pictures: {error}", file=sys.stderr)
        return 1
    return 0


def make(work: Path, seconds: int) -> None:
    """Record, then draw. PictureError if there is no browser, before anything is recorded."""
    browser = find_browser()
    recording, page = work / "recording.jsonl", work / "report.html"
    with serving(work) as url:
        _ziggurat(
            "top", url, "--json", "--interval", "1", "--count", str(seconds), "--record", str(recording)
        )
    _ziggurat("report", str(recording), "-o", str(page))
    IMAGES.mkdir(parents=True, exist_ok=True)
    (IMAGES / "top.svg").write_text(capture(read_recording(recording)), encoding="utf-8")
    screenshot(browser, page, IMAGES / "report.png")
    for name in ("top.svg", "report.png"):
        print(f"docs/images/{name}: {(IMAGES / name).stat().st_size / 1e3:.0f} kB")


def find_browser() -> str:
    """The first Chromium on the PATH."""
    found = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if found is None:
        raise PictureError(
            f"none of {', '.join(BROWSERS)} is on the PATH; `apt-get install chromium` brings one"
        )
    return found


@contextmanager
def serving(work: Path) -> Iterator[str]:
    """The service at work; yields the URL of its metrics."""
    routing = recorded(ROOT / "bench" / "traces" / "demo_moe.npz", SEQUENCES, repeat=REPEATED)
    shape = MoeShape("demo", routing.layers, routing.experts, routing.top_k, HIDDEN, INTERMEDIATE)
    pack = MemoryPack(shape, CODEC, routing.experts)
    rows = shape.layers * shape.experts
    tiers = Tiers(round(rows * POOL), round(rows * ARENA), torch.device("cpu"), SEQUENCES, {"mode": "replay"})
    geometry = ServiceGeometry(
        shape.layers, shape.experts, shape.top_k, shape.hidden, shape.intermediate, tuple(range(shape.layers))
    )
    config = tiers.config(work, CODEC)
    service = open_service(config, geometry, pack, get_codec(CODEC), place=tiers.place)
    stack = Stack(routing, shape.hidden, torch.device("cpu"))
    port, done = free_port(), threading.Event()
    worker = threading.Thread(target=_run, args=(service, stack, routing.steps, done))
    stop = serve_metrics(service.metrics, 0, port)
    worker.start()
    try:
        yield f"http://127.0.0.1:{port}/metrics"
    finally:
        done.set()
        worker.join()
        stop()
        service.close()


def _run(service: ExpertService, stack: Stack, steps: int, done: threading.Event) -> None:
    forward = Forward(stack, service.moe)
    torch.set_num_threads(1)
    step = 0
    while not done.is_set():
        stack.load(step % steps)
        service.run_step(forward, StepTokens(stack.tokens))
        step += 1


def _ziggurat(*arguments: str) -> None:
    command = [sys.executable, "-m", "ziggurat.integration.cli.main", *arguments]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise PictureError(f"ziggurat {arguments[0]}: {done.stderr.strip()}")


def capture(recording: Recording) -> str:
    """The screen of `ziggurat top` at 80 columns after the whole recording, as an SVG that loads nothing."""
    history = History()
    for before, after in pairwise(recording.pages):
        shown = figures(before, after)
        history.add(shown)
    console = Console(
        record=True, width=80, file=io.StringIO(), force_terminal=True, color_system="truecolor"
    )
    console.print(Screen(recording.url, shown, history))
    text = console.export_svg(title="ziggurat top", theme=MONOKAI, unique_id="top")
    # Rich would have the browser fetch a font.
    text = re.sub(r"@font-face\s*{[^}]*}\s*", "", text)
    return re.sub(r"[ \t]+\n", "\n", text).rstrip() + "\n"


def screenshot(browser: str, page: Path, target: Path) -> None:
    """A picture of a page, in few colours, cut below its end."""
    with tempfile.TemporaryDirectory(prefix="ziggurat-browser-") as scratch:
        raw = Path(scratch) / "raw.png"
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={scratch}/profile",
            f"--window-size={WINDOW[0]},{WINDOW[1]}",
            f"--screenshot={raw}",
            page.resolve().as_uri(),
        ]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if not raw.is_file():
            raise PictureError(f"{Path(browser).name} made no picture: {done.stderr.strip()[-300:]}")
        with Image.open(raw) as image:
            colours = image.convert("RGB").quantize(128, dither=Image.Dither.NONE)
            colours.save(target, optimize=True)
    if target.stat().st_size > MOST_BYTES:
        raise PictureError(f"{target.name} has {target.stat().st_size} bytes, more than {MOST_BYTES}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
