"""A link to site processes on this machine over their sockets, without a network: for trials and tests."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from fedllm.common.errors import RunError
from fedllm.common.files import replace_text
from fedllm.deployment.link import Kind, Reply
from fedllm.deployment.resident import Handler, ask, listen


class LocalLink:
    """A SiteLink over sockets on which sites listen; see resident.listen. sockets: site -> path.

    Who can write to a socket's folder is trusted, so that a reply's site is the socket's.
    """

    def __init__(self, sockets: Mapping[int, Path]) -> None:
        self._sockets = dict(sockets)
        self._names = itertools.count()
        self._replies: list[Reply] = []
        self._lock = threading.Lock()

    def online(self) -> dict[int, str]:
        """The sites whose processes listen: site -> life."""
        found = {site: life_of(path) for site, path in self._sockets.items()}
        return {site: life for site, life in found.items() if life is not None}

    def send(self, site: int, kind: Kind, body: bytes, seconds: float) -> str:
        """Sends a request in a thread of its own, which ends with the answer or after `seconds`."""
        name = f"{site}-{next(self._names)}"
        threading.Thread(target=self._ask, args=(name, site, kind, body, seconds), daemon=True).start()
        return name

    def replies(self) -> list[Reply]:
        """The replies since the last call."""
        with self._lock:
            found, self._replies = self._replies, []
        return found

    def close(self) -> None:
        """Nothing is to be closed: each request has a connection of its own."""

    def _ask(self, name: str, site: int, kind: Kind, body: bytes, seconds: float) -> None:
        try:
            reply = Reply(name, site, ask(self._sockets[site], kind, body, seconds))
        except RunError as error:
            reply = Reply(name, site, None, str(error))
        with self._lock:
            self._replies.append(reply)


def listen_as(path: Path, life: str, handler: Handler, stop: threading.Event | None = None) -> None:
    """Answers requests at a socket, see resident.listen, and says beside it that this process does.

    life: differs between the processes that listen there one after the other."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_text(_life_file(path), f"{os.getpid()} {life}")
    listen(path, handler, stop)


def life_of(path: Path) -> str | None:
    """The life of the process that listens at a socket; None if it has ended, or none ever did."""
    try:
        pid, life = _life_file(path).read_text(encoding="utf-8").split()
        os.kill(int(pid), 0)
    except (OSError, ValueError):
        return None
    return life if path.exists() else None


def _life_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.life")
