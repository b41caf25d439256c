"""vLLM model loader `ziggurat`: reads everything but the experts, then opens the tiers."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from ziggurat.integration.vllm import compat
from ziggurat.integration.vllm.compute import placement_of
from ziggurat.integration.vllm.consensus import TensorParallelConsensus
from ziggurat.integration.vllm.errors import SetupError
from ziggurat.integration.vllm.guard import check_engine
from ziggurat.integration.vllm.runner import patch_runner
from ziggurat.integration.vllm.settings import read_settings
from ziggurat.integration.vllm.tiered import TieredModel
from ziggurat.residency.consensus import Consensus, LocalConsensus
from ziggurat.stores.checkpoint import Checkpoint

MODEL_ATTRIBUTE = "ziggurat_tiers"


class ZigguratLoader(DefaultModelLoader):
    """Never reads an expert tensor through vLLM: packs are built from and opened beside the checkpoint."""

    def __init__(self, load_config: Any) -> None:
        compat.check_version()
        compat.check_hooks((*compat.HOOKS, *compat.RUNNER_HOOKS))
        if load_config.model_loader_extra_config:
            raise SetupError(
                "--model-loader-extra-config does not apply to the ziggurat load format; remove it"
            )
        # A copy, since a second loader (a drafter's) must still see the format it was asked for.
        super().__init__(dataclasses.replace(load_config, load_format="safetensors"))
        patch_runner()
        self._tiered: TieredModel | None = None

    def load_model(self, vllm_config: Any, model_config: Any, prefix: str = "") -> Any:
        settings = read_settings(vllm_config)
        check_engine(vllm_config)
        rank, size, consensus = _place()
        with Checkpoint.open(Path(model_config.model)) as checkpoint:
            place = placement_of(vllm_config, settings.config, kernels=settings.debug.kernels)
            tiered = TieredModel(settings, checkpoint, rank, size, consensus, vllm_config.instance_id, place)
            self._tiered = tiered
            with tiered.construct():
                model = super().load_model(vllm_config, model_config, prefix=prefix)
            tiered.open()
            tiered.look_ahead(model)
        object.__setattr__(model, MODEL_ATTRIBUTE, tiered)
        return model

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, torch.Tensor]]:
        assert self._tiered is not None
        checkpoint = self._tiered.checkpoint
        if getattr(model, "secondary_weights", ()):
            raise SetupError(
                f"{type(model).__name__} loads secondary weights, which is not supported with tiers"
            )
        for shard in checkpoint.shards:
            with safe_open(shard, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # safe_open is no mapping
                    if name in checkpoint.expert_tensor_names:
                        continue
                    if (
                        ".experts." in name
                        and ".shared_experts." not in name
                        and not checkpoint.is_ignored(name)
                    ):
                        raise SetupError(
                            f"tensor {name} looks like a routed expert but no pack holds it: vLLM would drop it "
                            "silently or the model would answer wrong"
                        )
                    yield name, file.get_tensor(name)


def _place() -> tuple[int, int, Consensus]:
    from vllm.distributed import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return 0, 1, LocalConsensus()
    return (
        group.rank_in_group,
        group.world_size,
        TensorParallelConsensus(group.cpu_group, group.rank_in_group, group.world_size),
    )
