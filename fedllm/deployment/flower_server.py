"""The server's side of Flower: a SuperLink, the registered keys, and the run whose ServerApp relays to the rounds."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from pathlib import Path

from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.deployment.federation_folder import ServerFolder, is_loopback, require_certificates
from fedllm.deployment.flower_processes import Child, command, environment, wait_for_port
from fedllm.deployment.grid_link import GridLink

_LINK = "fedllm"  # the connection's name in Flower's config.toml
_START = 60.0  # seconds in which a SuperLink must listen
_RELAY_START = 45.0  # seconds in which a new run's ServerApp must ask for work
_RUNS = 10  # starts of `flwr run` in a row without a ServerApp that asked for work


class FlowerServer:
    """Keeps a SuperLink and a run on it while the context lasts. `link` is the SiteLink over them."""

    def __init__(self, folder: ServerFolder, insecure: bool = False) -> None:
        self._folder, self._insecure, self._home = folder, insecure, folder.path / "run" / "flower"
        _check(folder, insecure)
        self._failure: UserError | RunError | None = None
        self._starting = threading.Lock()
        self._stop = threading.Event()
        self.superlink: Child | None = None
        self.link = GridLink(folder.socket, folder.keys, folder.names, insecure=insecure, check=self.check)

    def __enter__(self) -> FlowerServer:
        try:
            if not self._database.exists():
                for known in self._home.glob("*.pub"):
                    known.unlink()
            self.superlink = Child(self._command(), environment(self._home), self._log("superlink"))
            wait_for_port(self._folder.port, _START, self.check)
            self._configure()
            if not self._insecure:
                self._register()
            self._run()
        except BaseException:
            self.__exit__()
            raise
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.link.close()
        if self.superlink is not None:
            self.superlink.end()

    def check(self) -> None:
        """Raises RunError if the SuperLink or the run could not be kept running."""
        if self.superlink is not None:
            self.superlink.check()
        if self._failure is not None:
            raise self._failure

    @property
    def _database(self) -> Path:
        return self._folder.path / "run" / "superlink.db"

    def _log(self, name: str) -> Path:
        return self._folder.path / "run" / f"{name}.log"

    def _command(self) -> list[str]:
        path, host = self._folder.path, self._folder.listen.rpartition(":")[0].strip("[]")
        tls = ["--insecure"] if self._insecure else [
            "--ssl-ca-certfile", str(path / "ca.crt"), "--ssl-certfile", str(path / "server.pem"),
            "--ssl-keyfile", str(path / "server.key"), "--enable-supernode-auth",
        ]  # fmt: skip
        return [
            "python", "-m", "fedllm.deployment.flower_superlink", *tls,
            "--host", host, "--port", str(self._folder.port),
            "--database", str(self._database), "--disable-runtime-dependency-installation",
        ]  # fmt: skip

    def _configure(self) -> None:
        """Flower's config.toml, which names the SuperLink for flwr's commands."""
        how = "insecure = true" if self._insecure else f'root-certificates = "{self._folder.path / "ca.crt"}"'
        address = f'address = "127.0.0.1:{self._folder.port}"'
        text = f'[superlink]\ndefault = "{_LINK}"\n\n[superlink.{_LINK}]\n{address}\n{how}\n'
        replace_text(self._home / "config.toml", text)

    def _register(self) -> None:
        """Registers the keys of sites.yaml that this SuperLink, whose database is kept, does not have yet."""
        new: dict[Path, str] = {}
        for site in self._folder.sites:
            file, key = self._home / f"{site.name}.pub", f"{site.key}\n"
            if not file.exists() or file.read_text() != key:
                new[file] = key
        if new:
            aside = {file: file.with_suffix(".new") for file in new}
            for file, key in new.items():
                replace_text(aside[file], key)
            files = [f"{file.stem}={other}" for file, other in aside.items()]
            command(["python", "-m", "fedllm.deployment.flower_control", _LINK, *files], self._home)
            for file, other in aside.items():
                other.replace(file)

    def _run(self) -> None:
        config = f'socket="{self._folder.socket}"'
        command(
            ["flwr", "run", str(self._folder.path / "app"), _LINK, "--run-config", config, "--format", "json"],
            self._home,
        )

    def _watch(self) -> None:
        """Starts another run where the ServerApp has gone: it died, or the SuperLink with it."""
        starts, began = 1, time.monotonic()
        while not self._stop.wait(0.5):
            process = self.link.relay_process
            late = not _alive(process) if process else time.monotonic() - began > _RELAY_START
            if process and not late:
                starts = 0
            if not late:
                continue
            if starts >= _RUNS:
                self._failure = RunError(f"Flower's server app did not start; see {self._log('superlink')}")
                return
            starts, began, self.link.relay_process = starts + 1, time.monotonic(), 0
            try:
                wait_for_port(self._folder.port, _START, self.check)
                self._run()
            except (UserError, RunError) as error:
                if starts >= _RUNS or self.superlink is None or self.superlink.failure is not None:
                    self._failure = error
                    return
                began = time.monotonic() - _RELAY_START + 2  # again in two seconds


def _alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    with contextlib.suppress(OSError, IndexError):  # a process that has ended and that nobody has waited for
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return True


def _check(folder: ServerFolder, insecure: bool) -> None:
    host = folder.listen.rpartition(":")[0].strip("[]")
    if not insecure:
        require_certificates(folder)
    elif not is_loopback(host):
        raise UserError(
            f"{folder.path / 'sites.yaml'}: listen: found '{folder.listen}' with --insecure, expected an address of "
            "this machine alone, such as 127.0.0.1:18000: without TLS others could read and change messages"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, folder.port))
    except OSError as error:
        raise UserError(
            f"{folder.path / 'sites.yaml'}: listen: {folder.listen} cannot be used ({error.strerror}); end what "
            "listens there, or choose another port here and in every site.yaml"
        ) from None
