"""Sending without ever waiting for the peer: what a socket does not take is sent by a thread.

The thread lives only while there is a backlog. It must not be the caller who sends it later: the
caller may be waiting in another group, for a peer that waits for this backlog.
"""

from __future__ import annotations

import select
import socket
import sys
import threading
from collections import deque

Piece = bytes | memoryview


class Outbox:
    """The sending side of one non-blocking stream socket."""

    def __init__(self, connection: socket.socket) -> None:
        """Send through `connection`, which somebody else closes."""
        self._socket = connection
        self._lock = threading.Lock()
        self._backlog: deque[memoryview] = deque()
        self._thread: threading.Thread | None = None

    def post(self, record: bytes, data: Piece = b"") -> None:
        """Send both, now or when the socket takes them; `data` may be changed at once.

        A broken connection is not reported: the reading side will find out and can say why.
        """
        with self._lock:
            sent = 0 if self._backlog else self._try(record, data)
            if sent < len(record) + len(data):
                self._backlog.append(memoryview(b"".join((record, data)))[sent:])
                if self._thread is None:
                    self._thread = threading.Thread(target=self._drain, daemon=True)
                    self._thread.start()

    def close(self, linger_s: float) -> None:
        """Give a backlog `linger_s` to leave; then the caller closes the socket."""
        with self._lock:
            thread = self._thread
        if thread is not None:
            thread.join(linger_s)
        with self._lock:
            self._backlog.clear()
        if thread is not None:
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes the thread
            thread.join()

    def _try(self, *pieces: Piece) -> int:
        try:
            return self._socket.sendmsg(pieces)
        except BlockingIOError:
            return 0
        except OSError:
            return sys.maxsize  # nobody listens: as good as sent

    def _drain(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLOUT)
        while True:
            with self._lock:
                self._send_backlog()
                if not self._backlog:
                    self._thread = None
                    return
            poll.poll()

    def _send_backlog(self) -> None:
        while self._backlog:
            piece = self._backlog[0]
            sent = self._try(piece)
            if sent < len(piece):
                self._backlog[0] = piece[sent:]
                return
            self._backlog.popleft()
