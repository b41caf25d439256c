"""A model that is served from its export alone: the checkpoint is gone, its experts are in packs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from support.engines import assert_identical, run_workloads
from ziggurat.integration.determinism.engine import open_engine
from ziggurat.integration.portable import CONFIG_NAME, export
from ziggurat.residency.config import TiersConfig, load_config
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackMissingError
from ziggurat.stores.exporting import PACKS_FOLDER
from ziggurat.stores.shards import INDEX_FILE, SINGLE_FILE

TiersFactory = Callable[..., TiersConfig]


def test_an_export_serves_alone_and_bit_for_bit(
    demo_model: Path, make_tiers: TiersFactory, tmp_path: Path
) -> None:
    model, packs, exported = tmp_path / "model", tmp_path / "packs", tmp_path / "exported"
    shutil.copytree(demo_model, model)
    tiers = make_tiers(pool="25%", folder=packs)
    with open_engine(model, tiers) as engine:
        expected = run_workloads(engine)
    with Checkpoint.open(model) as checkpoint:
        names = {name for header in checkpoint.headers for name in header.tensors}
        export(checkpoint, tiers, 1, exported)
    shutil.rmtree(model)
    shutil.rmtree(packs)
    # An index of the whole checkpoint, as whoever copies small files by hand would leave it.
    index = {"metadata": {}, "weight_map": dict.fromkeys(names, SINGLE_FILE)}
    (exported / INDEX_FILE).write_text(json.dumps(index))

    served = load_config(exported / CONFIG_NAME)
    assert served.model.path == exported
    with open_engine(exported, served) as engine:
        assert_identical(expected, run_workloads(engine))

    shutil.rmtree(exported / PACKS_FOLDER)
    with pytest.raises(PackMissingError, match="ziggurat import"), open_engine(exported, served):
        pass
