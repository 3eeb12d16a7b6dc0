"""A site's Flower node: takes messages from the SuperLink and hands them to the site's resident process. Needs flwr.

It connects, authenticates and sends heartbeats with flower-supernode's own code. Unlike flower-supernode it runs no app
that the server sends: the only code at a site is the site's own. It also starts no process for a message, so that an
answer takes a fraction of a second. Started by flower_site as `python -m fedllm.deployment.flower_node SETTINGS.json`.
"""

from __future__ import annotations

import contextlib
import json
import logging
import signal
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedllm.deployment.flower import answer
from fedllm.deployment.resident import UnreachableError, ask

if TYPE_CHECKING:
    from flwr.app import Message

_OFTEN, _SELDOM = 0.2, 1.0  # seconds between questions for a message, while one came lately and later
_LATELY = 60.0  # seconds
_ABSENT = 60.0  # seconds without the resident process, after which the node ends
_NOT_YET = (2004,)  # Flower's code for a key that is not registered, or whose node is connected
_HEARTBEAT = 30.0  # seconds, for the time of the question
_log = logging.getLogger("fedllm.node")


def main(settings: Mapping[str, Any]) -> None:
    """Serves until a signal ends it. settings: superlink, certificate, key, socket, name, memory (a file), admit."""
    from flwr.supernode.fleet_http_connection import http_request_response

    keys = _keys(settings["key"])
    certificate = Path(settings["certificate"]).read_bytes() if settings["certificate"] else None
    insecure, memory = certificate is None, Path(settings["memory"])
    if keys is not None:
        _admit(settings["superlink"], certificate, keys, memory, settings["admit"])
    # Without a limit of its own every request is tried again until the server is there.
    with http_request_response(settings["superlink"], insecure, certificate, keys) as connection:
        memory.write_text(str(connection[0]))
        _log.info("connected as node %s", connection[0])
        _serve(connection, settings)


def _keys(path: str | None) -> tuple[Any, Any] | None:
    if path is None:
        return None
    from cryptography.hazmat.primitives.serialization import load_ssh_private_key

    key = load_ssh_private_key(Path(path).read_bytes(), None)
    return key, key.public_key()


def _admit(address: str, certificate: bytes | None, keys: tuple[Any, Any], memory: Path, seconds: float) -> None:
    """Waits until the server admits this site's key. Ends an earlier connection of this site first: after a kill the
    server takes that for alive for a minute, and would refuse this one. SystemExit if the key is not admitted."""
    import httpx
    from flwr.proto.fleet_pb2 import ActivateNodeRequest, DeactivateNodeRequest
    from flwr.supercore.error import FlowerError
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    interceptors = [RuntimeVersionHttpInterceptor(component_name="SuperNode"), NodeAuthHttpInterceptor(*keys)]
    request = ActivateNodeRequest(public_key=public_key_to_bytes(keys[1]), heartbeat_interval=_HEARTBEAT)
    end = time.monotonic() + seconds
    with FleetHttpClient.from_server_address(address, False, certificate, interceptors=interceptors) as client:
        if memory.exists():
            with contextlib.suppress(httpx.HTTPError, RuntimeError, ValueError):  # it was signed off, or is unknown
                client.DeactivateNode(DeactivateNodeRequest(node_id=int(memory.read_text())))
        while True:
            try:
                node = client.ActivateNode(request).node_id
                client.DeactivateNode(DeactivateNodeRequest(node_id=node))
                return
            except httpx.HTTPStatusError as error:
                found = FlowerError.from_json(error.response.text)
                code, text = (found.code, found.message) if found else (error.response.status_code, "")
                if time.monotonic() > end or code not in _NOT_YET:
                    _log.error("refused [code: %s] %s", code, text)
                    sys.exit(1)
            except httpx.TransportError as error:
                if time.monotonic() > end:
                    raise
                _log.info("the server does not answer: %s", error)
            time.sleep(2.0)


def _serve(connection: Any, settings: Mapping[str, Any]) -> None:
    import httpx
    from flwr.supercore.run import RunNotRunningException

    receive, last, seen = connection[1], time.monotonic(), time.monotonic()
    while True:
        try:
            if (received := receive()) is not None:
                _handle(connection, received, settings)
                last = time.monotonic()
                continue
        except RunNotRunningException:
            _log.info("a message of a run that has ended is left out")
        except (httpx.HTTPStatusError, OSError, RuntimeError, ValueError) as error:
            _log.warning("a message failed: %s: %s", type(error).__name__, error)
            time.sleep(1.0)
        if Path(settings["socket"]).exists():
            seen = time.monotonic()
        elif time.monotonic() - seen > _ABSENT:
            _log.error("the site's process has gone: nothing listens at %s", settings["socket"])
            return
        time.sleep(_OFTEN if time.monotonic() - last < _LATELY else _SELDOM)


def _handle(connection: Any, received: tuple[Any, Any], settings: Mapping[str, Any]) -> None:
    """Pulls a message's parts, asks the site's process, and pushes the reply's parts."""
    from flwr.app import Error, Message
    from flwr.common.constant import ErrorCode
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents, pull_objects

    _, _, send, _, _, pull, push, confirm = connection
    head, tree = received
    run, name = head.metadata.run_id, head.metadata.message_id
    contents = pull_objects([each.object_id for each in iterate_object_tree(tree)], partial(pull, run))
    confirm(run, name)
    message = inflate_object_from_contents(name, contents)
    assert isinstance(message, Message)
    del contents
    message.metadata.__dict__["_message_id"] = name
    began = time.monotonic()
    try:
        reply = answer(message, settings["name"], partial(ask, Path(settings["socket"])))
    except (UnreachableError, KeyError, TypeError, ValueError) as error:
        _log.warning("no answer from the site: %s", error)
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, str(error)), reply_to=message)
    del message
    _push(reply, send, partial(push, run), time.monotonic() - began)


def _push(reply: Message, send: Callable[..., tuple[set[str], str]], push: Callable[..., None], seconds: float) -> None:
    from flwr.supercore.inflatable.inflatable_object import (
        get_all_nested_objects,
        get_object_tree,
        iterate_object_tree,
        no_object_id_recompute,
    )
    from flwr.supercore.inflatable.inflatable_utils import push_object_contents_from_iterable

    reply.metadata.__dict__["_message_id"] = reply.object_id
    with no_object_id_recompute():
        tree, objects = get_object_tree(reply), get_all_nested_objects(reply)
        wanted, session = send(reply, tree, seconds)
        order = [each.object_id for each in iterate_object_tree(tree) if each.object_id in wanted]
        contents = ((name, objects[name].deflate()) for name in dict.fromkeys(order))
        push_object_contents_from_iterable(contents, partial(push, session))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: sys.exit(0))  # so that the node signs off
    main(json.loads(Path(sys.argv[1]).read_text()))
