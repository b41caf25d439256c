"""What engines and the arena process say to each other: JSON objects, one a packet, some with descriptors.

    engine -> process   attach (Attach), status
    process -> engine   progress (ready, whole), then granted (Grant, two descriptors) or refused (reason)
    process -> writer   freeze (number), thaw;   writer -> process   frozen (number)

A connection that was granted an arena is its lease, for as long as it is open.
"""

from __future__ import annotations

import array
import json
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ziggurat.allocators.shared.errors import ArenaUnreachableError, ProtocolError

__all__ = [
    "MOST_BYTES",
    "VERSION",
    "ArenaStatus",
    "Attach",
    "Grant",
    "Role",
    "Status",
    "check_peer",
    "close_all",
    "receive",
    "send",
]

VERSION = 1
MOST_BYTES = 64 << 10
_MOST_FILES = 4
_FILE = struct.calcsize("i")
_MOST_ARENA = 1 << 46

Role = Literal["writer", "reader"]


@dataclass(frozen=True, slots=True)
class Attach:
    """An engine wants an arena. key: 64 hex digits, the same for the same rows. label: for people.

    node: the NUMA node for memory that is not there yet. writable: map the memory of a reader for writing, too, which
    a driver that locks pages may ask for; a reader writes nothing all the same.
    """

    key: str
    label: str
    places: int
    stride: int
    node: int | None = None
    writable: bool = False

    @property
    def nbytes(self) -> int:
        return self.places * self.stride

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Attach:
        """ProtocolError for anything that is not one."""
        fields = {name: value for name, value in message.items() if name not in ("op", "version")}
        if set(fields) != set(cls.__slots__):
            raise ProtocolError(f"attach has the fields {sorted(cls.__slots__)}, not {sorted(fields)[:20]}")
        key, label, node = fields["key"], fields["label"], fields["node"]
        if not isinstance(key, str) or not re.fullmatch("[0-9a-f]{64}", key):
            raise ProtocolError("attach: a key is 64 hex digits")
        if not isinstance(label, str) or not label.isprintable() or len(label) > 200:
            raise ProtocolError("attach: a label is at most 200 printable characters")
        places, stride = _number(fields, "places"), _number(fields, "stride")
        if places < 1 or stride < 4096 or stride % 4096 or places * stride > _MOST_ARENA:
            raise ProtocolError(f"attach: {places} places of {stride} bytes make no arena")
        if node is not None and not 0 <= _number(fields, "node") < 1024:
            raise ProtocolError(f"attach: there is no node {node}")
        if not isinstance(fields["writable"], bool):
            raise ProtocolError("attach: writable is true or false")
        return cls(key, label, places, stride, node, fields["writable"])

    def message(self) -> dict[str, Any]:
        return {"op": "attach", "version": VERSION, **asdict(self)}


@dataclass(frozen=True, slots=True)
class Grant:
    """What an engine got: its role, and whether rows may be evicted by now. With it come the descriptors of the
    directory and of the rows."""

    role: Role
    frozen: bool
    data_bytes: int
    huge: bool

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Grant:
        role, frozen, huge = (message.get(name) for name in ("role", "frozen", "huge"))
        if role not in ("writer", "reader") or not isinstance(frozen, bool) or not isinstance(huge, bool):
            raise ProtocolError(f"not a grant: {str(message)[:200]}")
        return cls(role, frozen, _number(message, "data_bytes"), huge)

    def message(self) -> dict[str, Any]:
        return {"op": "granted", **asdict(self)}


@dataclass(frozen=True, slots=True)
class ArenaStatus:
    """An arena that is held. published: rows in it. lost: places that nobody uses before all have left. writer,
    readers: process ids."""

    key: str
    label: str
    places: int
    stride: int
    bytes: int
    huge: bool
    published: int
    lost: int
    writer: int | None
    readers: tuple[int, ...]

    @property
    def idle(self) -> bool:
        return self.writer is None and not self.readers


@dataclass(frozen=True, slots=True)
class Status:
    """An arena process. limit: bytes of all its arenas; allocatable: bytes that it could take now, if it knows;
    huge_pages: bytes of reserved huge pages that it could take besides."""

    pid: int
    limit: int
    allocatable: int | None
    arenas: tuple[ArenaStatus, ...]
    huge_pages: int = 0

    @classmethod
    def parse(cls, message: Mapping[str, Any]) -> Status:
        """ProtocolError for anything that is not one."""
        arenas, allocatable = message.get("arenas"), message.get("allocatable")
        if message.get("op") != "status" or not isinstance(arenas, list):
            raise ProtocolError(f"not a status: {str(message)[:200]}")
        return cls(
            _number(message, "pid"),
            _number(message, "limit"),
            None if allocatable is None else _number(message, "allocatable"),
            tuple(_arena_status(one) for one in arenas),
            _number(message, "huge_pages"),
        )

    def message(self) -> dict[str, Any]:
        return {"op": "status", **asdict(self)}


def _arena_status(found: object) -> ArenaStatus:
    if not isinstance(found, Mapping) or not isinstance(found.get("readers"), list):
        raise ProtocolError(f"not an arena: {str(found)[:200]}")
    numbers = {name: _number(found, name) for name in ("places", "stride", "bytes", "published", "lost")}
    writer = None if found.get("writer") is None else _number(found, "writer")
    readers = tuple(_number({"reader": one}, "reader") for one in found["readers"])
    key, label = str(found.get("key")), str(found.get("label"))
    return ArenaStatus(key, label, **numbers, huge=found.get("huge") is True, writer=writer, readers=readers)


def _number(fields: Mapping[str, Any], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 62:
        raise ProtocolError(f"{name} is no number: {str(value)[:40]}")
    return value


def send(
    connection: socket.socket, message: Mapping[str, Any], files: Sequence[int] = (), flags: int = 0
) -> None:
    """One packet. OSError if the other side is gone, or, with MSG_DONTWAIT, does not listen."""
    ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))] if files else []
    connection.sendmsg([json.dumps(message).encode()], ancillary, flags | socket.MSG_NOSIGNAL)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """One packet and its descriptors, which are the caller's; None when the other side has closed.

    ProtocolError for a packet that is truncated or no JSON object; its descriptors are closed.
    """
    data, ancillary, flags, _ = connection.recvmsg(
        MOST_BYTES, socket.CMSG_SPACE(_MOST_FILES * _FILE), socket.MSG_CMSG_CLOEXEC
    )
    files = array.array("i")
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            files.frombytes(payload[: len(payload) // _FILE * _FILE])
    if not data and not files:
        return None
    try:
        if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
            raise ProtocolError(f"a packet of more than {MOST_BYTES} bytes or {_MOST_FILES} descriptors")
        message = json.loads(data)
        if not isinstance(message, dict):
            raise ProtocolError(f"a message is an object, not {data[:40]!r}")
    except (ValueError, RecursionError) as error:
        close_all(files)
        raise ProtocolError(f"not a message: {data[:40]!r}") from error
    except ProtocolError:
        close_all(files)
        raise
    return message, files.tolist()


def close_all(files: Sequence[int]) -> None:
    for file in files:
        os.close(file)


def check_peer(connection: socket.socket) -> int:
    """The process id at the other end. ArenaUnreachableError if it is another user's."""
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, uid, _ = struct.unpack("3i", raw)
    if uid != os.geteuid():
        raise ArenaUnreachableError(f"the other end of the socket belongs to user {uid}, not {os.geteuid()}")
    return int(pid)
