"""Mutated safetensors headers: refused with a clear error or read as the format says, in bounded memory."""

from __future__ import annotations

import json
import random
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from ziggurat.stores.errors import HeaderError
from ziggurat.stores.headers import read_header

MEMORY_PER_HEADER_BYTE = 40
MEMORY_BESIDE = 256 << 10
_TENSORS: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "model.layers.0.a": {"dtype": "I16", "shape": [2, 3], "data_offsets": [0, 12]},
    "model.layers.0.b": {"dtype": "F32", "shape": [5], "data_offsets": [12, 32]},
    "model.layers.1.c": {"dtype": "U8", "shape": [0, 4], "data_offsets": [32, 32]},
    "model.layers.1.d": {"dtype": "BF16", "shape": [4, 4], "data_offsets": [32, 64]},
}
_DATA = bytes(64)
_VALUES: tuple[Any, ...] = (
    0, 1, -1, 2**31, 2**53, 2**63, 2**64, -(2**63), 10**300, 1.5, 1e308, True, None, "", "U8", "\ud800", "é" * 50, [],
    {}, [[]], {"a": {}}, [0] * 200, [2**62] * 60, "F64", "I4", "x" * 3000,
)  # fmt: skip


def run(seed: int, count: int, work: Path) -> dict[str, object]:
    """Read `count` mutated files. Raises AssertionError naming the mutation's number. Returns counts of the ends."""
    path = work / "mutated.safetensors"
    happened: Counter[str] = Counter()
    worst = 0.0
    tracemalloc.start()
    try:
        for number in range(count):
            dice = random.Random(f"{seed} {number}")
            raw, header_bytes = mutated(dice)
            path.write_bytes(raw)
            where = f"mutation {number} of seed {seed}"
            del raw
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            try:
                read_header(path)
                end = "sound"
            except HeaderError as e:
                end = e.kind
                end = e.kind if _is_clear(e, path) else "unclear"
            took = tracemalloc.get_traced_memory()[1] - before
            bound = MEMORY_BESIDE + MEMORY_PER_HEADER_BYTE * header_bytes
            assert took <= bound, f"{where}: {took} bytes of memory for a header of {header_bytes}"
            worst = max(worst, (took - MEMORY_BESIDE) / max(header_bytes, 1))
            assert end != "unclear", f"{where}: the message lacks the file's name or is too long"
            if end == "sound":
                _agrees(path, where)
            happened[end] += 1
    finally:
        tracemalloc.stop()
    return {
        "headers": count,
        "seed": seed,
        "ends": dict(sorted(happened.items())),
        "memory_bound": f"{MEMORY_BESIDE} + {MEMORY_PER_HEADER_BYTE} x header bytes",
        "most_memory_per_header_byte": round(worst, 1),
    }


def _is_clear(error: HeaderError, path: Path) -> bool:
    return str(error).startswith(str(path)) and len(str(error)) < 1000


def mutated(dice: random.Random) -> tuple[bytes, int]:
    """A file, and how many bytes of it may be a header."""
    how = dice.choice(["values", "bytes", "length", "cut", "deep", "dense", "wide", "numbers"])
    if how == "values":
        raw = json.dumps(_changed(dice)).encode()
    elif how == "deep":
        opening = dice.choice([b'{"a":', b"[", b'{"a":{"b":[', b'{"shape":['])
        raw = b'{"a":' + opening * dice.randrange(1, 30000)
    elif how == "dense":
        piece = dice.choice([b"[],", b"{},", b'{"":0},', b'"",', b"0,", b"1.5,", b"257,", b"[[]],", b"null,"])
        around = dice.choice([(b'{"a":[', b"0]}"), (b'{"__metadata__":{"a":[', b"0]}}"), (b"[", b"0]")])
        raw = around[0] + piece * dice.randrange(1, 60000) + around[1]
    elif how == "wide":
        entries = {f"t{i}": {"dtype": "U8", "shape": [], "data_offsets": [i, i + 1]} for i in range(64)}
        entries |= {f"m{i}": dice.choice(_VALUES) for i in range(dice.randrange(300))}
        raw = json.dumps(entries).encode()
    elif how == "numbers":
        raw = b'{"a":{"dtype":"U8","shape":[' + b"9" * dice.randrange(1, 20000) + b'],"data_offsets":[0,64]}}'
    else:
        raw = json.dumps(_TENSORS).encode()
    length = len(raw)
    if how == "length":
        length = dice.choice([0, 1, length - 1, length + 1, length + 64, 2**31, 2**32, 2**63, 2**64 - 1])
    file = bytearray(length.to_bytes(8, "little") + raw + _DATA)
    if how == "bytes":
        for _ in range(dice.randint(1, 6)):
            file[dice.randrange(len(file))] = dice.randrange(256)
    elif how == "cut":
        del file[dice.randrange(len(file)) :]
    return bytes(file), len(file)


def _changed(dice: random.Random) -> dict[str, Any]:
    entries = json.loads(json.dumps(_TENSORS))
    for _ in range(dice.randint(1, 3)):
        name = dice.choice(list(entries))
        value = entries[name]
        kind = dice.choice(["replace", "member", "number", "extra", "rename"])
        if kind == "replace" or not isinstance(value, dict) or not value:
            entries[name] = dice.choice(_VALUES)
        elif kind == "member":
            value[dice.choice(list(value))] = dice.choice(_VALUES)
        elif kind == "number" and isinstance(value.get("shape"), list):
            numbers = (
                value[dice.choice(["shape", "data_offsets"])] if "data_offsets" in value else value["shape"]
            )
            if isinstance(numbers, list):
                numbers.append(dice.choice(_VALUES)) if dice.random() < 0.3 else None
                for i in range(len(numbers)):
                    if isinstance(numbers[i], int) and dice.random() < 0.5:
                        numbers[i] += dice.choice([-1, 1, 4, 2**40])
        elif kind == "extra":
            value[dice.choice(["more", "dtype", "x" * 500])] = dice.choice(_VALUES)
        else:
            entries[dice.choice(["", "a", "__metadata__", "\ud83d"])] = entries.pop(name)
    return dict(entries)


def _agrees(path: Path, where: str) -> None:
    """What is accepted here is what the format's own library accepts."""
    try:
        with safe_open(path, framework="numpy") as file:
            assert set(file.keys()) == set(read_header(path).tensors), where
    except SafetensorError as e:
        raise AssertionError(f"{where}: accepted, but safetensors says {e}") from e
