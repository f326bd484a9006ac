"""How tokens come from the decoders to the scheduler: a Unix socket of this server's own.

    llava          TokenLink.open ── job, by BLS ─▶ llava_decoder      submit, answered at once
      ▲  one reader per connection                       │
      └───────────── lines of JSON, one socket ──────────┘             TokenSender.send: tokens as they come

Not by Triton's decoupled responses, because the stub of the caller (2.51) can stand still for ever: `Next` of one
response iterator waits for Python's lock with the iterator's own in hand, the thread that enqueues waits for that with
the lock of all iterators in hand, and whoever begins another call waits for that with Python's. It took some ten
thousand requests on a busy machine. A socket also tells at once when a decoder dies.

The socket's name is abstract (no file is left behind) and holds the boot; both ends take only their own user.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import struct
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from python_backend.errors import PeerGone

logger = logging.getLogger(__name__)

_PEER = struct.Struct("3i")  # process, user and group, as SO_PEERCRED gives them
Line = Mapping[str, Any]


def address(boot_id: str) -> str:
    """The abstract name of a boot's socket."""
    return f"\0vlm_relay.tokens.{boot_id}"


@dataclass(slots=True, eq=False)
class Waiting:
    """One request whose tokens are waited for; None in `lines` says that its decoder is gone."""

    decoder: str
    lines: queue.SimpleQueue[Line | None] = field(default_factory=queue.SimpleQueue)


class TokenLink:
    """The scheduler's end. Any thread may open a request."""

    def __init__(self, boot_id: str) -> None:
        self._lock = threading.Lock()
        self._waiting: dict[str, Waiting] = {}
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(address(boot_id))
        self._socket.listen()
        threading.Thread(target=self._accept, name="tokens", daemon=True).start()

    @contextlib.contextmanager
    def open(self, decoder: str, request_id: str) -> Iterator[Iterator[Line]]:
        """The lines of one request, to be opened before the decoder is asked; ends with one that has a reason.

        Raises:
            PeerGone: while reading; the decoder closed its connection.
        """
        waiting = Waiting(decoder)
        with self._lock:
            self._waiting[request_id] = waiting
        try:
            yield self._lines(waiting)
        finally:
            with self._lock:
                del self._waiting[request_id]

    def close(self) -> None:
        """Lets go of all decoders."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._socket.close()

    @staticmethod
    def _lines(waiting: Waiting) -> Iterator[Line]:
        while True:
            line = waiting.lines.get()
            if line is None:
                raise PeerGone(f"{waiting.decoder} died; retry")
            yield line
            if line["finish_reason"]:
                return

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            if _user_of(connection) != os.getuid():
                logger.warning("a process of another user wanted to send tokens")
                connection.close()
                continue
            threading.Thread(target=self._read, args=(connection,), name="tokens", daemon=True).start()

    def _read(self, connection: socket.socket) -> None:
        """Hands out what one decoder sends; its first line is its name."""
        decoder = ""
        try:
            with connection, connection.makefile("rb", buffering=1 << 16) as lines:
                decoder = str(json.loads(lines.readline() or b'""'))
                for data in lines:
                    line = json.loads(data)
                    with self._lock:
                        waiting = self._waiting.get(line["request_id"])
                    if waiting is not None:
                        waiting.lines.put(line)
        except (OSError, ValueError, KeyError, TypeError) as error:
            logger.warning("the tokens of %s broke off: %s", decoder or "a decoder", error)
        finally:  # whatever ended it: who waits would wait for ever
            with self._lock:
                left = [waiting for waiting in self._waiting.values() if waiting.decoder == decoder]
            for waiting in left:
                waiting.lines.put(None)


class TokenSender:
    """A decoder's end. Used by one thread; connects when there is something to say."""

    def __init__(self, boot_id: str, decoder: str) -> None:
        self._address = address(boot_id)
        self._decoder = decoder
        self._socket: socket.socket | None = None

    def send(self, line: Line) -> None:
        """Sends one line; it has `request_id` and `finish_reason`.

        Raises:
            OSError: nobody listens any more.
        """
        try:
            self._connected().sendall(json.dumps(line).encode() + b"\n")
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the connection."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connected(self) -> socket.socket:
        if self._socket is None:
            fresh = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                fresh.connect(self._address)
                if _user_of(fresh) != os.getuid():
                    raise OSError("a process of another user listens for tokens")
                fresh.sendall(json.dumps(self._decoder).encode() + b"\n")
            except OSError:
                fresh.close()
                raise
            self._socket = fresh
        return self._socket


def _user_of(connection: socket.socket) -> int:
    """The user at the other end."""
    return int(_PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))[1])
