"""What a checkpoint folder without expert tensors says about itself: a JSON file beside its shards.

It states the identity of the whole checkpoint, which packs are named by, and cannot be computed without the experts;
and for each file that is left its length and digests. The identity is believed only of a folder whose shards have
these digests, so that a changed or another folder does not pass for the one that was exported. It is no signature: who
can write it can state any identity.

The object's own `digest` is the sha256 of the rest of it (keys sorted, no spaces), so that a damaged one is known.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

from ziggurat.stores.errors import ManifestError
from ziggurat.stores.stored import WeightFormat
from ziggurat.stores.strict_json import JsonError, is_unicode, parse_object, shortened

MANIFEST_FILE = "ziggurat-checkpoint.json"
#: Its name until everything it speaks of is there.
UNFINISHED_MANIFEST = "ziggurat-checkpoint.unfinished.json"
MANIFEST_FORMAT = "ziggurat-stripped-checkpoint"
MANIFEST_VERSION = 1
MAX_MANIFEST_BYTES = 16 << 20  # some 50 000 files
_AGAIN = "delete it and run `ziggurat export` again"
_DTYPES = ("bfloat16", "float16", "float32")
_DIGEST = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """One file. sha256: of all its bytes. sample: a shard's part of an identity (`file_digest`), else empty."""

    nbytes: int
    sha256: str
    sample: str = ""


@dataclass(frozen=True, slots=True)
class ExpertFacts:
    """The expert tensors that were left out: the model's shape, how they were stored, their number and bytes.

    layer_ids: the model's own numbers of its MoE layers. hidden, intermediate: the whole model's. block: of FP8
    scales. dtype: of the tensors that are not quantized, as torch names it.
    """

    layer_ids: tuple[int, ...]
    experts: int
    hidden: int
    intermediate: int
    format: WeightFormat
    block: tuple[int, int] | None
    dtype: str
    tensors: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """identity: of the whole checkpoint. stated_block: what config.json said about FP8 blocks, part of that.

    files: by name, all that the export wrote into the folder; those with a sample are its shards.
    """

    identity: str
    stated_block: tuple[int, int] | None
    experts: ExpertFacts
    files: Mapping[str, FileFacts]

    @property
    def shards(self) -> dict[str, FileFacts]:
        return {name: facts for name, facts in self.files.items() if facts.sample}


def manifest_bytes(manifest: Manifest) -> bytes:
    """The file's content."""
    body = {"format": MANIFEST_FORMAT, "format_version": MANIFEST_VERSION, **asdict(manifest)}
    return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True).encode() + b"\n"


def read_manifest(folder: Path, name: str = MANIFEST_FILE) -> Manifest | None:
    """A folder's manifest, or None if it has none. Raises ManifestError for one that cannot be believed."""
    path = folder / name
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as e:
        raise ManifestError(f"{path}: cannot be read: {e.strerror}") from e
    try:
        with os.fdopen(fd, "rb") as file:
            raw = file.read(MAX_MANIFEST_BYTES + 1)
    except OSError as e:
        raise ManifestError(f"{path}: cannot be read: {e.strerror}") from e
    return parse_manifest(path, raw)


def parse_manifest(path: Path, raw: bytes) -> Manifest:
    """Check a manifest's bytes; `path` is for messages. Raises ManifestError."""
    if len(raw) > MAX_MANIFEST_BYTES:
        raise _bad(path, f"over the limit of {MAX_MANIFEST_BYTES} bytes")
    try:
        body = parse_object(raw, "manifest")
    except JsonError as e:
        raise _bad(path, str(e)) from e
    if body.get("format") != MANIFEST_FORMAT:
        raise _bad(path, f"format is {shortened(body.get('format'))}, not {MANIFEST_FORMAT!r}")
    version = body.get("format_version")
    if type(version) is not int or version != MANIFEST_VERSION:
        raise _bad(path, f"format_version is {shortened(version)}; this release knows {MANIFEST_VERSION}")
    stated = body.pop("digest", None)
    try:
        found = _digest(body)
    except (ValueError, RecursionError) as e:  # half a surrogate pair, which no file of ours holds
        raise _bad(path, f"damaged: {e}") from e
    if stated != found:
        raise _bad(path, f"damaged: its digest is {shortened(stated)}, its content has {found}")
    try:
        return _from_body(body)
    except _ValueError as e:
        raise _bad(path, str(e)) from e


class _ValueError(Exception):
    """A value that no manifest holds."""


def _from_body(body: dict[str, Any]) -> Manifest:
    _keys("the manifest", body, ("format", "format_version", "identity", "stated_block", "experts", "files"))
    files = body["files"]
    if not isinstance(files, dict):
        raise _ValueError("files is not an object")
    return Manifest(
        identity=_hash("identity", body["identity"]),
        stated_block=_block("stated_block", body["stated_block"]),
        experts=_experts(body["experts"]),
        files={_file_name(name): _file(name, entry) for name, entry in files.items()},
    )


def _experts(entry: Any) -> ExpertFacts:
    _keys("experts", entry, tuple(ExpertFacts.__slots__))
    form, dtype, layers = entry["format"], entry["dtype"], entry["layer_ids"]
    if form not in get_args(WeightFormat):
        raise _ValueError(f"experts.format is {shortened(form)}")
    if dtype not in _DTYPES:
        raise _ValueError(f"experts.dtype is {shortened(dtype)}")
    if not isinstance(layers, list) or not layers or not all(type(one) is int for one in layers):
        raise _ValueError(f"experts.layer_ids is {shortened(layers)}")
    sizes = {
        name: _size(f"experts.{name}", entry[name])
        for name in ("experts", "hidden", "intermediate", "tensors", "nbytes")
    }
    return ExpertFacts(
        layer_ids=tuple(layers),
        format=form,
        block=_block("experts.block", entry["block"]),
        dtype=dtype,
        **sizes,
    )


def _file_name(name: str) -> str:
    if name in ("", ".", "..") or "/" in name or "\0" in name or not is_unicode(name):
        raise _ValueError(f"{shortened(name)} is not a file name")
    return name


def _file(name: str, entry: Any) -> FileFacts:
    what = f"files[{shortened(name)}]"
    _keys(what, entry, tuple(FileFacts.__slots__))
    sample = entry["sample"]
    return FileFacts(
        _size(f"{what}.nbytes", entry["nbytes"]),
        _hash(f"{what}.sha256", entry["sha256"]),
        "" if sample == "" else _hash(f"{what}.sample", sample),
    )


def _keys(what: str, entry: Any, wanted: tuple[str, ...]) -> None:
    if not isinstance(entry, dict) or entry.keys() != set(wanted):
        raise _ValueError(f"{what} does not hold exactly {', '.join(wanted)}")


def _hash(what: str, value: Any) -> str:
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise _ValueError(f"{what} is {shortened(value)}, not 64 hex digits")
    return value


def _size(what: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**63:
        raise _ValueError(f"{what} is {shortened(value)}, not a size")
    return value


def _block(what: str, value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(b) is int and b > 0 for b in value):
        raise _ValueError(f"{what} is {shortened(value)}, not two positive numbers")
    return value[0], value[1]


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def _bad(path: Path, problem: str) -> ManifestError:
    return ManifestError(f"{path}: {problem}; {_AGAIN}")
