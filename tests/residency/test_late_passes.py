"""Copies of counts for many passes: what each is behind, and when the arena that passes read may be written to."""

from __future__ import annotations

import threading
from itertools import count

import torch
from hypothesis import given
from hypothesis import strategies as st

from ziggurat.residency.late_passes import Brought, LatePasses
from ziggurat.residency.transfers import Download


class Device:
    """A queue of passes; a copy shows how many of them were in it when it was asked for."""

    def __init__(self) -> None:
        self.counter = torch.zeros(1, dtype=torch.int32)
        self.late = LatePasses(lambda: Download(self.counter), lambda copy: copy.take())
        self.epochs = count()
        self.passes_of: dict[int, int] = {}  # epoch -> number of the last pass that began under it
        self._epoch = -1

    def _open(self) -> int:
        self._epoch = next(self.epochs)
        return self._epoch

    def begin(self) -> None:
        self.late.begun(self._open)
        self.passes_of[self._epoch] = int(self.counter[0]) + 1

    def launch(self) -> None:
        self.counter += 1
        self.late.launched()

    def check(self, copies: list[Brought], before: int) -> int:
        """How many passes are known of after these copies."""
        for one in copies:
            before += one.passes
            assert one.counts.read().tolist() == [before], "what is behind these passes and no others"
            if one.epoch is not None:
                assert self.passes_of[one.epoch] <= before, (
                    "nothing that reads the arena under it may still come"
                )
        self.late.give_back(copies)
        return before


@given(st.lists(st.sampled_from(["pass", "ask", "ask within", "read", "raise"]), max_size=60))
def test_copies_are_behind_whole_passes_and_epochs_end_behind_all_of_theirs(steps: list[str]) -> None:
    device = Device()
    late = device.late
    known = passes = 0
    for step in steps:
        match step:
            case "pass" | "ask within":
                device.begin()
                if step == "ask within":
                    late.ask()
                assert late.interrupted
                device.launch()
                passes += 1
            case "raise":
                device.begin()
                late.abandon()
                assert not late.interrupted
            case "ask":
                late.ask()
            case "read":
                known = device.check(late.arrived(wait=False), known)
        assert late.waiting == (known < passes)
    late.ask()
    assert device.check(late.arrived(wait=True), known) == passes
    assert not late.waiting
    assert late.copies == 0


def test_many_passes_ask_by_themselves() -> None:
    device = Device()
    for _ in range(1000):
        device.begin()
        device.launch()
    assert device.late.copies == 3
    device.late.ask()
    assert device.check(device.late.arrived(wait=True), 0) == 1000


def test_a_thread_asks_while_passes_are_launched() -> None:
    device = Device()
    done = threading.Event()

    def ask() -> None:
        while not done.is_set():
            device.late.ask()

    thread = threading.Thread(target=ask)
    thread.start()
    known = 0
    try:
        for number in range(3000):
            device.begin()
            device.launch()
            if number % 7 == 0:
                known = device.check(device.late.arrived(wait=False), known)
    finally:
        done.set()
        thread.join()
    device.late.ask()
    assert device.check(device.late.arrived(wait=True), known) == 3000
