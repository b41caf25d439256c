"""Packing and CPU decode speed, written to bench/results/throughput.json.

    python bench/throughput.py [--layers N] [--experts N] [--tokens N] [--repeats N] [--folder DIR]

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

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from bench.results_io import RESULTS, provenance, write_json  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
RESULT = RESULTS / "throughput.json"


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from ziggurat.integration.determinism.environment import OFFLINE

    os.environ.update(OFFLINE)  # vLLM and OpenMP read it at import
    from bench import decode_speed, packing_speed

    origin = provenance(["bench/throughput.py", *arguments])
    load = os.getloadavg()[0]

    def tell(line: str) -> None:
        print(line, flush=True)

    packing = packing_speed.measure(options.layers, options.experts, options.repeats, options.folder, tell)
    decoding = decode_speed.measure(MODEL, options.tokens, options.repeats, tell)
    result = {
        "what": "packing in MB (10^6 source bytes) a second, CPU decode in tokens a second",
        **origin,
        "load": {"before": round(load, 2), "after": round(os.getloadavg()[0], 2)},
        "packing": packing,
        "decoding": decoding,
    }
    write_json(RESULT, result)
    print(f"written: {RESULT.relative_to(ROOT)}")
    return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Packing and CPU decode speed.")
    parser.add_argument("--layers", type=int, default=2, help="layers of the synthetic checkpoint")
    parser.add_argument("--experts", type=int, default=32, help="experts a layer, 9.4 MB each in bf16")
    parser.add_argument("--tokens", type=int, default=128, help="tokens to generate a stream")
    parser.add_argument("--repeats", type=int, default=5, help="the fastest counts")
    parser.add_argument("--folder", type=Path, default=None, help="where temporary checkpoints and packs go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
