"""The link over Flower, with a relay of the test's own in place of Flower's ServerApp."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives import serialization as s

from fedllm.common.errors import RunError, UserError
from fedllm.deployment.certificates import write_site_key
from fedllm.deployment.grid_link import GridLink, pack, public_point, unpack
from fedllm.deployment.link import Reply
from fedllm.deployment.resident import UnreachableError, ask


def pem(line: str) -> str:
    """The same public key as Flower gives it."""
    key = s.load_ssh_public_key(line.encode())
    return key.public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo).decode()


class Relay:
    """Asks as the relay does. nodes: [node, key, life]."""

    def __init__(self, socket: Path, name: str, nodes: list[tuple[str, str, str]]) -> None:
        self.socket, self.name, self.nodes = socket, name, nodes

    def ask(self, replies: list[dict[str, Any]] | None = None, bodies: list[bytes] | None = None) -> tuple[Any, Any]:
        nodes = [{"node": node, "key": key, "life": life} for node, key, life in self.nodes]
        head = {"relay": self.name, "process": 1, "nodes": nodes, "replies": replies or []}
        end = time.monotonic() + 10
        while True:
            try:
                return unpack(ask(self.socket, "exchange", pack(head, bodies or []), 10))
            except UnreachableError:
                assert time.monotonic() < end
                time.sleep(0.02)


@pytest.fixture
def keys(tmp_path: Path) -> list[str]:
    return [write_site_key(tmp_path / f"{number}.key", f"site-{number}") for number in range(3)]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., tuple[GridLink, Path]]]:
    monkeypatch.setattr("fedllm.deployment.grid_link._CLOSE", 0.1)
    links: list[GridLink] = []

    def made(*arguments: Any, **options: Any) -> tuple[GridLink, Path]:
        socket = tmp_path / "run" / "rounds.sock"
        links.append(GridLink(socket, *arguments, **options))
        return links[-1], socket

    yield made
    for link in links:
        link.close()


@pytest.fixture
def two(make: Any, keys: list[str]) -> tuple[GridLink, Relay]:
    link, socket = make({0: keys[0], 1: keys[1]}, {})
    return link, Relay(socket, "one", [("11", pem(keys[1]), "x"), ("10", pem(keys[0]), "y"), ("12", pem(keys[2]), "z")])


def test_a_sites_number_is_that_of_its_key(two: tuple[GridLink, Relay]) -> None:
    link, relay = two
    relay.ask()
    assert link.online() == {0: "y", 1: "x"}  # node 12 has a key that sites.yaml lacks


def test_a_request_goes_to_the_node_and_its_reply_comes_back(two: tuple[GridLink, Relay]) -> None:
    link, relay = two
    relay.ask()
    name = link.send(1, "train", b"broadcast", 30)
    head, bodies = relay.ask()
    assert head["send"] == [{"request": name, "node": "11", "kind": "train", "seconds": 30}]
    assert bodies == [b"broadcast"]
    assert relay.ask()[0]["send"] == []  # once
    relay.ask([{"request": name, "node": "11", "body": 0, "why": ""}], [b"upload"])
    assert link.replies() == [Reply(name, 1, b"upload")]
    relay.ask([{"request": name, "node": "11", "body": 0, "why": ""}], [b"again"])
    assert link.replies() == []


def test_a_reply_of_another_node_is_left_out(two: tuple[GridLink, Relay]) -> None:
    link, relay = two
    relay.ask()
    name = link.send(1, "train", b"", 30)
    relay.ask()
    relay.ask([{"request": name, "node": "10", "body": 0, "why": ""}], [b"forged"])
    assert link.replies() == []


def test_flowers_errors_become_replies_without_a_body(two: tuple[GridLink, Relay]) -> None:
    link, relay = two
    relay.ask()
    name = link.send(0, "status", b"", 30)
    relay.ask()
    relay.ask([{"request": name, "node": "10", "body": None, "why": "Flower error 5: gone"}])
    assert link.replies() == [Reply(name, 0, None, "Flower error 5: gone")]


def test_a_site_that_is_not_connected_is_answered_for_at_once(two: tuple[GridLink, Relay]) -> None:
    link, _ = two
    name = link.send(0, "train", b"", 30)
    assert link.replies() == [Reply(name, 0, None, "it is not connected")]


def test_a_newer_relay_takes_over_and_what_the_older_took_is_lost(two: tuple[GridLink, Relay]) -> None:
    link, relay = two
    relay.ask()
    taken = link.send(0, "train", b"a", 30)
    relay.ask()
    waiting = link.send(1, "train", b"b", 30)
    newer = Relay(relay.socket, "two", relay.nodes)
    assert [order["request"] for order in newer.ask()[0]["send"]] == [waiting]
    assert link.replies() == [Reply(taken, 0, None, "Flower's server app was started again")]
    assert relay.ask()[0]["stop"] == "a newer Flower run has taken over"
    assert link.online() == {0: "y", 1: "x"}


def test_a_request_without_a_reply_ends(two: tuple[GridLink, Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedllm.deployment.grid_link._SLACK", 0.0)
    link, relay = two
    relay.ask()
    name = link.send(0, "train", b"", 0.05)
    time.sleep(0.1)
    assert link.replies() == [Reply(name, 0, None, "no answer within 0 s")]


def test_without_the_relay_no_site_is_online(two: tuple[GridLink, Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    link, relay = two
    relay.ask()
    monkeypatch.setattr("fedllm.deployment.grid_link._SILENT", 0.0)
    assert link.online() == {}


def test_the_end_is_told(two: tuple[GridLink, Relay], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedllm.deployment.grid_link._CLOSE", 10.0)
    link, relay = two
    relay.ask()
    closing = threading.Thread(target=link.close)
    closing.start()
    assert relay.ask()[0]["stop"] == "done"
    closing.join(15)
    assert not closing.is_alive()


def test_a_failure_of_the_processes_reaches_the_rounds(make: Any, keys: list[str]) -> None:
    def check() -> None:
        raise RunError("the SuperLink ended 5 times")

    link, _ = make({0: keys[0]}, {}, check=check)
    with pytest.raises(RunError, match="ended 5 times"):
        link.online()


def test_without_keys_a_node_is_asked_for_its_name(make: Any, keys: list[str]) -> None:
    link, socket = make({0: keys[0]}, {"site-0": 0}, insecure=True)
    relay = Relay(socket, "one", [("77", pem(keys[2]), "x")])
    (order,) = relay.ask()[0]["send"]
    assert (order["node"], order["kind"]) == ("77", "name")
    assert link.online() == {}
    relay.ask([{"request": order["request"], "node": "77", "body": 0, "why": ""}], [b"site-0"])
    relay.ask()
    assert link.online() == {0: "x"}


def test_a_public_key_is_known_in_both_forms(keys: list[str]) -> None:
    assert [public_point(key) for key in keys] == [public_point(pem(key)) for key in keys]
    assert len({public_point(key) for key in keys}) == 3


@pytest.mark.parametrize(
    "text", ["", "ecdsa-sha2-nistp384 AAAA", "ssh-rsa AAAA", "-----BEGIN PUBLIC KEY-----\nAAAA\n-"]
)
def test_what_is_no_key_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="found no ECDSA public key"):
        public_point(text)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"12345678",
        pack({"relay": "x"})[:-3],
        pack({"nodes": []}),
        pack({}, [b"abc"]) + b"d",
        b"[]",
    ],
)
def test_what_no_relay_sends_has_no_effect(two: tuple[GridLink, Relay], data: bytes) -> None:
    link, relay = two
    relay.ask()
    head, _ = unpack(ask(relay.socket, "exchange", data, 10))
    assert "does not understand the relay" in head["stop"]
    assert link.online() == {0: "y", 1: "x"}
