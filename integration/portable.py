"""Packs that move between machines: which of them an export takes along, and which of a folder's are a model's."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import yaml

from ziggurat.integration.packing import ensure_packs, open_pack, wanted_headers
from ziggurat.residency.config import TiersConfig
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.copying import copy_packs
from ziggurat.stores.errors import (
    ExportError,
    PackError,
    PackIncompleteError,
    PackMismatchError,
    PackMissingError,
)
from ziggurat.stores.exporting import PACKS_FOLDER, Exported, check_target, export_checkpoint
from ziggurat.stores.pack import BUILDING_SUFFIX, Pack
from ziggurat.stores.packformat import PackHeader, check_expected, pack_filename
from ziggurat.stores.progress import ProgressSink
from ziggurat.stores.verify import verify_pack

#: The configuration that an export brings along, which serves the folder from itself.
CONFIG_NAME = "tiers.yaml"
_PACK_NAME = re.compile(r"[\w-]+\.v[0-9]+\.[\w-]+\.tp[0-9]+of[0-9]+\.safetensors")
_CONFIG_HEAD = """\
# Written by `ziggurat export`: serves this folder from itself. Sizes are those of the machine that it came from.
"""


def export(
    checkpoint: Checkpoint,
    config: TiersConfig,
    tp_size: int,
    folder: Path,
    *,
    packs_only: bool = False,
    packing: ProgressSink | None = None,
    copying: ProgressSink | None = None,
    rest: ProgressSink | None = None,
) -> Exported | list[Path]:
    """Export the packs of all ranks, built first if need be; returns what was written, or the packs' paths.

    packs_only: nothing but packs, straight into `folder`. Every row is checked on the way; damaged ones are made anew
    from the checkpoint. packing, copying, rest: progress of building packs, of copying them, and of the model's files.
    """
    if not packs_only:
        check_target(checkpoint, folder)
    elif (folder / "config.json").exists():
        raise ExportError(f"{folder}: is a model's folder; write packs alone into another")
    ensure_packs(checkpoint, config, tp_size, packing, wait=False)
    with ExitStack() as stack:
        packs = []
        for rank in range(tp_size):
            pack = open_pack(checkpoint, config, rank, tp_size, verify="always")
            stack.callback(pack.close)
            packs.append(pack)
        if packs_only:
            return copy_packs(packs, folder, copying)
        return export_checkpoint(
            checkpoint, packs, folder, copying, rest=rest, extra={CONFIG_NAME: own_config(config).encode()}
        )


def own_config(config: TiersConfig) -> str:
    """A configuration as it was written, but of a model and packs that lie beside it."""
    values = config.model_dump(mode="json", exclude_unset=True)
    values["model"] = {"path": "."}
    values["tiers"]["disk"]["path"] = PACKS_FOLDER
    values["tiers"]["disk"].pop("faults", None)
    if config.heat.path not in ("auto", None):  # a folder of that machine
        values["heat"].pop("path")
    return _CONFIG_HEAD + yaml.safe_dump(values, sort_keys=False)


@dataclass(frozen=True, slots=True)
class Choice:
    """The packs of a folder that a model needs, and those that were packed from other checkpoints."""

    wanted: tuple[tuple[Path, PackHeader], ...]
    foreign: tuple[tuple[Path, PackHeader], ...]

    @property
    def tp_sizes(self) -> list[int]:
        return sorted({header.tp_size for _, header in self.wanted})


def find_packs(place: Path) -> list[tuple[Path, PackHeader]]:
    """The packs of an exported folder, of a folder of packs, or the one that `place` is, with their headers.

    In a folder only files with a pack's name count. Raises PackError for one that is damaged, PackMissingError if
    there is none.
    """
    if place.is_dir():
        files = [
            path
            for folder in (place / PACKS_FOLDER, place)
            if folder.is_dir()
            for path in sorted(folder.iterdir())
            if _PACK_NAME.fullmatch(path.name)
        ]
    else:
        files = [place]
    if not place.exists():
        raise PackMissingError(place, "there is no such folder or pack")
    if not files:
        unfinished = [*place.rglob("*" + BUILDING_SUFFIX)]
        if unfinished:
            raise PackIncompleteError(unfinished[0], "its export was not finished; run it again")
        raise PackMissingError(place, "there is no pack in it, nor in its folder packs")
    found = []
    for path in files:
        pack = Pack.open(path)
        found.append((path, pack.header))
        pack.close()
    return found


def choose(
    found: Sequence[tuple[Path, PackHeader]], checkpoint: Checkpoint, config: TiersConfig, tp_size: int | None
) -> Choice:
    """Which packs to import: of this checkpoint, in the configured codec, with all ranks of their size.

    tp_size: of one size only; None: of every size that is there.

    Raises PackMismatchError if all are of other checkpoints, naming both identities, or one does not fit otherwise;
    PackMissingError if the codec, the size or a rank is not there.
    """
    own = [(path, header) for path, header in found if header.identity == checkpoint.identity]
    foreign = tuple((path, header) for path, header in found if header.identity != checkpoint.identity)
    if not own:
        path, header = foreign[0]
        advice = f"it was packed from another checkpoint than {checkpoint.path}"
        raise PackMismatchError(path, "identity", checkpoint.identity, header.identity, advice)
    codec = config.codecs.base
    fitting = [(path, header) for path, header in own if header.codec == codec]
    if not fitting:
        there = ", ".join(sorted({header.codec for _, header in own}))
        raise PackMissingError(own[0][0].parent, f"holds packs in {there}, but codecs.base is {codec}")
    sizes = sorted({header.tp_size for _, header in fitting})
    if tp_size is not None:
        if tp_size not in sizes:
            there = ", ".join(map(str, sizes))
            problem = f"holds packs of tensor-parallel size {there}, not {tp_size}"
            raise PackMissingError(fitting[0][0].parent, problem)
        sizes = [tp_size]
    wanted = []
    for size in sizes:
        for expected in wanted_headers(checkpoint, config, size):
            place = next((one for one in fitting if _is_rank(one[1], size, expected.tp_rank)), None)
            if place is None:
                problem = f"rank {expected.tp_rank} of {size} is not there: {pack_filename(expected)}"
                raise PackMissingError(fitting[0][0].parent, problem)
            check_expected(place[0], expected, place[1])
            wanted.append(place)
    return Choice(tuple(wanted), foreign)


def _is_rank(header: PackHeader, size: int, rank: int) -> bool:
    return (header.tp_size, header.tp_rank) == (size, rank)


def bring(choice: Choice, folder: Path, progress: ProgressSink | None = None) -> list[tuple[Path, bool]]:
    """Copy the chosen packs into `folder`; returns their paths, and whether each was copied or was there already.

    When this ends every row of each was compared with its checksum, also of those that were there.
    Raises PackError naming the bad rows of one that was there, and what `copy_packs` raises.
    """
    result = []
    with ExitStack() as stack:
        sources = []
        for path, header in choice.wanted:
            there = folder / pack_filename(header)
            result.append((there, not there.exists()))
            if there.exists():
                _check_rows(there, header, progress)
            else:
                source = Pack.open(path, expect=header, verify="always")
                stack.callback(source.close)
                sources.append(source)
        copy_packs(sources, folder, progress)
    return result


def _check_rows(path: Path, header: PackHeader, progress: ProgressSink | None) -> None:
    Pack.open(path, expect=header).close()
    report = verify_pack(path, progress)
    if report.bad:
        layer, expert, reason = report.bad[0]
        raise PackError(
            path,
            f"is there already, and {len(report.bad)} of its {report.rows} rows are bad (layer {layer} expert "
            f"{expert}: {reason}); delete it and run `ziggurat import` again",
        )
