"""Decode speed on the CPU: tiers at two coverages beside stock vLLM, the same weights, prompts and engine settings.

Importing this module imports vLLM; the environment must be set before.
"""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from vllm import LLM, SamplingParams

from bench.synthetic import write_bf16_copy
from ziggurat.integration.determinism.engine import SMALL_ENGINE
from ziggurat.integration.vllm.settings import LOAD_FORMAT, to_additional_config
from ziggurat.integration.vllm.tiered import close_all
from ziggurat.residency.config import TiersConfig

STREAMS = (1, 4)
PROMPTS = (
    "def read_config(path):\n    ",
    "import os\nimport sys\n\nclass Cache:\n",
    "# The quick brown fox",
    "for i in range(10):\n",
)
COVERAGES = ("100%", "25%")
CODECS = ("bf16", "fp4", "w2")


def measure(model: Path, tokens: int, repeats: int, tell: Callable[[str], None]) -> dict[str, Any]:
    """Generated tokens a second, prefill of the short prompts included; the fastest of ``repeats`` counts.

    model: an FP8 demo model; a bfloat16 copy of it is what everything here serves.
    """
    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="ziggurat-decode-") as work:
        bf16 = Path(work) / "model"
        write_bf16_copy(model, bf16)

        def add(what: str, **settings: Any) -> None:
            with _engine(bf16, **settings) as llm:
                found = {str(n): _speed(llm, n, tokens, repeats) for n in STREAMS}
            speeds = {n: round(speed, 2) for n, (speed, _) in found.items()}
            cpu = {n: round(seconds * 1e3, 3) for n, (_, seconds) in found.items()}
            runs.append({"what": what, "tokens_per_s": speeds, "cpu_ms_per_token": cpu})
            tell(
                f"decode, {what}: " + ", ".join(f"{speed:.1f} tok/s with {n}" for n, speed in speeds.items())
            )

        for codec in CODECS:
            for coverage in COVERAGES:
                additional = to_additional_config(_tiers(Path(work) / "packs", codec, coverage))
                add(
                    f"`{codec}` rows, {coverage} resident",
                    load_format=LOAD_FORMAT,
                    additional_config=additional,
                )
        add("stock vLLM, no tiers")
    by_name = {run["what"]: run["tokens_per_s"] for run in runs}
    ratios = {
        codec: {
            str(n): round(
                by_name[f"`{codec}` rows, 25% resident"][str(n)]
                / by_name[f"`{codec}` rows, 100% resident"][str(n)],
                3,
            )
            for n in STREAMS
        }
        for codec in CODECS
    }
    return {
        "tokens": tokens,
        "repeats": repeats,
        "streams": list(STREAMS),
        "runs": runs,
        "ratio_25_to_100": ratios,
    }


def _tiers(packs: Path, codec: str, coverage: str) -> TiersConfig:
    packs.mkdir(exist_ok=True)
    return TiersConfig.from_mapping(
        {
            "tiers": {
                "disk": {"path": str(packs)},
                "host": {"size": "100%"},  # what the pool lacks comes from host memory, not from disk
                "device": {"size": coverage, "device": "cpu"},
            },
            "codecs": {"base": codec},
            "heat": {"path": None},
        }
    )


@contextmanager
def _engine(model: Path, **settings: Any) -> Iterator[Any]:
    from vllm.distributed import cleanup_dist_env_and_memory

    if "load_format" not in settings:
        _repair_stock()
    llm = LLM(model=str(model), **{**SMALL_ENGINE, **settings})
    try:
        yield llm
    finally:
        close_all()
        llm.llm_engine.engine_core.shutdown()
        del llm
        cleanup_dist_env_and_memory()
        gc.collect()


def _repair_stock() -> None:
    """vLLM 0.24's CPU fallback for MoE builds an activation layer inside the forward, which its own checks refuse."""
    try:
        from vllm.model_executor.layers.activation import SiluAndMul
        from vllm.model_executor.layers.fused_moe import cpu_fused_moe
        from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    except ImportError:
        return
    if not hasattr(torch.ops._C, "prepack_moe_weight"):
        cpu_fused_moe._CPU_MOE_ACT_FN[MoEActivation.SILU] = SiluAndMul.forward_native


def _speed(llm: Any, streams: int, tokens: int, repeats: int) -> tuple[float, float]:
    """Tokens a second of the fastest run, and the fewest processor seconds a token."""
    parameters = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    prompts = list(PROMPTS[:streams])
    llm.generate(prompts, parameters, use_tqdm=False)
    runs = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, parameters, use_tqdm=False)
        spent = time.perf_counter() - wall, time.process_time() - cpu
        made = sum(len(output.outputs[0].token_ids) for output in outputs)
        runs.append((made / spent[0], spent[1] / made))
    return max(speed for speed, _ in runs), min(cpu for _, cpu in runs)
