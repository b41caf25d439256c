"""Single bits turned over anywhere in a finished pack: none is served, each is named."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

from faults.builds import SIZES

from support.checkpoints import write_checkpoint
from support.packfiles import data_start, flip
from support.verbatim import VerbatimEncoder
from ziggurat.stores.buffers import aligned_buffer
from ziggurat.stores.builder import build_pack
from ziggurat.stores.checkpoint import Checkpoint
from ziggurat.stores.errors import PackError
from ziggurat.stores.pack import Pack, RowRequest
from ziggurat.stores.packformat import PackHeader
from ziggurat.stores.readers.registry import open_reader


def run(seed: int, count: int, work: Path) -> dict[str, object]:
    """Turn `count` bits over, one at a time, a third each in rows, header and checksums; read everything each time.

    Raises AssertionError naming the bit. Returns counts of how each was named.
    """
    write_checkpoint(work / "model", **SIZES)
    with Checkpoint.open(work / "model") as checkpoint:
        (path,) = build_pack(checkpoint, VerbatimEncoder(checkpoint), work / "packs")
    pack = Pack.open(path)
    header = pack.header
    pack.close()
    raw = path.read_bytes()
    start = data_start(path)
    table = start + header.rows_nbytes
    regions = {"header": (0, start), "rows": (start, table), "checksums": (table, len(raw))}
    rows = [raw[start + i * header.stride : start + (i + 1) * header.stride] for i in range(header.rows)]
    buffers = [aligned_buffer(header.stride) for _ in range(header.rows)]
    named: Counter[str] = Counter()
    for number in range(count):
        dice = random.Random(f"{seed} {number}")
        region = dice.choice(list(regions))
        at, bit = dice.randrange(*regions[region]), dice.randrange(8)
        flip(path, at, bit)
        try:
            found = _read(path, header, rows, buffers, dice.choice(["pread", "io_uring"]))
        finally:
            flip(path, at, bit)
        where = f"bit {bit} of byte {at} ({region}; flip {number} of seed {seed})"
        if region == "header":
            assert isinstance(found, str), f"{where}: the pack was opened"
            named[f"header: {found}"] += 1
            continue
        row = (at - start) // header.stride if region == "rows" else (at - table) // 8
        if isinstance(found, str):  # a checksum of 0 makes a pack incomplete
            assert (region, found) == ("checksums", "PackIncompleteError"), f"{where}: {found}"
            named[f"{region}: {found}"] += 1
            continue
        assert set(found) == {row}, f"{where}: rows {sorted(found)} failed"
        named[f"{region}: {found[row]}"] += 1
    assert path.read_bytes() == raw
    return {"flips": count, "seed": seed, "pack_bytes": len(raw), "named": dict(sorted(named.items()))}


def _read(
    path: Path, header: PackHeader, rows: list[bytes], buffers: list[memoryview], reader: str
) -> str | dict[int, str]:
    """The error at opening, or the rows that failed and how; a row that did not fail must be right."""
    try:
        pack = Pack.open(path, expect=header, reader=open_reader(reader, path, threads=2))
    except PackError as e:
        return type(e).__name__ if str(path) in str(e) else f"an error without the file's name: {e}"
    failed = {}
    try:
        requests = [RowRequest(*divmod(i, header.experts), buffers[i]) for i in range(header.rows)]
        for result in pack.read_rows(requests):
            row = result.layer * header.experts + result.expert
            if result.error is None:
                assert buffers[row].tobytes() == rows[row], f"row {row} was served with wrong bytes"
            else:
                layer_id = header.layer_ids[result.layer]
                assert f"layer {layer_id} expert {result.expert} of {path}" in str(result.error)
                failed[row] = result.error.kind
    finally:
        pack.close()
    return dict(failed)
