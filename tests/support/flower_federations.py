"""A Flower server and nodes of this machine for tests: real processes; each site's answers come from a function."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import yaml

from fedllm.deployment.federation_folder import new_federation, read_server_folder
from fedllm.deployment.flower_processes import Child, environment, flower_folder, free_port, wait_for_port
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
    """A running server and its sites."""

    def __init__(
        self,
        folder: Path,
        handle: Callable[[str, str, bytes], bytes],
        names: Sequence[str] = ("a", "b"),
        insecure: bool = False,
    ) -> None:
        self.folder, self.settings = make(folder, list(names))
        if insecure:
            plain = {"insecure": True, "certificate": None, "key": None}
            self.settings = {name: replace(each, **plain) for name, each in self.settings.items()}
        self.server = FlowerServer(read_server_folder(self.folder), insecure).__enter__()
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


class ByHand:
    """A federation of two sites of the tiny recipe as an operator starts it with Flower's commands alone."""

    def __init__(self, tiny: Path, folder: Path) -> None:
        self.folder = folder
        self._recipe(tiny)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.home = self.server / "run" / "flower"
        self.surroundings = environment(self.home)

    def _recipe(self, tiny: Path) -> None:
        sections = yaml.safe_load((tiny / "recipe.yaml").read_text())
        sections["data"]["classes"] = ["0", "1"]
        sections["partition"] = {"scheme": "by_column", "column": "site", "clients": 2}
        sections["federation"] = {"rounds": 2, "clients_per_round": 2, "min_clients": 2}
        sections["local"] = {"steps": 2, "batch_size": 8}
        sections["run"] |= {"dir": str(self.folder / "result"), "device": "cpu", "trackers": []}
        sections["deployment"] = {"sites": 2, "deadline": 120, "ask_again": 30, "patience": 120}
        self.address = f"127.0.0.1:{free_port()}"
        text = yaml.safe_dump(sections)
        self.server, *self.homes = new_federation(
            self.folder, ["a", "b"], text, address=self.address, listen=self.address, validation=None
        )
        lines = (tiny / "train.csv").read_text().splitlines()
        for place, home in enumerate(self.homes):
            (home / "train.csv").write_text("\n".join([lines[0], *lines[1 + place :: 2]]) + "\n")

    def _start(self, command: list[str], name: str, surroundings: dict[str, str] | None = None) -> None:
        with (self.folder / f"{name}.log").open("wb") as log:
            self.processes.append(subprocess.Popen(command, stdout=log, stderr=log, env=surroundings))

    def flower(self, *arguments: str) -> str:
        """A command of Flower; returns what it prints."""
        program = flower_folder() / arguments[0]
        done = subprocess.run(
            [program, *arguments[1:]], env=self.surroundings, capture_output=True, text=True, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self) -> None:
        """SuperLink, keys, sites, and `flwr run` on the app's folder."""
        server, port = self.server, self.address.rpartition(":")[2]
        tls = ["--ssl-ca-certfile", "ca.crt", "--ssl-certfile", "server.pem", "--ssl-keyfile", "server.key"]
        tls = [str(server / word) if "." in word else word for word in tls]
        state = ["--enable-supernode-auth", "--disable-runtime-dependency-installation"]
        command = [str(flower_folder() / "flower-superlink"), *tls, *state, "--port", port]
        self._start(command, "superlink", self.surroundings)
        wait_for_port(int(port), PATIENCE, lambda: None)
        config = f'[superlink.hand]\naddress = "{self.address}"\nroot-certificates = "{server / "ca.crt"}"\n'
        (self.home / "config.toml").write_text(config)
        for entry in read_server_folder(server).sites:
            public = self.home / f"{entry.name}.pub"
            public.write_text(entry.key + "\n")
            self.flower("flwr", "supernode", "register", str(public), "hand", "--name", entry.name)
        for home in self.homes:
            self._start([sys.executable, "-m", "fedllm", "site", str(home / "site.yaml")], home.name)
        self.flower("flwr", "run", str(server / "app"), "hand")

    def status(self) -> str:
        """The run's status, as `flwr list` has it."""
        text = self.flower("flwr", "list", "hand", "--format", "json", "--limit", "1")
        return str(json.loads(text[text.index("{") :])["runs"][0]["status"])

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.wait(30)
