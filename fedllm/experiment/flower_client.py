"""A client of Flower's simulation engine: trains in one of Ray's processes, from an order in bytes to its answer."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from torch import Tensor

from fedllm.common import tensor_file
from fedllm.common.errors import UserError
from fedllm.common.tensors import State, under
from fedllm.config.recipe import make_recipe
from fedllm.experiment.build import assemble
from fedllm.experiment.job import Job
from fedllm.federation.client_states import ClientStore
from fedllm.federation.local_training import Trained, train_together
from fedllm.federation.setup import Setup
from fedllm.federation.state import FederationState


def order_bytes(
    setup: Setup, state: FederationState, client: int, steps: int, tracked: bool, inputs: Mapping[str, str]
) -> bytes:
    """The order for a client to train: the round's x and downloads, and the vectors that the client keeps.

    inputs: digests of the run's inputs, see `inputs_of`."""
    head = {"round": setup.info.index, "client": client, "steps": steps, "tracked": tracked, "inputs": dict(inputs)}
    tensors = {"x": state.x} | ({} if state.buffers is None else {"buffers": state.buffers})
    tensors |= {f"server/{name}": state.server[name] for name in setup.algorithm.downloads()}
    tensors |= {f"before/{name}": value for name, value in state.clients.get([client]).items()}
    return tensor_file.pack(head, tensors)


def read_answer(body: bytes) -> tuple[float, State, State, State, Tensor | None]:
    """What a client answers: its seconds, and with one row each what it sends, what it keeps, its local state and its
    mean loss. Raises UserError with the client's reason if it could not train."""
    head, tensors = tensor_file.unpack(body)
    if "error" in head:
        raise UserError(str(head["error"]))
    parts = [under(f"{name}/", tensors) for name in ("sent", "kept", "local")]
    return float(head["seconds"]), *parts, tensors.get("losses")  # type: ignore[return-value]


def inputs_of(job: Job) -> dict[str, str]:
    """Digests of a job's data and weights, which must be equal in all processes."""
    return job.data | {"base model": job.weights_digest()}


def train_order(sections: str, client: int, body: bytes) -> bytes:
    """The answer of a client to an order. Never raises a UserError: that is the answer. sections: see `_job`.

    client: the number by which Flower knows this client."""
    try:
        head, tensors = tensor_file.unpack(body)
        if head["client"] != client:
            raise UserError(f"found an order for client {head['client']}")
        job, inputs = _job(sections)
        if other := [name for name, digest in head["inputs"].items() if inputs[name] != digest]:
            raise UserError(
                f"Ray's process read other data than the run (it differs in: {', '.join(other)}); every machine must "
                "find the same files under the names in the recipe"
            )
        began = time.perf_counter()
        trained = _train(job, head, tensors)
    except UserError as error:
        return tensor_file.pack({"error": str(error)}, {})
    named = {"sent": trained.uploads.sent, "kept": trained.uploads.kept, "local": trained.local}
    found = {f"{part}/{name}": value for part, values in named.items() for name, value in values.items()}
    losses = {} if trained.losses is None else {"losses": trained.losses}
    return tensor_file.pack({"seconds": time.perf_counter() - began}, found | losses)


def _train(job: Job, head: dict[str, Any], tensors: State) -> Trained:
    device, client = job.machine.device, int(head["client"])
    placed = {name: value.to(device) for name, value in tensors.items() if not name.startswith("before/")}
    before = under("before/", tensors)
    state = FederationState(
        round=int(head["round"]),
        x=placed["x"],
        server=under("server/", placed),
        clients=ClientStore(lambda count: dict(before)),
        buffers=placed.get("buffers"),
    )
    setup = job.setup.at(state.round)
    tracked = {client} if head["tracked"] else set[int]()
    return train_together(setup, state, [client], [int(head["steps"])], tracked, lambda done: None)


@lru_cache(maxsize=1)
def _job(sections: str) -> tuple[Job, dict[str, str]]:
    """The job of this process and the digests of its inputs, built at its first order.

    sections: those of the run's recipe, as JSON."""
    recipe = make_recipe(json.loads(sections), "flower", "the run's recipe")
    job = assemble(recipe)
    return job, inputs_of(job)
