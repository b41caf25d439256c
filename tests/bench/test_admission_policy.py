"""The study of eviction on recorded routing: traces become steps, pools are used alike, nobody beats the future."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench import admission_policy
from bench.admission_policy import TRACE, as_steps
from bench.harness.mapping import mapped
from bench.harness.routing import TraceError, adjustable
from bench.policy_pools import BeladyPool, HostPool, PoolStep
from bench.shapes import SHAPES, MoeShape


def test_sequences_are_decoded_side_by_side_and_followed_by_the_next() -> None:
    trace = np.arange(4 * 3 * 2 * 1).reshape(4, 3, 2, 1)
    ids = as_steps(trace, 2)
    assert ids.shape == (6, 2, 2, 1)
    assert ids[0, 1].tolist() == [[trace[0, 0, 1, 0]], [trace[1, 0, 1, 0]]]
    assert ids[5, 0].tolist() == [[trace[2, 2, 0, 0]], [trace[3, 2, 0, 0]]]


def test_a_single_sequence_is_cut_into_batches() -> None:
    trace = np.arange(7 * 2).reshape(1, 7, 1, 2)
    ids = as_steps(trace, 3)
    assert ids.shape == (2, 1, 3, 2)
    assert ids[1, 0].tolist() == trace[0, 3:6, 0].tolist()


def pool_steps(*layers: list[int]) -> list[list[PoolStep]]:
    return [[PoolStep(np.array(one), np.ones(len(one), dtype=np.int64))] for one in layers]


def missed(pool: HostPool | BeladyPool, steps: list[list[PoolStep]]) -> list[int]:
    return [len(pool.admit(0, step[0].experts, step[0].pairs)) for step in steps]


def test_belady_keeps_what_comes_back_soonest() -> None:
    steps = pool_steps([0], [1], [2], [0], [1], [2], [0])
    assert missed(BeladyPool(1, 4, 2, steps), steps) == [1, 1, 1, 0, 1, 0, 1]
    assert missed(HostPool(1, 4, 2, "lru"), steps) == [1] * 7


@pytest.mark.parametrize("policy", ["lru", "lfu-decay"])
def test_a_layer_keeps_its_own_experts(policy: str) -> None:
    steps = pool_steps([0, 1], [0, 2], [1, 2], [0, 1, 2], [1, 2])
    found = missed(HostPool(1, 4, 2, policy), steps)
    assert found[:3] == [2, 1, 1]
    assert found[3] == 1  # no room for the third, and none of the two others leaves
    assert found[4] == 0


def test_mapped_routing_is_made_of_recorded_choices() -> None:
    shape = SHAPES["deepseek-v4-flash"]
    routing = mapped(TRACE, shape, 2, 40)
    assert routing.ids.shape == (40, 43, 2, 6)
    assert routing.ids.min() >= 0
    assert routing.ids.max() < 256
    ordered = np.sort(routing.ids, axis=-1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()
    with np.load(TRACE) as file:
        trace = file["topk_ids"].astype(int)
    for step, layer, token in ((0, 0, 0), (39, 13, 1), (7, 42, 1)):
        copy, here = divmod(layer, 6)
        sequence = trace[(token + 2 * copy) % 32, step]
        assert routing.ids[step, layer, token, 0] == sequence[(here + 1) % 6, 0] % 8 * 32 + sequence[here, 0]
        assert set(routing.ids[step, layer, token] % 32) <= set(sequence[here])
    assert len(np.unique(routing.ids[:, :6])) > 200


def test_tokens_of_one_group_still_have_distinct_experts(tmp_path: Path) -> None:
    ids = np.zeros((1, 5, 2, 2), dtype=np.uint8)
    ids[..., 1] = 8  # both choices are of the same group
    ids[0, 0, 0, 0] = 15
    np.savez(tmp_path / "same.npz", ids=ids)
    routing = mapped(tmp_path / "same.npz", MoeShape("large", 3, 128, 5, 8, 8), 1, 5)
    assert all(len(set(one)) == 5 for one in routing.ids.reshape(-1, 5).tolist())


@pytest.mark.parametrize(
    ("shape", "tokens", "steps"),
    [
        (MoeShape("odd", 2, 48, 4, 8, 8), 1, 4),
        (MoeShape("wide", 2, 32, 5, 8, 8), 1, 4),
        (SHAPES["deepseek-v4-flash"], 33, 4),
        (SHAPES["deepseek-v4-flash"], 1, 513),
    ],
)
def test_traces_that_do_not_map(shape: MoeShape, tokens: int, steps: int) -> None:
    with pytest.raises(TraceError):
        mapped(TRACE, shape, tokens, steps)


@pytest.mark.parametrize("hit", [0.0, 0.75, 1.0])
def test_adjustable_routing_hits_as_often_as_it_is_told_to(hit: float) -> None:
    routing = adjustable(60, 3, 64, 4, 2, hit=hit, hot=8)
    ordered = np.sort(routing.ids, axis=-1)
    assert (ordered[..., 1:] > ordered[..., :-1]).all()
    counts = np.sort(routing.counts(0, 60), axis=1)[:, ::-1]
    if hit == 1.0:
        assert (counts[:, 8:] == 0).all()
    assert counts[:, :8].sum() / counts.sum() == pytest.approx(max(hit, 8 / 64), abs=0.06)
    pool = HostPool(3, 64, 3 * 16, "lfu-decay")
    shares = []
    for step in range(60):
        for layer in range(3):
            experts, pairs = np.unique(routing.ids[step, layer], return_counts=True)
            shares.append(len(pool.admit(layer, experts.astype(np.int64), pairs)) / len(experts))
    assert np.mean(shares[60:]) == pytest.approx(1 - hit, abs=0.1)


def test_the_command_compares_every_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission_policy, "_MAPPED_STEPS", 8)
    output = tmp_path / "found.json"
    arguments = ["--steps", "40", "--variants", "64:32", "--output", str(output), "--commit", "abc"]
    assert admission_policy.main(arguments) == 0
    content = json.loads(output.read_text())
    assert content["commit"] == "abc"
    assert len(content["runs"]) == 12
    for run in content["runs"]:
        shares = run["missed_share"]
        assert {"device", "device 64:32", "lru", "lfu-decay", "belady"} <= set(shares)
        assert min(shares.values()) == shares["belady"]


@pytest.mark.parametrize("arguments", [["--steps", "0"], ["--variants", "0:32"]])
def test_arguments_that_study_nothing(arguments: list[str]) -> None:
    with pytest.raises(SystemExit):
        admission_policy.main(arguments)
