"""One connection between two processes of a run: frames, and the kernel's care for machines that have gone.

A frame is four fixed bytes, a letter, the length of what follows, and that. Nothing is ever unpickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import socket
import struct
import threading
from collections.abc import Mapping

SILENT_S = (10, 5, 4)  # seconds of silence, between the kernel's probes, and probes until a machine counts as gone: 30 s in all
_FRAME = struct.Struct("<4scI")
_MAGIC = b"dsv3"
_MOST = 2**28  # bytes in one frame: more is no frame of ours

Said = dict[str, str]


def identity(versions: Mapping[str, str]) -> Said:
    """Who this process is, for the others: host, a name of the machine that no two share, process id and versions."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as f:
            machine = f.read().strip()
    except OSError:
        machine = socket.gethostname()
    return {"host": socket.gethostname(), "machine": machine, "pid": str(os.getpid()), **versions}


class Peer:
    """A connection, written from one thread at a time and read by one."""

    def __init__(self, connection: socket.socket, process: int, who: Said):
        self.process, self.who, self.inbox, self.gone = process, who, queue.Queue(), threading.Event()
        self._socket, self._lock = connection, threading.Lock()
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in zip((socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT), SILENT_S, strict=True):
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30_000)

    @property
    def name(self) -> str:
        return f"process {self.process} (host {self.who.get('host', '?')}, pid {self.who.get('pid', '?')})"

    def send(self, kind: bytes, content: bytes) -> None:
        """Send a frame; a connection that is broken is its reader's to report."""
        with self._lock, contextlib.suppress(OSError):
            self._socket.sendall(_FRAME.pack(_MAGIC, kind, len(content)) + content)

    def tell(self, kind: bytes, **what: object) -> None:
        self.send(kind, json.dumps(what).encode())

    def read(self, seconds: float | None = None) -> tuple[bytes, bytes] | None:
        """The next frame, or None if the connection is closed, silent for `seconds`, or not one of ours."""
        self._socket.settimeout(seconds)
        try:
            magic, kind, size = _FRAME.unpack(self._exactly(_FRAME.size))
            return (kind, self._exactly(size)) if magic == _MAGIC and size <= _MOST else None
        except (OSError, EOFError):
            return None

    def _exactly(self, size: int) -> bytes:
        parts = bytearray()
        while len(parts) < size:
            part = self._socket.recv(min(size - len(parts), 2**20))
            if not part:
                raise EOFError
            parts += part
        return bytes(parts)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
