"""What a shared library asks of others, read from its ELF64 headers.

Only the four tables that the dynamic loader itself looks at are read: needed libraries, dynamic symbols,
symbol versions and version requirements (System V ABI; for versions, the Linux Standard Base).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_SHT_DYNAMIC, _SHT_DYNSYM = 6, 11
_SHT_GNU_VERNEED, _SHT_GNU_VERSYM = 0x6FFFFFFE, 0x6FFFFFFF
_DT_NULL, _DT_NEEDED = 0, 1
_STB_WEAK = 2
_SECTION = struct.Struct("<IIQQQQIIQQ")
_SYMBOL = struct.Struct("<IBBHQQ")
_DYNAMIC = struct.Struct("<qQ")
_VERNEED = struct.Struct("<HHIII")
_VERNAUX = struct.Struct("<IHHII")


class ElfError(ValueError):
    """The file is no little-endian ELF64 shared library; the message names it."""


@dataclass(frozen=True, slots=True)
class Wanted:
    """One symbol that a library leaves undefined. `library` is None where the symbol carries no version."""

    name: str
    library: str | None
    version: str | None
    weak: bool


@dataclass(frozen=True, slots=True)
class SharedLibrary:
    """The dynamic interface of one shared library."""

    needed: tuple[str, ...]
    wanted: tuple[Wanted, ...]
    defined: frozenset[str]


@dataclass(frozen=True, slots=True)
class _Section:
    kind: int
    offset: int
    size: int
    link: int


def read_shared_library(path: Path) -> SharedLibrary:
    """Read the dynamic interface of `path`. Raises ElfError for anything but a little-endian ELF64 file."""
    with path.open("rb") as file:
        if file.read(6) != b"\x7fELF\x02\x01":
            raise ElfError(f"{path}: not a little-endian ELF64 file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _read(data)


def _read(data: mmap.mmap) -> SharedLibrary:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry, count = struct.unpack_from("<HH", data, 0x3A)
    sections: list[_Section] = []
    for i in range(count):
        _, kind, _, _, offset, size, link, _, _, _ = _SECTION.unpack_from(data, table + i * entry)
        sections.append(_Section(kind, offset, size, link))
    by_kind = {section.kind: section for section in sections}

    dynamic, symbols = by_kind.get(_SHT_DYNAMIC), by_kind.get(_SHT_DYNSYM)
    needed = tuple(_needed(data, dynamic, sections[dynamic.link])) if dynamic else ()
    versions: dict[int, tuple[str, str]] = {}
    if requirements := by_kind.get(_SHT_GNU_VERNEED):
        versions = dict(_version_requirements(data, requirements, sections[requirements.link]))
    wanted: list[Wanted] = []
    defined: set[str] = set()
    if symbols:
        version_table = by_kind.get(_SHT_GNU_VERSYM)
        for i in range(1, symbols.size // _SYMBOL.size):
            name_at, info, _, section, _, _ = _SYMBOL.unpack_from(data, symbols.offset + i * _SYMBOL.size)
            name = _string(data, sections[symbols.link], name_at)
            if section:
                defined.add(name)
                continue
            index = 0
            if version_table:
                (index,) = struct.unpack_from("<H", data, version_table.offset + 2 * i)
            library, version = versions.get(index & 0x7FFF, (None, None))
            wanted.append(Wanted(name, library, version, info >> 4 == _STB_WEAK))
    return SharedLibrary(needed, tuple(wanted), frozenset(defined))


def _string(data: mmap.mmap, table: _Section, at: int) -> str:
    start = table.offset + at
    return data[start : data.find(b"\0", start)].decode("ascii", "surrogateescape")


def _needed(data: mmap.mmap, dynamic: _Section, strings: _Section) -> Iterator[str]:
    for at in range(dynamic.offset, dynamic.offset + dynamic.size, _DYNAMIC.size):
        tag, value = _DYNAMIC.unpack_from(data, at)
        if tag == _DT_NULL:
            return
        if tag == _DT_NEEDED:
            yield _string(data, strings, value)


def _version_requirements(
    data: mmap.mmap, requirements: _Section, strings: _Section
) -> Iterator[tuple[int, tuple[str, str]]]:
    """Yield (version index, (library, version)) for every version that the library asks of another one."""
    at = requirements.offset
    while True:
        _, count, file_at, first, following = _VERNEED.unpack_from(data, at)
        library = _string(data, strings, file_at)
        aux = at + first
        for _ in range(count):
            _, _, index, name_at, step = _VERNAUX.unpack_from(data, aux)
            yield index & 0x7FFF, (library, _string(data, strings, name_at))
            aux += step
        if not following:
            return
        at += following
