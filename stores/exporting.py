"""A folder that serves without the checkpoint it came from: what is left of that, its manifest, and packs.

<folder>/*.safetensors            the checkpoint's files without expert tensors, under their own names
<folder>/…                        its other files (configuration, tokenizer); no other weights, no folders
<folder>/packs/*.safetensors      packs
<folder>/ziggurat-checkpoint.json the manifest, written last: without it the folder is no checkpoint
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ziggurat.stores.builder import LOCK_SUFFIX
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.copying import copy_packs
from ziggurat.stores.errors import CheckpointError, ExportError, ManifestError
from ziggurat.stores.identity import file_digest
from ziggurat.stores.locking import build_lock
from ziggurat.stores.manifest import (
    MANIFEST_FILE,
    UNFINISHED_MANIFEST,
    FileFacts,
    Manifest,
    manifest_bytes,
    read_manifest,
)
from ziggurat.stores.pack import Pack
from ziggurat.stores.progress import NoProgress, ProgressSink
from ziggurat.stores.shards import INDEX_FILE, read_shard
from ziggurat.stores.stripping import StrippedShard, file_content, strip_shard, write_file, write_stripped
from ziggurat.stores.writing import make_folder, remove_folders, sync_folder, writing

PACKS_FOLDER = "packs"
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx")
_LEFT_OUT = (*_WEIGHTS, ".index.json", ".part", ".lock", ".building")
_SMALL = 1 << 20  # allowed for the manifest, the index and what a filesystem needs beside the bytes


@dataclass
class Exported:
    """What an export wrote or found in place. packs: their paths. nbytes: of the folder without packs.

    left_out: other things in the checkpoint's folder that were not taken, by name.
    """

    packs: list[Path]
    manifest: Manifest
    nbytes: int
    left_out: list[str] = field(default_factory=list)


def export_checkpoint(
    checkpoint: Checkpoint,
    packs: Sequence[Pack],
    folder: Path,
    progress: ProgressSink | None = None,
    *,
    rest: ProgressSink | None = None,
    extra: Mapping[str, bytes] | None = None,
) -> Exported:
    """Write the checkpoint without its experts, and copies of `packs` with every row checked, into `folder`.

    progress: of the packs. rest: of the checkpoint's files, whose rows are tensors. extra: further small files, by
    name. Space is checked before anything is copied. Each file is there as a whole or
    not at all; an export that was stopped is continued, and one that is finished is completed by further packs.

    Raises ExportError if the folder belongs to something else or the checkpoint changes meanwhile, and what
    `copy_packs` raises.
    """
    folder = Path(folder)
    shards = _shards(checkpoint)
    others, left_out = _other_files(checkpoint.path)
    small = dict(extra or {})
    others = [name for name in others if name not in small]
    if (checkpoint.path / INDEX_FILE).is_file():
        small[INDEX_FILE] = _index(shards)
    names = [*(shard.name for shard in shards), *others, *small]
    made = make_folder(folder)
    try:
        with build_lock(folder / (MANIFEST_FILE + LOCK_SUFFIX)):
            finished = check_target(checkpoint, folder, names)
            if finished is None:
                finished = {}
                _save(folder, _manifest(checkpoint, {}), UNFINISHED_MANIFEST)
            done = {shard.name for shard in shards if _is_there(folder, shard, finished)}
            todo = [shard for shard in shards if shard.name not in done]
            beside = sum(shard.nbytes for shard in todo) + _SMALL
            beside += sum((checkpoint.path / name).stat().st_size for name in others)
            beside += sum(map(len, small.values()))
            copies = copy_packs(packs, folder / PACKS_FOLDER, progress, beside=beside)
            manifest = _manifest(checkpoint, {name: finished[name] for name in sorted(done)})
            manifest = _write_shards(folder, checkpoint, manifest, todo, rest or NoProgress())
            files = dict(manifest.files)
            for name in others:
                path = checkpoint.path / name
                files[name] = write_file(folder / name, file_content(path), path.stat().st_size)
            for name, content in small.items():
                files[name] = write_file(folder / name, iter([content]), len(content))
            _check_unchanged(checkpoint)
            manifest = _manifest(checkpoint, files)
            _save(folder, manifest, MANIFEST_FILE)
            (folder / UNFINISHED_MANIFEST).unlink(missing_ok=True)
            with writing(folder, 0):
                sync_folder(folder)
    except (KeyboardInterrupt, SystemExit):
        raise  # to be continued
    except BaseException:
        _forget_beginning(folder)
        remove_folders(made)  # those that are empty
        raise
    return Exported(copies, manifest, sum(facts.nbytes for facts in files.values()), left_out)


def changed_files(folder: Path, manifest: Manifest) -> list[str]:
    """Names of the exported files whose content is no longer what was written; reads all of them."""
    changed = []
    for name, facts in manifest.files.items():
        digest = hashlib.sha256()
        try:
            for piece in file_content(folder / name):
                digest.update(piece)
        except ExportError:
            changed.append(name)
            continue
        if digest.hexdigest() != facts.sha256:
            changed.append(name)
    return changed


def check_target(
    checkpoint: Checkpoint, folder: Path, names: Sequence[str] = ()
) -> Mapping[str, FileFacts] | None:
    """What an earlier export of this checkpoint has finished in the folder, or None if none was begun.

    names: of the files to be written. Raises ExportError if the folder is the checkpoint's own or belongs to
    something else.
    """
    if folder.exists() and os.path.samefile(folder, checkpoint.path):
        raise ExportError(f"{folder}: is the checkpoint's own folder; export into another")
    for name in (MANIFEST_FILE, UNFINISHED_MANIFEST):
        before = read_manifest(folder, name)
        if before is None:
            continue
        if before.identity != checkpoint.identity:
            raise ExportError(
                f"{folder}: holds an export of checkpoint {before.identity}, but {checkpoint.path} is "
                f"{checkpoint.identity}; export into another folder"
            )
        return before.files
    names = names or [shard.name for shard in _shards(checkpoint)]
    if taken := [name for name in ("config.json", *names) if (folder / name).exists()]:
        raise ExportError(
            f"{folder}: {taken[0]} is there already, and no export wrote it; take another folder"
        )
    return None


def _shards(checkpoint: Checkpoint) -> list[StrippedShard]:
    stripped = (strip_shard(header, checkpoint.expert_tensor_names) for header in checkpoint.headers)
    return [shard for shard in stripped if shard is not None]


def _other_files(folder: Path) -> tuple[list[str], list[str]]:
    """Names of the small files to take, and of what is left out: other weights and folders. Hidden ones are neither."""
    taken, left_out = [], []
    for path in sorted(folder.iterdir()):
        if path.name.startswith(".") or path.name in (MANIFEST_FILE, UNFINISHED_MANIFEST):
            continue
        if path.is_file() and not path.name.endswith(_LEFT_OUT):
            taken.append(path.name)
        elif not path.name.endswith((".safetensors", ".index.json")):
            left_out.append(path.name)
    return taken, left_out


def _index(shards: Sequence[StrippedShard]) -> bytes:
    """An index of what is left."""
    total = sum(info.nbytes for shard in shards for info in shard.kept)
    weight_map = {info.name: shard.name for shard in shards for info in shard.kept}
    index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
    return json.dumps(index, indent=2).encode() + b"\n"


def _forget_beginning(folder: Path) -> None:
    """After an error: no trace of an export that has not finished a single file."""
    path = folder / UNFINISHED_MANIFEST
    with suppress(ManifestError, OSError):
        begun = read_manifest(folder, UNFINISHED_MANIFEST)
        if begun is not None and not begun.files:
            path.unlink()


def _is_there(folder: Path, shard: StrippedShard, finished: Mapping[str, FileFacts]) -> bool:
    facts = finished.get(shard.name)
    try:
        return (
            facts is not None
            and facts.nbytes == shard.nbytes == (folder / shard.name).stat().st_size
            and file_digest(read_shard(folder / shard.name)).hex() == facts.sample
        )
    except (OSError, CheckpointError):
        return False


def _write_shards(
    folder: Path,
    checkpoint: Checkpoint,
    manifest: Manifest,
    todo: Sequence[StrippedShard],
    progress: ProgressSink,
) -> Manifest:
    if not todo:
        return manifest
    progress.start(sum(len(shard.kept) for shard in todo), sum(shard.nbytes for shard in todo))
    try:
        for shard in todo:
            facts = write_stripped(shard, folder, lambda nbytes: progress.advance(0, nbytes))
            progress.advance(len(shard.kept), 0)
            manifest = _manifest(checkpoint, {**manifest.files, shard.name: facts})
            if not (folder / MANIFEST_FILE).exists():
                _save(folder, manifest, UNFINISHED_MANIFEST)
    finally:
        progress.finish()
    return manifest


def _manifest(checkpoint: Checkpoint, files: Mapping[str, FileFacts]) -> Manifest:
    return Manifest(checkpoint.identity, checkpoint.stated_block, checkpoint.experts_stored, files)


def _save(folder: Path, manifest: Manifest, name: str) -> None:
    content = manifest_bytes(manifest)
    write_file(folder / name, iter([content]), len(content))


def _check_unchanged(checkpoint: Checkpoint) -> None:
    with Checkpoint.open(checkpoint.path) as now:
        if now.identity != checkpoint.identity:
            raise ExportError(f"{checkpoint.path}: the checkpoint changed while it was being exported")
