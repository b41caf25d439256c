"""End-to-end tests on a real vLLM engine on the CPU. The environment must be set before vLLM is imported."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ziggurat.integration.determinism.environment import OFFLINE
from ziggurat.residency.config import TiersConfig

os.environ.update(OFFLINE)

# Where vLLM is not installed, this folder itself would be found under its name.
if importlib.util.find_spec("vllm.engine") is None:
    collect_ignore_glob = ["test_*.py"]

REPOSITORY = Path(__file__).resolve().parents[2]
DEMO_MODEL = REPOSITORY / "bench" / "models" / "demo-moe-fp8"

TiersFactory = Callable[..., TiersConfig]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return DEMO_MODEL


@pytest.fixture(scope="session")
def pack_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of packs for the whole session: packs are keyed by content, so models do not collide."""
    return tmp_path_factory.mktemp("packs")


@pytest.fixture(scope="session")
def make_tiers(pack_folder: Path) -> TiersFactory:
    """Builds a configuration: pool and arena sizes, codec, miss settings; no memory of earlier runs."""

    def make(
        pool: str | list[str] = "25%",
        arena: str = "16 rows",
        codec: str = "bf16",
        folder: Path | None = None,
        disk: dict[str, Any] | None = None,
        heat: dict[str, Any] | None = None,
        eviction: str = "lfu-decay",
        share: Path | None = None,
        **miss: Any,
    ) -> TiersConfig:
        return TiersConfig.from_mapping(
            {
                "tiers": {
                    "disk": {"path": str(folder or pack_folder), "readers": 4, **(disk or {})},
                    "host": {"size": arena, "share": None if share is None else str(share)},
                    "device": {"size": pool, "device": "cpu"},
                },
                "codecs": {"base": codec},
                "policy": {"eviction": eviction},
                "miss": miss,
                "heat": {"path": None, **(heat or {})},
            }
        )

    return make
