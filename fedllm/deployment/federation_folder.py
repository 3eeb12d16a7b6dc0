"""The folders of a federation: what `fedllm federation new` writes, and the server's list of sites, sites.yaml."""

from __future__ import annotations

import ipaddress
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fedllm.common.errors import UserError
from fedllm.common.schema import build, setting
from fedllm.config.yaml_layers import parse_yaml
from fedllm.deployment.certificates import write_certificates, write_new, write_site_key
from fedllm.deployment.grid_link import public_point

PORT = 18000
TRAINING, VALIDATION = "train.csv", "validation.csv"
_FILES = ("ca.crt", "server.pem", "server.key")
_APP = '''\
"""The two halves of the Flower app. A site runs its own fedllm's ClientApp and never this file."""

from fedllm.deployment.flower import client_app, server_app

client = client_app()
server = server_app()
'''
_PROJECT = """\
# The Flower app of this federation. `fedllm serve` starts it; `flwr run` on this folder works too.
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"

[project]
name = "fedllm-federation"
version = "1.0.0"
description = "A federation of fedllm"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedllm"

[tool.flwr.app.components]
serverapp = "federation_app:server"
clientapp = "federation_app:client"

# Where the process that runs the rounds listens, and how to start it where none does.
[tool.flwr.app.config]
"""
_SITE = """\
name: {name}
server: {address}
certificate: ca.crt
key: {name}.key
train: {train}               # this site's samples; the server never sees them
validation: {validation}
state: state                   # folder of what this site keeps between rounds
device: auto
allow: {{min_sites: 2}}          # also models, algorithms, rounds, steps: what a recipe may ask of this site
"""


@dataclass(frozen=True)
class SiteEntry:
    """A site as the server knows it."""

    number: int = setting(-1, "0 to N - 1")
    name: str = setting("", "the name in the site's own site.yaml")
    key: str = setting("", "its public key: 'ecdsa-sha2-nistp384 AAAA...'")


@dataclass(frozen=True)
class ServerFolder:
    """The server's folder as read. listen: host and port that the SuperLink binds."""

    path: Path
    listen: str
    sites: Sequence[SiteEntry]

    @property
    def keys(self) -> dict[int, str]:
        """Site number -> public key."""
        return {site.number: site.key for site in self.sites}

    @property
    def names(self) -> dict[str, int]:
        """Name -> site number."""
        return {site.name: site.number for site in self.sites}

    @property
    def port(self) -> int:
        """The port of `listen`."""
        return int(self.listen.rpartition(":")[2])

    @property
    def socket(self) -> Path:
        """Where the process that runs the rounds listens."""
        return self.path / "run" / "rounds.sock"


def new_federation(
    folder: Path,
    names: Sequence[str],
    recipe: str,
    *,
    address: str,
    listen: str,
    train: str = TRAINING,
    validation: str | None = VALIDATION,
) -> list[Path]:
    """Writes a folder for the server and one for each site; returns them, the server's first.

    recipe: the text of the recipe. address: host:port under which the sites reach the server. listen: host:port that
    the server binds. Raises UserError if a file exists already."""
    if not names:
        raise UserError("--sites: found 0, expected at least 1")
    _host_and_port("--address", address)
    _host_and_port("--listen", listen)
    folder = folder.absolute()
    server = folder / "server"
    for path in (server, server / "app", *(folder / name for name in names)):
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    write_certificates(server, [address.rpartition(":")[0]])
    entries = []
    for number, name in enumerate(names):
        site = folder / name
        public = write_site_key(site / f"{name}.key", name)
        shutil.copyfile(server / "ca.crt", site / "ca.crt")
        entries.append({"number": number, "name": name, "key": public})
        text = _SITE.format(name=name, address=address, train=train, validation=validation or "null")
        write_new(site / "site.yaml", text.encode())
    write_new(server / "recipe.yaml", recipe.encode())
    write_new(server / "sites.yaml", yaml.safe_dump({"listen": listen, "sites": entries}, sort_keys=False).encode())
    _write_app(server)
    return [server, *(folder / name for name in names)]


def recipe_text(sites: int) -> str:
    """The recipe of the template, for this number of sites."""
    text = (Path(__file__).parent / "templates" / "recipe.yaml").read_text(encoding="utf-8")
    return text.replace("SITES", str(sites)).replace("LEAST", str(min(2, sites)))


def require_address(what: str, address: str) -> str:
    """What a server under host:port binds: a loopback address itself, else all addresses of its machine. UserError if
    the address is none."""
    host, port = _host_and_port(what, address)
    return address if is_loopback(host.strip("[]")) else f"0.0.0.0:{port}"


def _host_and_port(what: str, address: str) -> tuple[str, int]:
    host, colon, port = address.rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 65536) or "/" in host:
        raise UserError(f"{what}: found '{address}', expected host:port, such as 10.0.0.5:{PORT}")
    return host, int(port)


def is_loopback(host: str) -> bool:
    """Whether an address or name is this machine's own, which no other machine reaches."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _write_app(server: Path) -> None:
    config = {
        "socket": str(server / "run" / "rounds.sock"),
        "recipe": str(server / "recipe.yaml"),
        "log": str(server / "run" / "rounds.log"),
        "python": sys.executable,
    }
    lines = [f"{key} = {_toml(value)}" for key, value in config.items()]
    write_new(server / "app" / "pyproject.toml", (_PROJECT + "\n".join(lines) + "\n").encode())
    write_new(server / "app" / "federation_app.py", _APP.encode())


def _toml(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def read_server_folder(path: Path) -> ServerFolder:
    """Reads the server's sites.yaml and looks for its certificates. Raises UserError naming file and key."""
    file = path / "sites.yaml"
    try:
        values = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(
            f"{file}: cannot be read: {error.strerror}; expected the list of sites beside the recipe, as "
            "`fedllm federation new` writes it"
        ) from error
    except ValueError as error:
        raise UserError(f"{file}: not readable as YAML: {error}") from error
    if not isinstance(values, Mapping) or set(values) != {"listen", "sites"} or not isinstance(values["sites"], list):
        raise UserError(f"{file}: expected listen: host:port, and a list sites: of number, name and key")
    _host_and_port(f"{file}: listen", str(values["listen"]))
    sites = [_entry(file, place, value) for place, value in enumerate(values["sites"])]
    _check_sites(file, sites)
    return ServerFolder(path.absolute(), str(values["listen"]), sites)


def _entry(file: Path, place: int, value: Any) -> SiteEntry:
    where = f"{file}: sites: entry {place + 1}: "
    if not isinstance(value, dict):
        raise UserError(f"{where}found {type(value).__name__}, expected number, name and key")
    found = build(SiteEntry, value, where)
    try:
        public_point(found.key)
    except UserError as error:
        raise UserError(f"{where}key: {error}") from None
    return found


def _check_sites(file: Path, sites: Sequence[SiteEntry]) -> None:
    if sorted(site.number for site in sites) != [*range(len(sites))]:
        raise UserError(
            f"{file}: numbers: found {[s.number for s in sites]}, expected 0 to {len(sites) - 1}, each once"
        )
    for what, those in (("name", [s.name for s in sites]), ("key", [public_point(s.key).hex() for s in sites])):
        if len({*those}) < len(those) or not all(those):
            raise UserError(f"{file}: two sites have one {what}, or one has none; expected {what}s that differ")


def require_certificates(folder: ServerFolder) -> None:
    """Raises UserError unless the server's certificates and key are there."""
    for name in _FILES:
        if not (folder.path / name).is_file():
            raise UserError(
                f"{folder.path / name}: missing; `fedllm federation new` writes it. Without TLS only --insecure works, "
                "on a loopback address"
            )
