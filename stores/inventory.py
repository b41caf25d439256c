"""Which tensors hold which expert: the complete, checked list, made from headers alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from ziggurat.stores.errors import CheckpointError
from ziggurat.stores.formats import FormatError, check_matrix, expect_shape, infer_block, recognise
from ziggurat.stores.headers import TensorInfo
from ziggurat.stores.manifest import MANIFEST_FILE
from ziggurat.stores.modelconfig import ModelConfig
from ziggurat.stores.names import MATRICES, Kind, Matrix, NameStyle, parse_expert_name, style_of
from ziggurat.stores.problems import Problems
from ziggurat.stores.shards import INDEX_FILE, ShardSet
from ziggurat.stores.stored import WeightFormat


class Key(NamedTuple):
    """Which tensor: `layer` is the model's own number; `expert` is None in the fused layout."""

    layer: int
    expert: int | None
    matrix: Matrix
    kind: Kind


class Part(NamedTuple):
    """Where a tensor is: the number of its file and its header entry."""

    shard: int
    info: TensorInfo


@dataclass(frozen=True, slots=True)
class Inventory:
    """parts: every tensor needed. names: those and the ignored ones. transposed: fused matrices are [E, K, N]."""

    parts: dict[Key, Part]
    names: frozenset[str]
    fused: frozenset[int]
    transposed: bool
    format: WeightFormat
    block: tuple[int, int] | None

    def of_layer(self, layer: int, experts: int) -> Iterator[Part]:
        """The tensors of one layer."""
        fused = layer in self.fused
        kinds: tuple[Kind, ...] = ("weight", "scale", "scale_2")
        matrices: tuple[Matrix, ...] = ("w13", "w2") if fused else MATRICES
        for expert in (None,) if fused else range(experts):
            for matrix in matrices:
                for kind in kinds:
                    part = self.parts.get(Key(layer, expert, matrix, kind))
                    if part is not None:
                        yield part


def take_inventory(folder: Path, config: ModelConfig, shards: ShardSet) -> Inventory:
    """Find every expert tensor and check names, completeness, dtypes and shapes.

    Raises CheckpointError naming the first few tensors that are missing, doubled, misshapen, of mixed or unsupported
    format, or without their scale.
    """
    problems = Problems(folder)
    parts, names, style = _collect(folder, config, shards, problems)
    fused = frozenset(key.layer for key in parts if key.expert is None)
    _check_complete(config, parts, fused, style, problems)
    problems.raise_if_any()
    transposed = _orientation(folder, config, parts, fused)
    form = _common_format(parts, problems)
    problems.raise_if_any()
    block = None
    if form == "fp8_block":
        block = _block(folder, config, parts)
    for key, part in parts.items():
        if key.kind == "weight":
            try:
                _check_shapes(config, form, block, transposed, parts, key, part)
            except FormatError as e:
                problems.add(e.kind, e.tensor, e.detail)
    problems.raise_if_any()
    return Inventory(parts, names, fused, transposed, form, block)


def _collect(
    folder: Path, config: ModelConfig, shards: ShardSet, problems: Problems
) -> tuple[dict[Key, Part], frozenset[str], NameStyle]:
    parts: dict[Key, Part] = {}
    names: set[str] = set()
    style: NameStyle | None = None
    moe_layers = frozenset(config.moe_layers)
    for shard, header in enumerate(shards.headers):
        for info in header.tensors.values():
            name = parse_expert_name(info.name)
            if name is None or name.layer >= config.layers:  # later layers only predict further tokens (MTP)
                continue
            names.add(info.name)
            placed = shards.placed.get(info.name, shard)
            if name.kind == "unknown":
                problems.add("of an unsupported kind", info.name)
            elif name.layer not in moe_layers:
                problems.add("in a layer that config.json says is dense", info.name)
            elif name.expert is not None and name.expert >= config.experts:
                problems.add(f"beyond the {config.experts} experts of config.json", info.name)
            elif placed != shard:
                there = shards.headers[placed]
                if info.name not in there.tensors:
                    detail = f"in {header.path.name}, not in {there.path.name}"
                    problems.add(f"in another file than {INDEX_FILE} says", info.name, detail)
            if name.kind not in ("weight", "scale", "scale_2"):
                continue
            key = Key(name.layer, name.expert, name.matrix, name.kind)
            if (first := parts.get(key)) is not None:
                problems.add("doubled", info.name, _both(shards, first, shard, info))
                continue
            parts[key] = Part(shard, info)
            style = style or style_of(info.name)
    if style is None:
        problems.raise_if_any()
        raise CheckpointError(
            f"{folder}: no routed-expert tensor found (looked for layers.N.….experts.N.gate_proj.weight and the like), "
            f"nor the {MANIFEST_FILE} of a folder that `ziggurat export` wrote without them"
        )
    return parts, frozenset(names), style


def _both(shards: ShardSet, first: Part, shard: int, info: TensorInfo) -> str:
    if first.info.name == info.name:
        return f"in {shards.headers[first.shard].path.name} and {shards.headers[shard].path.name}"
    return f"also as {first.info.name}"


def _check_complete(
    config: ModelConfig,
    parts: dict[Key, Part],
    fused: frozenset[int],
    style: NameStyle,
    problems: Problems,
) -> None:
    separate = {key.layer for key in parts if key.expert is not None}
    for layer in config.moe_layers:
        if layer in fused and layer in separate:
            for key, part in parts.items():
                if key.layer == layer and key.expert is not None:
                    problems.add("doubled", part.info.name, "the layer has fused expert tensors too")
            continue
        is_fused = layer in fused or (layer not in separate and bool(fused))
        matrices: tuple[Matrix, ...] = ("w13", "w2") if is_fused else MATRICES
        for expert in (None,) if is_fused else range(config.experts):
            for matrix in matrices:
                if Key(layer, expert, matrix, "weight") not in parts:
                    problems.add("missing", style.weight(layer, expert, matrix))


def _orientation(folder: Path, config: ModelConfig, parts: dict[Key, Part], fused: frozenset[int]) -> bool:
    """Whether fused matrices are stored [E, K, N]; decided by the first gate_up_proj, checked on all later."""
    if not fused:
        return False
    rows, columns = 2 * config.intermediate, config.hidden
    info = parts[Key(min(fused), None, "w13", "weight")].info
    if rows == columns:
        raise CheckpointError(
            f"{folder}: {info.name} is {list(info.shape)}; with hidden size {columns} = 2 x {config.intermediate} its "
            "orientation is ambiguous; store the experts one by one",
            [info.name],
        )
    return info.shape == (config.experts, columns, rows)


def _common_format(parts: dict[Key, Part], problems: Problems) -> WeightFormat:
    forms: dict[Key, WeightFormat] = {}
    for key, part in parts.items():
        if key.kind == "weight":
            try:
                forms[key] = recognise(part.info, *_scales(parts, key))
            except FormatError as e:
                problems.add(e.kind, e.tensor, e.detail)
        elif key._replace(kind="weight") not in parts:
            problems.add("without the weight it scales", part.info.name)
    problems.raise_if_any()
    common, _ = Counter(forms.values()).most_common(1)[0]
    for key, form in forms.items():
        if form != common:
            problems.add(f"not {common} like the others", parts[key].info.name, form)
    return common


def _scales(parts: dict[Key, Part], key: Key) -> tuple[TensorInfo | None, TensorInfo | None]:
    scale, scale_2 = parts.get(key._replace(kind="scale")), parts.get(key._replace(kind="scale_2"))
    return scale.info if scale else None, scale_2.info if scale_2 else None


def _logical(config: ModelConfig, matrix: Matrix) -> tuple[int, int]:
    hidden, intermediate = config.hidden, config.intermediate
    if matrix == "w2":
        return hidden, intermediate
    return (2 * intermediate if matrix == "w13" else intermediate), hidden


def _block(folder: Path, config: ModelConfig, parts: dict[Key, Part]) -> tuple[int, int]:
    if config.block is not None:
        return config.block
    layer = config.moe_layers[0]
    pairs = []
    for key, part in parts.items():
        if key.layer == layer and key.kind == "scale" and key.expert in (None, 0):
            info = part.info
            if key.expert is None:  # drop the expert axis
                info = TensorInfo(info.name, info.dtype, info.shape[1:], 0, 0)
            pairs.append((_logical(config, key.matrix), info))
    try:
        return infer_block(pairs)
    except FormatError as e:
        raise CheckpointError(f"{folder}: {e.tensor} is {e.kind}: {e.detail}", [e.tensor]) from e


def _check_shapes(
    config: ModelConfig,
    form: WeightFormat,
    block: tuple[int, int] | None,
    transposed: bool,
    parts: dict[Key, Part],
    key: Key,
    part: Part,
) -> None:
    shape = _logical(config, key.matrix)
    if key.expert is not None:
        check_matrix(form, shape, block, part.info, *_scales(parts, key))
        return
    if form not in ("bf16", "f16", "f32") and (form != "fp8_block" or transposed):
        turned = "transposed " if transposed else ""
        raise FormatError("of an unsupported format", part.info.name, f"{turned}fused {form}")
    rows, columns = shape
    expect_shape(part.info, (config.experts, *((columns, rows) if transposed else (rows, columns))))
    if block is not None:
        bn, bk = block
        if key.matrix == "w13" and config.intermediate % bn:
            detail = f"scale blocks of {bn} rows straddle gate and up of {config.intermediate} rows each"
            raise FormatError("of an unsupported format", part.info.name, detail)
        scale = parts[key._replace(kind="scale")].info
        expect_shape(scale, (config.experts, -(-rows // bn), -(-columns // bk)))
