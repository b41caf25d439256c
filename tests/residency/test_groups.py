"""Routing regrouped by expert says the same as the routing itself."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ziggurat.residency.groups import group_pairs
from ziggurat.residency.runtime_errors import RoutingError

EXPERTS = 7


@settings(max_examples=100, deadline=None)
@given(
    ids=hnp.arrays(
        st.sampled_from([np.int32, np.int64]),
        st.tuples(st.integers(0, 9), st.integers(1, 4)),
        elements=st.integers(0, EXPERTS - 1),
    ),
    data=st.data(),
)
def test_groups_are_a_partition_of_the_pairs(ids: np.typing.NDArray[np.integer], data: st.DataObject) -> None:
    prefill = data.draw(st.none() | hnp.arrays(np.bool_, len(ids)))
    groups = group_pairs(ids, EXPERTS, prefill)
    flat = ids.reshape(-1).tolist()
    assert groups.experts.tolist() == sorted(set(flat))
    assert sorted(groups.pairs.tolist()) == list(range(len(flat)))
    for group, expert in enumerate(groups.experts.tolist()):
        pairs = groups.of(group).tolist()
        assert pairs == [pair for pair, named in enumerate(flat) if named == expert]
        assert groups.counts[group] == len(pairs)
        steady = [pair for pair in pairs if prefill is None or not prefill[pair // ids.shape[1]]]
        assert groups.weights[group] == len(steady)


@pytest.mark.parametrize("wrong", [-1, EXPERTS, 2**31 - 1, -(2**31)])
def test_an_id_that_is_no_expert_is_named(wrong: int) -> None:
    with pytest.raises(RoutingError, match=f"expert {wrong},.*0..6"):
        group_pairs(np.array([[0, wrong]], dtype=np.int32), EXPERTS)
