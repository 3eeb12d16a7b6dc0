"""Flower's SuperLink, which answers other machines on its Fleet API alone. Needs flwr.

A SuperLink serves sites, `flwr` commands and apps on one port. Without an account service anyone who reaches the port
could register keys, start an app of his own on the server, and send orders to its sites. Here these are for loopback
addresses alone. Started by flower_server as `python -m fedllm.deployment.flower_superlink`, with flower-superlink's
options.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
App = Callable[[Message, Callable[[], Awaitable[Message]], Callable[[Message], Awaitable[None]]], Awaitable[None]]
_FLEET = "/v1/fleet/"


class FleetForOthers:
    """ASGI middleware: requests of other machines end with status 403, but for those of sites."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(
        self, scope: Message, receive: Callable[[], Awaitable[Message]], send: Callable[[Message], Awaitable[None]]
    ) -> None:
        if scope["type"] == "lifespan" or _is_local(scope) or _is_of_site(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 403, "headers": []})
            await send({"type": "http.response.body", "body": b""})


def _is_of_site(scope: Message) -> bool:
    path = scope["path"]
    return scope["type"] == "http" and path.startswith(_FLEET) and ".." not in path


def _is_local(scope: Message) -> bool:
    try:
        return ipaddress.ip_address((scope.get("client") or ("",))[0]).is_loopback
    except ValueError:
        return False


def main() -> None:
    """Runs flower-superlink with the middleware as the outermost."""
    from flwr.superlink import extensions
    from flwr.superlink.cli import flower_superlink
    from starlette.middleware import Middleware

    if not callable(getattr(extensions, "get_middleware", None)):
        sys.exit("fedllm: this version of flwr has no extensions.get_middleware; install the one that fedllm names")
    own = extensions.get_middleware
    extensions.get_middleware = lambda: [Middleware(FleetForOthers), *own()]
    flower_superlink()


if __name__ == "__main__":
    main()
