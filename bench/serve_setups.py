"""The servers that `bench/serve.py` compares, and the command lines that start them."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.served import HOST

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 32
KV_CACHE_BYTES = 2 << 30
QUARTER = 0.25

TIERS = """\
tiers:
  disk:   {{path: {packs}}}
  host:   {{size: 100%}}
  device: {{size: {pool}, device: auto}}
codecs:   {{base: bf16}}
heat:     {{path: null}}
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """coverage: share of the experts in the pool, None for a server without tiers. offload: None, `uva` or
    `prefetch`."""

    name: str
    what: str
    coverage: float | None = None
    offload: str | None = None

    def arguments(self, expert_bytes: int, layers: int) -> list[str]:
        """What this server is told beyond what all are told.

        expert_bytes: of all experts in bfloat16. layers: MoE layers of the model.
        """
        if self.offload == "uva":
            gib = (1 - QUARTER) * expert_bytes / 2**30
            return ["--cpu-offload-gb", f"{gib:.5f}", "--cpu-offload-params", "experts"]
        if self.offload == "prefetch":
            group = ["--offload-group-size", str(layers), "--offload-num-in-group", str(layers - 1)]
            return [*group, "--offload-prefetch-step", "1", "--offload-params", "experts"]
        return []

    def resident_bytes(self, expert_bytes: int, layers: int) -> int:
        """Expert bytes on the GPU; the prefetching peer keeps one layer there and a buffer for one more."""
        share = {"uva": QUARTER, "prefetch": 2 / layers}.get(self.offload or "", self.coverage or 1.0)
        return round(share * expert_bytes)


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("stock", "stock vLLM, all experts on the GPU"),
        Setup("tiers-100", "tiers, 100 % of the experts in the pool", coverage=1.0),
        Setup("tiers-25", "tiers, 25 % of the experts in the pool", coverage=QUARTER),
        Setup("uva", "stock vLLM, 75 % of the expert bytes by --cpu-offload-gb", offload="uva"),
        Setup("prefetch", "stock vLLM, all layers but one by --offload-group-size", offload="prefetch"),
    )
}


def commands(setup: Setup, model: Path, work: Path, port: int, expert_bytes: int, layers: int) -> list[str]:
    """The command line of one server. A tiers file is written into `work` if the setup needs one."""
    shared = ["--host", HOST, "--port", str(port), "--served-model-name", "demo"]
    shared += ["--max-model-len", str(MAX_MODEL_LEN), "--max-num-seqs", str(MAX_NUM_SEQS)]
    shared += ["--no-enable-prefix-caching", "--seed", "0"]
    # All servers share one GPU, so each is told its KV cache instead of taking a share of what happens to be free.
    shared += ["--gpu-memory-utilization", "0.05", "--kv-cache-memory-bytes", str(KV_CACHE_BYTES)]
    shared += setup.arguments(expert_bytes, layers)
    if setup.coverage is None:
        return [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve", str(model), *shared]
    config = work / f"{setup.name}.yaml"
    # A folder of packs for each server: two that start together would wait for each other's lock.
    packs = work / f"packs-{setup.name}"
    packs.mkdir(exist_ok=True)
    config.write_text(TIERS.format(packs=packs, pool=f"{setup.coverage:.0%}"), encoding="utf-8")
    ours = [sys.executable, "-m", "ziggurat.integration.cli.main", "serve", str(model), "-c", str(config)]
    return [*ours, "--", *shared]


def environment() -> dict[str, str]:
    """This process's environment, offline and quiet; the same for every server."""
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": HOST,
        "VLLM_NO_USAGE_STATS": "1",
    }
