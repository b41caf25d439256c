"""Which device layers compute on, found out without making a CUDA context: processes that come later may be forked."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ziggurat.residency.errors import ConfigError

__all__ = ["cuda_devices", "resolve_device"]


def cuda_devices() -> int:
    """CUDA devices that this process can compute on with the torch and the vLLM that are installed."""
    if torch.version.cuda is None or not _vllm_runs_on_cuda():
        return 0
    return torch.cuda.device_count()  # asks NVML first, which makes no context


def _vllm_runs_on_cuda() -> bool:
    # A vLLM built for the CPU computes there, whatever torch could do.
    try:
        from vllm.platforms import current_platform
    except ImportError:
        return True
    return bool(current_platform.is_cuda())


def resolve_device(wanted: str, tp_size: int = 1, count: Callable[[], int] = cuda_devices) -> str:
    """`tiers.device.device` as "cpu" or "cuda:N"; rank r of several is on device r. ConfigError if it is not here.

    auto: the first GPU if there is one that vLLM computes on, else the CPU.
    """
    if wanted == "cpu":
        return "cpu"
    available = count()
    if wanted == "auto":
        if not available:
            return "cpu"
        wanted = "cuda:0"
    number = int(wanted.removeprefix("cuda:"))
    if number and tp_size > 1:
        raise ConfigError(
            f"tiers.device.device: {wanted} with {tp_size} tensor-parallel ranks, which vLLM puts on devices 0 to"
            f" {tp_size - 1}; set it to auto, and CUDA_VISIBLE_DEVICES to the GPUs to use"
        )
    last = max(number, tp_size - 1)
    if last >= available:
        here = "none" if not available else f"cuda:0 to cuda:{available - 1}"
        raise ConfigError(
            f"tiers.device.device: there is no cuda:{last} that torch and vLLM can use (here: {here});"
            " set it to auto or cpu, or see `ziggurat doctor`"
        )
    return wanted
