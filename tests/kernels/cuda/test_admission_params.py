"""What the kernels of a layer are told about an admission, and what is refused before they are."""

from __future__ import annotations

import pytest
import torch

from support.admissions import copied, over_rows, pattern_rows
from ziggurat.kernels.admission import Admission
from ziggurat.kernels.cuda.admission import AdmittedLayers, mapped_address
from ziggurat.kernels.cuda.errors import LayerError

ARENA = 1 << 40


def admission(stride: int = 32, first: int = 0) -> Admission:
    return over_rows(pattern_rows(12, stride), 3, 7, log_events=20, first=first)


def test_each_layer_is_seen_where_it_lies() -> None:
    a = admission(first=1)
    layers = AdmittedLayers(a, 4, ARENA)
    for number in range(3):
        view = layers.view(number, a.table[number], a.pool)
        assert (view.first_key, view.begins, view.slots, view.log_mask) == (4 * number, number == 1, 7, 31)
        assert (view.table, view.owners, view.heat) == tuple(
            t.data_ptr() for t in (a.table, a.owners, a.heat)
        )
        assert (view.last, view.places, view.copies) == tuple(
            t.data_ptr() for t in (a.last, a.places, a.copies)
        )
        assert (view.state, view.log, view.arena) == (a.state.data_ptr(), a.log.data_ptr(), ARENA)


def test_slots_and_pool_have_to_be_the_admissions() -> None:
    a = admission()
    layers = AdmittedLayers(a, 4, ARENA)
    for slots, pool in ((a.table[0], a.pool), (a.table[1].clone(), a.pool), (a.table[1], a.pool.clone())):
        with pytest.raises(LayerError, match="not those of the admission's layer 1"):
            layers.view(1, slots, pool)


def test_an_admission_that_kernels_cannot_follow_is_refused() -> None:
    with pytest.raises(LayerError, match="4 experts a layer, expected 5"):
        AdmittedLayers(admission(), 5, ARENA)
    with pytest.raises(LayerError, match="multiple of 16"):
        AdmittedLayers(admission(stride=24), 4, ARENA)
    with pytest.raises(LayerError, match="the arena begins at 0x10000000004, which is no multiple of 16"):
        AdmittedLayers(admission(), 4, ARENA + 4)
    a = admission()
    apart = torch.zeros(12, 64, dtype=torch.uint8)[:, :32]
    with pytest.raises(LayerError, match=r"lie \(64, 1\) and \(32, 1\) bytes apart"):
        AdmittedLayers(copied(a, arena=apart), 4, ARENA)


@pytest.mark.gpu
def test_page_locked_memory_has_an_address_on_the_device_and_other_memory_has_none() -> None:
    pinned = torch.zeros(64, dtype=torch.uint8).pin_memory()
    assert mapped_address(pinned, 0) != 0
    there = torch.zeros(64, dtype=torch.uint8, device="cuda")
    assert mapped_address(there, 0) == there.data_ptr()
    with pytest.raises(LayerError, match="the arena is not mapped for devices"):
        mapped_address(torch.zeros(64, dtype=torch.uint8), 0)
