"""Which tensor names are routed-expert tensors, and of what.

Per expert:  …layers.{L}.<block>.experts.{E}.{gate_proj|up_proj|down_proj|w1|w3|w2}.<suffix>
Fused:       …layers.{L}.<block>.experts.{gate_up_proj|down_proj}[_scale_inv, …]
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

Matrix = Literal["w1", "w3", "w2", "w13"]
Kind = Literal["weight", "scale", "scale_2", "ignored", "unknown"]

MATRICES: tuple[Matrix, Matrix, Matrix] = ("w1", "w3", "w2")
_PROJECTIONS: dict[str, Matrix] = {
    "gate_proj": "w1",
    "up_proj": "w3",
    "down_proj": "w2",
    "w1": "w1",
    "w3": "w3",
    "w2": "w2",
    "gate_up_proj": "w13",
}
_KINDS: dict[str, Kind] = {
    "weight": "weight",
    "weight_scale_inv": "scale",
    "weight_scale": "scale",
    "scale_inv": "scale",
    "scale": "scale",
    "weight_scale_2": "scale_2",
    "scale_2": "scale_2",
    "input_scale": "ignored",  # activation scales: activations are not quantized here
    "activation_scale": "ignored",
}
# A name with anything else before `layers` (mtp., draft., vision_tower., …) is not of the main model.
_MAIN = r"(?P<prefix>(?:(?:model|language_model|text_model|transformer)\.)*)layers\.(?P<layer>[0-9]{1,6})\."
_BLOCK = r"(?P<block>(?:[A-Za-z_]\w*\.)*?)experts\."
_SINGLE = re.compile(_MAIN + _BLOCK + r"(?P<expert>[0-9]{1,6})\.(?P<projection>[A-Za-z_]\w*)\.(?P<suffix>.+)")
_FUSED = re.compile(_MAIN + _BLOCK + r"(?P<projection>gate_up_proj|down_proj)(?:[._](?P<suffix>.+))?")
_OTHER = re.compile(_MAIN + _BLOCK + r"(?P<rest>.+)")


@dataclass(frozen=True, slots=True)
class ExpertName:
    """A tensor name taken apart. `expert` is None in the fused layout; `matrix` w13 is gate over up, fused.

    `kind` "ignored": known and not needed. "unknown": belongs to an expert but means nothing to us (a bias,
    another quantization's tensors); a checkpoint with such tensors is refused, since dropping them would change
    results.
    """

    name: str
    layer: int
    expert: int | None
    matrix: Matrix
    kind: Kind


@dataclass(frozen=True, slots=True)
class NameStyle:
    """How a checkpoint spells expert tensors, so that a missing one can be named."""

    prefix: str
    block: str
    projections: dict[Matrix, str]

    def weight(self, layer: int, expert: int | None, matrix: Matrix) -> str:
        head = f"{self.prefix}layers.{layer}.{self.block}experts."
        if expert is None:
            return head + ("gate_up_proj" if matrix == "w13" else "down_proj")
        return f"{head}{expert}.{self.projections[matrix]}.weight"


def parse_expert_name(name: str) -> ExpertName | None:
    """What an expert tensor's name says, or None for a tensor that is no routed expert of the main model."""
    if ".experts." not in name:
        return None
    if single := _SINGLE.fullmatch(name):
        matrix = _PROJECTIONS.get(single["projection"])
        kind = _KINDS.get(single["suffix"], "unknown") if matrix not in (None, "w13") else "unknown"
        return ExpertName(name, int(single["layer"]), int(single["expert"]), matrix or "w1", kind)
    if fused := _FUSED.fullmatch(name):
        kind = _KINDS.get(fused["suffix"] or "weight", "unknown")
        return ExpertName(name, int(fused["layer"]), None, _PROJECTIONS[fused["projection"]], kind)
    if other := _OTHER.fullmatch(name):
        return ExpertName(name, int(other["layer"]), None, "w13", "unknown")
    return None


def style_of(name: str) -> NameStyle:
    """The style of a name that `parse_expert_name` recognised."""
    match = _OTHER.fullmatch(name)
    assert match is not None
    single = _SINGLE.fullmatch(name)
    if single is not None and single["projection"] in ("w1", "w2", "w3"):
        projections: dict[Matrix, str] = {"w1": "w1", "w3": "w3", "w2": "w2"}
    else:
        projections = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
    return NameStyle(match["prefix"], match["block"], projections)
