"""A local socket of a process that stays: others of the same user send it (kind, bytes) and get bytes. No torch."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from fedllm.common.errors import RunError, UserError

Handler = Callable[[str, bytes], bytes]
MOST_BYTES = 4 * 2**30  # of a body; a longer one is refused before it is read
_MAGIC = b"fedllm1"
_REQUEST = struct.Struct(f">{len(_MAGIC)}sBQ")  # magic, bytes of the kind, bytes of the body; both follow
_ANSWER = struct.Struct(f">{len(_MAGIC)}sQ")  # magic, bytes of the body, which follows
_TRANSFER = 120.0  # seconds for a request's bytes to come, or an answer's to go: both ends are on one machine
_WAKE = 0.5  # seconds between looks at `stop`
_CHUNK = 2**20
_LONGEST = 100  # bytes of a socket's path: the kernel's limit is 108, on other systems 104


class UnreachableError(RunError):
    """Nothing answers at a socket: no process listens there, or it did not answer in time."""


def listen(path: Path, handler: Handler, stop: threading.Event | None = None) -> None:
    """Answers requests one after the other with handler(kind, body) until `stop` is set.

    The socket has mode 0600, in a folder of its own that is made with mode 0700. That of a process that ended is
    replaced. A request that is cut off or is none has no effect. What `handler` raises ends this function.
    Raises UserError if another process listens at the path, or others may write to its folder.
    """
    with _listening(path) as server:
        while stop is None or not stop.is_set():
            with contextlib.suppress(TimeoutError):
                connection, _ = server.accept()
                with connection:
                    _answer(connection, handler)


def _answer(connection: socket.socket, handler: Handler) -> None:
    """Reads one request and answers it. A peer that has gone is no error: it asks again."""
    try:
        end = time.monotonic() + _TRANSFER
        magic, length, size = _REQUEST.unpack(_read(connection, _REQUEST.size, end))
        if magic != _MAGIC or size > MOST_BYTES:
            return
        kind = _read(connection, length, end).decode("ascii")
        body = _read(connection, size, end)
    except (OSError, UnicodeDecodeError):
        return
    found = handler(kind, body)
    del body
    with contextlib.suppress(OSError):
        connection.settimeout(_TRANSFER)
        connection.sendall(_ANSWER.pack(_MAGIC, len(found)))
        connection.sendall(found)


def ask(path: Path, kind: str, body: bytes, seconds: float) -> bytes:
    """The answer of the process that listens at `path`.

    Raises UnreachableError if nothing listens there, the answer takes longer than `seconds`, or the connection ends
    before the answer has come whole.
    """
    if len(body) > MOST_BYTES:
        raise RunError(f"{path}: found a message of {len(body):,} bytes, expected at most {MOST_BYTES:,}")
    end = time.monotonic() + seconds
    name = kind.encode("ascii")
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection, _short(path) as address:
            connection.settimeout(max(end - time.monotonic(), 0.001))
            connection.connect(address)
            connection.sendall(_REQUEST.pack(_MAGIC, len(name), len(body)) + name)
            connection.sendall(body)
            magic, size = _ANSWER.unpack(_read(connection, _ANSWER.size, end))
            if magic != _MAGIC or size > MOST_BYTES:
                raise UnreachableError(f"{path}: what listens there is not this version of fedllm; start both anew")
            return _read(connection, size, end)
    except TimeoutError:
        raise UnreachableError(f"{path}: no answer within {seconds:.0f} s") from None
    except OSError as error:
        raise UnreachableError(f"{path}: nothing listens there ({error.strerror or error})") from None


def _read(connection: socket.socket, size: int, end: float) -> bytes:
    """`size` bytes. Memory grows as they come, so that a wrong length costs nothing. Raises OSError without them."""
    found = bytearray()
    while len(found) < size:
        connection.settimeout(max(end - time.monotonic(), 0.001))
        part = connection.recv(min(size - len(found), _CHUNK))
        if not part:
            raise ConnectionError("the connection ended early")
        found += part
    return bytes(found)


@contextlib.contextmanager
def _listening(path: Path) -> Iterator[socket.socket]:
    """The bound socket. A lock beside it, which the kernel releases when its process ends, tells a live one."""
    _private_folder(path.parent)
    lock = os.open(path.with_name(f"{path.name}.lock"), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise UserError(
                f"{path}: another process listens there; it works on the same folder: wait for it or end it, or "
                "name another folder"
            ) from None
        path.unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
            with _short(path) as address:
                server.bind(address)
            path.chmod(0o600)
            server.listen(16)
            server.settimeout(_WAKE)
            try:
                yield server
            finally:
                path.unlink(missing_ok=True)
    finally:
        os.close(lock)


def _private_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
    except OSError as error:
        raise UserError(f"{folder}: cannot be made ({error.strerror}); a socket needs a folder of its own") from error
    if stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{folder}: found mode {stat.S_IMODE(found.st_mode):o}, expected 700: others could answer in this "
            f"process's name; run: chmod 700 {folder}"
        )


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """The socket's path, or a short name for it: a socket's address may be about 100 bytes long."""
    if len(os.fsencode(path)) <= _LONGEST:
        yield str(path)
        return
    if not Path("/proc/self/fd").is_dir():
        raise UserError(f"{path}: a socket's path may have {_LONGEST} bytes; name a folder with a shorter path")
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
