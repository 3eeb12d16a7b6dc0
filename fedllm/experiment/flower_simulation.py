"""Flower's simulation of all clients of a run, on Ray. Needs flwr[simulation].

Started by flower_engine as `python -m fedllm.experiment.flower_simulation SETTINGS.json`. Its ServerApp relays between
the clients and the process of the run, as on real sites. Each of Ray's processes builds the recipe's job once.
"""

from __future__ import annotations

import json
import logging
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedllm.deployment.flower import answer, relay_messages

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp
    from flwr.serverapp import Grid, ServerApp


def client_app(sections: str) -> ClientApp:
    """The ClientApp of all clients. sections: those of the recipe, as JSON."""
    from flwr.clientapp import ClientApp

    app = ClientApp()

    def train(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        return answer(message, str(number), partial(_train, sections, number))

    app.query()(train)
    return app


def _train(sections: str, client: int, kind: str, body: bytes, seconds: float) -> bytes:
    from fedllm.experiment.flower_client import train_order  # loads torch, which the relay does not need

    return train_order(sections, client, body)


def server_app(socket: Path) -> ServerApp:
    """The ServerApp: relays between the clients and the process that listens at `socket`."""
    from flwr.serverapp import ServerApp

    app = ServerApp()

    def main(grid: Grid, context: Context) -> None:
        if (why := relay_messages(grid, socket, str(context.run_id))) != "done":
            raise RuntimeError(why)

    app.main()(main)
    return app


def simulate(settings: dict[str, Any]) -> None:
    """Runs the clients until the run has ended. settings: socket, sections, clients, threads, and cores (null = Ray's
    own count, such as that of a cluster)."""
    from flwr.simulation import run_simulation

    run_simulation(
        server_app=server_app(Path(settings["socket"])),
        client_app=client_app(settings["sections"]),
        num_supernodes=settings["clients"],
        backend_config={
            "init_args": {} if settings["cores"] is None else {"num_cpus": settings["cores"]},
            "client_resources": {"num_cpus": settings["threads"], "num_gpus": 0.0},
        },
    )


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    # By its name, so that Ray's processes import this module rather than a copy of __main__.
    from fedllm.experiment import flower_simulation

    flower_simulation.simulate(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
