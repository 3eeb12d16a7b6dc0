"""The server's link to its sites over Flower, whose ServerApp relays messages to and from a local socket.

The process that runs the rounds listens (GridLink). The relay (deployment.flower) asks it again and again: it brings
the nodes and the replies, and takes the requests. So a relay that ends and is started again loses nothing. No flwr.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedllm.common.errors import RunError, UserError
from fedllm.deployment.link import Kind, Reply
from fedllm.deployment.resident import listen

_LENGTH = struct.Struct(">Q")
NAME = "name"  # the kind of a question for a node's name, asked where nodes have no registered key
_WAIT = 0.25  # seconds that the relay's question may wait for a request to send
_SILENT = 15.0  # seconds without the relay after which no site counts as online
_POINTS = (65, 97, 133)  # bytes of an uncompressed point on P-256, P-384, P-521
_CLOSE = 5.0  # seconds in which the relay is told that the run is over
_SLACK = 10.0  # seconds beyond a request's own before it is given up here


def pack(head: Mapping[str, Any], bodies: Sequence[bytes] = ()) -> bytes:
    """JSON and byte strings as one byte string."""
    text = json.dumps({**head, "sizes": [len(body) for body in bodies]}).encode()
    return b"".join([_LENGTH.pack(len(text)), text, *bodies])


def unpack(data: bytes) -> tuple[dict[str, Any], list[bytes]]:
    """What `pack` put together. Raises ValueError for anything else."""
    if len(data) < _LENGTH.size:
        raise ValueError(f"found {len(data)} bytes")
    end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
    head = json.loads(data[_LENGTH.size : end])
    if not isinstance(head, dict):
        raise ValueError(f"found {type(head).__name__}, expected an object")
    bodies = []
    for size in head.pop("sizes"):
        bodies.append(data[end : end + size])
        end += size
    if end != len(data):
        raise ValueError(f"found {len(data)} bytes, expected {end}")
    return head, bodies


def public_point(key: str) -> bytes:
    """The point on its curve of an ECDSA public key, which identifies it: of "ecdsa-sha2-... AAAA..." or of PEM.

    Raises UserError for another text."""
    try:
        if key.startswith("ecdsa-sha2-"):
            blob, fields = base64.b64decode(key.split()[1], validate=True), []
            while blob:
                size = int.from_bytes(blob[:4], "big")
                fields.append(blob[4 : 4 + size])
                blob = blob[4 + size :]
            point = fields[2]
        else:  # a SubjectPublicKeyInfo, which ends with a bit string of the point
            der = base64.b64decode("".join(key.strip().splitlines()[1:-1]), validate=True)
            point = next(der[-size:] for size in _POINTS if der[-size - 1 : -size + 1] == b"\x00\x04")
        if point[:1] != b"\x04" or len(point) not in _POINTS:
            raise ValueError
    except (ValueError, IndexError, StopIteration, binascii.Error):
        raise UserError("found no ECDSA public key, expected a line such as 'ecdsa-sha2-nistp384 AAAA...'") from None
    return point


@dataclass
class _Request:
    name: str
    site: int
    node: str
    kind: str
    body: bytes
    seconds: float
    end: float
    taken: bool = False  # by the relay


class GridLink:
    """A SiteLink over Flower. It listens at `path` from the start.

    keys: site number -> public key, for nodes that Flower has authenticated. names: name -> site number; used instead
    of the keys where `insecure`, because Flower authenticates no node without TLS. check: called now and then; it
    raises RunError if what carries the messages cannot be kept running.
    """

    def __init__(
        self,
        path: Path,
        keys: Mapping[int, str],
        names: Mapping[str, int],
        *,
        insecure: bool = False,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        self._points = {public_point(key): number for number, key in keys.items()}
        self._names, self._insecure, self._check = dict(names), insecure, check
        self._lock = threading.Condition()
        self._stop = threading.Event()
        self._count = 0
        self._requests: dict[str, _Request] = {}
        self._replies: list[Reply] = []
        self._nodes: dict[int, tuple[str, str]] = {}  # site -> its node and life
        self._named: dict[str, str] = {}  # node -> its name
        self._relay, self._former, self._seen, self.relay_process = "", set[str](), -_SILENT, 0
        self._failed: BaseException | None = None
        self._stopping = self._told = False
        self._thread = threading.Thread(target=self._listen, args=(path,), daemon=True)
        self._thread.start()

    def _listen(self, path: Path) -> None:
        try:
            listen(path, self._answer, self._stop)
        except BaseException as error:
            self._failed = error

    # The rounds' side.

    def online(self) -> dict[int, str]:
        """The sites that Flower's server reaches now. Raises RunError if it cannot be kept running."""
        self._look()
        with self._lock:
            if time.monotonic() - self._seen > _SILENT:
                return {}
            return {site: life for site, (_, life) in self._nodes.items()}

    def send(self, site: int, kind: Kind, body: bytes, seconds: float) -> str:
        """Queues a request; the relay takes it within a second."""
        with self._lock:
            name = self._name()
            if site not in self._nodes:
                self._replies.append(Reply(name, site, None, "it is not connected"))
            else:
                node, end = self._nodes[site][0], time.monotonic() + seconds + _SLACK
                self._requests[name] = _Request(name, site, node, kind, body, seconds, end)
                self._lock.notify_all()
            return name

    def replies(self) -> list[Reply]:
        """The replies since the last call. A request without one in its time is answered here."""
        self._look()
        with self._lock:
            now = time.monotonic()
            for late in [each for each in self._requests.values() if now > each.end]:
                self._fail(late, f"no answer within {late.seconds:.0f} s")
            found, self._replies = self._replies, []
            return found

    def close(self) -> None:
        """Tells the relay to end, and stops listening."""
        if self._stop.is_set():
            return
        with self._lock:
            self._stopping = True
            self._requests.clear()
            self._lock.notify_all()
        end = time.monotonic() + _CLOSE
        while self._relay and time.monotonic() < end and not self._told:
            time.sleep(0.05)
        self._stop.set()
        self._thread.join(10)

    def silent_for(self) -> float:
        """Seconds since the relay asked last."""
        return time.monotonic() - self._seen

    def _look(self) -> None:
        if isinstance(self._failed, UserError | RunError):
            raise self._failed
        if self._failed is not None:
            raise RunError(f"the link to Flower ended: {self._failed!r}") from self._failed
        self._check()

    def _name(self) -> str:
        self._count += 1
        return f"{os.getpid()}-{self._count}"

    def _fail(self, request: _Request, why: str) -> None:
        del self._requests[request.name]
        if request.kind != NAME:
            self._replies.append(Reply(request.name, request.site, None, why))

    # The relay's side.

    def _answer(self, kind: str, body: bytes) -> bytes:
        try:
            head, bodies = unpack(body)
            if kind != "exchange":
                raise ValueError(f"found kind '{kind}'")
            relay, process, nodes, replies = str(head["relay"]), int(head["process"]), head["nodes"], head["replies"]
        except (ValueError, KeyError, TypeError) as error:
            return pack({"stop": f"this fedllm does not understand the relay ({error}); use one version", "send": []})
        with self._lock:
            if relay in self._former:
                return pack({"stop": "a newer Flower run has taken over", "send": []})
            if relay != self._relay:
                self._take_over(relay)
            self._seen, self.relay_process = time.monotonic(), process
            self._find(nodes)
            for reply in replies:
                self._receive(reply, bodies)
            end = time.monotonic() + _WAIT
            while not self._stopping and not self._waiting() and (left := end - time.monotonic()) > 0:
                self._lock.wait(left)
            return self._orders()

    def _take_over(self, relay: str) -> None:
        """Another Flower run: what the one before it was asked is lost with it, and is asked again by the rounds."""
        self._former.add(self._relay)
        self._relay = relay
        for lost in [each for each in self._requests.values() if each.taken]:
            self._fail(lost, "Flower's server app was started again")

    def _waiting(self) -> list[_Request]:
        return [each for each in self._requests.values() if not each.taken]

    def _orders(self) -> bytes:
        if self._stopping:
            self._told = True
            return pack({"stop": "done", "send": []})
        orders = self._waiting()
        for each in orders:
            each.taken = True
        heads = [
            {"request": each.name, "node": each.node, "kind": each.kind, "seconds": each.seconds} for each in orders
        ]
        bodies = [each.body for each in orders]
        for each in orders:
            each.body = b""
        return pack({"stop": "", "send": heads}, bodies)

    def _find(self, nodes: Sequence[Mapping[str, str]]) -> None:
        found: dict[int, tuple[str, str]] = {}
        for node in nodes:
            if self._insecure:
                number = self._names.get(self._named.get(node["node"], ""))
                if node["node"] not in self._named:
                    self._ask_name(node["node"])
            else:
                try:
                    number = self._points.get(public_point(node["key"]))
                except UserError:
                    number = None
            if number is not None:
                found[number] = (node["node"], node["life"])
        self._nodes = found

    def _ask_name(self, node: str) -> None:
        if not any(each.node == node and each.kind == NAME for each in self._requests.values()):
            name = self._name()
            self._requests[name] = _Request(name, -1, node, NAME, b"", 30.0, time.monotonic() + 30.0)

    def _receive(self, reply: Mapping[str, Any], bodies: Sequence[bytes]) -> None:
        request = self._requests.get(reply["request"])
        if request is None or reply["node"] not in ("", request.node):
            return
        place = reply["body"]
        if place is None:
            self._fail(request, str(reply["why"]))
            return
        del self._requests[request.name]
        if request.kind == NAME:
            self._named[request.node] = bodies[place].decode(errors="replace")
        else:
            self._replies.append(Reply(request.name, request.site, bodies[place]))
