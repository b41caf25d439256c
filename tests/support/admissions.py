"""Admissions for tests: rows that tell whose they are, and random sequences of routed calls."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch

from ziggurat.kernels.admission import ABSENT, Admission, make_admission
from ziggurat.residency.inline.layers import InlineLayers
from ziggurat.residency.service import ExpertService


def pattern_rows(keys: int, stride: int) -> torch.Tensor:
    """uint8 [keys, stride]: each row holds its key in every 32-bit word."""
    words = torch.arange(keys, dtype=torch.int32)[:, None].expand(-1, stride // 4).contiguous()
    return words.view(torch.uint8)


def admission_of(service: ExpertService) -> Admission:
    """What a service's layers admit into."""
    layers = service._layers
    assert isinstance(layers, InlineLayers)
    return layers._device.admission


def over_rows(
    rows: torch.Tensor,
    layers: int,
    slots: int,
    *,
    absent: Iterable[int] = (),
    log_events: int | None = None,
    first: int = 0,
    seed: int = 0,
) -> Admission:
    """On the CPU, nothing resident: rows uint8 [layers * experts, stride] lie shuffled in an arena, but for the keys
    of `absent`; slots hold garbage."""
    keys, stride = rows.shape
    order = torch.randperm(keys, generator=torch.Generator().manual_seed(seed))
    arena = torch.full((keys, stride), 0xEE, dtype=torch.uint8)
    arena[order] = rows
    pool = torch.full((slots, stride), 0xFF, dtype=torch.uint8)
    made = make_admission(layers, keys // layers, arena, pool, log_events=log_events, first=first)
    made.places.copy_(order)
    for key in absent:
        made.places[key] = ABSENT
        arena[order[key]] = 0xDD
    return made


def copied(admission: Admission, **changes: Any) -> Admission:
    """The same contents in tensors of its own, but for those given."""
    parts: dict[str, Any] = {f.name: getattr(admission, f.name) for f in fields(admission)}
    own: dict[str, Any] = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in parts.items()}
    own.update(changes)
    return Admission(**own)


def differences(a: Admission, b: Admission) -> list[str]:
    """Names of the tensors that differ, wherever they are; what copies holds beyond their number does not count."""
    wrong = []
    for field in fields(a):
        mine, other = getattr(a, field.name), getattr(b, field.name)
        if isinstance(mine, torch.Tensor):
            mine, other = mine.cpu(), other.cpu()
            if field.name == "copies":
                count = int(a.state[3])
                mine, other = mine[:count], other[:count]
            if not torch.equal(mine, other):
                wrong.append(field.name)
    return wrong


@dataclass(frozen=True)
class Call:
    """One layer's routing: ids int32 [T, k], of which `live` tokens count; prefill uint8 [T] or None."""

    layer: int
    ids: torch.Tensor
    live: torch.Tensor
    prefill: torch.Tensor | None


def random_calls(
    layers: int, experts: int, top_k: int, tokens: int, passes: int, seed: int, *, first: int = 0
) -> list[Call]:
    """Passes of all layers from `first` on: routing that is skewed and drifts, so that some experts stay wanted; fewer
    live tokens now and then, down to none, ids that are no expert's, and prefill flags in some passes."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.randn(layers, experts, generator=generator) * 2
    calls = []
    for number in range(passes):
        live = tokens if number % 3 == 0 else int(torch.randint(0, tokens + 1, (1,), generator=generator))
        prefill = None
        if number % 2:
            prefill = torch.randint(0, 2, (tokens,), generator=generator).to(torch.uint8)
        taste += torch.randn(layers, experts, generator=generator) * 0.5
        for layer in range(first, layers):
            noise = torch.rand(tokens, experts, generator=generator).log().neg().log().neg()  # Gumbel
            ids = (taste[layer] + noise).topk(top_k, dim=1).indices.int()
            stray = torch.rand(tokens, top_k, generator=generator) < 0.02
            ids[stray] = torch.tensor([-1, experts, 1 << 20], dtype=torch.int32)[number % 3]
            calls.append(Call(layer, ids, torch.tensor([live], dtype=torch.int32), prefill))
    return calls
