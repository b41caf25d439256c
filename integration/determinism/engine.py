"""A vLLM engine in this process, with tiers, for runs whose logits are compared bit for bit.

Importing this module imports vLLM; the environment of :func:`offline_environment` must be set before.
"""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.platforms import current_platform

from ziggurat.integration.determinism.compare import Outcome
from ziggurat.integration.vllm.capture import read_steps
from ziggurat.integration.vllm.settings import LOAD_FORMAT, to_additional_config
from ziggurat.integration.vllm.tiered import close_all
from ziggurat.residency.config import TiersConfig

SMALL_ENGINE: dict[str, Any] = {
    "enforce_eager": True,
    "max_model_len": 1024,
    "max_num_batched_tokens": 256,
    "max_num_seqs": 8,
    "seed": 0,
}
# With graphs; and a fixed cache, since an engine among others shall not take a share of whatever is free.
ON_GPU: dict[str, Any] = {
    "enforce_eager": False,
    "gpu_memory_utilization": 0.05,
    "kv_cache_memory_bytes": 1 << 30,
}

# Else every engine times several shapes of a reduction, and whether to join kernels, and takes the fastest: two engines
# may add in another order.
SAME_KERNELS: dict[str, Any] = {
    "inductor_compile_config": {
        "benchmark_combo_kernel": False,
        "combo_kernels": False,
        "deterministic": True,
    }
}


class Engine:
    """One engine and the capture of its steps."""

    def __init__(self, llm: Any, capture: Path) -> None:
        self.llm = llm
        self._capture = capture
        self._read = 0  # bytes of the capture
        self.last_logprobs: list[Any] = []

    def run(self, prompts: Sequence[str], tokens: int, **sampling: Any) -> Outcome:
        """Generate greedily (unless ``sampling`` says otherwise) for one batch of prompts."""
        parameters = SamplingParams(
            **{"temperature": 0.0, "max_tokens": tokens, "ignore_eos": True, **sampling}
        )
        outputs = self.llm.generate(list(prompts), parameters, use_tqdm=False)
        self.last_logprobs = [
            (choice.logprobs, out.prompt_logprobs) for out in outputs for choice in out.outputs
        ]
        with (self._capture / "logits.rank0.npys").open("rb") as file:
            file.seek(self._read)
            new = tuple(read_steps(file))
            self._read = file.tell()
        return Outcome(tuple(tuple(choice.token_ids) for out in outputs for choice in out.outputs), new)

    @property
    def service(self) -> Any:
        """The tiers of the engine, when it runs in this process."""
        runner = self.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
        return runner.get_model().ziggurat_tiers.service


@contextmanager
def open_engine(
    model: Path, tiers: TiersConfig, debug: Mapping[str, Any] | None = None, **engine: Any
) -> Iterator[Engine]:
    """An engine of ``model`` behind ``tiers``; torn down completely on exit."""
    with tempfile.TemporaryDirectory(prefix="ziggurat-capture-") as folder:
        arguments = {**SMALL_ENGINE, **engine}
        if current_platform.is_cuda():
            arguments = {**SMALL_ENGINE, **ON_GPU, **engine}
            arguments["compilation_config"] = {**SAME_KERNELS, **engine.get("compilation_config", {})}
        # Engines collect garbage several times at their start; what is alive already need not be walked each time.
        # (Their end undoes it.)
        gc.freeze()
        llm = LLM(
            model=str(model),
            load_format=LOAD_FORMAT,
            additional_config=to_additional_config(tiers, {"capture_logits": folder, **(debug or {})}),
            **arguments,
        )
        try:
            yield Engine(llm, Path(folder))
        finally:
            close_all()
            llm.llm_engine.engine_core.shutdown()
            del llm
            cleanup_dist_env_and_memory()
