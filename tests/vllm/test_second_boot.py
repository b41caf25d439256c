"""With packs in place, no expert tensor is read from the checkpoint again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from support.engines import SINGLE
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.integration.vllm import loader
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.checkpoint import Checkpoint

TiersFactory = Callable[..., TiersConfig]


def test_second_boot_reads_no_expert(
    demo_model: Path, make_tiers: TiersFactory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiers = make_tiers(pool="25%", folder=tmp_path)
    with open_engine(demo_model, tiers) as engine:
        first = engine.run([SINGLE], 6)

    class Guarded:
        """safe_open whose expert tensors cannot be read."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._file = safe_open(*args, **kwargs)

        def __enter__(self) -> Guarded:
            self._file.__enter__()
            return self

        def __exit__(self, *args: Any) -> None:
            self._file.__exit__(*args)

        def keys(self) -> list[str]:
            return list(self._file.keys())

        def get_tensor(self, name: str) -> Any:
            assert ".experts." not in name, f"{name} was read"
            return self._file.get_tensor(name)

    def refuse(self: Checkpoint, layer_index: int, expert: int, **_: Any) -> Any:
        raise AssertionError(f"expert {expert} of layer index {layer_index} was read from the checkpoint")

    monkeypatch.setattr(loader, "safe_open", Guarded)
    monkeypatch.setattr(Checkpoint, "expert", refuse)
    with open_engine(demo_model, tiers) as engine:
        second = engine.run([SINGLE], 6)
    assert second.tokens == first.tokens

    for pack in tmp_path.glob("*.safetensors"):
        pack.unlink()
    with pytest.raises(AssertionError, match="was read from the checkpoint"), open_engine(demo_model, tiers):
        pass
