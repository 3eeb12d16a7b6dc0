"""The two halves of a Flower app: each passes bytes between Flower and a local socket. Needs flwr, and no torch.

At a site the ClientApp hands a request to the resident process of `fedllm site`. At the server the ServerApp is the
relay of deployment.grid_link: `fedllm serve` runs the rounds in a process of its own.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedllm.common.errors import RunError
from fedllm.deployment.grid_link import NAME, pack, unpack
from fedllm.deployment.resident import UnreachableError, ask

if TYPE_CHECKING:
    from flwr.app import Context, Message, RecordDict
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp

_RECORD, _BODY = "fedllm", "body"
_EVERY = 0.1  # seconds between looks for replies
_NODES_EVERY = 1.0  # seconds between looks at the nodes
_PATIENCE = 120.0  # seconds without the process that runs the rounds, after which the relay ends


def client_app() -> ClientApp:
    """A ClientApp that passes requests to the socket that --node-config names, and the answers back."""
    from flwr.clientapp import ClientApp

    app = ClientApp()
    app.query()(_pass_on)
    return app


def _pass_on(message: Message, context: Context) -> Message:
    """An error becomes Flower's error reply, which the server's link takes for a failure of the transport."""
    config = context.node_config
    return answer(message, str(config.get("name", "")), partial(ask, Path(str(config["socket"]))))


def answer(message: Message, name: str, asked: Callable[[str, bytes, float], bytes]) -> Message:
    """The reply to a message. name: the site's. asked(kind, body, seconds): the resident process's answer."""
    from flwr.app import Message

    kind, body = _content(message)
    found = name.encode() if kind == NAME else asked(kind, body, message.metadata.ttl)  # clocks may disagree
    return Message(_record(kind, found), reply_to=message)


def _record(kind: str, body: bytes) -> RecordDict:
    """Bytes are sent as an array, which Flower cuts into chunks of 5 MB."""
    from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

    array = Array(dtype="uint8", shape=(len(body),), stype="bytes", data=body)
    return RecordDict({_RECORD: ConfigRecord({"kind": kind}), _BODY: ArrayRecord({_BODY: array})})


def _content(message: Message) -> tuple[str, bytes]:
    kind, body = message.content[_RECORD]["kind"], message.content[_BODY][_BODY].data
    if not isinstance(kind, str) or not isinstance(body, bytes):
        raise RunError(f"found a message with {type(kind).__name__} and {type(body).__name__}, expected text and bytes")
    return kind, body


def server_app() -> ServerApp:
    """A ServerApp that relays between the grid and the process that runs the rounds."""
    from flwr.serverapp import ServerApp

    app = ServerApp()
    app.main()(_main)
    return app


def _main(grid: Grid, context: Context) -> None:
    """Starts the rounds itself where `flwr run` was typed by hand and no `fedllm serve` listens."""
    config = context.run_config
    socket, relay = Path(str(config["socket"])), f"{context.run_id}"
    started = None if _listens(socket, relay) else _start_rounds(config)
    try:
        why = relay_messages(grid, socket, relay, started)
    finally:
        if started is not None:
            _end(started)
    if why != "done":
        raise RuntimeError(why)
    if started is not None and started.returncode:
        raise RuntimeError(f"the rounds ended with exit code {started.returncode}; see {config['log']}")


def _listens(socket: Path, relay: str) -> bool:
    try:
        ask(socket, "exchange", pack({"relay": relay, "process": os.getpid(), "nodes": [], "replies": []}), 10)
    except UnreachableError:
        return False
    return True


def _start_rounds(config: Any) -> subprocess.Popen[bytes]:
    command = [str(config["python"]), "-m", "fedllm", "serve", str(config["recipe"]), "--rounds-only"]
    surroundings = {name: value for name, value in os.environ.items() if not name.startswith("FLWR_")}
    with Path(str(config["log"])).open("ab") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=surroundings)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Waits for the rounds' process, which may still write its report; ends it where it does not end."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(300)
        return
    process.terminate()
    process.wait(30)


def relay_messages(grid: Grid, socket: Path, relay: str, started: subprocess.Popen[bytes] | None = None) -> str:
    """Carries messages until the rounds end; returns why it ended, "done" in order."""
    waiting: dict[str, tuple[str, str]] = {}  # Flower's message -> the request's name and its node
    replies: list[dict[str, Any]] = []
    bodies: list[bytes] = []
    nodes: list[dict[str, str]] = []
    looked, heard = -_NODES_EVERY, time.monotonic()
    while True:
        if time.monotonic() - looked >= _NODES_EVERY:
            nodes, looked = _nodes(grid), time.monotonic()
        if waiting:
            _pull(grid, waiting, replies, bodies)
        head = {"relay": relay, "process": os.getpid(), "nodes": nodes, "replies": replies}
        try:
            answer = ask(socket, "exchange", pack(head, bodies), _PATIENCE)
        except UnreachableError as error:
            if started is not None and started.poll() is not None:
                return "done"
            if time.monotonic() - heard > _PATIENCE:
                return f"the process that runs the rounds has gone: {error}"
            time.sleep(1.0)
            continue
        heard, replies, bodies = time.monotonic(), [], []
        orders, content = unpack(answer)
        if orders["stop"]:
            return str(orders["stop"])
        for order, body in zip(orders["send"], content, strict=True):
            _push(grid, order, body, waiting, replies)
        if not orders["send"]:
            time.sleep(_EVERY)


def _nodes(grid: Grid) -> list[dict[str, str]]:
    """The nodes that are online, each with its public key in PEM and the time when it was activated last."""
    return [
        {"node": str(each.node_id), "key": each.public_key.decode(errors="replace"), "life": each.last_activated_at}
        for each in grid.get_nodes()
    ]


def _push(grid: Grid, order: Any, body: bytes, waiting: dict[str, tuple[str, str]], replies: list[Any]) -> None:
    from flwr.app import Message

    content = _record(order["kind"], body)
    message = Message(content, dst_node_id=int(order["node"]), message_type="query", ttl=float(order["seconds"]))
    name = next(iter(grid.push_messages([message])), None)
    if name:
        waiting[name] = (order["request"], order["node"])
    else:
        why = "Flower's server did not take the message"
        replies.append({"request": order["request"], "node": order["node"], "body": None, "why": why})


def _pull(grid: Grid, waiting: dict[str, tuple[str, str]], replies: list[Any], bodies: list[bytes]) -> None:
    found: Iterable[Message] = grid.pull_messages(list(waiting))
    for message in found:
        request, node = waiting.pop(message.metadata.reply_to_message_id, ("", ""))
        reply = {"request": request, "node": node, "body": None, "why": ""}
        if message.has_error():
            replies.append({**reply, "why": _why(message)})
        elif str(message.metadata.src_node_id) != node:
            replies.append({**reply, "why": f"found a reply of node {message.metadata.src_node_id}, expected {node}"})
        else:
            replies.append({**reply, "body": len(bodies)})
            bodies.append(_content(message)[1])


def _why(message: Message) -> str:
    """Flower's reason, short: it may contain what a site's exception says."""
    text = " ".join(str(message.error.reason).split())
    return f"Flower error {message.error.code}: {text[:300]}"
