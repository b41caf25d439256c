"""Environment of a small vLLM engine, to be set before vLLM is imported."""

from __future__ import annotations

import os

# One OpenMP thread, unbound: two spinning threads on a busy machine cost a factor of fifty, and results depend on the
# thread count, so every run that is compared must have the same.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_MLA_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # steps are taken over in the V1 runner
}


def offline_environment() -> dict[str, str]:
    """This process's environment with :data:`OFFLINE` on top."""
    return {**os.environ, **OFFLINE}
