"""A disk that fails: the expert is named on every rank, only its tokens fail, and the service goes on."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from support.fake_moe import FakeModel, FakePacks, Passes, bits_equal, open_tiers, tiers
from support.packfiles import flip, row_start
from support.ranks import ThreadConsensus, run_ranks
from ziggurat.residency.passes import StepResult
from ziggurat.stores.counts import FAILED_READS
from ziggurat.stores.pack import Pack, RowRequest
from ziggurat.stores.readers.registry import open_reader

pytestmark = pytest.mark.usefixtures("layers")

INLINE = {"mode": "inline"}
REPLAY = {"mode": "replay", "max_replays": 3}


def faulty(packs: FakePacks, *rules: dict[str, Any], rank: int = 0) -> Pack:
    """The rank's pack behind a reader that fails by rule; tags are row keys."""
    path = packs.paths[rank]
    return Pack.open(path, reader=open_reader("pread", path, threads=2, faults={"rules": list(rules)}))


def routed_tokens(packs: FakePacks, model: FakeModel, x: torch.Tensor, key: int) -> list[bool]:
    """Which tokens of the healthy model are routed to a row."""
    wanted_layer, expert = packs.geometry.split(key)
    hit = [False] * len(x)

    def moe(layer: int, h: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if layer == wanted_layer:
            hit[:] = (ids == expert).any(1).tolist()
        return packs.whole()(layer, h, weights, ids)

    model.forward(x, moe)
    return hit


KEY = 12 * 3 + 4  # an expert of the last layer: no later layer's routing depends on it


@pytest.mark.parametrize("miss", [INLINE, REPLAY], ids=["inline", "replay"])
@pytest.mark.parametrize(
    ("kind", "times", "verification"), [("error", 2, 0), ("short", 2, 0), ("flip", 4, 1)]
)
def test_only_the_tokens_of_a_lost_expert_fail_and_the_next_step_is_clean(
    packs: FakePacks, model: FakeModel, miss: dict[str, Any], kind: str, times: int, verification: int
) -> None:
    x = model.inputs(6)
    wanted = packs.reference(model, x)
    hit = routed_tokens(packs, model, x, KEY)
    assert any(hit)
    assert not all(hit)
    # enough failures for one step: replay tries a row in the batch and once more in the exact pass
    times = times if miss is REPLAY else times // 2
    pack = faulty(packs, {"kind": kind, "tags": [KEY], "times": times})
    with tiers(packs, slots=48, miss=miss, pack=pack) as service:
        run = Passes(model, service)
        result = run.step(x)
        assert result.outcome == "failed"
        assert [(f.layer_id, f.expert, f.rank) for f in result.failures] == [(3, 4, 0)]
        assert "expert 4 of layer 3" in str(result.failures[0])
        assert result.failed_tokens is not None
        assert result.failed_tokens.tolist() == hit
        kept = torch.from_numpy(~result.failed_tokens)
        assert bits_equal(result.value[kept], wanted[kept])
        assert torch.isfinite(result.value).all()

        again = run.step(x)
        assert again.outcome in ("clean", "replayed")
        assert (again.failures, again.failed_tokens) == ((), None)
        assert bits_equal(again.value, wanted)

        metrics = service.metrics
        assert metrics.value("ziggurat_steps_total", "failed") == 1
        assert metrics.value("ziggurat_failed_tokens_total") == sum(hit)
        tried = 2 if miss is REPLAY else 1
        assert metrics.value("ziggurat_io_errors_total") == tried
        assert metrics.value("ziggurat_verification_failures_total") == tried * verification
        reason = {"error": "io", "short": "short", "flip": "checksum"}[kind]
        reads = tried * (1 + verification)  # one that brings wrong bytes is read again
        for one in FAILED_READS:
            assert metrics.value("ziggurat_failed_reads_total", one) == (reads if one == reason else 0)
        assert metrics.value("ziggurat_reread_rows_total") == tried * verification
        assert metrics.value("ziggurat_quarantined_rows_total") == verification, (
            "it stays in after the first pass"
        )


def test_a_failure_that_passes_is_healed_within_the_step(packs: FakePacks, model: FakeModel) -> None:
    x = model.inputs(2)
    pack = faulty(packs, {"kind": "error", "tags": list(range(48)), "times": 1})
    with tiers(packs, slots=48, miss=REPLAY, pack=pack) as service:
        result = Passes(model, service).step(x)
        assert (result.outcome, result.passes, result.failures) == ("exact", 2, ())
        assert bits_equal(result.value, packs.reference(model, x))
        assert service.metrics.value("ziggurat_io_errors_total") == 1


def test_with_every_read_failing_every_token_fails_and_nothing_is_resident(
    packs: FakePacks, model: FakeModel
) -> None:
    pack = faulty(packs, {"kind": "error"})
    with tiers(packs, slots=5, pack=pack) as service:
        result = Passes(model, service).step(model.inputs(3))
        assert result.failed_tokens is not None
        assert result.failed_tokens.all()
        assert len(result.failures) == len(set(result.failures)) > 0
        assert (service.slots.used, service.cache.used) == (0, 0)
        assert torch.isfinite(result.value).all()
        service.slots.check()
        service.cache.check()


@pytest.mark.parametrize("written_back", [True, False])
def test_a_damaged_row_is_made_anew_and_only_counted(
    packs: FakePacks, model: FakeModel, tmp_path: Path, written_back: bool
) -> None:
    x = model.inputs(6)
    path = Path(shutil.copy(packs.paths[0], tmp_path))
    sound = path.read_bytes()
    rows = packs.open()

    def rebuild(layer: int, expert: int, buffer: memoryview) -> None:
        (result,) = rows.read_rows([RowRequest(layer, expert, buffer)])
        assert result.error is None

    flip(path, row_start(path, rows.header, *divmod(KEY, 12)) + 5)
    pack = Pack.open(path, rebuild=rebuild)
    if not written_back:
        path.unlink()
    with tiers(packs, slots=48, miss=REPLAY, pack=pack) as service:
        result = Passes(model, service).step(x)
        assert result.failures == ()
        assert bits_equal(result.value, packs.reference(model, x))
        value = service.metrics.value
        assert value("ziggurat_failed_reads_total", "checksum") == 2
        assert value("ziggurat_quarantined_rows_total") == value("ziggurat_reread_rows_total") == 1
        assert value("ziggurat_rebuilt_rows_total", "yes") == written_back
        assert value("ziggurat_rebuilt_rows_total", "no") == (not written_back)
        assert value("ziggurat_io_errors_total") == value("ziggurat_failed_tokens_total") == 0
        fetched = value("ziggurat_fetched_rows_total", "pack", "pool")
        assert value("ziggurat_pack_read_bytes_total") == (fetched + 1) * pack.header.stride
    assert not written_back or path.read_bytes() == sound
    rows.close()


def test_a_tolerated_step_does_not_fail_for_a_row_it_did_without(packs: FakePacks, model: FakeModel) -> None:
    pack = faulty(packs, {"kind": "error", "tags": [KEY]})
    with tiers(packs, slots=48, miss={**REPLAY, "tolerance": 10**6}, pack=pack) as service:
        result = Passes(model, service).step(model.inputs(6))
        assert (result.outcome, result.failures) == ("tolerated", ())


def test_a_row_that_fails_at_warm_start_is_tried_again_when_it_is_wanted(
    packs: FakePacks, model: FakeModel, layers: str
) -> None:
    pack = faulty(packs, {"kind": "error", "tags": [KEY], "times": 1})
    with tiers(packs, slots=48, pack=pack) as service:
        start = service.warm_start()
        assert (start.pool_rows, [fault.key for fault in start.faults]) == (47, [KEY])
        x = model.inputs(6)
        result = Passes(model, service).step(x)
        assert result.outcome == ("clean" if layers == "host" else "replayed")
        assert result.misses_first_pass > 0
        assert bits_equal(result.value, packs.reference(model, x))


# -- ranks ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("miss", [INLINE, REPLAY], ids=["inline", "replay"])
@pytest.mark.parametrize("broken", [(1,), (0, 1)], ids=["one-rank", "both-ranks"])
def test_every_rank_learns_of_every_failure(
    packs_tp2: FakePacks, model: FakeModel, miss: dict[str, Any], broken: tuple[int, ...]
) -> None:
    x = model.inputs(6)

    def work(consensus: ThreadConsensus) -> tuple[list[StepResult[torch.Tensor]], int, int]:
        rank = consensus.rank
        rule = {"kind": "error", "tags": [KEY + rank], "times": 1 if miss is INLINE else 2}
        pack = faulty(packs_tp2, *([rule] if rank in broken else []), rank=rank)
        service = open_tiers(
            packs_tp2, slots=(48, 40)[rank], rank=rank, consensus=consensus, miss=miss, pack=pack
        )
        run = Passes(model, service, consensus.all_reduce)
        first = run.step(x)
        gathers = consensus.gathers
        second = run.step(x)
        service.close()
        return [first, second], gathers, consensus.gathers

    one, other = run_ranks(2, work).all()
    for mine, theirs in zip(one[0], other[0], strict=True):
        assert (mine.outcome, mine.passes, mine.failures) == (theirs.outcome, theirs.passes, theirs.failures)
        assert np.array_equal(mine.failed_tokens, theirs.failed_tokens)  # type: ignore[arg-type]  # None == None
        assert bits_equal(mine.value, theirs.value)
    failed, healthy = one[0]
    assert failed.outcome == "failed"
    assert [(f.layer_id, f.expert, f.rank) for f in failed.failures] == [
        (3, 4 + rank, rank) for rank in broken
    ]
    union = np.logical_or.reduce(
        [np.array(routed_tokens(packs_tp2, model, x, KEY + rank)) for rank in broken]
    )
    assert failed.failed_tokens is not None
    assert failed.failed_tokens.tolist() == union.tolist()
    assert 0 < union.sum() < len(x)
    kept = torch.from_numpy(~failed.failed_tokens)
    wanted = packs_tp2.reference(model, x)
    assert bits_equal(failed.value[kept], wanted[kept])
    assert healthy.outcome in ("clean", "replayed", "exact")
    assert bits_equal(healthy.value, wanted)
    assert one[1:] == other[1:] == (1, 1), "one gather in the failed step, none in the healthy one"
