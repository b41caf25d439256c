"""Steps of vLLM's model runner under the step protocol.

``_model_forward`` is the one call between the inputs of a scheduled batch and its logits: profiling, warm-up and graph
capture call the model directly, so they never arm the tiers.

A step may call it several times. What a second call touches is either written to the same place with the same or the
repaired value (KV blocks by slot, the output buffer of a captured graph), or read only (attention metadata, slot
mappings, input ids; the embeddings of a text model are computed anew). Sampling and everything after it comes once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ziggurat.integration.vllm.failures import attach_failures
from ziggurat.integration.vllm.patching import is_patched, patch_once
from ziggurat.residency.service import PassPath, StepTokens

if TYPE_CHECKING:
    from ziggurat.integration.vllm.tiered import TieredModel

_STEP = "_ziggurat_step"
_FAILED = "_ziggurat_failed"


def patch_runner() -> None:
    """Wrap the V1 model runner; idempotent."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    patch_once(GPUModelRunner, "execute_model", _wrap_execute)
    patch_once(GPUModelRunner, "_model_forward", _wrap_forward)
    patch_once(GPUModelRunner, "sample_tokens", _wrap_sample)
    patch_once(GPUModelRunner, "capture_model", _wrap_capture)
    # It captures graphs, too, to learn what they take.
    patch_once(GPUModelRunner, "profile_cudagraph_memory", _wrap_capture)


def runner_is_patched() -> bool:
    """True if steps of the V1 runner go through the step protocol in this process."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    return is_patched(GPUModelRunner, "_model_forward")


def _tiered(runner: Any) -> TieredModel | None:
    return getattr(runner.get_model(), "ziggurat_tiers", None)


def _wrap_execute(original: Any) -> Any:
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        tiered = _tiered(self)
        if tiered is None:
            return original(self, scheduler_output, *args, **kwargs)
        setattr(self, _STEP, scheduler_output)
        setattr(self, _FAILED, {})
        try:
            output = original(self, scheduler_output, *args, **kwargs)
        finally:
            setattr(self, _STEP, None)
        state = self.execute_model_state
        if tiered.capture is not None and state is not None and state.logits is not None:
            requests = list(self.input_batch.req_ids)
            scheduled = scheduler_output.num_scheduled_tokens
            tiered.capture.add(requests, [scheduled[r] for r in requests], state.logits)
        return output

    return execute_model


def _wrap_forward(original: Any) -> Any:
    from vllm.config import CUDAGraphMode
    from vllm.forward_context import get_forward_context

    def prepare(path: PassPath) -> None:
        """Every pass numbers its MoE layers from zero; an eager pass must not replay a captured graph."""
        context = get_forward_context()
        context.moe_layer_index = 0
        if path is PassPath.EAGER:
            context.cudagraph_runtime_mode = CUDAGraphMode.NONE

    def _model_forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        tiered = _tiered(self)
        scheduler_output = getattr(self, _STEP, None)
        if tiered is None or tiered.service is None or scheduler_output is None:
            return original(self, *args, **kwargs)

        def forward(path: PassPath) -> Any:
            prepare(path)
            return original(self, *args, **kwargs)

        count = scheduler_output.total_num_scheduled_tokens
        if tiered.service.complete:
            return tiered.run_step(forward, StepTokens(count)).value

        batch = self.input_batch
        n = len(batch.req_ids)
        in_prompt = batch.num_computed_tokens_cpu[:n] < batch.num_prompt_tokens[:n]
        # A step of a GPU that replays no graph runs in eager code anyway, where misses are served at once.
        eager = tiered.place.on_gpu and get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.NONE
        prefill = np.repeat(in_prompt, _scheduled(self, scheduler_output)) if in_prompt.any() else None
        result = tiered.run_step(forward, StepTokens(count, prefill, eager))
        if result.failures and result.failed_tokens is not None:
            requests, counts = list(batch.req_ids), _scheduled(self, scheduler_output)
            setattr(self, _FAILED, _failed_requests(requests, counts, result.failed_tokens, result.failures))
        return result.value

    return _model_forward


def _scheduled(runner: Any, scheduler_output: Any) -> Any:
    """int64 [requests]: tokens of each request in this step."""
    scheduled = scheduler_output.num_scheduled_tokens
    return np.array([scheduled[request] for request in runner.input_batch.req_ids], dtype=np.int64)


def _failed_requests(requests: list[str], counts: Any, failed_tokens: Any, failures: Any) -> dict[str, str]:
    message = "; ".join(str(failure) for failure in failures)
    owners = np.repeat(np.arange(len(requests)), counts)
    hit = sorted(set(owners[failed_tokens].tolist()))
    return {requests[i]: message for i in hit}


def _wrap_sample(original: Any) -> Any:
    def sample_tokens(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = original(self, *args, **kwargs)
        failed = getattr(self, _FAILED, None)
        if failed:
            setattr(self, _FAILED, {})
            attach_failures(output, failed)
        return output

    return sample_tokens


def _wrap_capture(original: Any) -> Any:
    def capture_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        tiered = _tiered(self)
        if tiered is None or tiered.service is None:
            return original(self, *args, **kwargs)
        with tiered.service.paused():
            return original(self, *args, **kwargs)

    return capture_model
