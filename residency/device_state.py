"""The static tensors that captured graphs of one service read and write, in one place with one way in.

Their addresses never change, so a graph that was captured before the first step serves every step. Whatever a pass
needs to know is put into them in stream order before it, and whatever it learns is taken out in stream order after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.residency.passes import BoolArray, IntArray
from ziggurat.residency.runtime_errors import StepError
from ziggurat.residency.slots import ABSENT, SlotTable
from ziggurat.residency.transfers import Download, EventFactory, Uploads

_ALIGN = 32  # words: of what follows the counts
_HEAD = 8  # words before the counts: live, a spare one, the tally's three, spare ones
_TALLY = slice(2, 5)


@dataclass(frozen=True, slots=True)
class Counted:
    """What passes counted. missing, invalid: live pairs without a slot, and with an id that is no expert. absent: of
    layers that admit, live pairs whose expert had no slot when its layer began.

    pairs, steady: int64 [L, E], live pairs routed to each expert: of all tokens, of those that are not prefill.
    """

    missing: int
    invalid: int
    absent: int
    pairs: IntArray
    steady: IntArray


class DeviceState:
    """slot table int32 [L, E], live int32 [1], prefill uint8 [max_tokens], counts int32 [L, E, 2], tally int32 [3].

    Layers add to counts and tally, modulo 2^32; whatever is downloaded is looked at in order, as the difference to what
    came before. The thread that runs passes arms them on one stream.

    Between passes `live` is 0, so that whatever the model runs outside a step (profiling, dummy batches) computes
    nothing and counts nothing; after a pass that cannot miss it may stay, since nothing can go wrong, until something
    else is called. max_tokens: rows of the largest batch that a layer can be called with.
    events: makes events; for tests. more: int32 words behind the counts that a download brings, too; `more` [more].
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        max_tokens: int,
        device: torch.device,
        *,
        more: int = 0,
        events: EventFactory | None = None,
    ) -> None:
        if max_tokens < 1:
            raise StepError(f"the largest batch has at least 1 token, not {max_tokens}")
        self.device = device
        self.max_tokens = max_tokens
        self._counted = _HEAD + layers * experts * 2
        self._more = -(-self._counted // _ALIGN) * _ALIGN if more else self._counted
        self._words = torch.zeros(self._more + more, dtype=torch.int32, device=device)
        self._shape = (layers, experts, 2)
        self.live = self._words[0:1]
        self.tally = self._words[_TALLY]
        self.more = self._words[self._more :]
        counts = self._words[_HEAD : self._counted].view(self._shape)
        table = torch.full((layers, experts), ABSENT, dtype=torch.int32, device=device)
        self.table = table
        self.prefill = torch.zeros(max_tokens, dtype=torch.uint8, device=device)
        self.chunk = torch.full((experts,), ABSENT, dtype=torch.int32, device=device)
        # One view per layer, made once: a replayed step makes no objects, and an eager one few.
        self.table_of = tuple(table.unbind(0))
        self.counts_of = tuple(counts.unbind(0))
        self._tables = Uploads((layers, experts), torch.int32, device, depth=2, events=events)
        self._flags = Uploads((max_tokens,), torch.uint8, device, events=events)
        self._chunks = Uploads((experts,), torch.int32, device, depth=8, events=events)
        self._lives = Uploads((max_tokens,), torch.int32, device, events=events)
        self._live_of_part = torch.zeros(max_tokens, dtype=torch.int32, device=device)
        self._parted: tuple[int, int, int] | None = None  # what `_live_of_part` holds
        self.events = events
        self._answer = self.download()
        self._parsed: npt.NDArray[np.int32] = np.zeros(self._counted, dtype=np.int32)  # what came last
        self._stream: torch.cuda.Stream | None = None  # of passes
        self._flagged = 0  # leading rows of `prefill` that may hold a 1
        self._alive = 0  # what `live` holds once everything that is queued has run
        self._version = -1  # of the slot table that `table` shows

    def check(self, live: int) -> None:
        """StepError for a batch that is too large."""
        if live > self.max_tokens:
            raise StepError(
                f"a step of {live} live tokens is larger than the largest batch, {self.max_tokens}"
            )

    def arm(self, live: int, prefill: BoolArray | None) -> None:
        """Before a pass: `live` tokens, prefill bool [live], nothing counted yet. What earlier passes counted has been
        parsed, or is of no interest."""
        self.check(live)
        if self.device.type == "cuda":
            self._stream = torch.cuda.current_stream(self.device)
        self._words[: self._counted].zero_()
        self._parsed[:] = 0
        self._alive = 0
        self.set_live(live)
        self.set_prefill(live, prefill)

    def arm_again(self, live: int, prefill: BoolArray | None) -> None:
        """Before a pass whose counts come together with those of the one before."""
        self.check(live)
        self.set_live(live)
        self.set_prefill(live, prefill)

    def set_prefill(self, live: int, prefill: BoolArray | None) -> None:
        """Which of the live tokens belong to a prompt."""
        flags = prefill is not None and bool(prefill.any())
        if flags or self._flagged:
            values = np.zeros(max(live, self._flagged), dtype=np.uint8)
            if prefill is not None:
                values[:live] = prefill
            self._flags.send(values, self.prefill)
            self._flagged = live if flags else 0

    def set_live(self, live: int) -> None:
        """The number of live tokens, and nothing else."""
        if live != self._alive:
            self.live.fill_(live)
            self._alive = live

    def disarm(self) -> None:
        """After a pass."""
        self.set_live(0)

    def show(self, table: SlotTable) -> None:
        """Make the device's table that of the host. Queued behind the row copies that the caller has waited for."""
        if table.version != self._version:
            self._tables.send(table.numpy, self.table)
            self._version = table.version

    def show_chunk(self, slots: npt.NDArray[np.int32]) -> torch.Tensor:
        """int32 [E] on the device for one `add`; the next chunk may be shown once that call is queued."""
        self._chunks.send(slots, self.chunk)
        return self.chunk

    def parts(self, rows: int, live: int, most: int) -> list[tuple[int, int, torch.Tensor]]:
        """(first row, number of rows, live int32 [1]) of a batch in parts of at most `most` rows, as equal as can be.

        Equal, because kernels may be chosen by the number of rows: no small part is left at the end of a large batch.
        """
        if rows <= most:
            return [(0, rows, self.live)]
        size = -(-rows // -(-rows // most))
        firsts = np.arange(0, rows, size)
        if self._parted != (rows, live, size):  # most layers of a pass ask for the same
            self._lives.send(np.clip(live - firsts, 0, size).astype(np.int32), self._live_of_part)
            self._parted = (rows, live, size)
        return [
            (first, min(size, rows - first), self._live_of_part[i : i + 1])
            for i, first in enumerate(firsts.tolist())
        ]

    def download(self) -> Download:
        """A buffer for what a pass counted."""
        return Download(self._words, events=self.events)

    def take(self, counts: Download) -> None:
        """Queue a copy into such a buffer behind the passes, in any thread."""
        with self._behind_passes():
            counts.take()

    @contextmanager
    def _behind_passes(self) -> Iterator[None]:
        if self._stream is None:
            yield
        else:
            with torch.cuda.stream(self._stream):
                yield

    def counted(self) -> Counted:
        """What the pass that is queued now will have counted: waits for its end."""
        return self.parse(self.answer())

    def answer(self) -> npt.NDArray[np.int32]:
        """The words as the pass that is queued now leaves them: waits for its end. Valid until the next call."""
        self._answer.take()
        return self._answer.read()

    def behind(self, words: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """What `more` held when words were downloaded."""
        return words[self._more :]

    def parse(self, words: npt.NDArray[np.int32]) -> Counted:
        """What was counted since the download that was parsed last."""
        more = words[: self._counted] - self._parsed  # modulo 2^32, as the kernels add
        self._parsed[:] = words[: self._counted]
        missing, invalid, absent = more[_TALLY].tolist()
        counts = more[_HEAD:].reshape(self._shape).astype(np.int64)
        return Counted(missing, invalid, absent, counts[..., 0], counts[..., 1])
