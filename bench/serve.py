"""`vllm serve` on a GPU: tiers beside stock vLLM and beside its two ways of offloading, one model, one run.

    python bench/serve.py [--servers stock tiers-100 inline-25 replay-25 uva ...] [--at-once 5] [--seconds N]

The demo model in bfloat16 (made from `bench/models` at the start), CUDA graphs on, greedy. A group of servers is
started together and one at a time is sent requests while the others idle; then the next group. Rounds go over the
servers in turn, and a ratio is the median of the rounds' ratios to stock vLLM. The offloading peers hold as many expert
bytes on the GPU as the coverage that they are compared with, or more. Written to `serve.json` in the result folder
after each group.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.completions import CompletionError, call  # noqa: E402
from bench.results_io import provenance, results_folder, write_json  # noqa: E402
from bench.scrape import Scrape, total_steps  # noqa: E402
from bench.serve_setups import SETUPS, commands, environment  # noqa: E402
from bench.served import Server, ServerError, free_port  # noqa: E402
from bench.serving_load import Load, prompts_from, run_load  # noqa: E402
from bench.serving_profile import profiler_arguments, summarize  # noqa: E402
from bench.synthetic import write_bf16_copy  # noqa: E402
from ziggurat.stores.checkpoint import Checkpoint  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
HELDOUT = ROOT / "bench" / "models" / "heldout.txt.xz"
READY_SECONDS = 240.0
STOCK = "stock"
PROFILED = (STOCK, "tiers-100", "inline-25")
PROFILED_TOKENS = 48


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    began = time.monotonic()
    origin = provenance(["bench/serve.py", *arguments], at=options.commit)
    loads = (Load(1, options.single_tokens), Load(options.streams, options.stream_tokens))
    path = (options.results or results_folder(origin["machine"].get("gpu"))) / "serve.json"
    with tempfile.TemporaryDirectory(prefix="ziggurat-serve-") as name:
        work = Path(name)
        model = work / "demo"
        write_bf16_copy(MODEL, model)
        bench = Bench(model, work, loads, options)
        for group in groups(options.servers, options.at_once):
            if time.monotonic() - began > options.seconds:
                print(f"no time left for {', '.join(group)}", flush=True)
                bench.skipped += group
                continue
            bench.run(group)
            result = {**bench.result(), **origin}
            write_json(path, result)
        print(table(result))
    if options.logs is not None:
        bench.save_logs(options.logs)
    return 0 if len(bench.measured) == len(options.servers) else 1


def groups(names: Sequence[str], at_once: int) -> list[list[str]]:
    """The servers in order, so many at a time."""
    return [list(names[first : first + at_once]) for first in range(0, len(names), at_once)]


class Bench:
    """Starts servers, measures them in turn, and keeps what they did. A server that fails is noted, not fatal."""

    def __init__(self, model: Path, work: Path, loads: Sequence[Load], options: argparse.Namespace) -> None:
        self.measured: dict[str, dict[str, Any]] = {}
        self.failures: dict[str, str] = {}
        self.skipped: list[str] = []
        self._logs: dict[str, str] = {}
        self._model = model
        self._work = work
        self._loads = loads
        self._rounds = options.rounds
        self._profiled = PROFILED if options.profile else ()
        self._prompts = prompts_from(HELDOUT, max(load.streams for load in loads))
        self._tokens: dict[str, list[int]] = {}
        with Checkpoint.open(model) as checkpoint:
            self._layers = len(checkpoint.layer_ids)
            weights = 3 * checkpoint.experts * checkpoint.hidden * checkpoint.intermediate
            self._expert_bytes = 2 * self._layers * weights

    def run(self, names: Sequence[str]) -> None:
        """One group of servers, up at the same time."""
        with contextlib.ExitStack() as stack:
            servers = {}
            for name in names:
                port = free_port()
                command = commands(
                    SETUPS[name], self._model, self._work, port, self._expert_bytes, self._layers
                )
                if name in self._profiled:
                    command += profiler_arguments(self._traces(name))
                log = self._work / f"{name}.log"
                servers[name] = stack.enter_context(Server(command, environment(), port, log))
            ready = {name: self._ready(name, server) for name, server in servers.items()}
            alive = {name: server for name, server in servers.items() if ready[name] is not None}
            for name, server in alive.items():
                self._guarded(name, partial(self._warm_up, name, server, ready[name]))
            for number in range(self._rounds):
                for name, server in alive.items():
                    if name not in self.failures:
                        self._guarded(name, partial(self._round, name, server, number))
            for name, server in alive.items():
                if name in self._profiled and name in self.measured:
                    self.measured[name]["profile"] = self._profile(name, server)
            for name, server in servers.items():
                self._logs[name] = server.tail(400)

    def _ready(self, name: str, server: Server) -> float | None:
        try:
            seconds = server.wait_ready(READY_SECONDS, lambda waited: None)
        except ServerError as error:
            self._fail(name, str(error))
            return None
        print(f"{name}: ready after {seconds:.0f} s", flush=True)
        return seconds

    def _guarded(self, name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except (CompletionError, KeyError) as error:
            self._fail(name, f"{type(error).__name__}: {error}")

    def _fail(self, name: str, why: str) -> None:
        self.failures[name] = why[-3000:]
        self.measured.pop(name, None)
        print(f"{name}: failed\n{why[-3000:]}", flush=True)

    def _warm_up(self, name: str, server: Server, ready: float | None) -> None:
        # Twice what a round does: kernels that vLLM compiles when a batch of some size comes for the first time stop it
        # for a second.
        for load in (*self._loads, *self._loads):
            run_load(server.port, load, self._prompts)
        self.measured[name] = {
            "ready_s": round(ready or 0.0, 1),
            "expert_bytes_on_gpu": SETUPS[name].resident_bytes(self._expert_bytes, self._layers),
            "tokens_per_s": {str(load.streams): [] for load in self._loads},
        }
        if SETUPS[name].coverage is not None:
            self.measured[name]["before"] = _counters(server)

    def _round(self, name: str, server: Server, number: int) -> None:
        for load in self._loads:
            started = time.perf_counter()
            tokens = run_load(server.port, load, self._prompts)
            seconds = time.perf_counter() - started
            made = sum(len(one) for one in tokens)
            self.measured[name]["tokens_per_s"][str(load.streams)].append(round(made / seconds, 1))
            if load.streams == 1:
                self._tokens.setdefault(name, tokens[0])
        if SETUPS[name].coverage is not None and number == self._rounds - 1:
            before = self.measured[name].pop("before")
            after = _counters(server)
            self.measured[name]["tiers"] = {key: after[key] - before[key] for key in after}

    def _traces(self, name: str) -> Path:
        return self._work / f"traces-{name}"

    def _profile(self, name: str, server: Server) -> dict[str, Any]:
        """One stream under the profiler, after everything was measured; what was measured stays if this fails."""
        load = Load(1, PROFILED_TOKENS)
        try:
            call(server.port, "POST", "/start_profile")
            run_load(server.port, load, self._prompts)
            call(server.port, "POST", "/stop_profile")
            return summarize(self._traces(name), load.tokens)
        except (CompletionError, OSError, ValueError) as error:
            return {"failed": str(error)[:500]}

    def result(self) -> dict[str, Any]:
        """What goes into the result file."""
        stock = self.measured.get(STOCK)
        for name, found in self.measured.items():
            found.pop("before", None)
            found["what"] = SETUPS[name].what
            found["arguments"] = SETUPS[name].arguments(self._expert_bytes, self._layers)
            found["median_tokens_per_s"] = {
                n: round(median(values), 1) for n, values in found["tokens_per_s"].items() if values
            }
            if stock is not None:
                found["ratio_to_stock"] = _ratios(found["tokens_per_s"], stock["tokens_per_s"])
            replay = self.measured.get(name.replace("inline-", "replay-"))
            if name.startswith("inline-") and replay is not None:
                found["ratio_to_replay"] = _ratios(found["tokens_per_s"], replay["tokens_per_s"])
        return {
            "what": "generated tokens a second of vLLM servers, prefill of the prompts included",
            "model": MODEL.name,
            "loads": [{"streams": load.streams, "tokens": load.tokens} for load in self._loads],
            "rounds": self._rounds,
            "expert_bytes": self._expert_bytes,
            "servers": self.measured,
            "failures": self.failures,
            "skipped": self.skipped,
            "tiers_gave_the_same_tokens": self._same_tokens(),
        }

    def _same_tokens(self) -> bool | None:
        """Whether all servers with the same rows gave the same tokens; None if none can be compared."""
        by_codec: dict[str, list[list[int]]] = {}
        for name in self.measured:
            if SETUPS[name].coverage is not None and name in self._tokens:
                by_codec.setdefault(SETUPS[name].codec, []).append(self._tokens[name])
        compared = [one for one in by_codec.values() if len(one) > 1]
        return all(tokens == one[0] for one in compared for tokens in one) if compared else None

    def save_logs(self, path: Path) -> None:
        """The end of every server's log, in one file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        text = "\n".join(f"==== {name}\n{log}" for name, log in self._logs.items())
        path.write_text(text + "\n", encoding="utf-8")


def _ratios(mine: dict[str, list[float]], stock: dict[str, list[float]]) -> dict[str, float]:
    """Median over rounds of mine / stock, by number of streams."""
    return {
        n: round(median(a / b for a, b in zip(values, stock[n], strict=False)), 4)
        for n, values in mine.items()
        if values and stock[n]
    }


def _counters(server: Server) -> dict[str, float]:
    """What the tiers have counted so far."""
    page = Scrape.parse(call(server.port, "GET", "/metrics"))
    names = ("routed_pairs", "missed_pairs", "passes", "steps_without_miss")
    found = {name: page.value(f"ziggurat_{name}_total") for name in names}
    found["steps"] = total_steps(page)
    found["bytes_to_pool"] = sum(
        page.value("ziggurat_fetched_bytes_total", source=source, target="pool")
        for source in ("arena", "pack")
    )
    return found


def table(result: dict[str, Any]) -> str:
    """The result as lines of text."""
    streams = [str(load["streams"]) for load in result["loads"]]
    head = "".join(f"{f'{n} stream(s)':>15}{'of stock':>10}" for n in streams)
    lines = [f"{'server':<14}{'ready s':>8}{'MB on GPU':>11}{head}{'0-miss':>8}{'passes':>8}"]
    for name, found in result["servers"].items():
        cells = "".join(
            f"{found['median_tokens_per_s'].get(n, 0.0):>15.1f}{found.get('ratio_to_stock', {}).get(n, 0.0):>10.3f}"
            for n in streams
        )
        tiers = found.get("tiers")
        steps = max(1.0, tiers["steps"]) if tiers else 1.0
        more = f"{tiers['steps_without_miss'] / steps:>8.1%}{tiers['passes'] / steps:>8.2f}" if tiers else ""
        if "ratio_to_replay" in found:
            told = ", ".join(f"{n}: {ratio:.2f}" for n, ratio in found["ratio_to_replay"].items())
            more += f"  of replay {told}"
        lines.append(
            f"{name:<14}{found['ready_s']:>8.0f}{found['expert_bytes_on_gpu'] / 1e6:>11.1f}{cells}{more}"
        )
    for name, found in result["servers"].items():
        if "span_us" in found.get("profile", {}):
            profile = found["profile"]
            top = ", ".join(f"{one['name']} {one['us']:.1f}" for one in profile["top"][:6])
            lines.append(
                f"{name}: {profile['span_us']:.0f} us a token traced, {profile['busy_us']:.0f} busy, "
                f"{profile['activities']:.0f} activities: {top}"
            )
    lines += [f"{name}: {why.splitlines()[0]}" for name, why in result["failures"].items()]
    lines.append(f"the tiers gave the same tokens: {result['tiers_gave_the_same_tokens']}")
    return "\n".join(lines)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Serving speed on a GPU, beside stock vLLM.")
    parser.add_argument("--servers", nargs="+", choices=list(SETUPS), default=list(SETUPS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--single-tokens", type=int, default=384, help="generated by the single stream")
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--stream-tokens", type=int, default=128, help="generated by each of the streams")
    parser.add_argument("--at-once", type=int, default=5, help="servers that are up at the same time")
    parser.add_argument("--seconds", type=float, default=900.0, help="begin no further group after that")
    parser.add_argument("--profile", action="store_true", help="trace one stream of some servers at the end")
    parser.add_argument("--logs", type=Path, default=None, help="file for the ends of the servers' logs")
    parser.add_argument("--results", type=Path, default=None, help="folder; default: one named after the GPU")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    if options.at_once < 1:
        parser.error("--at-once is at least 1")
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
