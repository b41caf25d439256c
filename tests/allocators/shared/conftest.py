"""An arena process in a thread of this one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.keepers import keeper
from ziggurat.allocators.shared.segments import Segments


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "socket"


@pytest.fixture
def segments(path: Path) -> Iterator[Segments]:
    with keeper(path) as made:
        yield made
