"""Where and on what an engine computes, as the tiers need to know it."""

from __future__ import annotations

import logging
from typing import Any

import torch

from ziggurat.integration.vllm.errors import SetupError, UnsupportedFeatureError
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.placement import Placement
from ziggurat.residency.runtime_errors import UnsupportedDeviceError


def check_compute(vllm_config: Any, config: TiersConfig) -> None:
    """Refuse a platform, a device or activations that tiers do not serve. Makes no CUDA context.

    UnsupportedFeatureError or SetupError.
    """
    from vllm.platforms import current_platform

    if not (current_platform.is_cuda() or current_platform.is_cpu()):
        raise UnsupportedFeatureError(
            f"vLLM on {current_platform.device_name} is not supported together with tiered experts"
        )
    device = config.tiers.device.device
    if current_platform.is_cuda() and device == "cpu":
        raise SetupError(
            "tiers.device.device is cpu, but this vLLM computes on a GPU; set it to auto (the pool is where layers run)"
        )
    if current_platform.is_cpu() and device.startswith("cuda"):
        raise SetupError(
            f"tiers.device.device is {device}, but this vLLM computes on the CPU; set it to auto, or install vLLM for "
            "CUDA"
        )
    if current_platform.is_cuda():
        place = Placement(torch.device("cuda", 0), vllm_config.model_config.dtype)
        try:
            place.check_dtype(config.codecs.base)
        except UnsupportedDeviceError as error:
            raise UnsupportedFeatureError(str(error)) from error


def placement_of(vllm_config: Any, config: TiersConfig, *, kernels: bool) -> Placement:
    """Where the layers of this worker compute. SetupError if that is another device than the configuration names.

    kernels: run layers of a CPU as those of a device.
    """
    from vllm.platforms import current_platform

    on_gpu = current_platform.is_cuda()
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    wanted = config.tiers.device.device
    if wanted not in ("auto", str(device)):
        raise SetupError(
            f"tiers.device.device is {wanted}, but this worker computes on {device}; set it to auto, and "
            "CUDA_VISIBLE_DEVICES to the GPUs to use"
        )
    return Placement(device, vllm_config.model_config.dtype, largest_batch(vllm_config), kernels)


def largest_batch(vllm_config: Any) -> int:
    """Rows of the largest batch that a layer is called with: scheduled, or padded to the size of a captured graph."""
    captured = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None)
    return max(int(vllm_config.scheduler_config.max_num_batched_tokens), int(captured or 0))


def join_logs() -> None:
    """Let what the packages below say appear in vLLM's log; idempotent."""
    ours, theirs = logging.getLogger("ziggurat"), logging.getLogger("vllm")
    if not ours.handlers:
        for handler in theirs.handlers:
            ours.addHandler(handler)
        ours.setLevel(theirs.level)
