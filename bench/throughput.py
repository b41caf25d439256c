"""Packing and CPU decode speed, written to bench/results/throughput.json.

    python bench/throughput.py [--only packing|decoding] [--layers N] [--experts N] [--tokens N] [--repeats N]

Packing: experts of a real size (hidden 2048, intermediate 768), against a memory copy of the same bytes in the same
run. Decode: the demo model at 100 % and 25 % coverage, beside stock vLLM. Nothing else should run meanwhile; the load
of the machine before and after is written down, and so is processor time, which other processes disturb less.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.results_io import RESULTS, provenance, read_json, write_json  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
RESULT = RESULTS / "throughput.json"
PARTS = ("packing", "decoding")


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from ziggurat.integration.determinism.environment import OFFLINE

    os.environ.update(OFFLINE)  # vLLM and OpenMP read it at import
    origin = provenance(["bench/throughput.py", *arguments])
    result = read_json(RESULT)
    result["what"] = "packing in MB (10^6 source bytes) a second, CPU decode in tokens a second"
    for part in options.parts:
        before = os.getloadavg()[0]
        measured = _measure(part, options)
        load = {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)}
        result[part] = {**measured, **origin, "load": load}
        write_json(RESULT, result)
        print(f"written: {part} in {RESULT.relative_to(ROOT)}")
    return 0


def _measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    def tell(line: str) -> None:
        print(line, flush=True)

    if part == "packing":
        from bench import packing_speed

        return packing_speed.measure(options.layers, options.experts, options.repeats, options.folder, tell)
    from bench import decode_speed

    return decode_speed.measure(MODEL, options.tokens, options.repeats, tell)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Packing and CPU decode speed.")
    parser.add_argument(
        "--only", dest="parts", action="append", choices=PARTS, help="keep the other part's old numbers"
    )
    parser.add_argument("--layers", type=int, default=2, help="layers of the synthetic checkpoint")
    parser.add_argument("--experts", type=int, default=16, help="experts a layer, 9.4 MB each in bf16")
    parser.add_argument("--tokens", type=int, default=64, help="tokens to generate a stream")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--folder", type=Path, default=None, help="where temporary checkpoints and packs go")
    options = parser.parse_args(arguments)
    options.parts = options.parts or list(PARTS)
    return options


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
