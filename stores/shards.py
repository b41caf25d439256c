"""The safetensors files a checkpoint folder consists of."""

from __future__ import annotations

import json
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from ziggurat.stores.errors import CheckpointError, HeaderError
from ziggurat.stores.headers import FileHeader, read_header

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclass(frozen=True, slots=True)
class ShardSet:
    """headers: one per file, in order of file name; placed: the index's tensor -> number of its file, if any."""

    headers: tuple[FileHeader, ...]
    placed: Mapping[str, int]


def read_shards(folder: Path) -> ShardSet:
    """Find a checkpoint's files and read their headers. Raises CheckpointError naming the file that is at fault."""
    weight_map = read_index(folder / INDEX_FILE)
    single = folder / SINGLE_FILE
    if weight_map is None:
        if not single.is_file():
            raise CheckpointError(f"{folder}: neither {SINGLE_FILE} nor {INDEX_FILE} is there")
        return ShardSet((read_shard(single),), {})
    names = sorted(set(weight_map.values()))
    if single.is_file() and SINGLE_FILE not in names:
        raise CheckpointError(
            f"{folder}: holds both {SINGLE_FILE} and an {INDEX_FILE} that does not list it; remove one of them"
        )
    absent = [name for name in names if not (folder / name).is_file()]
    if absent:
        raise CheckpointError(f"{folder}: {INDEX_FILE} lists {_first(absent)}, not there")
    with ThreadPoolExecutor(min(8, len(names))) as threads:
        headers = tuple(threads.map(read_shard, [folder / name for name in names]))
    number = {name: i for i, name in enumerate(names)}
    return ShardSet(headers, {tensor: number[name] for tensor, name in weight_map.items()})


def read_shard(path: Path) -> FileHeader:
    """One file's header. Raises CheckpointError."""
    try:
        return read_header(path)
    except HeaderError as e:
        raise CheckpointError(str(e)) from e
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e


def read_index(path: Path) -> dict[str, str] | None:
    """An index's tensor -> file name, or None if there is no index. Raises CheckpointError."""
    try:
        text = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as e:
        raise CheckpointError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise CheckpointError(f"{path}: not JSON: {e}") from e
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map is missing or empty")
    for tensor, name in weight_map.items():
        if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\0" in name:
            raise CheckpointError(f"{path}: the file of {tensor!r} is {name!r}, not a file name")
    return weight_map


def _first(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more
