"""An engine's end of the connection to the arena process, which is its lease."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Callable
from pathlib import Path

from ziggurat.allocators.shared import messages
from ziggurat.allocators.shared.directory import directory_bytes
from ziggurat.allocators.shared.errors import ArenaRefusedError, ArenaUnreachableError, ProtocolError
from ziggurat.allocators.shared.memory import check_file
from ziggurat.allocators.shared.messages import Attach, Grant, Status

__all__ = ["Lease", "ask_status"]

logger = logging.getLogger(__name__)

_PATIENCE = 60.0  # seconds between two packets of a process that makes an arena, or makes room for it
_QUICK = 5.0  # seconds for one that has nothing to do

_open: weakref.WeakSet[Lease] = weakref.WeakSet()


def _connect(path: Path, patience: float) -> socket.socket:
    """ArenaUnreachableError if nobody of this user listens there."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(patience)
        connection.connect(str(path))
        messages.check_peer(connection)
    except OSError as error:
        connection.close()
        raise ArenaUnreachableError(f"no arena process at {path}: {error.strerror or error}") from error
    except BaseException:
        connection.close()
        raise
    return connection


def ask_status(path: Path) -> Status:
    """What the process at `path` holds. ArenaUnreachableError, ProtocolError."""
    with _connect(path, _QUICK) as connection:
        try:
            messages.send(connection, {"op": "status", "version": messages.VERSION})
            received = messages.receive(connection)
        except OSError as error:
            raise ArenaUnreachableError(f"the arena process at {path} does not answer: {error}") from error
    if received is None:
        raise ArenaUnreachableError(f"the arena process at {path} has closed the connection")
    messages.close_all(received[1])
    return Status.parse(received[0])


class Lease:
    """A granted arena. listing, data: descriptors of the directory and the rows, closed with the lease.

    `listen` begins to hear what the process has to say; until then a freeze waits.
    """

    def __init__(self, connection: socket.socket, grant: Grant, listing: int, data: int) -> None:
        self.grant = grant
        self.listing, self.data = listing, data
        self._connection = connection
        self._closed = False
        self._thread: threading.Thread | None = None
        _open.add(self)

    @classmethod
    def attach(cls, path: Path, want: Attach, progress: Callable[[int, int], None] | None = None) -> Lease:
        """ArenaUnreachableError, ArenaRefusedError or ProtocolError."""
        connection = _connect(path, _PATIENCE)
        try:
            grant, listing, data = _granted(connection, want, progress)
        except OSError as error:
            connection.close()
            raise ArenaUnreachableError(f"the arena process at {path} does not answer: {error}") from error
        except BaseException:
            connection.close()
            raise
        connection.settimeout(None)
        return cls(connection, grant, listing, data)

    def listen(self, freeze: Callable[[], None], thaw: Callable[[], None], lost: Callable[[], None]) -> None:
        """Call these from a thread: rows must not be evicted any more, may be evicted again, the process is gone."""

        def hear() -> None:
            try:
                while self._hear(freeze, thaw):
                    pass
            except OSError as error:
                logger.debug("lease: %s", error)
            if not self._closed:
                lost()

        self._thread = threading.Thread(target=hear, name="ziggurat-lease", daemon=True)
        self._thread.start()

    def _hear(self, freeze: Callable[[], None], thaw: Callable[[], None]) -> bool:
        """One message; False when the process has closed the connection. Nonsense does not end it from our side: rows
        that we go on to use would be given away."""
        try:
            received = messages.receive(self._connection)
        except ProtocolError as error:
            logger.warning("the arena process: %s", error)
            return True
        if received is None:
            return False
        message, files = received
        messages.close_all(files)
        if message.get("op") == "freeze":
            freeze()
            messages.send(self._connection, {"op": "frozen", "number": message.get("number")})
        elif message.get("op") == "thaw":
            thaw()
        return True

    def close(self) -> None:
        """End the lease. Twice does nothing."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        self._let_go()

    def _let_go(self) -> None:
        self._closed = True
        self._connection.close()
        messages.close_all([self.listing, self.data])
        _open.discard(self)


def _granted(
    connection: socket.socket, want: Attach, progress: Callable[[int, int], None] | None
) -> tuple[Grant, int, int]:
    messages.send(connection, want.message())
    while True:
        received = messages.receive(connection)
        if received is None:
            raise ArenaUnreachableError("the arena process has closed the connection")
        message, files = received
        try:
            op = message.get("op")
            if op == "granted":
                grant = Grant.parse(message)
                if len(files) != 2 or grant.data_bytes < want.nbytes:
                    raise ProtocolError(
                        f"{len(files)} descriptors of {grant.data_bytes} bytes for {want.nbytes}"
                    )
                check_file(files[0], directory_bytes(want.places))
                check_file(files[1], grant.data_bytes)
                listing, data = files
                files = []
                return grant, listing, data
            if op == "refused":
                raise ArenaRefusedError(f"the arena process refuses: {str(message.get('reason'))[:2000]}")
            if op != "progress":
                raise ProtocolError(f"the arena process says {str(message)[:200]}")
            ready, whole = message.get("ready"), message.get("whole")
            if progress is not None and isinstance(ready, int) and isinstance(whole, int):
                progress(ready, whole)
        finally:
            messages.close_all(files)


def _in_child() -> None:
    """A forked child has no part in its parent's leases, which must end with the parent."""
    for lease in list(_open):
        lease._let_go()


os.register_at_fork(after_in_child=_in_child)
