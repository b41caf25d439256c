"""Inline misses at real sizes without a model: decode beside replay and beside the all-resident step, churn, a prompt.

    python bench/harness/inline.py [--parts decode prompt timeline churn offloaders] [--shape deepseek-v4-flash]
                                   [--layers N] [--tokens 1 8] [--coverage 50 25 19] [--routing mapped adjustable]
                                   [--hit 0.9] [--lookahead 3] [--name inline]

One process and one arena for everything, since locking 70 GiB takes a while. Coverages run the same steps, and outputs
are compared bit by bit with those of the run with every expert resident. The link is measured between the steps of
every case, by large copies from page-locked memory, since a shared host is not always as fast. Routing: `mapped` is the
recorded routing of a small model mapped onto the shape (bench/harness/mapping.py), `adjustable` sends a share --hit of
the choices to a few hot experts of each layer. With --lookahead N, N guesses a token of the next layer's experts are
fetched beside each layer (mode `ahead`): recorded with the routing, or drawn with a given --recall. With the part
`offloaders` the same steps also run under vLLM's own offloaders (bench/harness/offloaders.py). Written to `inline.json`
(with look-ahead `inline_ahead.json`, with offloaders `offloaders.json`, or as --name says) in the result folder after
each pool, so that a run that is cut short leaves what it has; churn, which has a shape of its own, to `churn.json`.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench.harness import decode, offloaders, prefill, timeline  # noqa: E402
from bench.harness.churn import churn  # noqa: E402
from bench.harness.decode import Case  # noqa: E402
from bench.harness.guesses import drawn_guesses, mapped_guesses, recall_of  # noqa: E402
from bench.harness.link import link_of  # noqa: E402
from bench.harness.mapping import mapped  # noqa: E402
from bench.harness.memory import SharedMemory  # noqa: E402
from bench.harness.routing import IdArray, Routing, adjustable  # noqa: E402
from bench.harness.rows import MemoryPack  # noqa: E402
from bench.harness.stack import Stack  # noqa: E402
from bench.results_io import provenance, results_folder, write_json  # noqa: E402
from bench.shapes import SHAPES, MoeShape  # noqa: E402
from ziggurat.kernels.lookahead import MOST_GUESSES  # noqa: E402
from ziggurat.residency.service import ExpertService  # noqa: E402

TRACE = ROOT / "bench" / "traces" / "demo_moe.npz"
GUESSES = ROOT / "bench" / "traces" / "demo_guesses.npz"
PARTS = ("decode", "prompt", "timeline", "churn", "offloaders")
_DEFAULT_PARTS = PARTS[:4]  # the last one needs vLLM
_PROMPT_COVERAGE, _TIMELINE_COVERAGE = 0.19, 0.25
_DRAWN_RECALL = 0.75  # about what routers let one guess
_HOT_SHARE = 0.09  # of a layer's experts; the hot ones fit every pool that is measured


class Session:
    """One run: its memory, what it has measured so far, and the time it has left."""

    def __init__(self, options: argparse.Namespace, origin: dict[str, Any], folder: Path) -> None:
        self._options = options
        self._began = time.monotonic()
        self._folder = folder
        self._origin = origin
        self._good = True
        self._device = torch.device(options.device)
        shape = SHAPES[options.shape]
        self._shape: MoeShape = shape.with_layers(options.layers or shape.layers)
        self._cases: list[Case] = []
        self._prompts: dict[str, prefill.Prompt] = {}
        self._prompt_stack: Stack | None = None
        self._stock: dict[str, list[offloaders.Offloaded]] = {}
        self._link = link_of(self._device)
        self.result: dict[str, Any] = {
            "what": "steps of MoE layers that fetch their own misses, beside replay and beside all experts resident",
            "shape": self._shape.name,
            "layers": self._shape.layers,
            "experts": self._shape.experts,
            "top_k": self._shape.top_k,
            "hidden": self._shape.hidden,
            "intermediate": self._shape.intermediate,
            "codec": options.codec,
            "dense_mb_per_layer": options.dense_mb,
            **({"lookahead": options.lookahead} if options.lookahead else {}),
            **origin,
        }

    def left(self) -> float:
        """Seconds."""
        return float(self._options.seconds - (time.monotonic() - self._began))

    def run(self) -> None:
        """Every part that was asked for."""
        parts = set(self._options.parts)
        if "churn" in parts:
            found = churn(self._device, self._options.codec, self._options.churn_steps, left=self.left)
            print(f"churn: {found}", flush=True)
            self._good &= found["steps_with_other_bits"] == 0
            what = "steps while rows leave the arena and come back, compared with all experts resident"
            write_json(self._folder / "churn.json", {"what": what, **found, **self._origin})
        if parts - {"churn"}:
            self._shared()

    def _shared(self) -> None:
        """The parts that need the large pool."""
        options, shape = self._options, self._shape
        pack = MemoryPack(shape, options.codec, options.distinct)
        self.result |= {"row_bytes": pack.header.stride, "distinct_rows": pack.distinct}
        self._cases = [self._case(tokens, kind) for tokens in options.tokens for kind in options.routing]
        most = max(options.tokens)
        if "prompt" in options.parts:
            routing = prefill.prompt_routing(TRACE, shape, options.prompt_tokens)
            self._prompt_stack = Stack(routing, shape.hidden, self._device)
            most = max(most, options.prompt_tokens)
        began = time.monotonic()
        print(f"pool and arena: {shape.rows} rows of {pack.header.stride} bytes", flush=True)
        coverages = [percent / 100 for percent in sorted(options.coverage, reverse=True)]
        with SharedMemory(shape, pack, self._device, most) as memory:
            self.result["memory_s"] = round(time.monotonic() - began, 1)
            print(f"pool and arena after {self.result['memory_s']} s", flush=True)
            decode.measure(
                memory,
                self._cases if "decode" in options.parts else [],
                coverages,
                left=self.left,
                done=self.save,
                visit=self._visit,
                modes=options.modes,
                lookahead=options.lookahead,
                link=self._link,
            )
            if "offloaders" in options.parts:
                offloaders.measure(
                    memory,
                    self._cases,
                    coverages,
                    self._stock,
                    left=self.left,
                    done=self.save,
                    link=self._link,
                )
            if "timeline" in options.parts and self._device.type == "cuda":
                self._timelines(memory)
        self.save()

    def _case(self, tokens: int, kind: str) -> Case:
        options, shape = self._options, self._shape
        steps, warm = (
            (options.steps, options.warm) if tokens == 1 else (options.batch_steps, options.batch_warm)
        )
        if kind == "mapped":
            routing = mapped(GUESSES if options.lookahead else TRACE, shape, tokens, steps + warm)
        else:
            hot = max(shape.top_k, round(shape.experts * _HOT_SHARE))
            routing = adjustable(
                steps + warm, shape.layers, shape.experts, shape.top_k, tokens, hit=options.hit, hot=hot
            )
        guesses = self._guesses(routing, kind) if options.lookahead else None
        stack = Stack(
            routing, shape.hidden, self._device, dense_bytes=round(options.dense_mb * 1e6), guesses=guesses
        )
        return Case(f"{kind} M={tokens}", routing, warm, stack, recall=recall_of(guesses, routing))

    def _guesses(self, routing: Routing, kind: str) -> IdArray:
        options = self._options
        if kind == "mapped" and options.recall is None:
            return mapped_guesses(GUESSES, self._shape, routing.tokens, routing.steps, options.lookahead)
        recall = _DRAWN_RECALL if options.recall is None else options.recall
        return drawn_guesses(routing, options.lookahead, recall)

    def _visit(self, service: ExpertService, mode: str, coverage: float) -> None:
        """What is measured on a service that is there anyway."""
        full = mode == "auto"
        if self._prompt_stack is not None and (full or (mode, coverage) == (decode.INLINE, _PROMPT_COVERAGE)):
            self._prompt(service, full)

    def _timelines(self, memory: SharedMemory) -> None:
        """One step of the first case in each of three services. Behind everything that is timed: once the profiler has
        run in a process, each launch of a graph takes longer, by a tenth of a millisecond."""
        first, rows = self._cases[0], self._shape.rows
        services = {
            "resident": (rows, "auto"),
            "resident, admitting": (rows, decode.INLINE),
            f"inline at {_TIMELINE_COVERAGE:.0%}": (
                decode.slots_of(memory, _TIMELINE_COVERAGE),
                decode.INLINE,
            ),
        }
        for name, (slots, mode) in services.items():
            with memory.service(slots, mode) as service:
                found = timeline.profiled(service, first.stack, first.routing, first.warm)
            said = timeline.summary(found, self.result["row_bytes"])
            self.result.setdefault("timeline", {})[name] = {"routing": first.label, **said}
            print(
                f"timeline, {name}: {said['span_us']} us, gathers alone {said['gather_alone_us']} us",
                flush=True,
            )

    def _prompt(self, service: ExpertService, full: bool) -> None:
        assert self._prompt_stack is not None
        if full:
            self._prompts["resident"] = prefill.serve_prompt(service, self._prompt_stack, self._link)
            return
        case = self._hits_case()
        hits = prefill.hit_rates(service, case.stack, case.routing, case.warm, self._prompt_stack, self._link)
        streamed = hits.pop("prompt")
        found = prefill.report(self._prompts["resident"], streamed, hits, self._best())
        self.result["prompt"] = {"coverage": _PROMPT_COVERAGE, **found}
        print(f"prompt: {self.result['prompt']}", flush=True)

    def _hits_case(self) -> Case:
        """One decoded sequence, as many steps as hits are counted over."""
        warm = self._options.warm
        routing = mapped(TRACE, self._shape, 1, warm + 2 * prefill.HITS_OVER)
        return Case("hits", routing, warm, Stack(routing, self._shape.hidden, self._device))

    def _best(self) -> float | None:
        return None if self._link is None else self._link.best

    def save(self) -> None:
        """Write what there is."""
        best = self._best()
        self.result["link_gb_per_s"] = best
        if self._link is not None and self._link.samples:
            self.result["slowest_link_gb_per_s"] = min(self._link.samples)
        stride = self.result.get("row_bytes", 0)
        self.result["cases"] = [decode.report(case, stride, self._shape.rows, best) for case in self._cases]
        for case, said in zip(self._cases, self.result["cases"], strict=True):
            if case.resident is not None and case.label in self._stock:
                said["stock"] = offloaders.report(self._stock[case.label], case.resident, stride, best)
        self.result["seconds"] = round(time.monotonic() - self._began, 1)
        write_json(self._folder / f"{self._options.name}.json", self.result)

    def good(self) -> bool:
        """Whether every comparison of bits came out right."""
        said = self.result
        return (
            all(decode.all_same(case) for case in said.get("cases", ()))
            and all(one["same_bits"] for case in said.get("cases", ()) for one in case.get("stock", ()))
            and self._good
            and said.get("prompt", {}).get("same_bits", True)
        )


def main(arguments: Sequence[str]) -> int:
    began = time.monotonic()
    options = _parse(arguments)
    if "offloaders" in options.parts:
        try:
            offloaders.check_vllm()
        except offloaders.OffloadersMissingError as error:
            print(f"inline: {error}", file=sys.stderr)
            return 1
    logging.basicConfig(format="%(message)s")
    logging.getLogger("ziggurat.residency.placement").setLevel(logging.INFO)  # how far locking memory is
    origin = provenance(["bench/harness/inline.py", *arguments], at=options.commit)
    device = torch.device(options.device)
    gpu = origin["machine"].get("gpu") if device.type == "cuda" else None
    if device.type == "cuda":
        torch.cuda.set_device(device)
    session = Session(options, origin, options.results or results_folder(gpu))
    session.run()
    for case in session.result.get("cases", ()):
        print(decode.table(case), flush=True)
        if "stock" in case:
            print(offloaders.table(case["stock"]), flush=True)
    print(f"link {session.result.get('link_gb_per_s')} GB/s, {time.monotonic() - began:.1f} s", flush=True)
    return 0 if session.good() else 1


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(_DEFAULT_PARTS))
    parser.add_argument("--shape", choices=sorted(SHAPES), default="deepseek-v4-flash")
    parser.add_argument("--layers", type=int, default=None, help="default: all of the model's")
    parser.add_argument("--codec", choices=("w2", "fp4", "bf16"), default="w2")
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 8], help="sequences decoded together")
    parser.add_argument(
        "--coverage", type=float, nargs="+", default=[50, 25, 19], help="percent of the experts"
    )
    parser.add_argument(
        "--modes",
        nargs="+",
        choices=decode.MODES,
        default=None,
        help=f"default: {decode.INLINE} and {decode.REPLAY}, with --lookahead {decode.AHEAD} instead of the latter",
    )
    parser.add_argument(
        "--lookahead", type=int, default=0, help="guesses a token of the next layer's experts, fetched ahead"
    )
    parser.add_argument(
        "--recall",
        type=float,
        default=None,
        help="draw guesses each of which is right with this probability, instead of recorded ones",
    )
    parser.add_argument(
        "--routing", nargs="+", choices=("mapped", "adjustable"), default=["mapped", "adjustable"]
    )
    parser.add_argument(
        "--hit", type=float, default=0.9, help="share of the hot experts in adjustable routing"
    )
    parser.add_argument("--warm", type=int, default=64, help="steps that seed the tiers, for one token")
    parser.add_argument("--steps", type=int, default=96, help="measured steps, for one token")
    parser.add_argument("--batch-warm", type=int, default=24, help="the same for more tokens")
    parser.add_argument("--batch-steps", type=int, default=32, help="the same for more tokens")
    parser.add_argument("--prompt-tokens", type=int, default=8192)
    parser.add_argument("--churn-steps", type=int, default=10_000)
    parser.add_argument(
        "--dense-mb", type=float, default=0.0, help="megabytes of other weights read in each layer"
    )
    parser.add_argument("--distinct", type=int, default=512, help="different rows; all experts share them")
    parser.add_argument("--seconds", type=float, default=280.0, help="begin no further pool after that")
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--name", default=None, help="of the result file, without its suffix")
    parser.add_argument("--results", type=Path, default=None, help="folder; default: one named after the GPU")
    parser.add_argument("--commit", default=None, help="what to record where there is no git history")
    options = parser.parse_args(arguments)
    if "offloaders" in options.parts and "decode" not in options.parts:
        parser.error("--parts offloaders needs decode, whose steps are compared with theirs")
    options.name = options.name or _name(options)
    options.modes = options.modes or [decode.INLINE, decode.AHEAD if options.lookahead else decode.REPLAY]
    if not 0 <= options.lookahead <= MOST_GUESSES or (
        decode.AHEAD in options.modes and not options.lookahead
    ):
        parser.error(f"--lookahead is 1 to {MOST_GUESSES} guesses a token for mode {decode.AHEAD}")
    if options.recall is not None and not 0 <= options.recall <= 1:
        parser.error("--recall is between 0 and 1")
    positive = (
        options.steps,
        options.batch_steps,
        options.churn_steps,
        options.prompt_tokens,
        *options.tokens,
    )
    if min(positive) < 1 or min(options.warm, options.batch_warm) < 1 or not 0 <= options.hit <= 1:
        parser.error("numbers of steps and tokens are positive, --hit is between 0 and 1")
    if not all(0 < percent < 100 for percent in options.coverage):
        parser.error("--coverage is above 0 and below 100; all resident is always measured")
    return options


def _name(options: argparse.Namespace) -> str:
    if "offloaders" in options.parts:
        return "offloaders"
    return "inline_ahead" if options.lookahead else "inline"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
