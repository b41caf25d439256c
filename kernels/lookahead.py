"""Look-ahead: rows of the next layer that are fetched before its router has spoken; its tensors and its rules.

While a layer runs, somebody guesses which experts the next one will be routed to. Guessed rows that have no slot go
from the arena into *spare* rows, which belong to no expert, beside the layer's own work. What the next layer admits,
evicts and logs is exactly what it would be without guesses (`ziggurat.kernels.admission`); but a row that it has to
copy is taken from its spare as far as it has arrived there, and every other guess is called off, in the middle of its
row. So a wrong guess costs time on the link, and nothing else. The rules, for layer `layer` with guesses ids [T, N]:

1. Choice, once the layer before has copied its rows. Candidates are the guesses of live tokens, all tokens' first ones
   before any second one, in the order of tokens. Of those that are experts, have no slot, have a place in the arena
   and did not come before, the first SPARES are chosen: rows[g] = (place, key), COUNT is their number, GUESSED grows by
   it, and VALID becomes the tag of this pass and layer: clock * layers + layer, modulo 2^32, in int32.
2. Fetch. Rows are copied to spares in the order of the choice, in chunks that are dealt to LANES in turn. Of each
   lane, a chunk is claimed before it is copied (`progress[0]`), and told of afterwards (`progress[1]`). FETCHED counts
   chunks.
3. The layer itself, behind its admission, if VALID is its tag: it takes all lanes away, so that no chunk is begun any
   more. A row of its copy list whose place is among rows[:COUNT] takes chunks that were claimed from
   its spare, when they have arrived, and the others from the arena. MATCHED counts such rows, USED such chunks.
   CALLED_OFF becomes the tag, so that a fetch that is late does not begin.

A place holds one row during a pass, and a tag comes once; so a spare with the right place has the right row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ziggurat.kernels.admission import Admission

#: Rows that are guessed for one layer at most. While a layer and the next one's attention run, few arrive.
SPARES: Final = 8
#: Guesses of a token, and tokens of a batch, up to which layers look ahead: more have no use for so few spares.
MOST_GUESSES: Final = 16
MOST_TOKENS: Final = 16
#: Parts of a row that are moved side by side: one for each block of the gather.
LANES: Final = 24
#: Bytes that a block of a device moves at a time: the unit of FETCHED and USED. A row's last chunk may be smaller.
CHUNK_BYTES: Final = 32 << 10

# Words of `words`.
COUNT: Final = 0
VALID: Final = 1
CALLED_OFF: Final = 2
GUESSED: Final = 3
MATCHED: Final = 4
FETCHED: Final = 5
USED: Final = 6
WORDS: Final = 8

Guess = Callable[[torch.Tensor], torch.Tensor]
"""From what goes into a layer's experts, x [T, H], to experts that the next layer may be routed to: integers [T, N],
the likeliest first; what is no expert counts as no guess. Runs on the device, beside the layer."""


@dataclass(frozen=True, slots=True)
class Lookahead:
    """The tensors beside one admission's, on the same device.

    spare: uint8 [SPARES, stride]. words: int32 [WORDS]; GUESSED and the words behind it count since the start, modulo
    2^32. rows: int32 [SPARES, 2]. progress: int32 [2, SPARES, LANES].
    """

    spare: torch.Tensor
    words: torch.Tensor
    rows: torch.Tensor
    progress: torch.Tensor


@dataclass(frozen=True, slots=True)
class LookaheadCounts:
    """Rows that were guessed, those of them that were missing, and chunks: brought, and of these used. A chunk has
    CHUNK_BYTES. All modulo 2^32."""

    guessed: int
    matched: int
    fetched: int
    used: int

    @classmethod
    def of(cls, words: Sequence[int]) -> LookaheadCounts:
        """From `Lookahead.words`, as they are at some time. int32 [WORDS]."""
        return cls(*(int(words[i]) & 0xFFFFFFFF for i in (GUESSED, MATCHED, FETCHED, USED)))

    def since(self, before: LookaheadCounts) -> LookaheadCounts:
        """What has come to it."""
        names = ("guessed", "matched", "fetched", "used")
        return LookaheadCounts(*((getattr(self, n) - getattr(before, n)) & 0xFFFFFFFF for n in names))


NOTHING_GUESSED: Final = LookaheadCounts(0, 0, 0, 0)


def make_lookahead(admission: Admission, words: torch.Tensor | None = None) -> Lookahead:
    """Nothing guessed yet; spares hold garbage. words: memory for the words, int32 [WORDS] on the same device."""
    device = admission.pool.device
    if words is None:
        words = torch.empty(WORDS, dtype=torch.int32, device=device)
    words.zero_()
    words[VALID : CALLED_OFF + 1] = -1
    return Lookahead(
        torch.empty((SPARES, admission.pool.shape[1]), dtype=torch.uint8, device=device),
        words,
        torch.full((SPARES, 2), -1, dtype=torch.int32, device=device),
        torch.zeros((2, SPARES, LANES), dtype=torch.int32, device=device),
    )


def lookahead_bytes(stride: int) -> int:
    """Memory of a Lookahead over rows of so many bytes, but for a few thousand bytes."""
    return SPARES * stride


def tag(clock: int, layers: int, layer: int) -> int:
    """The tag of a layer in a pass, as int32 holds it."""
    word = clock * layers + layer
    return (word + (1 << 31)) % (1 << 32) - (1 << 31)
