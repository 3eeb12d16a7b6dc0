"""A TCP proxy on this machine that can be cut: connections end and new ones are refused, until it is mended."""

from __future__ import annotations

import contextlib
import socket
import threading

_CHUNK = 65_536


class Proxy:
    """Passes bytes between 127.0.0.1:`port` and a target on this machine. passed: connections so far."""

    def __init__(self, target: int) -> None:
        self._target, self.passed = target, 0
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._start()

    def _start(self) -> None:
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._open += [near, far]
                self.passed += 1
                for one, other in ((near, far), (far, near)):
                    threading.Thread(target=_pass, args=(one, other), daemon=True).start()

    def cut(self) -> None:
        """Ends all connections and listens no more."""
        # shutdown wakes the threads that wait in accept and recv, which close does not
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            each.close()
        self._open = []

    def mend(self) -> None:
        """Listens again at the same port."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        self._start()


def _pass(one: socket.socket, other: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := one.recv(_CHUNK):
            other.sendall(data)
    for each in (one, other):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
