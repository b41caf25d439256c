"""Seconds until `ziggurat serve` is ready, without and with packs in place, written to bench/results/boot.json.

    python bench/boot.py [--experts N] [--repeats N] [--codec w2]

A random Qwen3-MoE whose experts outweigh everything else is served twice on 127.0.0.1: the first start packs its
experts, the second finds the packs and reads no expert from the checkpoint. Nothing else should run meanwhile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import yaml  # noqa: E402

from bench.results_io import RESULTS, provenance, write_json  # noqa: E402
from bench.served import HOST, Server, free_port  # noqa: E402
from support.checkpoints import SizeArgs, write_checkpoint  # noqa: E402

MODEL = ROOT / "bench" / "models" / "demo-moe-fp8"
RESULT = RESULTS / "boot.json"
START_SECONDS = 900.0
SIZES: SizeArgs = {"layers": 8, "hidden": 1024, "intermediate": 512, "vocab": 8192}


def main(arguments: Sequence[str]) -> int:
    options = _parse(arguments)
    from ziggurat.integration.determinism.environment import offline_environment

    origin = provenance(["bench/boot.py", *arguments])
    before = os.getloadavg()[0]
    environment = offline_environment()
    with tempfile.TemporaryDirectory(prefix="ziggurat-boot-", dir=options.folder) as name:
        folder = Path(name)
        sizes: SizeArgs = {**SIZES, "experts": options.experts}
        write_checkpoint(folder / "model", kind="qwen3", tokenizer=MODEL, **sizes)
        checkpoint = sum(path.stat().st_size for path in (folder / "model").glob("*.safetensors"))
        firsts, seconds = [], []
        for repeat in range(options.repeats):
            packs = folder / f"packs-{repeat}"
            firsts.append(_boot(folder, packs, options.codec, environment))
            seconds.append(_boot(folder, packs, options.codec, environment))
            print(f"first start {firsts[-1]:.1f} s, second {seconds[-1]:.1f} s", flush=True)
        rows = sum(path.stat().st_size for path in packs.glob("*.safetensors"))
    result: dict[str, Any] = {
        "what": "seconds until ready, without and with packs; the fastest of each counts",
        "codec": options.codec,
        "checkpoint_bytes": checkpoint,
        "pack_bytes": rows,
        "first_start_seconds": round(min(firsts), 2),
        "second_start_seconds": round(min(seconds), 2),
        "ratio": round(min(seconds) / min(firsts), 3),
        "all_first": [round(value, 2) for value in firsts],
        "all_second": [round(value, 2) for value in seconds],
        **origin,
        "load": {"before": round(before, 2), "after": round(os.getloadavg()[0], 2)},
    }
    write_json(RESULT, result)
    print(f"written: {RESULT.relative_to(ROOT)}")
    return 0


def _boot(folder: Path, packs: Path, codec: str, environment: dict[str, str]) -> float:
    config = folder / "tiers.yaml"
    tiers = {
        "tiers": {
            "disk": {"path": str(packs)},
            "host": {"size": "32 rows"},
            "device": {"size": "25%", "device": "cpu"},
        },
        "codecs": {"base": codec},
        "heat": {"path": None},
    }
    config.write_text(yaml.safe_dump(tiers), encoding="utf-8")
    port = free_port()
    command = [sys.executable, "-m", "ziggurat.integration.cli.main", "serve", str(folder / "model")]
    command += ["-c", str(config), "--", "--host", HOST, "--port", str(port), "--enforce-eager"]
    command += ["--max-model-len", "256", "--max-num-batched-tokens", "128", "--max-num-seqs", "2"]
    with Server(command, environment, port, folder / "server.log") as server:
        return server.wait_ready(START_SECONDS, lambda waited: None)


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time until ready, without and with packs.")
    parser.add_argument(
        "--experts", type=int, default=64, help="experts a layer, 25 MB each in bf16 over 8 layers"
    )
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--codec", default="w2", choices=("w2", "fp4", "bf16"))
    parser.add_argument("--folder", type=Path, default=None, help="where the checkpoint and the packs go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
