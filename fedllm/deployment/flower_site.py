"""A site's side of Flower: a node that passes requests to this process's socket."""

from __future__ import annotations

import json
import re
import socket
import ssl
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from fedllm.common.console import say
from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replace_text
from fedllm.deployment.flower_processes import Child, environment

_PATIENCE = 600.0  # seconds in which the server must answer for the first time
_LOOK, _CONNECT = 1.5, 10.0  # seconds for a connection: at the first look, and later
_ADMIT = 90.0  # longer than a server takes a killed node for alive, and than it takes to register its sites' keys
_REFUSED = re.compile(r"refused (\[code: \d+\][^\n]*)")  # of flower_node


class Connection(Protocol):
    """What of a SiteSettings the node needs."""

    @property
    def name(self) -> str: ...
    @property
    def server(self) -> str: ...
    @property
    def certificate(self) -> Path | None: ...
    @property
    def insecure(self) -> bool: ...
    @property
    def key(self) -> Path | None: ...
    @property
    def state(self) -> Path: ...


def site_socket(state: Path) -> Path:
    """Where the site's resident process listens."""
    return state / "run" / "site.sock"


def start_node(site: Connection, admit: float = _ADMIT) -> Child:
    """Starts the site's Flower node (flower_node) and keeps it running; see Child. Its log is state/run/node.log.

    admit: seconds after which the server must have admitted the site's key."""
    folder = site.state / "run"
    surroundings = environment(folder / "flower")
    settings = {
        "superlink": site.server,
        "certificate": None if site.insecure else str(site.certificate),
        "key": None if site.insecure else str(site.key),
        "socket": str(site_socket(site.state)),
        "name": site.name,
        "memory": str(folder / "node"),
        "admit": admit,
    }
    replace_text(folder / "node.json", json.dumps(settings, indent=2))
    command = ["python", "-m", "fedllm.deployment.flower_node", str(folder / "node.json")]
    return Child(command, surroundings, folder / "node.log", final=lambda log: _refusal(site, log))


def _refusal(site: Connection, log: str) -> UserError | None:
    """What in a dead node's log no new start would mend."""
    if (found := _REFUSED.search(log)) is not None:
        return UserError(
            f"{site.server}: the server refuses this site's key {site.key} ({found.group(1)}): it is not in the "
            "server's sites.yaml, another process uses it, or this machine's clock is more than 5 s ahead or 5 min "
            f"behind; send the server's operator its public key: ssh-keygen -y -f {site.key}"
        )
    return None


def look_for_server(site: Connection) -> None:
    """Tells of a wrong address at once, before anything is loaded. A server that does not answer may come later.

    Raises UserError as wait_for_server does."""
    host, _, port = site.server.rpartition(":")
    try:
        _handshake(site, host.strip("[]"), int(port), _LOOK)
    except OSError as error:
        say(f"{site.server}: nothing answers there yet ({error.strerror or error}); loading meanwhile", "dim")


def wait_for_server(site: Connection, seconds: float = _PATIENCE, stop: Callable[[], bool] = lambda: False) -> None:
    """Waits until the server's address answers, and checks its certificate.

    Raises UserError at once for a name that is unknown or a certificate that is not the federation's, and RunError if
    nothing answers in time."""
    host, _, port = site.server.rpartition(":")
    end, said = time.monotonic() + seconds, False
    while not stop():
        try:
            _handshake(site, host.strip("[]"), int(port), _CONNECT)
            return
        except OSError as error:
            if time.monotonic() > end:
                raise RunError(
                    f"{site.server}: nothing answers there after {seconds:.0f} s ({error.strerror or error}); check "
                    "`server:` in site.yaml, whether the server runs, and firewalls"
                ) from None
            if not said:
                say(f"{site.server}: nothing answers there yet ({error.strerror or error}); waiting", "dim")
            said = True
            time.sleep(1.0)


def _handshake(site: Connection, host: str, port: int, seconds: float) -> None:
    try:
        with socket.create_connection((host, port), timeout=seconds) as plain:
            if site.insecure:
                return
            context = ssl.create_default_context(cafile=str(site.certificate))
            with context.wrap_socket(plain, server_hostname=host):
                return
    except socket.gaierror as error:
        raise UserError(
            f"{site.server}: no machine of this name is known ({error.strerror}); check `server:`"
        ) from None
    except ssl.SSLCertVerificationError as error:
        raise UserError(_certificate_fault(site, error.verify_message)) from None
    except ssl.SSLError as error:
        raise UserError(
            f"{site.server}: what answers there speaks no TLS ({error.reason}); check the port in `server:`, or "
            "whether the server was started with --insecure"
        ) from None


def _certificate_fault(site: Connection, why: str) -> str:
    if "expired" in why or "not yet valid" in why:
        todo = "the server's operator must renew its certificate; check this machine's clock too"
    elif "mismatch" in why or "not valid for" in why.lower() or "doesn't match" in why.lower():
        todo = (
            "the certificate is for another address: connect to the one that it names, or ask the server's operator "
            "for a new one"
        )
    else:
        todo = f"it is not signed by {site.certificate}: another server answers, or the file is of another federation"
    return f"{site.server}: the server's certificate is refused ({why}); {todo}"
