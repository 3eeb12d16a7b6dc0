"""The files of a federation: certificates, keys, the list of sites."""

from __future__ import annotations

import contextlib
import socket
import ssl
import stat
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from fedllm.cli import main
from fedllm.common.errors import RunError, UserError
from fedllm.config.recipe import load_recipe
from fedllm.deployment.certificates import write_certificates
from fedllm.deployment.federation_folder import new_federation, read_server_folder, recipe_text
from fedllm.deployment.flower_site import wait_for_server
from fedllm.deployment.site_settings import SiteSettings, load_site


def federation(folder: Path, names: tuple[str, ...] = ("a", "b")) -> list[Path]:
    address = "127.0.0.1:18000"
    return new_federation(folder, names, recipe_text(len(names)), address=address, listen=address)


def test_the_files_are_read_by_those_who_need_them(tmp_path: Path) -> None:
    server, *sites = federation(tmp_path)
    read = read_server_folder(server)
    assert read.names == {"a": 0, "b": 1}
    assert load_recipe(server / "recipe.yaml", []).deployment.sites == 2
    for site in sites:
        for name in ("train.csv", "validation.csv"):
            (site / name).write_text("text,label\na,b\n")
        settings = load_site(site / "site.yaml")
        assert settings.server == "127.0.0.1:18000"
        assert settings.key == site / f"{site.name}.key"


def test_private_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    federation(tmp_path)
    private = [*tmp_path.rglob("*.key")]
    assert len(private) == 4
    assert {stat.S_IMODE(path.stat().st_mode) for path in private} == {0o600}
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("server", "a", "b")} == {0o700}
    for path in (tmp_path / "server").rglob("*"):
        if path.is_file() and path.suffix != ".key":
            assert "PRIVATE KEY" not in path.read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    federation(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(UserError, match="exists, and nothing is overwritten"):
        federation(tmp_path)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda values: values["sites"].pop(0), r"numbers: found \[1\], expected 0 to 0"),
        (lambda values: values["sites"][0].update(key="ssh-rsa AAAA"), "entry 1: key: found no ECDSA public key"),
        (lambda values: values["sites"][0].update(kye="x"), "entry 1: .*kye"),
        (lambda values: values["sites"][1].update(key=values["sites"][0]["key"]), "two sites have one key"),
        (lambda values: values["sites"][1].update(name="a"), "two sites have one name"),
        (lambda values: values.update(listen="18000"), "listen: found '18000', expected host:port"),
        (lambda values: values.update(sites={}), "expected listen: host:port, and a list sites"),
    ],
)
def test_a_wrong_list_of_sites_is_named(tmp_path: Path, change: Any, message: str) -> None:
    server, *_ = federation(tmp_path)
    values = yaml.safe_load((server / "sites.yaml").read_text())
    change(values)
    (server / "sites.yaml").write_text(yaml.safe_dump(values))
    with pytest.raises(UserError, match=f"sites.yaml.*{message}"):
        read_server_folder(server)


def test_the_command_writes_a_federation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    address = ["--address", "fed.example.org:4433"]
    assert main(["federation", "new", str(tmp_path / "f"), "--sites", "2", *address]) == 0
    assert "fedllm serve" in capsys.readouterr().out
    assert read_server_folder(tmp_path / "f" / "server").listen == "0.0.0.0:4433"
    assert main(["federation", "new", str(tmp_path / "g"), "--address", "nonsense"]) == 2
    assert "--address: found 'nonsense', expected host:port" in capsys.readouterr().err
    assert main(["serve", str(tmp_path / "nowhere.yaml")]) == 2


# A site looks at the server's certificate before it connects.


def serve_tls(folder: Path, host: str = "127.0.0.1") -> int:
    """A TLS server with the folder's certificate, for one connection; returns its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    listening = socket.create_server((host, 0))

    def accept() -> None:
        connection, _ = listening.accept()
        with listening, connection, contextlib.suppress(OSError):
            context.wrap_socket(connection, server_side=True).close()

    threading.Thread(target=accept, daemon=True).start()
    return int(listening.getsockname()[1])


def site(port: int, certificate: Path) -> SiteSettings:
    return SiteSettings(
        name="a", server=f"127.0.0.1:{port}", certificate=certificate, key=certificate, train=certificate
    )


def certificates(folder: Path, hosts: tuple[str, ...] = (), days: int = 10) -> Path:
    folder.mkdir()
    write_certificates(folder, hosts, days)
    return folder


def test_a_good_certificate_is_accepted(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "one")
    wait_for_server(site(serve_tls(folder), folder / "ca.crt"), 5)


def test_a_foreign_certificate_is_refused(tmp_path: Path) -> None:
    one, other = certificates(tmp_path / "one"), certificates(tmp_path / "other")
    with pytest.raises(UserError, match=r"certificate is refused.*another server answers, or the file is of another"):
        wait_for_server(site(serve_tls(one), other / "ca.crt"), 5)


def test_an_expired_certificate_is_refused(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "one", days=-1)
    with pytest.raises(UserError, match=r"certificate is refused .*expired.*renew its certificate"):
        wait_for_server(site(serve_tls(folder), folder / "ca.crt"), 5)


def test_a_certificate_for_another_address_is_refused(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "one", hosts=("10.9.8.7",))
    settings = site(serve_tls(folder, "127.0.0.2"), folder / "ca.crt")
    settings = SiteSettings(**{**vars(settings), "server": settings.server.replace("127.0.0.1", "127.0.0.2")})
    with pytest.raises(UserError, match="is for another address"):
        wait_for_server(settings, 5)


def test_a_wrong_address_is_named(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "one")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(RunError, match=f"127.0.0.1:{port}: nothing answers there after 0 s.*check `server:`"):
        wait_for_server(site(port, folder / "ca.crt"), 0.1)


def test_a_server_without_tls_is_named(tmp_path: Path) -> None:
    folder = certificates(tmp_path / "one")
    listening = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(10)
            connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=accept, daemon=True).start()
    with pytest.raises(UserError, match="speaks no TLS"):
        wait_for_server(site(listening.getsockname()[1], folder / "ca.crt"), 5)
