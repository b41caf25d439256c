"""A model's checkpoint, as far as its routed experts are concerned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import NamedTuple

import torch

from ziggurat.stores.errors import CheckpointError, ExpertsAbsentError
from ziggurat.stores.headers import FileHeader
from ziggurat.stores.identity import identity_of
from ziggurat.stores.inventory import FUSED, KINDS, Inventory, Key, Part, take_inventory
from ziggurat.stores.manifest import ExpertFacts
from ziggurat.stores.mapping import TORCH_DTYPES, MappedFile, tensor_over
from ziggurat.stores.modelconfig import ModelConfig, read_model_config
from ziggurat.stores.names import MATRICES, Matrix, parse_expert_name
from ziggurat.stores.shards import ShardSet, read_shards
from ziggurat.stores.stored import StoredExpert, StoredWeight, WeightFormat
from ziggurat.stores.stripped import read_stripped, refuse_unfinished

#: A tensor, or the one of that index where an expert is a part of a fused tensor.
TensorSource = Callable[[Part, int | None], torch.Tensor]


class FileRange(NamedTuple):
    """Bytes begin..end of the checkpoint's file of that number."""

    file: int
    begin: int
    end: int


class Checkpoint:
    """An opened checkpoint folder, all of whose expert tensors are known to be there and well-shaped.

    Or a folder that `ziggurat export` wrote without them (`has_experts` is False): everything is known of it but what
    is in the experts, and `expert`, `layer_bytes` and the like raise ExpertsAbsentError.

    `shards` are its files, `headers` theirs; `expert_tensor_names` every tensor name of the main layers' experts in
    them, input scales too; `experts_stored` how the experts are stored, here or where they are.
    Tensors that `expert` returns are views of the mapped files and stay valid after `close`. Safe for concurrent
    use.
    """

    def __init__(
        self,
        path: Path,
        config: ModelConfig,
        headers: tuple[FileHeader, ...],
        inventory: Inventory | None,
        stored: ExpertFacts,
        identity: str,
    ) -> None:
        self.path = path
        self.identity = identity
        self.stated_block = config.block
        self.experts_stored = stored
        self.architecture = config.architecture
        self.layer_ids = config.moe_layers
        self.experts = config.experts
        self.hidden = config.hidden
        self.intermediate = config.intermediate
        self.top_k = config.top_k
        self.format: WeightFormat = stored.format
        self.block = stored.block
        self.dtype: torch.dtype = getattr(torch, stored.dtype)
        self.expert_tensor_names = frozenset[str]() if inventory is None else inventory.names
        self.headers = headers
        self.shards = tuple(header.path for header in headers)
        self._made_of = (path, config, headers, inventory, stored, identity)
        self._main_layers = config.layers
        self._inventory = inventory
        self._data_starts = [header.data_start for header in headers]
        self._files = [MappedFile(header) for header in headers]

    @classmethod
    def open(cls, folder: Path) -> Checkpoint:
        """Open and check a checkpoint. Reads headers and sampled pages only.

        Raises CheckpointError naming what is missing, doubled, misshapen or unsupported; ManifestError for a folder
        without experts that is not what was exported.
        """
        folder = Path(folder)
        refuse_unfinished(folder)
        config = read_model_config(folder)
        if (found := read_stripped(folder, config)) is not None:
            manifest, shards = found
            return cls(folder, config, shards.headers, None, manifest.experts, manifest.identity)
        shards = read_shards(folder)
        inventory = take_inventory(folder, config, shards)
        stored = _facts(config, shards, inventory)
        return cls(
            folder, config, shards.headers, inventory, stored, identity_of(shards.headers, config.block)
        )

    def __reduce__(self) -> tuple[type[Checkpoint], tuple[object, ...]]:
        """For another process, which then need not read the headers and sampled pages again."""
        return Checkpoint, self._made_of

    @property
    def has_experts(self) -> bool:
        """Whether the folder holds the expert tensors."""
        return self._inventory is not None

    @property
    def layers(self) -> int:
        """Number of MoE layers."""
        return len(self.layer_ids)

    def expert(
        self, layer_index: int, expert: int, *, copied: bool = False, tensors: TensorSource | None = None
    ) -> StoredExpert:
        """The three matrices of one expert, without reading them. Raises IndexError out of range.

        copied: read them now, into memory of their own, so that a file that fails or shrinks is an OSError here and not
        the end of the process that uses them. tensors: where else their tensors come from.
        """
        if not (0 <= layer_index < self.layers and 0 <= expert < self.experts):
            raise IndexError(
                f"layer index {layer_index}, expert {expert}: the model has {self.layers} x {self.experts}"
            )
        layer = self.layer_ids[layer_index]
        make = self._from_fused if layer in self._experts().fused else self._from_single
        get = tensors or (self._copy if copied else self._view)
        return StoredExpert(*(make(layer, expert, matrix, get) for matrix in MATRICES))

    def ranges(self, layer_index: int, expert: int) -> list[FileRange]:
        """Where the bytes of one expert lie."""
        layer = self.layer_ids[layer_index]
        parts = self._experts().parts
        fused = layer in self._experts().fused
        found = []
        for matrix in FUSED if fused else MATRICES:
            for kind in KINDS:
                part = parts.get(Key(layer, None if fused else expert, matrix, kind))
                if part is not None:
                    found.append(self._range(part, expert if fused else None))
        return found

    def _range(self, part: Part, index: int | None) -> FileRange:
        start = self._data_starts[part.shard] + part.info.begin
        if index is None:
            return FileRange(part.shard, start, start + part.info.nbytes)
        each = part.info.nbytes // part.info.shape[0]
        return FileRange(part.shard, start + index * each, start + (index + 1) * each)

    def read_tensor(
        self, part: Part, index: int | None, memory: Callable[[FileRange], memoryview]
    ) -> torch.Tensor:
        """A tensor, or the `index`-th of a fused one, over bytes that were read before. memory: where they are."""
        dtype = TORCH_DTYPES[part.info.dtype]
        shape = part.info.shape if index is None else part.info.shape[1:]
        where = self._range(part, index)
        return tensor_over(memory(where), dtype, shape)

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor is an expert's of the layers behind the main ones, which only predict further tokens."""
        if ".experts." not in name:
            return False
        parsed = parse_expert_name(name)
        return "mtp" in name.split(".") or (parsed is not None and parsed.layer >= self._main_layers)

    def layer_bytes(self, layer_index: int) -> int:
        """Bytes of one layer's expert tensors in the checkpoint."""
        return sum(part.info.nbytes for part in self._layer(layer_index))

    def close(self) -> None:
        """Let the files go once the last tensor made from them is gone."""
        self._files = []

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _experts(self) -> Inventory:
        if self._inventory is None:
            raise ExpertsAbsentError(
                f"{self.path} holds no expert tensors: they were left out when it was exported (identity of the whole "
                f"checkpoint: {self.identity})"
            )
        return self._inventory

    def _layer(self, layer_index: int) -> Iterator[Part]:
        return self._experts().of_layer(self.layer_ids[layer_index], self.experts)

    def _file(self, shard: int) -> MappedFile:
        if not self._files:
            raise ValueError(f"checkpoint {self.path} is closed")
        return self._files[shard]

    def _view(self, part: Part, index: int | None) -> torch.Tensor:
        whole = self._file(part.shard).tensor(part.info)
        return whole if index is None else whole[index]

    def _copy(self, part: Part, index: int | None) -> torch.Tensor:
        return self._file(part.shard).read(part.info, index)

    def _from_single(self, layer: int, expert: int, matrix: Matrix, get: TensorSource) -> StoredWeight:
        parts, form = self._experts().parts, self.format
        part = parts[Key(layer, expert, matrix, "weight")]
        scale, scale_2 = (parts.get(Key(layer, expert, matrix, kind)) for kind in ("scale", "scale_2"))
        data = get(part, None)
        scales = None if scale is None else get(scale, None)
        if form in ("nvfp4", "mxfp4"):
            data = data.view(torch.uint8)
        if form == "mxfp4" and scales is not None:
            scales = scales.view(torch.uint8)
        return StoredWeight(
            name=part.info.name,
            format=form,
            shape=self._shape(matrix),
            data=data,
            scale=scales,
            scale_2=None if scale_2 is None else get(scale_2, None).view(()),
            block=self.block,
        )

    def _from_fused(self, layer: int, expert: int, matrix: Matrix, get: TensorSource) -> StoredWeight:
        inventory = self._experts()
        parts = inventory.parts
        key = Key(layer, None, "w2" if matrix == "w2" else "w13", "weight")
        shape = self._shape(matrix)
        first = shape[0] if matrix == "w3" else 0  # gate stands over up
        data = get(parts[key], expert)
        if inventory.transposed:
            data = data.T
        scale = parts.get(key._replace(kind="scale"))
        scales = None
        if scale is not None and self.block is not None:
            rows = -(-shape[0] // self.block[0])
            scales = get(scale, expert).narrow(0, first // self.block[0], rows)
        return StoredWeight(
            name=f"{parts[key].info.name}[{expert}]",
            format=self.format,
            shape=shape,
            data=data.narrow(0, first, shape[0]),
            scale=scales,
            block=self.block,
        )

    def _shape(self, matrix: Matrix) -> tuple[int, int]:
        return (self.hidden, self.intermediate) if matrix == "w2" else (self.intermediate, self.hidden)


def _facts(config: ModelConfig, shards: ShardSet, inventory: Inventory) -> ExpertFacts:
    """What a manifest says of these experts."""
    dtype = config.dtype or _common_dtype(shards, inventory.names)
    left_out = [
        info for header in shards.headers for info in header.tensors.values() if info.name in inventory.names
    ]
    return ExpertFacts(
        layer_ids=config.moe_layers,
        experts=config.experts,
        hidden=config.hidden,
        intermediate=config.intermediate,
        format=inventory.format,
        block=inventory.block,
        dtype=str(dtype).removeprefix("torch."),
        tensors=len(left_out),
        nbytes=sum(info.nbytes for info in left_out),
    )


def _common_dtype(shards: ShardSet, expert_names: frozenset[str]) -> torch.dtype:
    """The float dtype that most bytes outside the experts have; for a config.json that does not say."""
    sizes: Counter[str] = Counter()
    for header in shards.headers:
        for info in header.tensors.values():
            if info.dtype in ("BF16", "F16", "F32") and info.name not in expert_names:
                sizes[info.dtype] += info.nbytes
    if not sizes:
        raise CheckpointError(f"{shards.headers[0].path}: no float tensor outside the experts")
    return TORCH_DTYPES[sizes.most_common(1)[0][0]]
