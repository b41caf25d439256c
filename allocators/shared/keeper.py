"""The arena process: a unix socket that hands arenas to engines of the same user, and ends their leases with them."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import stat
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ziggurat.allocators.shared import messages
from ziggurat.allocators.shared.errors import ArenaUnreachableError, ProtocolError, SharedArenaError
from ziggurat.allocators.shared.segments import REFUSALS, Segments

__all__ = ["Keeper"]

logger = logging.getLogger(__name__)

_MOST_CONNECTIONS = 128
_FIRST_WORD = 10.0  # seconds in which somebody who connects says what is wanted
_SAY_EVERY = 64 << 20  # bytes of an arena in the making between two packets about it


class Keeper:
    """Listens at `path` (mode 0600) from when it is made; `serve` answers until `close`.

    ArenaUnreachableError if another one listens there, or if `path` is something else than a socket. OSError if the
    socket cannot be made.
    """

    def __init__(self, path: Path, segments: Segments) -> None:
        self.path = path
        self._segments = segments
        self._connections: set[_Connection] = set()
        self._guard = threading.Lock()
        self._closed = False
        self._lock, self._socket = _listen(path)

    def serve(self) -> None:
        """Answer, a thread for each connection, until `close` is called."""
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                if self._closed:
                    return
                raise
            with self._guard:
                full = self._closed or len(self._connections) >= _MOST_CONNECTIONS
                if not full:
                    one = _Connection(connection, self._segments, self._ended)
                    self._connections.add(one)
            if full:
                connection.close()
            else:
                one.start()

    def _ended(self, connection: _Connection) -> None:
        with self._guard:
            self._connections.discard(connection)

    def close(self) -> None:
        """Stop listening, end all leases, and let go of the memory. Twice does nothing."""
        with self._guard:
            if self._closed:
                return
            self._closed = True
            self._segments.end()
            connections = list(self._connections)
        with contextlib.suppress(OSError):
            self.path.unlink()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for one in connections:
            one.close()
        self._segments.close()
        os.close(self._lock)


class _Connection:
    """One engine: a Holder of at most one arena."""

    def __init__(self, connection: socket.socket, segments: Segments, ended: Any) -> None:
        self.pid = 0
        self._connection = connection
        self._segments = segments
        self._ended = ended
        self._thread = threading.Thread(target=self._run, name="ziggurat-lease", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """End the connection and wait for its thread."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        if self._thread.ident is not None:
            self._thread.join()

    def tell(self, message: Mapping[str, Any]) -> bool:
        try:
            messages.send(self._connection, message, flags=socket.MSG_DONTWAIT)
        except OSError:
            return False
        return True

    def _run(self) -> None:
        try:
            self.pid = messages.check_peer(self._connection)
            self._connection.settimeout(_FIRST_WORD)
            self._answer()
        except (SharedArenaError, OSError) as error:
            logger.warning("process %d: %s", self.pid, error)
        finally:
            self._segments.leave(self)
            self._connection.close()
            self._ended(self)

    def _answer(self) -> None:
        """One request; a granted one goes on until its connection ends."""
        message = self._receive()
        if message is None:
            return
        op, version = message.get("op"), message.get("version")
        if version != messages.VERSION:
            self._refuse(f"the arena process speaks version {messages.VERSION}, not {str(version)[:20]}")
        elif op == "status":
            messages.send(self._connection, self._segments.status().message())
        elif op == "attach":
            if self._attach(messages.Attach.parse(message)):
                self._hold()
        else:
            raise ProtocolError(f"nobody asks for {str(op)[:40]!r} here")

    def _attach(self, want: messages.Attach) -> bool:
        said = 0

        def progress(ready: int, whole: int) -> None:
            nonlocal said
            if ready == 0 or ready - said >= _SAY_EVERY:
                said = ready
                messages.send(self._connection, {"op": "progress", "ready": ready, "whole": whole})

        try:
            grant, files = self._segments.attach(want, self, progress)
        except REFUSALS as error:
            logger.warning("process %d is refused: %s", self.pid, error)
            self._refuse(str(error))
            return False
        try:
            messages.send(self._connection, grant.message(), files)
        finally:
            messages.close_all(files)
        logger.info("process %d is a %s of %s", self.pid, grant.role, want.label)
        return True

    def _refuse(self, reason: str) -> None:
        messages.send(self._connection, {"op": "refused", "reason": reason[:2000]})

    def _hold(self) -> None:
        """Until the engine ends the connection. Whatever it says, the lease is not ended from here: it would go on to
        use the memory."""
        self._connection.settimeout(None)
        while True:
            try:
                message = self._receive()
            except ProtocolError as error:
                logger.warning("process %d: %s", self.pid, error)
                continue
            if message is None:
                return
            number = message.get("number")
            if message.get("op") == "frozen" and isinstance(number, int):
                self._segments.frozen(self, number)
            else:
                logger.warning("process %d: a holder says nothing like %s", self.pid, str(message)[:80])

    def _receive(self) -> dict[str, Any] | None:
        """A message; nobody has descriptors to give us."""
        try:
            received = messages.receive(self._connection)
        except ConnectionResetError:
            return None
        if received is None:
            return None
        messages.close_all(received[1])
        return received[0]


def _listen(path: Path) -> tuple[int, socket.socket]:
    """A lock that says that somebody listens, and the socket; whatever a dead one left there is removed."""
    lock = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArenaUnreachableError(f"{path}: another arena process listens there") from None
        if path.exists():
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise ArenaUnreachableError(f"{path} is there, and is no socket")
            path.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            os.fchmod(listener.fileno(), 0o600)  # what bind gives the file, so that nobody gets in before
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_MOST_CONNECTIONS)
        except BaseException:
            listener.close()
            raise
        return lock, listener
    except BaseException:
        os.close(lock)
        raise
