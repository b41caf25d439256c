"""A failed read ends the requests it touched, with the expert named, and nothing else.

Raising in a worker would stop the whole engine, so failures travel: the worker attaches them to its step output, the
scheduler (engine process) finishes the requests with an error, and the API process puts the message into the reply.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

from ziggurat.integration.vllm.patching import patch_once

_ATTRIBUTE = "ziggurat_failures"
_MARK = "ziggurat: "


def attach_failures(output: Any, failures: Mapping[str, str]) -> Any:
    """Attach ``{request id: message}`` to a ``ModelRunnerOutput`` or to its asynchronous form."""
    if not failures:
        return output
    if hasattr(output, "sampled_token_ids"):
        setattr(output, _ATTRIBUTE, dict(failures))
        return output
    finish = output.get_output

    def get_output() -> Any:
        return attach_failures(finish(), failures)

    output.get_output = get_output
    return output


def patch_scheduler() -> None:
    """Make the scheduler finish failed requests; idempotent."""
    from vllm.v1.core.sched.scheduler import Scheduler

    def wrap(original: Any) -> Any:
        def update_from_output(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
            failures: dict[str, str] = getattr(model_runner_output, _ATTRIBUTE, {})
            if not failures:
                return original(self, scheduler_output, model_runner_output)
            failures = _with_sharers(self, scheduler_output, failures)
            _drop_tokens(model_runner_output, failures)
            outputs = original(self, scheduler_output, model_runner_output)
            return _finish(self, outputs, failures)

        return update_from_output

    patch_once(Scheduler, "update_from_output", wrap)


def _written_blocks(scheduler: Any, scheduler_output: Any, request_id: str) -> set[int]:
    """KV blocks that this step wrote for a request: their contents follow from a wrong hidden state."""
    request = scheduler.requests[request_id]
    scheduled = scheduler_output.num_scheduled_tokens.get(request_id, 0)
    first = max(0, request.num_computed_tokens - scheduled) // scheduler.block_size
    if scheduler.vllm_config.scheduler_config.async_scheduling:
        first = 0  # the count already includes the next step, so where this one began is not known
    return {
        block for group in scheduler.kv_cache_manager.get_block_ids(request_id) for block in group[first:]
    }


def _with_sharers(scheduler: Any, scheduler_output: Any, failures: Mapping[str, str]) -> dict[str, str]:
    """Failures plus the running requests that share a spoiled block through the prefix cache, and theirs in turn.

    Blocks enter the prefix cache when they are scheduled, so a neighbour in the same step can already read them.
    The spoiled blocks leave the prefix cache, so no later request finds them.
    """
    known = {request_id: text for request_id, text in failures.items() if request_id in scheduler.requests}
    spoiled: set[int] = set()
    for request_id in known:
        spoiled |= _written_blocks(scheduler, scheduler_output, request_id)
    message = next(iter(failures.values()))
    grew = True
    while grew:
        grew = False
        for request in scheduler.running:
            request_id = request.request_id
            if request_id in known:
                continue
            held = {
                block for group in scheduler.kv_cache_manager.get_block_ids(request_id) for block in group
            }
            if held & spoiled:
                known[request_id] = message
                spoiled |= _written_blocks(scheduler, scheduler_output, request_id)
                grew = True
    scheduler.kv_cache_manager.evict_blocks(spoiled)
    return known


def _drop_tokens(output: Any, failures: Iterable[str]) -> None:
    """Remove what the failed requests sampled in this step, so that no wrong token reaches anybody."""
    for request_id in failures:
        index = output.req_id_to_index.get(request_id)
        if index is not None and output.sampled_token_ids:
            output.sampled_token_ids[index] = []
        output.prompt_logprobs_dict.pop(request_id, None)


def _finish(scheduler: Any, outputs: dict[int, Any], failures: Mapping[str, str]) -> dict[int, Any]:
    from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
    from vllm.v1.request import RequestStatus

    ended = {i: scheduler.requests[i] for i in failures if i in scheduler.requests}
    scheduler.finish_requests(set(ended), RequestStatus.FINISHED_ERROR)
    for request_id, request in ended.items():
        bundle = outputs.get(request.client_index)
        if bundle is None:
            bundle = outputs[request.client_index] = EngineCoreOutputs(outputs=[])
        bundle.outputs = [
            *bundle.outputs,
            EngineCoreOutput(
                request_id=request_id,
                new_token_ids=[],
                finish_reason=request.get_finished_reason(),
                stop_reason=_MARK + failures[request_id],
                events=request.take_events(),
                trace_headers=request.trace_headers,
            ),
        ]
    return outputs


def patch_api_process() -> None:
    """Make replies to failed requests carry the message; idempotent.

    The message reaches the API server as a choice's stop reason. Raising it here ends streams and plain replies alike;
    vLLM 0.24's own check overlooks an error that comes before a stream's first token, and the stream would just end.
    """
    from vllm.v1.engine.async_llm import AsyncLLM

    error = _generation_error()

    def wrap(original: Any) -> Any:
        async def generate(self: Any, *args: Any, **kwargs: Any) -> AsyncGenerator[Any, None]:
            async with aclosing(original(self, *args, **kwargs)) as outputs:
                async for output in outputs:
                    for choice in output.outputs:
                        reason = choice.stop_reason
                        if choice.finish_reason == "error" and isinstance(reason, str):
                            raise error(reason)
                    yield output

        return generate

    patch_once(AsyncLLM, "generate", wrap)


def _generation_error() -> type[Exception]:
    """The exception that vLLM's endpoints turn into an error reply with its text."""
    try:
        from vllm.exceptions import GenerationError
    except ImportError:
        from vllm.entrypoints.openai.engine.protocol import GenerationError
    return GenerationError
