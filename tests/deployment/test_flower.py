"""Flower's own processes, killed and started again: SuperLink, nodes and ServerApp. The rounds are the test's."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from flower_federations import PATIENCE, ByHand, Federation, kill, make, until
from tcp_proxy import Proxy

from fedllm.common.errors import UserError
from fedllm.deployment import flower_site
from fedllm.deployment.certificates import write_site_key
from fedllm.deployment.federation_folder import read_server_folder
from fedllm.deployment.flower_processes import Child, environment, flower_folder, free_port
from fedllm.deployment.flower_server import FlowerServer
from fedllm.deployment.flower_site import site_socket, start_node

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CUT = 60.0  # seconds of a cut network
# Python runs it in a process whose PYTHONPATH has its folder; certificates are checked by OpenSSL's own clock.
OTHER_CLOCK = """
import datetime, os, time
real, ahead = time.time, float(os.environ["CLOCK_AHEAD"])
time.time = lambda: real() + ahead
class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)
datetime.datetime = Shifted
"""

Clock = Callable[[float], None]


class Answers:
    """What the sites answer: the digest of what they were asked. asked: how often, by name."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.slow = threading.Event()
        self.slow.set()

    def handle(self, name: str, kind: str, body: bytes) -> bytes:
        self.asked.append(name)
        self.slow.wait(PATIENCE)
        return f"{name} {kind} {hashlib.sha256(body).hexdigest()}".encode()


def expected(name: str, kind: str, body: bytes) -> bytes:
    return f"{name} {kind} {hashlib.sha256(body).hexdigest()}".encode()


@pytest.fixture(scope="module")
def answers() -> Answers:
    return Answers()


@pytest.fixture(scope="module")
def two(answers: Answers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    made = Federation(tmp_path_factory.mktemp("flower"), answers.handle)
    yield made
    answers.slow.set()
    made.close()


@pytest.mark.long
def test_messages_go_to_the_right_site_and_back(two: Federation) -> None:
    two.wait_online()
    names = {two.link.send(0, "train", b"to a", PATIENCE): 0, two.link.send(1, "evaluate", b"to b", PATIENCE): 1}
    found = {names[reply.request]: reply.body for reply in [two.reply(name) for name in names]}
    assert found == {0: expected("a", "train", b"to a"), 1: expected("b", "evaluate", b"to b")}


@pytest.mark.long
def test_a_message_of_50_megabytes(two: Federation) -> None:
    two.wait_online()
    body = bytes(range(256)) * 195_313
    assert two.ask(0, "train", body).body == expected("a", "train", body)


@pytest.mark.long
def test_a_site_whose_node_is_killed_has_another_life_and_answers_again(two: Federation, answers: Answers) -> None:
    lives = two.wait_online()
    answers.slow.clear()
    count = len(answers.asked)
    two.link.send(0, "train", b"x", PATIENCE)
    until(lambda: len(answers.asked) > count or None)
    kill(two.sites.nodes["a"].pid)
    answers.slow.set()
    until(lambda: two.link.online().get(0, lives[0]) != lives[0] or None)
    assert two.ask_until_answered(0, "train", b"x") == expected("a", "train", b"x")
    assert two.link.online()[1] == lives[1]


@pytest.mark.long
def test_a_killed_server_app_is_started_again_and_says_what_was_lost(two: Federation, answers: Answers) -> None:
    two.wait_online()
    answers.slow.clear()
    count = len(answers.asked)
    name = two.link.send(1, "train", b"y", PATIENCE)
    until(lambda: len(answers.asked) > count or None)
    relay = two.link.relay_process
    kill(relay)
    assert two.reply(name).why == "Flower's server app was started again"
    assert two.link.relay_process not in (0, relay)
    answers.slow.set()
    assert two.ask_until_answered(1, "train", b"y") == expected("b", "train", b"y")


@pytest.mark.long
def test_a_killed_superlink_is_started_again_with_its_keys(two: Federation, answers: Answers) -> None:
    two.wait_online()
    answers.slow.clear()
    count = len(answers.asked)
    name = two.link.send(0, "train", b"z", PATIENCE)
    until(lambda: len(answers.asked) > count or None)
    assert two.server.superlink is not None
    kill(two.server.superlink.pid)
    assert two.reply(name).body is None
    answers.slow.set()
    assert two.ask_until_answered(0, "train", b"z") == expected("a", "train", b"z")


@pytest.mark.long
def test_a_key_that_is_not_listed_is_refused(two: Federation, tmp_path: Path) -> None:
    two.wait_online()
    write_site_key(tmp_path / "c.key", "c")
    home = two.settings["a"]
    settings = type(home)(**{**vars(home), "name": "c", "key": tmp_path / "c.key", "state": tmp_path / "state"})
    node = start_node(settings, admit=3.0)
    try:
        until(lambda: node.failure)
        assert isinstance(node.failure, UserError)
        assert "the server refuses this site's key" in str(node.failure)
    finally:
        node.end()
    assert set(two.link.online()) == {0, 1}
    assert two.ask_until_answered(1, "status", b"") == expected("b", "status", b"")


@pytest.mark.long
def test_a_second_process_under_one_key_is_refused_and_the_first_goes_on(two: Federation, tmp_path: Path) -> None:
    """The second is on another machine: it has a state folder of its own."""
    lives = two.wait_online()
    node = start_node(dataclasses.replace(two.settings["a"], state=tmp_path / "state"), admit=3.0)
    try:
        until(lambda: node.failure)
        assert isinstance(node.failure, UserError)
        assert "another process uses it" in str(node.failure)
    finally:
        node.end()
    assert two.ask_until_answered(0, "train", b"one") == expected("a", "train", b"one")
    assert two.link.online() == lives


@pytest.mark.long
def test_a_network_cut_while_a_site_works_costs_time_alone(two: Federation, answers: Answers) -> None:
    """
    Site b connects through a proxy, which is cut for a minute between an order and its answer.

    Flower takes the node for lost after some missed heartbeats and reports the order as failed; the rounds then ask
    again. The same node connects again and answers.
    """
    two.wait_online()
    two.sites.nodes["b"].end()
    site = two.settings["b"]
    proxy = Proxy(int(site.server.rpartition(":")[2]))
    node = start_node(dataclasses.replace(site, server=f"127.0.0.1:{proxy.port}"))
    try:
        assert two.ask_until_answered(1, "train", b"before") == expected("b", "train", b"before")
        answers.slow.clear()
        count = len(answers.asked)
        name = two.link.send(1, "train", b"in between", PATIENCE)
        until(lambda: len(answers.asked) > count or None)
        proxy.cut()
        answers.slow.set()
        time.sleep(CUT)
        passed = proxy.passed
        proxy.mend()
        reply = two.reply(name)
        if reply.body is None:
            assert "Node Unavailable" in reply.why
        else:
            assert reply.body == expected("b", "train", b"in between")
        assert two.ask_until_answered(1, "train", b"in between") == expected("b", "train", b"in between")
        assert proxy.passed > passed
        assert node.failure is None
    finally:
        answers.slow.set()
        node.end()
        proxy.cut()
        two.sites.nodes["b"] = start_node(site)
    assert two.ask_until_answered(1, "train", b"after") == expected("b", "train", b"after")


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    """clock(s): nodes that are started from now on have a clock that is s seconds ahead."""
    (tmp_path / "sitecustomize.py").write_text(OTHER_CLOCK)

    def set_ahead(seconds: float) -> None:
        def shifted(home: Path) -> dict[str, str]:
            found = environment(home)
            path = os.pathsep.join([str(tmp_path), found["PYTHONPATH"]])
            return found | {"PYTHONPATH": path, "CLOCK_AHEAD": str(seconds)}

        monkeypatch.setattr(flower_site, "environment", shifted)

    return set_ahead


@pytest.mark.long
@pytest.mark.parametrize("ahead", [3.0, -240.0])
def test_clocks_that_disagree_a_little_change_nothing(two: Federation, ahead: float, clock: Clock) -> None:
    two.wait_online()
    two.sites.nodes["b"].end()
    clock(ahead)
    node = start_node(two.settings["b"])
    try:
        assert two.ask_until_answered(1, "train", b"t") == expected("b", "train", b"t")
    finally:
        node.end()
        clock(0.0)
        two.sites.nodes["b"] = start_node(two.settings["b"])


@pytest.mark.long
@pytest.mark.parametrize("ahead", [20.0, -400.0])
def test_a_site_whose_clock_is_wrong_is_refused_and_told(two: Federation, ahead: float, clock: Clock) -> None:
    two.wait_online()
    two.sites.nodes["b"].end()
    clock(ahead)
    node = start_node(two.settings["b"], admit=3.0)
    try:
        until(lambda: node.failure)
        assert isinstance(node.failure, UserError)
        assert "this machine's clock is more than 5 s ahead or 5 min behind" in str(node.failure)
        assert two.ask_until_answered(0, "train", b"u") == expected("a", "train", b"u")
    finally:
        node.end()
        clock(0.0)
        two.sites.nodes["b"] = start_node(two.settings["b"])
    assert two.ask_until_answered(1, "train", b"u") == expected("b", "train", b"u")


@pytest.mark.long
def test_a_federation_without_tls_on_one_machine(answers: Answers, tmp_path: Path) -> None:
    """Without keys a site's number is that of the name which it gives."""
    plain = Federation(tmp_path, answers.handle, insecure=True)
    try:
        plain.wait_online()
        assert plain.ask_until_answered(0, "train", b"v") == expected("a", "train", b"v")
        assert plain.ask_until_answered(1, "train", b"v") == expected("b", "train", b"v")
    finally:
        plain.close()


@pytest.mark.long
def test_only_this_machine_reaches_flowers_control(two: Federation) -> None:
    """uvicorn takes the header's address for the client's where the request comes from a local proxy, as here."""
    two.wait_online()
    address = f"https://{two.settings['a'].server}"
    context = ssl.create_default_context(cafile=str(two.settings["a"].certificate))

    def status(path: str, **headers: str) -> int:
        request = urllib.request.Request(address + path, data=b"", headers=headers)
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                return int(answer.status)
        except urllib.error.HTTPError as error:
            return error.code

    other = {"X-Forwarded-For": "203.0.113.9"}
    assert status("/v1/control/start-run", **other) == 403
    assert status("/v1/runtime/pull-object", **other) == 403
    assert status("/v1/control/start-run") != 403
    assert status("/v1/fleet/pull-messages", **other) == 415  # the SuperLink's own: no message of a node


@pytest.mark.long
def test_flowers_own_supernode_works_with_the_app(two: Federation, tmp_path: Path) -> None:
    """flower-supernode in place of fedllm's node: it runs the ClientApp of the folder `app`."""
    two.wait_online()
    two.sites.nodes["b"].end()
    site = two.settings["b"]
    command = [
        "flower-supernode", "--superlink", site.server, "--root-certificates", str(site.certificate),
        "--auth-supernode-private-key", str(site.key), "--port", str(free_port()),
        "--node-config", f'name="b" socket="{site_socket(site.state)}"',
    ]  # fmt: skip
    node = Child(command, environment(tmp_path / "run" / "flower"), tmp_path / "run" / "supernode.log")
    try:
        assert two.ask_until_answered(1, "train", b"w") == expected("b", "train", b"w")
    finally:
        node.end()
        two.sites.nodes["b"] = start_node(site)


@pytest.mark.long
def test_no_log_has_a_secret(two: Federation) -> None:
    two.wait_online()
    secrets = [path.read_text().splitlines()[1:-1] for path in two.folder.parent.rglob("*.key")]
    logs = [path.read_text(errors="replace") for path in two.folder.parent.rglob("*.log")]
    assert len(secrets) == 4
    assert len(logs) >= 3
    assert not [line for lines in secrets for line in lines for log in logs if line in log]


@pytest.mark.long
def test_the_end_leaves_no_process(answers: Answers, tmp_path: Path) -> None:
    one = Federation(tmp_path, answers.handle)
    one.wait_online()
    children = [one.server.superlink.pid, one.link.relay_process, *(node.pid for node in one.sites.nodes.values())]
    one.close()
    until(lambda: not any(alive(process) for process in children) or None)


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_insecure_is_for_loopback_alone(tmp_path: Path) -> None:
    folder, _ = make(tmp_path, ["a"])
    file = folder / "sites.yaml"
    file.write_text(file.read_text().replace("listen: 127.0.0.1", "listen: 0.0.0.0"))
    with pytest.raises(UserError, match="expected an address of this machine alone"):
        FlowerServer(read_server_folder(folder), insecure=True)
    shutil.rmtree(folder / "app")
    (folder / "ca.crt").unlink()
    with pytest.raises(UserError, match=r"ca\.crt: missing"):
        FlowerServer(read_server_folder(folder))


def test_flower_reports_nothing_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_TELEMETRY_ENABLED", "1")
    found = environment(tmp_path / "run" / "flower")
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert found["FLWR_HOME"] == str(tmp_path / "run" / "flower")
    assert str(flower_folder()) in found["PATH"]


@pytest.mark.long
def test_flwr_run_typed_by_hand_trains(tiny: Path, tmp_path: Path) -> None:
    """Without `fedllm serve` the ServerApp starts the rounds itself."""
    by_hand = ByHand(tiny, tmp_path)
    try:
        by_hand.start()
        until(lambda: (tmp_path / "result" / "result.json").exists() or None)
        until(lambda: by_hand.status() == "finished:completed" or None)
    finally:
        by_hand.close()
    metrics = (tmp_path / "result" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["missing"] for line in metrics] == [[], []]
    assert (tmp_path / "result" / "adapter" / "adapter_model.safetensors").exists()
