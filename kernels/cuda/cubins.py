"""The sizes of kernels' parameters, read from a cubin (an ELF64 file).

Each kernel has a section `.nv.info.<name>` of small attributes; one of them gives the bytes of its parameters. Format:
a byte that says how the value is stored, a byte with the attribute, then two bytes of value, or of its length when the
value follows. Launchers check their structs against it, on the CPU too.
"""

from __future__ import annotations

import struct

from ziggurat.kernels.cuda.errors import ImageError

_INFO = ".nv.info."
_SIZED = 4  # the value follows, its length in the two bytes
_PARAMETER_BYTES = 0x19


def parameter_sizes(cubin: bytes) -> dict[str, int]:
    """Kernel name -> bytes of its parameters. Raises ImageError for something that is not a cubin."""
    if cubin[:6] != b"\x7fELF\x02\x01":
        raise ImageError("not a cubin: no little-endian ELF64 header")
    (start,) = struct.unpack_from("<Q", cubin, 0x28)
    entry, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", cubin, start + entry * i) for i in range(count)]
    names_at = sections[names_index][4]
    found: dict[str, int] = {}
    for name_offset, _, _, _, offset, size in sections:
        at = names_at + name_offset
        name = cubin[at : cubin.index(b"\0", at)].decode()
        if name.startswith(_INFO):
            found[name.removeprefix(_INFO)] = _parameter_bytes(cubin[offset : offset + size])
    return found


def _parameter_bytes(info: bytes) -> int:
    at = 0
    while at + 4 <= len(info):
        how, attribute, value = struct.unpack_from("<BBH", info, at)
        if attribute == _PARAMETER_BYTES:
            return int(value)
        at += 4 + (value if how == _SIZED else 0)
    return 0
