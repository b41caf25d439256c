"""The churn run of the harness, small and on a CPU."""

from __future__ import annotations

import pytest

from bench.harness import churn
from ziggurat.residency.inline.cache import InlineCache

SMALL = ["--shape", "demo", "--layers", "2", "--steps", "40", "--device", "cpu", "--codec", "w2"]


@pytest.mark.parametrize("arena", ["100", "50"])
def test_bits_are_those_of_the_resident_run(capsys: pytest.CaptureFixture[str], arena: str) -> None:
    assert churn.main([*SMALL, "--arena", arena]) == 0
    assert '"same_bits": true' in capsys.readouterr().out


def test_it_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places that are written to while a pass may read them; the pass is slow enough to notice."""
    monkeypatch.setattr(InlineCache, "_retire", lambda self, key: self._free.append(self._unbind(key)))
    arguments = [*SMALL, "--arena", "100", "--most", "64", "--tokens", "4"]
    assert any(churn.main([*arguments, "--seed", str(seed)]) == 1 for seed in range(20))
