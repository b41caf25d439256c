"""Packs that many tests read and none writes."""

from __future__ import annotations

import pytest

from support import fake_moe
from support.fake_moe import FakeModel, FakePacks, make_packs


@pytest.fixture(scope="session")
def packs(tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    """bf16 rows for one rank."""
    return make_packs(tmp_path_factory.mktemp("one-rank"))


@pytest.fixture(scope="session")
def packs_w2(tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    """w2 rows for one rank."""
    return make_packs(tmp_path_factory.mktemp("w2"), codec="w2")


@pytest.fixture(scope="session")
def packs_tp2(tmp_path_factory: pytest.TempPathFactory) -> FakePacks:
    """bf16 rows for two ranks."""
    return make_packs(tmp_path_factory.mktemp("two-ranks"), tp_size=2)


@pytest.fixture(scope="session")
def model() -> FakeModel:
    return FakeModel.make()


@pytest.fixture(params=["host", "device"])
def layers(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test twice: with layers that the host computes, and with layers behind kernels and static tensors."""
    kind: str = request.param
    monkeypatch.setattr(fake_moe, "ON_DEVICE", kind == "device")
    return kind
