"""The arithmetic of the policy next-use, over plain arrays, written for a compiler (and for a kernel).

Only +, -, *, / and comparisons of float64 and table look-ups are used, no library function: the same bits everywhere.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

ROWS: Final = 16  # tokens of a step whose histories are kept; further ones count for heat only
HISTORY: Final = 256  # steps of a token's past that the present is compared with
AHEAD: Final = 6  # steps after a similar one that are looked at …
AHEAD_DECAY: Final = 0.6  # … each worth this much of the one before
HEAT_DECAY: Final = 31 / 32
BASE_DECAY: Final = 511 / 512
CONTEXT_DECAY: Final = 0.8  # of likeness, a layer
SHARPNESS: Final = 32.0  # octaves of weight between unlike and like
FAINT: Final = -10.0  # octaves below the most alike that do not count
FOLLOW_DECAY: Final = 0.5  # of "was used", a step, when followers are counted
PRIOR: Final = (
    10.0  # uses that an expert must have seen before its followers count for as much as the base rate
)
FORGET: Final = 1024.0  # uses of an expert after which its followers are halved
MATCH_LOW: Final = 0.0
MATCH_HIGH: Final = 0.7
FOLLOW_LOW: Final = 0.4
FOLLOW_HIGH: Final = 0.2
LOG_BITS: Final = 10

_STEPS: Final = 1 << LOG_BITS
_SHIFT: Final = 52 - LOG_BITS
_MASK: Final = _STEPS - 1

# Rounded to float32, in which no library differs from another.
_FRACTIONS: Final[F64] = np.arange(_STEPS + 1) / _STEPS
LOG_TABLE: Final[F64] = np.log2(1.0 + _FRACTIONS).astype(np.float32).astype(np.float64)  # log2(1 + i / steps)
EXP_TABLE: Final[F64] = (
    np.exp2(_FRACTIONS - 1.0).astype(np.float32).astype(np.float64)
)  # 2 ** (i / steps - 1)
HALVES: Final[F64] = np.power(0.5, np.arange(64, dtype=np.float64))


def record(
    ids: I64, layer: int, place: I64, masks: npt.NDArray[np.uint64], chosen: I64, context: F64, steps: I64
) -> None:
    """Write down where the tokens of a step went in a layer, and how alike every past step of theirs is by now.

    ids [T, k]. place [T]: of this step in the rings. masks uint64 [ROWS, L, HISTORY, words], chosen
    [ROWS, L, HISTORY, k]: rings of the past. context [ROWS, HISTORY]: likeness of the step so many steps ago.
    steps [T]: how many are known.
    """
    tokens, top_k = ids.shape
    words = masks.shape[3]
    for row in range(tokens):
        here = place[row]
        for word in range(words):
            masks[row, layer, here, word] = np.uint64(0)
        for j in range(top_k):
            expert = ids[row, j]
            chosen[row, layer, here, j] = expert
            masks[row, layer, here, expert >> 6] |= np.uint64(1) << np.uint64(expert & 63)
        for back in range(1, min(steps[row], HISTORY - 1) + 1):
            there = (here - back) & (HISTORY - 1)
            common = np.int64(0)
            for word in range(words):
                both = masks[row, layer, here, word] & masks[row, layer, there, word]
                both = both - ((both >> np.uint64(1)) & np.uint64(0x5555555555555555))
                both = (both & np.uint64(0x3333333333333333)) + (
                    (both >> np.uint64(2)) & np.uint64(0x3333333333333333)
                )
                both = (both + (both >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
                common += np.int64((both * np.uint64(0x0101010101010101)) >> np.uint64(56))
            context[row, back] = CONTEXT_DECAY * context[row, back] + (1.0 - CONTEXT_DECAY) * common / top_k


def follow(ids: I64, layer: int, recent: F64, followers: F64, seen: F64) -> None:
    """Count which experts followed which. recent [ROWS, L, E]: how recently a token used an expert, 1 = one step ago
    and never anything else; followers [L, E, E]; seen [L, E]: uses of the expert that followers are counted for."""
    tokens, top_k = ids.shape
    experts = recent.shape[2]
    for row in range(tokens):
        for before in range(experts):
            weight = recent[row, layer, before]
            if weight > 0.02:
                for j in range(top_k):
                    followers[layer, before, ids[row, j]] += weight
                seen[layer, before] += weight
                if seen[layer, before] > FORGET:
                    seen[layer, before] *= 0.5
                    for after in range(experts):
                        followers[layer, before, after] *= 0.5
            recent[row, layer, before] = weight * FOLLOW_DECAY
        for j in range(top_k):
            recent[row, layer, ids[row, j]] += 1.0 - FOLLOW_DECAY


def warm(ids: I64, extra: I64, layer: int, heat: F64, base: F64, mark: I64, stamp: int) -> None:
    """A step's uses into the fast and the slow rate, [L, E] each. mark [E]: the last stamp an expert was counted at."""
    experts = heat.shape[1]
    for expert in range(experts):
        heat[layer, expert] *= HEAT_DECAY
        base[layer, expert] *= BASE_DECAY
    for part in (ids, extra):
        for row in range(part.shape[0]):
            for j in range(part.shape[1]):
                expert = part[row, j]
                if mark[expert] != stamp:
                    mark[expert] = stamp
                    heat[layer, expert] += 1.0 - HEAT_DECAY
                    base[layer, expert] += 1.0 - BASE_DECAY


def score(
    ids: I64,
    layer: int,
    place: I64,
    steps: I64,
    chosen: I64,
    context: F64,
    followers: F64,
    seen: F64,
    heat: F64,
    base: F64,
    scores: F64,
    work: F64,
    bits: I64,
) -> None:
    """The scores [L, E] of one layer: log2 of what the next use of each expert is worth, if a use in the next step is
    worth 1 and in every later step half as much. work float64 [6, E]; bits: the same memory as int64."""
    tokens, top_k = ids.shape
    experts = heat.shape[1]
    chance, after, product, value, rate, inverse = work[0], work[1], work[2], work[3], work[4], work[5]
    value_bits = bits[3]
    share = 1.0 / tokens
    for expert in range(experts):
        chance[expert] = 0.0
        rate[expert] = base[layer, expert] * share + 1e-6
        inverse[expert] = 1.0 / rate[expert]
    for row in range(tokens):
        known = min(steps[row], HISTORY - 1)
        most = 0.0
        for back in range(1, known + 1):
            most = max(most, context[row, back])
        for expert in range(experts):
            after[expert] = 0.0
            product[expert] = 1.0
        total = 0.0
        for back in range(1, known + 1):
            octaves = SHARPNESS * (context[row, back] - most)
            if octaves > FAINT:
                whole = int(-octaves)
                worth = HALVES[whole] * EXP_TABLE[int((octaves + whole + 1.0) * _STEPS)]
                there = place[row] - back
                for ahead in range(1, min(AHEAD, back) + 1):
                    total += worth
                    for j in range(top_k):
                        after[chosen[row, layer, (there + ahead) & (HISTORY - 1), j]] += worth
                    worth *= AHEAD_DECAY
        match_share = MATCH_LOW + (MATCH_HIGH - MATCH_LOW) * most
        follow_share = FOLLOW_LOW + (FOLLOW_HIGH - FOLLOW_LOW) * most
        denominator = 1.0
        for j in range(top_k):
            before = ids[row, j]
            denominator *= seen[layer, before] + PRIOR
            for expert in range(experts):
                product[expert] *= followers[layer, before, expert] * inverse[expert] + PRIOR
        for expert in range(experts):
            fast = heat[layer, expert] * share + 0.003 * rate[expert]
            matched = fast
            if total > 0.0:
                matched = (after[expert] / total + 0.1 * rate[expert]) / 1.1
            value[expert] = fast
            log_fast = (value_bits[expert] >> 52) - 1023 + LOG_TABLE[(value_bits[expert] >> _SHIFT) & _MASK]
            value[expert] = matched
            log_matched = (
                (value_bits[expert] >> 52) - 1023 + LOG_TABLE[(value_bits[expert] >> _SHIFT) & _MASK]
            )
            value[expert] = product[expert] / denominator
            lift = (value_bits[expert] >> 52) - 1023 + LOG_TABLE[(value_bits[expert] >> _SHIFT) & _MASK]
            octaves = log_fast + match_share * (log_matched - log_fast) + follow_share * lift
            octaves = max(-60.0, min(0.0, octaves))
            whole = int(-octaves)
            chance[expert] += HALVES[whole] * EXP_TABLE[int((octaves + whole + 1.0) * _STEPS)]
    for expert in range(experts):
        value[expert] = chance[expert] / (0.5 + 0.5 * chance[expert])
        scores[layer, expert] = (
            (value_bits[expert] >> 52) - 1023 + LOG_TABLE[(value_bits[expert] >> _SHIFT) & _MASK]
        )


def coldest(scores: F64, held: npt.NDArray[np.uint8], low: F64, low_key: I64, fresh: I64, layer: int) -> int:
    """The held key whose next use is worth least, or -1. `layer` ran last: a row of the layer after it can be used at
    once, one of its own only a step later, and waiting a step halves the worth. low, low_key, fresh [L]: the lowest
    score of each layer and whether that is known."""
    layers, experts = scores.shape
    best = np.inf
    found = -1
    for one in range(layers):
        if fresh[one] == 0:
            fresh[one] = 1
            low[one], low_key[one] = np.inf, -1
            for expert in range(experts):
                if held[one, expert] != 0 and scores[one, expert] < low[one]:
                    low[one], low_key[one] = scores[one, expert], one * experts + expert
        distance = (one - layer - 1) % layers + 1
        worth = low[one] - distance / layers
        if low_key[one] >= 0 and worth < best:
            best, found = worth, low_key[one]
    return found
