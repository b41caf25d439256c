"""Held-out loss of a demo model through the whole path: checkpoint, packs, tiers, vLLM.

    python bench/heldout_loss.py [MODEL ...] [--codecs bf16,fp4,w2] [--windows N] [--dtype auto|float32]

The procedure is the one the models were scored with when they were trained: 192 windows of 513 tokens, cross-entropy
of tokens 1 to 512 of each in nats, mean over all. vLLM computes it as prompt log-probabilities: it has the logits of
every prompt position in the engine's dtype and takes their log-softmax in float32, so that nothing but the logits
themselves is rounded. With ``--dtype auto`` they are bfloat16, as served; float32 is the arithmetic of the
reference. Rows are decoded, and experts computed, in float32 in both.

Writes bench/results/heldout_loss.json when all windows are scored. Status 1 if a loss is out of tolerance.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.heldout_text import ALL_WINDOWS, WINDOW, cut_windows, read_documents, token_stream  # noqa: E402
from bench.results_io import RESULTS, provenance, read_json, write_json  # noqa: E402

DEFAULT_MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
TEXT = ROOT / "bench" / "models" / "heldout.txt.xz"
RESULT = RESULTS / "heldout_loss.json"
CODECS = ("bf16", "fp4", "w2")
COVERAGE = "25%"
BATCH = 8


@dataclass(frozen=True, slots=True)
class Target:
    """The loss that an independent evaluation found, and how far ours may be from it, both in nats."""

    loss: float
    tolerance: float

    def holds(self, loss: float) -> bool:
        return abs(loss - self.loss) <= self.tolerance


TARGETS = {
    "demo-moe": {"bf16": Target(1.373, 0.003), "fp4": Target(1.386, 0.004), "w2": Target(1.538, 0.006)},
    "demo-moe-fp8": {"bf16": Target(1.373, 0.003), "fp4": Target(1.387, 0.004), "w2": Target(1.542, 0.006)},
}


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from ziggurat.integration.determinism.environment import OFFLINE

    os.environ.update(OFFLINE)  # vLLM and OpenMP read it at import
    origin = provenance(["bench/heldout_loss.py", *arguments])
    records: dict[str, dict[str, Any]] = {}
    failed = False
    for model in options.models:
        folder = Path(model).resolve()
        values: dict[str, Any] = {}
        for codec in options.codecs:
            record = score(folder, codec, options.windows, options.dtype)
            failed |= not _judge(folder.name, codec, record, options.windows)
            values[codec] = record
        records[_key(folder.name, options.dtype)] = {
            "model": folder.name,
            "dtype": options.dtype,
            "coverage": COVERAGE,
            "windows": options.windows,
            "predicted_tokens": options.windows * (WINDOW - 1),
            "codecs": values,
            **origin,
        }
    if options.windows == ALL_WINDOWS:
        runs = {**read_json(RESULT).get("runs", {}), **records}
        write_json(RESULT, {"what": "held-out loss in nats", "runs": dict(sorted(runs.items()))})
        print(f"written: {RESULT.relative_to(ROOT)}")
    return 1 if failed else 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Held-out loss of a demo model through packs, tiers and vLLM."
    )
    parser.add_argument(
        "models", nargs="*", default=[str(DEFAULT_MODEL)], metavar="MODEL", help="model folders"
    )
    parser.add_argument("--codecs", type=_codecs, default=CODECS, help="some of bf16,fp4,w2")
    parser.add_argument("--windows", type=int, default=ALL_WINDOWS, help="score only the first N windows")
    parser.add_argument("--dtype", choices=("auto", "float32"), default="auto", help="of the model in vLLM")
    return parser.parse_args(arguments)


def _codecs(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in CODECS:
            raise argparse.ArgumentTypeError(f"unknown codec {name!r}; choose from {', '.join(CODECS)}")
    return names


def _key(model: str, dtype: str) -> str:
    return model if dtype == "auto" else f"{model} {dtype}"


def score(folder: Path, codec: str, windows: int, dtype: str) -> dict[str, Any]:
    """Mean loss of ``folder``'s model with its experts in ``codec`` rows, a quarter of them resident."""
    from ziggurat.integration.determinism.engine import open_engine
    from ziggurat.residency.config import TiersConfig

    prompts = cut_windows(_stream(folder), windows)
    started = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="ziggurat-heldout-") as packs:
        tiers = TiersConfig.from_mapping(
            {
                "tiers": {
                    "disk": {"path": packs},
                    "host": {"size": "64 rows"},
                    "device": {"size": COVERAGE, "device": "cpu"},
                },
                "codecs": {"base": codec},
                "heat": {"path": None},
            }
        )
        with open_engine(
            folder,
            tiers,
            dtype=dtype,
            max_num_batched_tokens=BATCH * WINDOW,
            max_num_seqs=BATCH,
            enable_prefix_caching=False,
        ) as engine:
            losses: list[float] = []
            for start in range(0, windows, BATCH):
                losses += window_losses(engine.llm, prompts[start : start + BATCH])
                done = len(losses)
                mean = math.fsum(losses) / done
                print(f"{folder.name} {codec}: {done}/{windows} windows, {mean:.4f} nats", flush=True)
            seen = _tier_counts(engine.service.metrics)
    return {
        "loss": round(math.fsum(losses) / len(losses), 5),
        "seconds": round(time.monotonic() - started, 1),
        **seen,
    }


def _stream(folder: Path) -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return token_stream(
        read_documents(TEXT), lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    )


def window_losses(llm: Any, windows: Sequence[Sequence[int]]) -> list[float]:
    """Mean loss in nats of each window's tokens after the first."""
    from vllm import SamplingParams

    # Logits are there for every prompt position; the one generated token is not looked at.
    parameters = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
    prompts = [{"prompt_token_ids": list(window)} for window in windows]
    losses = []
    for window, output in zip(windows, llm.generate(prompts, parameters, use_tqdm=False), strict=True):
        found = output.prompt_logprobs
        if list(output.prompt_token_ids) != list(window) or found is None or len(found) != len(window):
            raise RuntimeError("vLLM scored another prompt than the one it was given")
        losses.append(
            -math.fsum(found[i][window[i]].logprob for i in range(1, len(window))) / (len(window) - 1)
        )
    return losses


def _tier_counts(metrics: Any) -> dict[str, Any]:
    """What shows that the tiers were at work: a run that never missed would prove nothing about them."""
    pairs = int(metrics.value("ziggurat_routed_pairs_total"))
    missed = int(metrics.value("ziggurat_missed_pairs_total"))
    rows = {
        f"rows_{source}_to_pool": int(metrics.value("ziggurat_fetched_rows_total", source, "pool"))
        for source in ("arena", "pack")
    }
    if not (pairs and missed and any(rows.values())):
        raise RuntimeError(f"the tiers were idle: {pairs} routed pairs, {missed} missed, {rows}")
    return {"routed_pairs": pairs, "missed_pairs": missed, **rows}


def _judge(model: str, codec: str, record: dict[str, Any], windows: int) -> bool:
    """Print a line, and note the target in the record; False if the loss is out of tolerance."""
    target = TARGETS.get(model, {}).get(codec)
    line = f"{model} {codec}: {record['loss']:.4f} nats in {record['seconds']:.0f} s"
    if target is None or windows != ALL_WINDOWS:
        print(f"{line} (no target for this model or number of windows)", flush=True)
        return True
    record.update(target=target.loss, tolerance=target.tolerance, ok=target.holds(record["loss"]))
    verdict = "within" if record["ok"] else "OUT OF"
    print(f"{line}, target {target.loss} ± {target.tolerance}: {verdict} tolerance", flush=True)
    return bool(record["ok"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
