"""Host values on their way to a device: a buffer is left alone while a copy out of it may be pending."""

from __future__ import annotations

import numpy as np
import torch

from ziggurat.residency.transfers import Download, Uploads


class Log:
    """Events that say when they are recorded and waited for."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, int]] = []
        self.made = 0

    def __call__(self) -> Numbered:
        self.made += 1
        return Numbered(self, self.made - 1)


class Numbered:
    def __init__(self, log: Log, number: int) -> None:
        self.log, self.number = log, number

    def record(self) -> None:
        self.log.lines.append(("record", self.number))

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        self.log.lines.append(("wait", self.number))


def test_a_buffer_is_waited_for_before_it_is_written_again() -> None:
    log = Log()
    uploads = Uploads((4,), torch.int32, torch.device("cpu"), depth=2, events=log)
    target = torch.zeros(4, dtype=torch.int32)
    for round in range(3):
        uploads.send(np.full(3, round, dtype=np.int32), target)
        assert target.tolist() == [round, round, round, 0]
    order = [("wait", 0), ("record", 0), ("wait", 1), ("record", 1), ("wait", 0), ("record", 0)]
    assert log.lines == order


def test_what_was_sent_may_change_afterwards() -> None:
    uploads = Uploads((2, 2), torch.int32, torch.device("cpu"))
    target = torch.zeros(2, 2, dtype=torch.int32)
    values = np.array([[1, 2], [3, 4]], dtype=np.int32)
    uploads.send(values, target)
    values[:] = 9
    assert target.tolist() == [[1, 2], [3, 4]]


def test_a_download_is_read_after_its_event() -> None:
    log = Log()
    source = torch.arange(3, dtype=torch.int32)
    download = Download(source, events=log)
    download.take()
    assert not download.arrived()
    assert log.lines == [("record", 0)]
    source += 10
    assert download.read().tolist() == [0, 1, 2]
    assert log.lines == [("record", 0), ("wait", 0)]
    download.take()
    assert download.read().tolist() == [10, 11, 12]
