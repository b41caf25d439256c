"""Telling a checkpoint folder without expert tensors from a whole one, by its manifest."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ziggurat.stores.errors import CheckpointError, ManifestError
from ziggurat.stores.headers import FileHeader
from ziggurat.stores.identity import file_digest
from ziggurat.stores.manifest import MANIFEST_FILE, UNFINISHED_MANIFEST, Manifest, read_manifest
from ziggurat.stores.modelconfig import ModelConfig
from ziggurat.stores.names import parse_expert_name
from ziggurat.stores.shards import INDEX_FILE, SINGLE_FILE, ShardSet, read_index, read_shard

_AGAIN = "run `ziggurat export` again, or take a folder that holds the whole checkpoint"


def read_stripped(folder: Path, config: ModelConfig) -> tuple[Manifest, ShardSet] | None:
    """The manifest and the shards of a folder without expert tensors; None for a folder with them.

    An index may list tensors and files that are not there: it can be the whole checkpoint's. Files in the folder that
    neither the manifest nor the index names take no part, as in a whole checkpoint.

    Raises ManifestError if the manifest is damaged, or a shard or config.json is not the one it was written for.
    """
    manifest = read_manifest(folder)
    if manifest is None:
        if (folder / UNFINISHED_MANIFEST).is_file():
            raise CheckpointError(
                f"{folder}: its export was not finished; run the same `ziggurat export` again"
            )
        return None
    weight_map = read_index(folder / INDEX_FILE)
    listed = {SINGLE_FILE} if weight_map is None else set(weight_map.values())
    headers = {
        name: read_shard(folder / name)
        for name in sorted(listed | manifest.shards.keys())
        if (folder / name).is_file()
    }
    if any(is_main_expert(name, config) for header in headers.values() for name in header.tensors):
        return None  # somebody completed the folder: then its content says what it is
    _check_shards(folder, manifest, headers)
    _check_config(folder, manifest, config)
    return manifest, ShardSet(tuple(headers.values()), {})


def refuse_unfinished(folder: Path) -> None:
    """Raises CheckpointError for a folder whose export has not come to its end."""
    if (folder / UNFINISHED_MANIFEST).is_file() and not (folder / MANIFEST_FILE).exists():
        raise CheckpointError(f"{folder}: its export was not finished; run the same `ziggurat export` again")


def is_main_expert(name: str, config: ModelConfig) -> bool:
    """Whether a tensor is a routed expert's of the main layers: what packs hold, and an export leaves out."""
    parsed = parse_expert_name(name)
    return parsed is not None and parsed.layer < config.layers


def _check_shards(folder: Path, manifest: Manifest, headers: dict[str, FileHeader]) -> None:
    shards = manifest.shards
    if not shards:
        raise ManifestError(f"{folder}: {MANIFEST_FILE} lists no shard; {_AGAIN}")
    if absent := [name for name in shards if name not in headers]:
        raise ManifestError(f"{folder}: {absent[0]} is not there, which {MANIFEST_FILE} lists; {_AGAIN}")
    with ThreadPoolExecutor(8) as threads:
        digests = list(threads.map(file_digest, [headers[name] for name in shards]))
    for (name, facts), digest in zip(shards.items(), digests, strict=True):
        found = digest.hex()
        if found != facts.sample:
            raise ManifestError(
                f"{folder}: {name} is not the file that was exported: its digest is {found}, but {MANIFEST_FILE} says "
                f"{facts.sample}; {_AGAIN}"
            )
    if extra := [name for name in headers if name not in manifest.shards]:
        raise ManifestError(f"{folder}: {extra[0]} was not exported with the others; {_AGAIN}")


def _check_config(folder: Path, manifest: Manifest, config: ModelConfig) -> None:
    """config.json may change as it may beside a whole checkpoint, but not in what rows were made from."""
    facts = manifest.experts
    for name, exported, found in (
        ("MoE layers", facts.layer_ids, config.moe_layers),
        ("number of experts", facts.experts, config.experts),
        ("hidden size", facts.hidden, config.hidden),
        ("expert intermediate size", facts.intermediate, config.intermediate),
        ("weight_block_size", manifest.stated_block, config.block),
    ):
        if exported != found:
            raise ManifestError(
                f"{folder}: the {name} in config.json is {_plain(found)}, but {_plain(exported)} was exported; {_AGAIN}"
            )


def _plain(value: object) -> object:
    return list(value) if isinstance(value, tuple) else value
