"""What the plugin decides on a GPU, asked of it with stand-ins for vLLM's runner, layers and platform."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import override_forward_context

from ziggurat.integration.vllm import compute, runner
from ziggurat.integration.vllm.errors import SetupError, UnsupportedFeatureError
from ziggurat.integration.vllm.tiered import TieredModel
from ziggurat.residency.config import TiersConfig
from ziggurat.residency.passes import PassPath, StepResult, StepTokens

TiersFactory = Callable[..., TiersConfig]


class Service:
    """Runs the passes it is told to, and remembers the step."""

    def __init__(self, *paths: PassPath, complete: bool = False) -> None:
        self.paths, self.complete = paths, complete
        self.tokens: StepTokens | None = None

    def run_step(self, forward: Callable[[PassPath], Any], tokens: StepTokens) -> StepResult[Any]:
        self.tokens = tokens
        values = [forward(path) for path in self.paths]
        return StepResult(values[-1], "clean", len(values), 0)


def step(service: Service, mode: CUDAGraphMode, *, on_gpu: bool = True) -> tuple[list[Any], Any]:
    """One armed forward of a runner with two requests; what the model's forward saw, and what came out."""
    place = SimpleNamespace(on_gpu=on_gpu)
    tiered = SimpleNamespace(service=service, run_step=service.run_step, place=place)
    context = SimpleNamespace(moe_layer_index=7, cudagraph_runtime_mode=mode)
    seen: list[Any] = []

    def model_forward(self: Any, *args: Any, **kwargs: Any) -> str:
        seen.append((context.moe_layer_index, context.cudagraph_runtime_mode))
        context.moe_layer_index = 3
        return f"pass {len(seen)}"

    fake = SimpleNamespace(
        get_model=lambda: SimpleNamespace(ziggurat_tiers=tiered),
        input_batch=SimpleNamespace(
            req_ids=["a", "b"],
            num_computed_tokens_cpu=np.array([9, 2, 0]),
            num_prompt_tokens=np.array([9, 6, 0]),
        ),
        _ziggurat_step=SimpleNamespace(num_scheduled_tokens={"a": 1, "b": 4}, total_num_scheduled_tokens=5),
    )
    with override_forward_context(context):
        return seen, runner._wrap_forward(model_forward)(fake, input_ids=None)


def test_a_step_with_a_graph_keeps_it_until_the_exact_pass() -> None:
    service = Service(PassPath.GRAPH, PassPath.GRAPH, PassPath.EAGER)
    seen, value = step(service, CUDAGraphMode.FULL)
    assert seen == [(0, CUDAGraphMode.FULL), (0, CUDAGraphMode.FULL), (0, CUDAGraphMode.NONE)]
    assert value == "pass 3"
    assert service.tokens is not None
    assert (service.tokens.count, service.tokens.eager) == (5, False)
    assert service.tokens.prefill is not None
    assert service.tokens.prefill.tolist() == [False, True, True, True, True]


@pytest.mark.parametrize(("on_gpu", "eager"), [(True, True), (False, False)])
def test_a_step_without_a_graph_is_eager_on_a_gpu(on_gpu: bool, eager: bool) -> None:
    service = Service(PassPath.EAGER)
    step(service, CUDAGraphMode.NONE, on_gpu=on_gpu)
    assert service.tokens is not None
    assert service.tokens.eager is eager


def test_a_complete_pool_is_asked_for_nothing_more() -> None:
    service = Service(PassPath.GRAPH, complete=True)
    seen, value = step(service, CUDAGraphMode.PIECEWISE)
    assert (seen, value) == ([(0, CUDAGraphMode.PIECEWISE)], "pass 1")
    assert service.tokens == StepTokens(5)


# -- layers --------------------------------------------------------------------------------------------------------


def layer(**changes: Any) -> Any:
    values: dict[str, Any] = {
        "moe_config": SimpleNamespace(has_bias=False, moe_parallel_config=SimpleNamespace(use_ep=False)),
        "apply_router_weight_on_input": False,
        "activation": "silu",
        "swiglu_limit": None,
        "swiglu_alpha": None,
        "swiglu_beta": None,
    }
    return SimpleNamespace(**{**values, **changes})


def model() -> TieredModel:
    made = TieredModel.__new__(TieredModel)
    made._clamps = set()
    return made


@pytest.mark.parametrize(("limit", "clamp"), [(None, None), (0.0, None), (10.0, 10.0), (7, 7.0)])
def test_a_clamped_swiglu_reaches_the_kernels(limit: float | None, clamp: float | None) -> None:
    tiered = model()
    for _ in range(2):
        tiered.check_layer(layer(swiglu_limit=limit, swiglu_alpha=1.0, swiglu_beta=0.0), "layers.0", None)
    assert tiered._clamps == {clamp}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"swiglu_alpha": 1.702}, "swiglu_alpha"),
        ({"swiglu_beta": 1.0}, "swiglu_beta"),
        ({"activation": "gelu"}, "SiLU"),
    ],
)
def test_another_activation_is_refused(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedFeatureError, match=named):
        model().check_layer(layer(**change), "layers.0", None)


def test_layers_must_agree_on_the_clamp() -> None:
    tiered = model()
    tiered.check_layer(layer(swiglu_limit=10.0), "layers.0", None)
    with pytest.raises(UnsupportedFeatureError, match=r"layers\.1: .*swiglu_limit"):
        tiered.check_layer(layer(), "layers.1", None)


# -- device and activations ----------------------------------------------------------------------------------------


class Platform:
    device_name = "somewhere"

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def is_cpu(self) -> bool:
        return self.kind == "cpu"


def on(make_tiers: TiersFactory, device: str, codec: str = "w2") -> TiersConfig:
    raw = make_tiers(codec=codec).model_dump(mode="json")
    raw["tiers"]["device"]["device"] = device
    return TiersConfig.from_mapping(raw)


@pytest.mark.parametrize(
    ("kind", "device", "dtype", "codec", "error", "message"),
    [
        ("cuda", "auto", torch.bfloat16, "bf16", None, ""),
        ("cuda", "cuda:0", torch.float16, "fp4", None, ""),
        ("cpu", "auto", torch.float32, "bf16", None, ""),
        ("cuda", "cpu", torch.bfloat16, "w2", SetupError, "set it to auto"),
        ("cpu", "cuda:0", torch.bfloat16, "w2", SetupError, "computes on the CPU"),
        ("cuda", "auto", torch.float32, "w2", UnsupportedFeatureError, "not float32"),
        ("cuda", "auto", torch.float16, "bf16", UnsupportedFeatureError, "need bfloat16"),
        ("rocm", "auto", torch.bfloat16, "w2", UnsupportedFeatureError, "somewhere"),
    ],
)
def test_device_and_activations(
    monkeypatch: pytest.MonkeyPatch,
    make_tiers: TiersFactory,
    kind: str,
    device: str,
    dtype: torch.dtype,
    codec: str,
    error: type[Exception] | None,
    message: str,
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", Platform(kind))
    config = SimpleNamespace(model_config=SimpleNamespace(dtype=dtype))
    if error is None:
        compute.check_compute(config, on(make_tiers, device, codec))
        return
    with pytest.raises(error, match=message):
        compute.check_compute(config, on(make_tiers, device, codec))


def test_the_largest_batch_is_scheduled_or_padded(
    monkeypatch: pytest.MonkeyPatch, make_tiers: TiersFactory
) -> None:
    monkeypatch.setattr("vllm.platforms.current_platform", Platform("cpu"))
    for scheduled, captured, largest in ((256, 512, 512), (2048, 512, 2048), (64, None, 64)):
        config = SimpleNamespace(
            model_config=SimpleNamespace(dtype=torch.bfloat16),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=scheduled),
            compilation_config=SimpleNamespace(max_cudagraph_capture_size=captured),
        )
        place = compute.placement_of(config, on(make_tiers, "auto"), kernels=True)
        assert (place.max_tokens, place.kernels, place.on_gpu) == (largest, True, False)
    with pytest.raises(SetupError, match="computes on cpu"):
        compute.placement_of(config, on(make_tiers, "cuda:1"), kernels=False)
