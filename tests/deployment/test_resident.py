"""The local socket of a resident process."""

from __future__ import annotations

import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedllm.common.errors import UserError
from fedllm.deployment import resident
from fedllm.deployment.resident import UnreachableError, ask, listen


def echo(kind: str, body: bytes) -> bytes:
    if kind == "sleep":
        time.sleep(float(body))
    return kind.encode() + b":" + body


@pytest.fixture
def path(tmp_path: Path) -> Iterator[Path]:
    """A socket at which `echo` answers."""
    where, stop = tmp_path / "private" / "site.sock", threading.Event()
    thread = threading.Thread(target=listen, args=(where, echo, stop))
    thread.start()
    wait_for(where)
    yield where
    stop.set()
    thread.join(10)
    assert not thread.is_alive()
    assert not where.exists()


def wait_for(path: Path) -> None:
    end = time.monotonic() + 20
    while time.monotonic() < end:
        try:
            ask(path, "up", b"", 5)
        except UnreachableError:
            time.sleep(0.02)
        else:
            return
    raise AssertionError(f"nothing listens at {path}")


def test_requests_are_answered_one_after_the_other(path: Path) -> None:
    body = os.urandom(3_000_000)
    assert ask(path, "train", body, 10) == b"train:" + body
    found: list[bytes] = []
    asking = [threading.Thread(target=lambda n=n: found.append(ask(path, "k", b"%d" % n, 10))) for n in range(5)]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join(10)
    assert sorted(found) == [b"k:%d" % n for n in range(5)]


def test_only_the_user_may_connect(path: Path) -> None:
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_a_folder_open_to_others_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    with pytest.raises(UserError, match="found mode 755, expected 700.*chmod 700"):
        listen(tmp_path / "site.sock", echo)


def test_a_long_path_works(tmp_path: Path) -> None:
    where, stop = tmp_path / ("d" * 120) / "site.sock", threading.Event()
    thread = threading.Thread(target=listen, args=(where, echo, stop))
    thread.start()
    wait_for(where)
    stop.set()
    thread.join(10)


def test_two_processes_do_not_share_a_socket(path: Path) -> None:
    with pytest.raises(UserError, match="another process listens there"):
        listen(path, echo)
    assert ask(path, "still", b"here", 5) == b"still:here"


def test_the_socket_of_a_killed_process_is_replaced(tmp_path: Path) -> None:
    where = tmp_path / "private" / "site.sock"
    program = f"""
from pathlib import Path
from fedllm.deployment.resident import listen
listen(Path({str(where)!r}), lambda kind, body: b"first")
"""
    process = subprocess.Popen([sys.executable, "-c", program])
    wait_for(where)
    process.send_signal(signal.SIGKILL)
    process.wait(10)
    assert where.exists()
    with pytest.raises(UnreachableError, match="nothing listens there"):
        ask(where, "up", b"", 5)
    stop = threading.Event()
    thread = threading.Thread(target=listen, args=(where, echo, stop))
    thread.start()
    wait_for(where)
    assert ask(where, "a", b"b", 5) == b"a:b"
    stop.set()
    thread.join(10)


def test_a_slow_answer_ends_at_the_time_given_and_the_next_is_served(path: Path) -> None:
    began = time.monotonic()
    with pytest.raises(UnreachableError, match="no answer within 0 s"):
        ask(path, "sleep", b"1", 0.2)
    assert time.monotonic() - began < 0.9
    assert ask(path, "a", b"b", 5) == b"a:b"


@pytest.mark.parametrize(
    "sent",
    [
        b"",
        b"GET / HTTP/1.1\r\n\r\n",
        resident._REQUEST.pack(b"another", 1, 1) + b"xx",
        resident._REQUEST.pack(resident._MAGIC, 3, 10) + b"kin",  # ends before the body
        resident._REQUEST.pack(resident._MAGIC, 3, 2**63) + b"kind",
        resident._REQUEST.pack(resident._MAGIC, 2, 0) + b"\xff\xff",
    ],
)
def test_what_is_no_request_has_no_effect(path: Path, sent: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.connect(str(path))
        connection.sendall(sent)
        connection.shutdown(socket.SHUT_WR)
        connection.settimeout(5)
        try:
            assert connection.recv(10) == b""
        except ConnectionResetError:
            pass
    assert ask(path, "a", b"b", 5) == b"a:b"


def test_what_the_handler_raises_ends_the_listener_and_the_asker_is_told(tmp_path: Path) -> None:
    where, raised = tmp_path / "private" / "site.sock", []

    def fail(kind: str, body: bytes) -> bytes:
        if kind == "up":
            return b""
        raise RuntimeError("a bug")

    def run() -> None:
        try:
            listen(where, fail)
        except RuntimeError as error:
            raised.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(where)
    with pytest.raises(UnreachableError, match="the connection ended early"):
        ask(where, "a", b"b", 5)
    thread.join(10)
    assert raised == ["a bug"]


def test_the_module_needs_no_torch() -> None:
    program = "import sys; import fedllm.deployment.resident; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
