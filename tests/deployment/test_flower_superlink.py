"""Which requests reach a SuperLink's APIs from where."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fedllm.deployment.flower_superlink import FleetForOthers


def status(path: str, client: Any, kind: str = "http") -> int | None:
    """200 where the request reaches the app."""
    sent: list[Any] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"status": 200})

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(FleetForOthers(app)({"type": kind, "path": path, "client": client}, None, send))  # type: ignore[arg-type]
    return sent[0]["status"] if sent else None


@pytest.mark.parametrize("path", ["/v1/control/start-run", "/v1/control/register-node", "/v1/runtime/pull-object", "/"])
def test_other_machines_reach_the_fleet_api_alone(path: str) -> None:
    for client in (("10.0.0.7", 5), ("203.0.113.9", 5), ("::ffff:10.0.0.7", 5), None, ("unix", 0)):
        assert status(path, client) == 403
    assert status(path, ("127.0.0.1", 5)) == 200
    assert status(path, ("::1", 5)) == 200


def test_sites_of_other_machines_reach_it() -> None:
    assert status("/v1/fleet/pull-messages", ("10.0.0.7", 5)) == 200
    assert status("/v1/fleet/../control/start-run", ("10.0.0.7", 5)) == 403
    assert status("/v1/fleet/x", ("10.0.0.7", 5), kind="websocket") is None
