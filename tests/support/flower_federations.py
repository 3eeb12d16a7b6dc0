"""A Flower server and nodes of this machine for tests: real processes; each site's answers come from a function."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fedllm.deployment.federation_folder import new_federation, read_server_folder
from fedllm.deployment.flower_processes import Child, free_port
from fedllm.deployment.flower_server import FlowerServer
from fedllm.deployment.flower_site import site_socket, start_node
from fedllm.deployment.grid_link import GridLink
from fedllm.deployment.link import Kind, Reply
from fedllm.deployment.resident import Handler, listen
from fedllm.deployment.site_settings import SiteSettings

T = TypeVar("T")
PATIENCE = 180.0  # seconds in which anything must happen


def make(folder: Path, names: list[str]) -> tuple[Path, dict[str, SiteSettings]]:
    """Writes a federation; returns the server's folder and the sites' settings."""
    address = f"127.0.0.1:{free_port()}"
    server, *_ = new_federation(folder, names, "{}", address=address, listen=address)
    return server, {name: site(folder, name, address) for name in names}


def site(folder: Path, name: str, address: str) -> SiteSettings:
    home = folder / name
    return SiteSettings(
        name=name, server=address, certificate=home / "ca.crt", key=home / f"{name}.key", train=home / "train.csv",
        state=home / "state",
    )  # fmt: skip


class Sites:
    """Sites whose answers are handle(kind, body), and their nodes."""

    def __init__(self, settings: dict[str, SiteSettings], handle: Callable[[str, str, bytes], bytes]) -> None:
        self._stop = threading.Event()
        self.threads: list[threading.Thread] = []
        self.nodes: dict[str, Child] = {}
        for name, each in settings.items():
            self._listen(site_socket(each.state), lambda kind, body, name=name: handle(name, kind, body))
            self.nodes[name] = start_node(each)

    def _listen(self, path: Path, handler: Handler) -> None:
        self.threads.append(threading.Thread(target=listen, args=(path, handler, self._stop), daemon=True))
        self.threads[-1].start()

    def close(self) -> None:
        for node in self.nodes.values():
            node.end()
        self._stop.set()
        for thread in self.threads:
            thread.join(10)


class Federation:
    """A running server and two sites, a and b."""

    def __init__(self, folder: Path, handle: Callable[[str, str, bytes], bytes]) -> None:
        self.folder, self.settings = make(folder, ["a", "b"])
        self.server = FlowerServer(read_server_folder(self.folder)).__enter__()
        self.sites = Sites(self.settings, handle)

    @property
    def link(self) -> GridLink:
        return self.server.link

    def close(self) -> None:
        self.server.__exit__()
        self.sites.close()

    def wait_online(self, count: int = 2) -> dict[int, str]:
        """The sites' lives, once this many are online."""
        return until(lambda: found if len(found := self.link.online()) == count else None)

    def reply(self, name: str) -> Reply:
        """The reply to one request."""
        return until(lambda: next((each for each in self.link.replies() if each.request == name), None))

    def ask(self, number: int, kind: Kind, body: bytes, seconds: float = PATIENCE) -> Reply:
        return self.reply(self.link.send(number, kind, body, seconds))

    def ask_until_answered(self, number: int, kind: Kind, body: bytes) -> bytes:
        """Asks again while the transport fails, as the rounds do."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if (reply := self.ask(number, kind, body, 30)).body is not None:
                return reply.body
            time.sleep(0.5)
        raise AssertionError(f"site {number} does not answer: {reply.why}")


def until(look: Callable[[], T | None]) -> T:
    """What `look` finds, once it finds something."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        if (found := look()) is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("it did not happen in time")


def kill(process: int) -> None:
    os.kill(process, signal.SIGKILL)
