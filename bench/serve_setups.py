"""The servers that `bench/serve.py` compares, and the command lines that start them."""

from __future__ import annotations

import math
import os
import sys
from dataclasses import dataclass
from pathlib import Path

from bench.served import HOST

MAX_MODEL_LEN = 1024
MAX_NUM_SEQS = 32
KV_CACHE_BYTES = 2 << 30
HALF, QUARTER = 0.5, 0.25
_BITS = {"bf16": 16.0, "w2": 2.25}  # of a weight

TIERS = """\
tiers:
  disk:   {{path: {packs}}}
  host:   {{size: 100%}}
  device: {{size: {pool}, device: auto}}
codecs:   {{base: {codec}}}
miss:     {{mode: {miss}}}
heat:     {{path: null}}
"""


@dataclass(frozen=True, slots=True)
class Setup:
    """coverage: share of the experts in the pool, None for a server without tiers. offload: None, `uva` or
    `prefetch`; what they hold on the GPU is at least `resident` of the expert bytes. codec: of the rows. miss: mode."""

    name: str
    what: str
    coverage: float | None = None
    offload: str | None = None
    resident: float = QUARTER
    codec: str = "bf16"
    miss: str = "auto"

    def arguments(self, expert_bytes: int, layers: int) -> list[str]:
        """What this server is told beyond what all are told.

        expert_bytes: of all experts in bfloat16. layers: MoE layers of the model.
        """
        if self.offload == "uva":
            gib = (1 - self.resident) * expert_bytes / 2**30
            return ["--cpu-offload-gb", f"{gib:.5f}", "--cpu-offload-params", "experts"]
        if self.offload == "prefetch":
            group = ["--offload-group-size", str(layers)]
            group += ["--offload-num-in-group", str(layers - self._kept_layers(layers))]
            return [*group, "--offload-prefetch-step", "1", "--offload-params", "experts"]
        return []

    def _kept_layers(self, layers: int) -> int:
        """Layers that the prefetching peer keeps: with its buffer for one more they are at least `resident`."""
        return max(1, math.ceil(self.resident * layers) - 1)

    def resident_bytes(self, expert_bytes: int, layers: int) -> int:
        """Expert bytes on the GPU, scales included."""
        kept = (self._kept_layers(layers) + 1) / layers
        share = {"uva": self.resident, "prefetch": kept}.get(self.offload or "", self.coverage or 1.0)
        return round(share * expert_bytes * _BITS[self.codec] / _BITS["bf16"])


def _tiers(percent: int, miss: str, codec: str = "bf16") -> Setup:
    tail = "" if codec == "bf16" else f"-{codec}"
    how = {"auto": ""}.get(miss, f", misses {miss}")
    what = f"tiers, {codec} rows, {percent} % of the experts in the pool{how}"
    name = f"tiers-{percent}" if miss == "auto" else f"{miss}-{percent}"
    return Setup(f"{name}{tail}", what, coverage=percent / 100, codec=codec, miss=miss)


SETUPS = {
    setup.name: setup
    for setup in (
        Setup("stock", "stock vLLM, all experts on the GPU"),
        _tiers(100, "auto"),
        _tiers(100, "auto", "w2"),
        *(
            _tiers(percent, miss, codec)
            for codec in ("bf16", "w2")
            for percent in (50, 25)
            for miss in ("inline", "replay")
        ),
        Setup("uva", "stock vLLM, 75 % of the expert bytes by --cpu-offload-gb", offload="uva"),
        Setup(
            "uva-50", "stock vLLM, 50 % of the expert bytes by --cpu-offload-gb", offload="uva", resident=HALF
        ),
        Setup("prefetch", "stock vLLM, all layers but one by --offload-group-size", offload="prefetch"),
        Setup(
            "prefetch-50",
            "stock vLLM, all layers but two by --offload-group-size",
            offload="prefetch",
            resident=HALF,
        ),
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
    config.write_text(
        TIERS.format(packs=packs, pool=f"{setup.coverage:.0%}", codec=setup.codec, miss=setup.miss),
        encoding="utf-8",
    )
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
