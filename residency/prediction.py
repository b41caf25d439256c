"""What a decode step will take when layers fetch their own misses, before anything is measured.

    step = resident step + missed rows x row bytes / what the gather reaches of the link

How many rows a step misses comes from recorded routing, through the device's own rules of admission, or, where there is
none, from heat: then every expert is taken to be wanted at random, as often as its heat says, so that nothing is known
of how experts follow each other, and the estimate is on the high side.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from ziggurat.residency.admission_model import AdmissionModel
from ziggurat.residency.errors import ResidencyError

#: What kernels that read mapped memory reach of the copy engine's rate for rows of 1 MiB and more.
GATHER_SHARE: Final = 0.92


class PredictionError(ResidencyError):
    """Routing or rates that say nothing about the model at hand; the message says what to change."""


@dataclass(frozen=True, slots=True)
class Misses:
    """Of one step on average. rows: routed experts without a slot, of all layers. share: of all routed experts."""

    rows: float
    share: float


@dataclass(frozen=True, slots=True)
class StepEstimate:
    """A decode step of `tokens` sequences. link_gb_per_s: of one large copy from page-locked memory.

    resident_ms: the step with every expert resident, None if nobody knows; then only the link's part is known.
    """

    tokens: int
    misses: Misses
    row_bytes: int
    link_gb_per_s: float
    resident_ms: float | None = None

    @property
    def fetch_ms(self) -> float:
        """Milliseconds in which the missing rows arrive."""
        return self.misses.rows * self.row_bytes / (self.link_gb_per_s * GATHER_SHARE) / 1e6

    @property
    def step_ms(self) -> float | None:
        """Milliseconds of the step, without look-ahead."""
        return None if self.resident_ms is None else self.resident_ms + self.fetch_ms

    def line(self) -> str:
        """The estimate in one line."""
        batch = f"{self.tokens} token{'s' if self.tokens > 1 else ''}"
        text = (
            f"decode of {batch}: {self.misses.rows:.1f} rows missed a step ({self.misses.share:.1%} of those routed "
            f"to), {self.fetch_ms:.2f} ms on a link of {self.link_gb_per_s:.1f} GB/s"
        )
        if self.step_ms is None:
            return text
        return f"{text}, after {self.resident_ms:.2f} ms of work: {self.step_ms:.2f} ms a step"


def load_routing(path: Path) -> npt.NDArray[np.integer]:
    """The `topk_ids` or `ids` of an .npz, integers [sequences, positions, layers, top_k].

    Raises PredictionError if the file has no such array or is no .npz.
    """
    try:
        with np.load(path) as file:
            name = next((name for name in ("topk_ids", "ids") if name in file.files), None)
            if name is None:
                raise PredictionError(
                    f"{path.name} holds {', '.join(file.files)}, but neither topk_ids nor ids"
                )
            found: npt.NDArray[np.integer] = file[name]
    except (OSError, ValueError) as error:
        raise PredictionError(f"{path.name} is no trace: {error}") from error
    if found.ndim != 4 or not np.issubdtype(found.dtype, np.integer):
        raise PredictionError(
            f"{path.name}: ids are {found.dtype} {list(found.shape)}, not integers [sequences, positions, layers, "
            "top_k]"
        )
    return found


def side_by_side(routing: npt.NDArray[np.integer], tokens: int) -> npt.NDArray[np.integer]:
    """Sequences [sequences, positions, layers, k] as steps [steps, layers, tokens, k]: `tokens` of them decoded at a
    time, then the next ones. PredictionError if there are fewer sequences than that."""
    sequences, positions, layers, k = routing.shape
    groups = sequences // tokens
    if groups < 1:
        raise PredictionError(f"the trace has {sequences} sequences, not the {tokens} that a step decodes")
    kept = routing[: groups * tokens].reshape(groups, tokens, positions, layers, k)
    return kept.transpose(0, 2, 3, 1, 4).reshape(groups * positions, layers, tokens, k)


def misses_of_routing(ids: npt.NDArray[np.integer], experts: int, slots: int, *, warm: int) -> Misses:
    """Misses of the steps behind the first `warm` ones; ids int [steps, layers, tokens, k].

    The pool starts with what the warm steps route to most, as a warm start from heat does, and serves them, too.
    """
    steps, layers = ids.shape[:2]
    if not 0 <= warm < steps:
        raise PredictionError(f"{steps} steps leave nothing to count behind {warm} warm ones")
    keys = ids.astype(np.int64) + experts * np.arange(layers)[None, :, None, None]
    uses = np.bincount(keys[:warm].reshape(-1), minlength=layers * experts)
    model = AdmissionModel(layers, experts, slots)
    used = min(slots, int(np.count_nonzero(uses)))
    model.seed(np.argsort(-uses, kind="stable")[:used].tolist(), uses / 4)
    missed = routed = 0
    for step in range(steps):
        for layer in range(layers):
            counts = np.bincount(ids[step, layer].reshape(-1), minlength=experts)
            chosen = np.flatnonzero(counts)
            absent = model.admit(layer, chosen, counts[chosen])
            if step >= warm:
                missed += len(absent)
                routed += len(chosen)
    return Misses(missed / (steps - warm), missed / routed)


def misses_of_heat(heat: npt.NDArray[np.floating], top_k: int, slots: int, *, tokens: int) -> Misses:
    """Misses if the hottest `slots` experts stay in the pool; heat float [layers, experts], not all of it 0."""
    total = heat.sum(axis=1, keepdims=True)
    if not (total > 0).all():
        raise PredictionError("a layer has no heat: nothing is known about its routing")
    wanted = 1 - (1 - np.minimum(1.0, top_k * heat / total)) ** tokens
    ranked = np.argsort(-heat.reshape(-1), kind="stable")
    absent = float(wanted.reshape(-1)[ranked[slots:]].sum())
    return Misses(absent, absent / float(wanted.sum()))
