"""The tensors of layers that admit their own experts, and what a pass leaves in them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from ziggurat.kernels.admission import (
    ABSENT,
    CLOCK,
    HALF_LIFE,
    HEAT_MOST,
    HEAT_UNIT,
    LOG_HEAD,
    STATE_WORDS,
    Admission,
    make_admission,
)
from ziggurat.kernels.lookahead import WORDS, LookaheadCounts
from ziggurat.residency.device_state import DeviceState
from ziggurat.residency.heat import HALF_LIFE_STEPS
from ziggurat.residency.slots import IntArray32
from ziggurat.residency.transfers import EventFactory, Uploads

_EVENT = 4  # words: clock, key, slot, evicted key
# Words of what a download brings beside the counts: the admission's, those of look-ahead, the log. Two kernels may
# write to the first two at the same time, so each has cache lines of its own.
_LINE = 32
_AHEAD = -(-STATE_WORDS // _LINE) * _LINE
_LOG = _AHEAD + -(-WORDS // _LINE) * _LINE
_LEAST_ROOM = 4096  # events, 64 KiB
_HOST_TO_DEVICE = (
    HALF_LIFE_STEPS / HALF_LIFE
)  # the host's heat halves in 1024 steps, so its sums are larger by that


@dataclass(frozen=True, slots=True)
class Events:
    """Part of the log, in order; all int32 [N]. clocks: of the passes, different for each. slots: -1 where a row was
    not in the arena. evicted: keys or -1."""

    clocks: IntArray32
    keys: IntArray32
    slots: IntArray32
    evicted: IntArray32

    @property
    def admitted(self) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.slots != ABSENT
        return found


class InlineState(DeviceState):
    """A DeviceState whose slot table belongs to an Admission; log, counts and what came of guesses come to the host in
    one copy.

    arena uint8 [places, stride] as the device sees it, pool uint8 [S, stride] on the device. first: of the layers that
    admit. `ahead`: place for the words of a Lookahead, int32 [WORDS]; zeros while nobody looks ahead.
    """

    def __init__(
        self,
        layers: int,
        experts: int,
        max_tokens: int,
        arena: torch.Tensor,
        pool: torch.Tensor,
        *,
        first: int = 0,
        events: EventFactory | None = None,
    ) -> None:
        self._keys = layers * experts
        #: Events that the log holds: what one pass can add, as a power of two, or what many small ones do.
        self.room = max(_LEAST_ROOM, 1 << (self._keys - 1).bit_length())
        more = _LOG + self.room * _EVENT
        super().__init__(layers, experts, max_tokens, pool.device, more=more, events=events)
        with torch.inference_mode(False):
            made = make_admission(layers, experts, arena, pool, log_events=self.room, first=first)
        self.admission: Admission = dataclasses.replace(
            made,
            table=self.table,
            state=self.more[:STATE_WORDS],
            log=self.more[_LOG:].view(self.room, _EVENT),
        )
        self.ahead = self.more[_AHEAD : _AHEAD + WORDS]
        self._places = Uploads((self._keys,), torch.int32, pool.device, depth=4, events=events)
        self._places_version = 0
        self._head = 0  # of the log, as far as it has been read

    @property
    def places_version(self) -> int:
        """Of the table of places that the device has."""
        return self._places_version

    def show_places(self, places: IntArray32, version: int) -> None:
        """Make the device's table of places that of the host, for what is queued from now on."""
        if version != self._places_version:
            self._places.send(places, self.admission.places)
            self._places_version = version

    def give(self, table: IntArray32, owners: IntArray32, heat: npt.NDArray[np.float64] | None) -> None:
        """Slots as the host has filled them: table [L, E], owners [S]; heat [L, E] as in HeatMap, None leaves it.

        For the start and for tests: waits for the device.
        """
        to = self.admission
        to.table.copy_(torch.from_numpy(table))
        to.owners.copy_(torch.from_numpy(owners))
        if heat is not None:
            units = np.minimum(heat.reshape(-1) * (HEAT_UNIT / _HOST_TO_DEVICE), HEAT_MOST)
            to.heat.copy_(torch.from_numpy(units.astype(np.int32)))
            to.last.copy_(to.state[CLOCK : CLOCK + 1].expand(self._keys))

    def look(self) -> tuple[IntArray32, IntArray32]:
        """Table [L, E] and owners [S] as everything queued so far leaves them; what the log has beside that is taken
        for read. Waits for the device."""
        self._head = _head(self.admission.state.cpu().numpy())
        return self.admission.table.cpu().numpy(), self.admission.owners.cpu().numpy()

    def logged(self, words: npt.NDArray[np.int32]) -> Events:
        """What passes did since the download before this one, if it is no more than the log holds. In order."""
        more = self.behind(words)
        head = _head(more)
        numbers = np.arange(self._head, self._head + ((head - self._head) & 0xFFFFFFFF)) % self.room
        self._head = head
        return Events(*more[_LOG:].reshape(self.room, _EVENT)[numbers].T)

    def guesses(self, words: npt.NDArray[np.int32]) -> LookaheadCounts:
        """What had come of guesses since the start when words were downloaded."""
        return LookaheadCounts.of(self.behind(words)[_AHEAD : _AHEAD + WORDS].tolist())


def _head(state: npt.NDArray[np.int32]) -> int:
    return int(state[LOG_HEAD]) & 0xFFFFFFFF
