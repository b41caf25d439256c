"""The demo: a trained Mixture-of-Experts model answers with a quarter of its experts in the device pool.

    make demo                      on the CPU
    python bench/demo.py --gpu     on a GPU, with CUDA graphs

Packs the model, serves it on 127.0.0.1 behind tiers, streams four completions at once and one of a long prompt, reads
/metrics, then does the same with every expert resident. Status 0 if tokens and logits are the same bit for bit.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from rich.console import Console  # noqa: E402
from rich.table import Table  # noqa: E402

from bench.captured import Comparison, Step, compare, request_id  # noqa: E402
from bench.completions import Completion, CompletionError, Prompt, call, complete_all  # noqa: E402
from bench.scrape import ROUTES, Scrape, problems, total_steps  # noqa: E402
from bench.served import HOST, Server, ServerError, free_port  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
READY_SECONDS = 240.0
ATTEMPTS = 4
# What the last step has counted on a GPU is on /metrics a moment after its answer, since nobody waits for it.
SETTLE_SECONDS = 0.5

TIERS = """\
tiers:
  # Every expert, in one pack file.
  disk:   {{path: packs}}
  # A cache over the pack in host memory.
  host:   {{size: 32 rows}}
  # What a layer can compute with.
  device: {{size: {pool}, device: {device}}}
# Rows that hold this checkpoint's weights without loss.
codecs:   {{base: bf16}}
# Nothing is remembered from one run to the next.
heat:     {{path: null}}
"""
ENGINE = ("--max-model-len", "1024", "--max-num-batched-tokens", "256", "--max-num-seqs", "8")
ON_CPU = ("--enforce-eager",)
# A server among others on one GPU: no share of whatever happens to be free.
ON_GPU = ("--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(1 << 30))
CONCURRENT = (
    Prompt(
        "a",
        "class Stack:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n",
        48,
    ),
    Prompt("b", "import argparse\n\n\ndef main():\n    parser = argparse.ArgumentParser(", 48),
    Prompt("c", "import unittest\n\n\nclass TestParser(unittest.TestCase):\n    def setUp(self):\n", 48),
    Prompt("d", "def load_data(filename):\n    with open(filename", 48),
)
# Longer than two prefill chunks of 256 tokens.
LONG = Prompt(
    "long",
    "".join(
        f'def scale_{i}(values, factor={i}):\n    """Multiply by {i}."""\n    return [factor * v for v in values]\n\n\n'
        for i in range(20)
    )
    + "def shift_",
    32,
)
BURSTS = {"four at once": CONCURRENT, "a long prompt": (LONG,)}


class DemoError(Exception):
    """The demo cannot go on."""


@dataclass(slots=True)
class Burst:
    """What was sent together: its completions and the steps that computed them."""

    completions: list[Completion]
    steps: list[Step]


@dataclass(slots=True)
class Run:
    """One server's life. pairs: routed (token, expert) pairs that all requests sent to it must have made."""

    name: str
    ready_seconds: float
    bursts: dict[str, Burst]
    page: Scrape
    pairs: int


def main() -> int:
    signal.signal(signal.SIGTERM, _stop)
    console = Console(highlight=False, soft_wrap=True)
    try:
        with tempfile.TemporaryDirectory(prefix="ziggurat-demo-") as folder:
            return _demo(console, Path(folder), gpu=sys.argv[1:] == ["--gpu"])
    except (DemoError, ServerError, CompletionError) as error:
        console.print(f"demo failed: {error}", markup=False, style="red")
        return 1
    except KeyboardInterrupt:
        return 130


def _stop(number: int, frame: FrameType | None) -> NoReturn:
    """Leave through the handlers that end the server and remove the temporary folder."""
    raise SystemExit(128 + number)


def _demo(console: Console, work: Path, *, gpu: bool) -> int:
    quarter = _write_tiers(work, "25%", gpu=gpu)
    console.rule("a quarter of the experts in the pool")
    console.print(quarter.read_text(encoding="utf-8"), markup=False)
    _pack(console, quarter)
    tiered = _run(console, "25 % resident", quarter, work, None, gpu=gpu)
    console.rule("the same, every expert resident")
    resident = _run(console, "all resident", _write_tiers(work, "100%", gpu=gpu), work, tiered, gpu=gpu)

    console.rule("result")
    console.print(_table([tiered, resident]))
    wrong = [
        f"{run.name}: {problem}" for run in (tiered, resident) for problem in problems(run.page, run.pairs)
    ]
    for line in wrong:
        console.print(f"metrics: {line}", markup=False, style="red")
    if not wrong:
        console.print("metrics: every metric of docs/metrics.md is on both pages, and the counts add up")
    tokens = all(
        [c.tokens for c in tiered.bursts[name].completions]
        == [c.tokens for c in resident.bursts[name].completions]
        for name in BURSTS
    )
    found = {name: compare(resident.bursts[name].steps, tiered.bursts[name].steps) for name in BURSTS}
    for name, comparison in found.items():
        if not comparison.identical or not comparison.same_batches:
            console.print(_explain(name, comparison), markup=False)
    logits = all(comparison.identical for comparison in found.values())
    rows = sum(comparison.rows for comparison in found.values())
    console.print(f"compared: {rows} rows of logits, every bit of every value")
    console.print(f"tokens identical: {_yes(tokens)} · logits identical: {_yes(logits)}")
    return 0 if tokens and logits and not wrong else 1


def _yes(value: bool) -> str:
    return "yes" if value else "NO"


def _explain(name: str, comparison: Comparison) -> str:
    batches = "the same batches" if comparison.same_batches else "other batches in every attempt"
    return f"{name}: {comparison.different} of {comparison.rows} rows of logits differ, computed in {batches}"


def _write_tiers(work: Path, pool: str, *, gpu: bool) -> Path:
    path = work / f"tiers-{pool.rstrip('%')}.yaml"
    text = TIERS.format(pool=pool, device="auto" if gpu else "cpu")
    path.write_text(text, encoding="utf-8")
    return path


def _ziggurat() -> str:
    command = Path(sys.executable).with_name("ziggurat")
    if not command.exists():
        raise DemoError("this Python has no ziggurat command beside it; start the demo with `make demo`")
    return str(command)


def _environment() -> dict[str, str]:
    from ziggurat.integration.determinism.environment import offline_environment

    # Development mode: only its endpoints can hold requests back until all have arrived.
    return {**offline_environment(), "VLLM_SERVER_DEV_MODE": "1"}


def _pack(console: Console, tiers: Path) -> None:
    console.print(f"$ ziggurat pack {MODEL.relative_to(ROOT)} -c {tiers.name}", style="bold")
    sys.stdout.flush()
    done = subprocess.run(
        [_ziggurat(), "pack", str(MODEL), "-c", str(tiers)], env=_environment(), check=False, timeout=600
    )
    if done.returncode != 0:
        raise DemoError(f"ziggurat pack ended with status {done.returncode}")


def _run(console: Console, name: str, tiers: Path, work: Path, reference: Run | None, *, gpu: bool) -> Run:
    port = free_port()
    capture = work / f"capture-{tiers.stem}"
    arguments = [
        *ENGINE,
        *(ON_GPU if gpu else ON_CPU),
        "--no-enable-prefix-caching",
        "--served-model-name",
        "demo",
    ]
    arguments += ["--host", HOST, "--port", str(port)]
    shown = f"ziggurat serve {MODEL.relative_to(ROOT)} -c {tiers.name} -- {' '.join(arguments)}"
    console.print(f"$ {shown}", style="bold", markup=False)
    debug = json.dumps({"capture_logits": str(capture)})
    command = [_ziggurat(), "serve", str(MODEL), "-c", str(tiers), "--debug-json", debug, "--", *arguments]
    log = work / f"{tiers.stem}.log"
    with Server(command, _environment(), port, log) as server:
        ready = _wait(console, server)
        console.print(
            f"ready after {ready:.1f} s; meanwhile: curl http://{HOST}:{port}/metrics | grep ^ziggurat_"
        )
        try:
            bursts, processed = _send_bursts(console, server, capture / "logits.rank0.npys", reference)
            time.sleep(SETTLE_SECONDS)
            page = Scrape.parse(call(port, "GET", "/metrics"))
        except CompletionError as error:
            raise server.error(str(error)) from error
    config = json.loads((MODEL / "config.json").read_text(encoding="utf-8"))
    pairs = processed * int(config["num_hidden_layers"]) * int(config["num_experts_per_tok"])
    return Run(name, ready, bursts, page, pairs)


def _wait(console: Console, server: Server) -> float:
    if console.is_terminal:
        with console.status("starting") as status:
            return server.wait_ready(
                READY_SECONDS, lambda waited: status.update(f"starting the server: {waited:.0f} s")
            )
    said = [0.0]

    def tell(waited: float) -> None:
        if waited - said[0] >= 10.0:
            said[0] = waited
            console.print(f"starting the server: {waited:.0f} s")

    return server.wait_ready(READY_SECONDS, tell)


def _send_bursts(
    console: Console, server: Server, capture: Path, reference: Run | None
) -> tuple[dict[str, Burst], int]:
    """Send every burst; repeat one whose batches were made up otherwise than the reference's. Counts all tokens."""
    bursts = {}
    processed = 0
    for name, prompts in BURSTS.items():
        for attempt in range(ATTEMPTS):
            ids = {prompt.tag: request_id(prompt.tag, attempt) for prompt in prompts}
            completions = _stream(console, server.port, name, prompts, ids, quiet=reference is not None)
            processed += sum(completion.processed_tokens for completion in completions)
            bursts[name] = Burst(completions, _steps_of(capture, set(ids.values())))
            if reference is None or compare(reference.bursts[name].steps, bursts[name].steps).same_batches:
                break
            console.print("the scheduler put these requests into other batches; sending them again")
    return bursts, processed


def _stream(
    console: Console, port: int, name: str, prompts: Sequence[Prompt], ids: Mapping[str, str], *, quiet: bool
) -> list[Completion]:
    """Send prompts together; print their text as it comes, or only how much came."""
    console.print(f"\n{name}:" if not quiet else f"{name}: ", style="bold", end="" if quiet else "\n")
    if quiet:
        completions = complete_all(port, prompts, ids, lambda tag, text: None)
        console.print(f"{sum(len(completion.tokens) for completion in completions)} tokens")
        return completions
    streams = Streams(console, prompts)
    completions = complete_all(port, prompts, ids, streams.take)
    streams.finish()
    return completions


def _steps_of(capture: Path, ids: set[str]) -> list[Step]:
    from ziggurat.integration.vllm.capture import read_capture

    return [
        step
        for step in read_capture(capture)
        if any(name_id in name for name in step.requests for name_id in ids)
    ]


class Streams:
    """Prints several streams as they come, a line at a time, each under its tag."""

    _STYLES = ("cyan", "green", "magenta", "yellow")

    def __init__(self, console: Console, prompts: Sequence[Prompt]) -> None:
        self._console = console
        self._styles = {p.tag: self._STYLES[i % len(self._STYLES)] for i, p in enumerate(prompts)}
        # The last line of the prompt is the beginning of the first line that the model completes.
        self._open = {p.tag: p.text.rpartition("\n")[2] for p in prompts}

    def take(self, tag: str, text: str) -> None:
        *lines, self._open[tag] = (self._open[tag] + text).split("\n")
        for line in lines:
            self._print(tag, line)

    def finish(self) -> None:
        for tag, line in self._open.items():
            if line:
                self._print(tag, line)

    def _print(self, tag: str, line: str) -> None:
        self._console.print(f"{tag:>4} │ {line}", style=self._styles[tag], markup=False)


def _table(runs: Sequence[Run]) -> Table:
    table = Table("", *(run.name for run in runs))
    for column in table.columns[1:]:
        column.justify = "right"
    rows = [_figures(run) for run in runs]
    for label in rows[0]:
        table.add_row(label, *(row[label] for row in rows))
    return table


def _figures(run: Run) -> dict[str, str]:
    value = run.page.value
    steps = total_steps(run.page)
    pairs = value("ziggurat_routed_pairs_total")
    figures = {
        "coverage": f"{value('ziggurat_coverage_ratio'):.0%}",
        "hit ratio": f"{value('ziggurat_hit_pairs_total') / pairs:.1%}",
        "steps": f"{steps:.0f}",
        "zero-miss steps": f"{value('ziggurat_steps_without_miss_total'):.0f}",
        "replays per step": f"{value('ziggurat_replay_passes_total') / steps:.2f}",
    }
    for source, target in ROUTES:
        moved = value("ziggurat_fetched_bytes_total", source=source, target=target)
        figures[f"{source} to {target}"] = f"{moved / 2**20:.1f} MiB"
    figures["server ready after"] = f"{run.ready_seconds:.1f} s"
    return figures


if __name__ == "__main__":
    # Children write to the same terminal; lines must not wait in a buffer.
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
