"""A client and a server on their own: fedllm.client and fedllm.server."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_clients import (
    DIM,
    ROUNDS,
    SIZES,
    STEPS,
    K,
    Point,
    batches,
    client_of,
    line,
    quadratic,
    setup,
    slope,
    squared,
)
from torch import Tensor, nn

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.aggregation.upload_checks import faults
from fedllm.algorithms import algorithm_names
from fedllm.blocks import partition
from fedllm.client import Broadcast, Client, FederatedOptimizer, Upload, full_gradient
from fedllm.common.errors import RunError, UserError
from fedllm.federation.info import round_info
from fedllm.federation.sampling import sample
from fedllm.server import Server

# A loop of one's own computes the gradient of its loss, and no contrast.
OF_A_LOOP = [name for name in algorithm_names() if not load_algorithm(name).contrastive]


def poisoned() -> list[tuple[Tensor, Tensor]]:
    found = batches()
    return [found[0], (torch.full((8, 3), torch.nan), found[1][1]), found[2]]


def broadcast_for(client: Client, round: int = 0, **changes: Any) -> Broadcast:
    server = client.algorithm.init_server(torch.zeros(DIM), client.info)
    sent = {"x": torch.zeros(DIM), **{name: server[name] for name in client.algorithm.downloads()}, **changes}
    return Broadcast(round, sent.pop("x"), {name: value for name, value in sent.items() if value is not None})


# What is not finite is not kept and not sent.


@pytest.mark.parametrize("name", ["fadamgc", "localadam", "fa_nt", "scaffold", "fedavg"])
def test_a_poisoned_round_leaves_the_client_as_it_was(name: str) -> None:
    client, twin = client_of(name), client_of(name)
    for each in (client, twin):
        each.fit(broadcast_for(each), batches(), squared)
    with pytest.raises(RunError, match=r"round 2: tensor '\w+': 4 of 4 values are not finite; .* Lower algorithm.lr"):
        client.fit(broadcast_for(client, 1), poisoned(), squared)
    after, expected = (each.fit(broadcast_for(each, 2), batches(3), squared) for each in (client, twin))
    for key, value in expected.items():
        assert torch.equal(after[key], value)
    for key, value in twin.state.items():
        assert torch.equal(client.state[key], value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": None}, r"broadcast of round 0: found tensors \['x'\], expected \['x', 'y'\]"),
        ({"q": torch.zeros(DIM)}, r"found tensors \['q', 'x', 'y'\], expected \['x', 'y'\]"),
        ({"y": torch.zeros(1)}, r"tensor 'y': found \[1\] torch.float32, expected \[4\] torch.float32"),
        ({"y": torch.zeros(DIM).double()}, r"tensor 'y': found \[4\] torch.float64, expected \[4\] torch.float32"),
        ({"y": torch.full((DIM,), torch.nan)}, "tensor 'y': 4 of 4 values are not finite"),
        ({"x": torch.zeros(5)}, r"tensor 'x': found \[5\] torch.float32, expected \[4\]"),
        ({"x": torch.full((DIM,), torch.inf)}, "tensor 'x': 4 of 4 values are not finite"),
        ({"x": [0.0] * DIM}, r"tensor 'x': found list, expected \[4\] torch.float32"),
        ({"round": -1}, "broadcast round: found -1, expected 0 to 4, the rounds of the run"),
        ({"round": 5}, "broadcast round: found 5, expected 0 to 4, the rounds of the run"),
    ],
)
def test_a_broadcast_is_checked_on_arrival(changes: dict, message: str) -> None:
    client = client_of("fadamgc")
    before = {name: value.clone() for name, value in client.model.state_dict().items()}
    with pytest.raises(UserError, match=message):
        client.begin(broadcast_for(client, **changes), steps=K)
    assert all(torch.equal(value, before[name]) for name, value in client.model.state_dict().items())


def test_what_the_server_keeps_to_itself_may_come_along() -> None:
    client = client_of("fedadam")
    client.begin(broadcast_for(client, m=torch.zeros(DIM), v=torch.zeros(DIM)), steps=K)


@pytest.mark.parametrize("steps", [0, K + 1, 1.5])
def test_steps_are_those_of_the_federation(steps: Any) -> None:
    client = client_of("fedadamw")
    with pytest.raises(UserError, match=f"steps: found {steps}, expected 1 to {K}, the federation's local steps"):
        client.begin(broadcast_for(client), steps=steps)


# A round that is interrupted.


def interrupted(client: Client, after: int) -> dict:
    optimizer = client.begin(broadcast_for(client), steps=K)
    steps(client, optimizer, batches()[:after])
    return optimizer.state_dict()


def steps(client: Client, optimizer: FederatedOptimizer, work: list) -> None:
    for batch in work:
        optimizer.zero_grad()
        loss = squared(client.model, batch)
        loss.backward()
        optimizer.step(loss.detach)


@pytest.mark.parametrize("name", OF_A_LOOP)
def test_a_loaded_state_goes_on_bit_for_bit(name: str, tmp_path: Path) -> None:
    client, again = client_of(name), client_of(name)
    expected = client.fit(broadcast_for(client), batches(), squared)
    torch.save(interrupted(client_of(name), 2), tmp_path / "optimizer.pt")
    optimizer = again.begin(broadcast_for(again), steps=K)
    optimizer.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    steps(again, optimizer, batches()[2:])
    found = again.finish(optimizer)
    assert found.head == expected.head
    for key, value in expected.items():
        assert torch.equal(found[key], value)


def test_a_first_step_without_its_loss_is_refused() -> None:
    client = client_of("qfedavg")
    optimizer = client.begin(broadcast_for(client), steps=K)
    squared(client.model, batches()[0]).backward()
    with pytest.raises(UserError, match=r"step 1: QFedAvg reads the loss of the first batch, found none; call step\(l"):
        optimizer.step()


def test_a_contrast_is_refused() -> None:
    client = client_of("moon")
    with pytest.raises(UserError, match="algorithm: found Moon, whose clients add a contrast to the loss, which an"):
        client.begin(broadcast_for(client), steps=K)


def test_a_state_of_another_round_is_refused() -> None:
    client = client_of("fadamgc")
    saved = interrupted(client, 2)
    with pytest.raises(UserError, match="optimizer state: found round 0, expected 1, the broadcast's; start the round"):
        client.begin(broadcast_for(client, 1), steps=K).load_state_dict(saved)
    with pytest.raises(UserError, match="found 2 steps taken, expected at most 1, as the round was begun"):
        client.begin(broadcast_for(client), steps=1).load_state_dict(saved)
    other = client_of("fedavg")
    with pytest.raises(UserError, match=r"optimizer state: found tensors \['correction', .*expected \['x'\]"):
        other.begin(broadcast_for(other), steps=K).load_state_dict(saved)
    plain = torch.optim.SGD(client.model.parameters(), lr=0.1).state_dict()
    with pytest.raises(UserError, match="optimizer state: found none of a FederatedOptimizer's local round"):
        client.begin(broadcast_for(client), steps=K).load_state_dict(plain)


# What a site needs at the start.


def test_gradient_tracking_starts_from_full_gradients() -> None:
    """One client: y_i = y, so that its first round is LocalAdam's, and y is its gradient at x0."""
    alg, info = setup("fadamgc", tracking_init="gradient")
    x0 = torch.zeros(DIM)
    with pytest.raises(UserError, match=r"tracking_init: gradient starts from full gradients at x0: give them, Client"):
        Client(line(), alg, info)
    with pytest.raises(UserError, match=r"tracking_init: gradient starts from .*: give them, Server"):
        Server(alg, x0, info)
    with pytest.raises(UserError, match=r"tensor 'gradient': found \[3\]"):
        Client(line(), alg, info, gradient=torch.zeros(3))
    model = line()
    gradient = full_gradient(model, x0, batches(), squared)
    features, labels = (torch.cat(part) for part in zip(*batches(), strict=True))
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1)
    torch.testing.assert_close(gradient, (-2 * inputs * labels).mean(0))
    client, server = Client(model, alg, info, gradient=gradient), Server(alg, x0, info, gradient=gradient)
    assert torch.equal(client.state["y"][0], gradient)
    plain = client_of("localadam")
    found = client.fit(server.broadcast(), batches(), squared)
    torch.testing.assert_close(found["d"], plain.fit(broadcast_for(plain), batches(), squared)["d"])


def test_a_client_goes_on_with_the_state_it_kept() -> None:
    first = client_of("fadamgc")
    first.fit(broadcast_for(first), batches(), squared)
    again = Client(line(), first.algorithm, first.info, state=first.state)
    one, other = (each.fit(broadcast_for(each, 1), batches(3), squared) for each in (first, again))
    assert torch.equal(one["d"], other["d"])
    with pytest.raises(UserError, match=r"state: found tensors \['y'\], expected \['v', 'vhat', 'y'\]"):
        Client(line(), first.algorithm, first.info, state={"y": torch.zeros(1, DIM)})


@pytest.mark.parametrize("name", ["fedadamw", "fadamgc_b"])
def test_a_client_sends_the_block_means_of_its_own_model(name: str) -> None:
    """Also where the federation was described without blocks."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    blocks, alg = partition(model), load_algorithm(name, lr=0.01)
    assert blocks.num_blocks == 8 + 1 + 2 + 1
    problem = QuadraticProblem.random(num_clients=10, dim=blocks.dim)
    info = round_info(alg, problem, rounds=5, sampled=2, tracked=2, local_steps=2)
    client = Client(model, alg, info)
    upload = client.fit(
        Server(alg, torch.zeros(blocks.dim), client.info).broadcast(),
        [torch.randn(4, 8)] * 2,
        lambda model, batch: model(batch).square().mean(),
    )
    assert upload["vbar"].shape == (1, 12)
    by_coordinate = load_algorithm(name, lr=0.01, blocks="elementwise")
    assert Client(model, by_coordinate, info).info.blocks.num_blocks == blocks.dim


def test_a_model_of_another_size_is_named() -> None:
    alg, info = setup("fedavg")
    with pytest.raises(UserError, match=r"info.blocks: found 4 coordinates, expected 6, the model's size"):
        Client(nn.Linear(5, 1), alg, info)


# Server and clients together are the simulation.


@pytest.mark.parametrize("schedule", ["constant", "cosine_steps"])
@pytest.mark.parametrize("name", OF_A_LOOP)
def test_server_and_clients_equal_the_simulation(name: str, schedule: str, tmp_path: Path) -> None:
    """Every upload goes through a safetensors file and JSON; clients of unequal steps and weights, some untracked."""
    weights = "uniform" if name == "feddyn" else "size"  # FedDyn has uniform weights alone
    keys = {"schedule": schedule, "clip_norm": 2.0, "weights": weights}
    alg = load_algorithm(name, **({} if name == "padamfed" else {"lr": 0.05}), **keys)
    problem = quadratic()
    expected = simulate(alg, problem, rounds=ROUNDS, local_steps=K, clients_per_round=3, tracked_per_round=2)

    info = round_info(alg, problem, rounds=ROUNDS, sampled=3, tracked=2, local_steps=K)
    server = Server(alg, problem.initial(), info)
    sites = [Client(Point(problem.initial()), alg, info, samples=size) for size in SIZES]
    for t in range(ROUNDS):
        clients, tracked = sample(0, t, 5, 3, 2)
        for client in clients:
            work = [(problem, client, t, k) for k in range(STEPS[client])]
            sent = sites[client].fit(server.broadcast(), work, slope, tracked=client in tracked)
            save_file(sent.tensors, tmp_path / "upload.safetensors")
            head = json.loads(json.dumps(sent.head))
            assert server.add(Upload(load_file(tmp_path / "upload.safetensors"), **head), client=client) is None
        x = server.aggregate()
        torch.testing.assert_close(x, expected.history[t + 1], rtol=1e-12, atol=1e-12)
    for key, value in expected.server.items():
        torch.testing.assert_close(server.state[key], value, rtol=1e-12, atol=1e-12)
    for key, value in expected.clients.items():
        kept = torch.cat([site.state[key] for site in sites])
        torch.testing.assert_close(kept, value, rtol=1e-12, atol=1e-12)


# What a server may receive.


@pytest.fixture
def served() -> tuple[Server, Upload]:
    client = client_of("fadamgc")
    server = Server(client.algorithm, torch.zeros(DIM), client.info)
    return server, client.fit(server.broadcast(), batches(), squared)


def changed(upload: Upload, tensors: dict | None = None, **head: Any) -> Upload:
    return Upload({**upload.tensors, **(tensors or {})}, **{**upload.head, **head})


@pytest.mark.parametrize(
    ("tensors", "head", "message"),
    [
        ({"d": torch.full((1, DIM), torch.nan)}, {}, "tensor 'd': 4 of 4 values are not finite"),
        ({"d": torch.zeros(1, 3)}, {}, r"tensor 'd': found \[1, 3\]"),
        ({"q": torch.zeros(1, 3)}, {}, r"found tensors \['d', 'q', 'y'\], expected \['d', 'y'\]"),
        ({}, {"round": 3}, "round: found 3, expected 0"),
        ({}, {"rate_sum": float("nan")}, "rate_sum: found nan, expected a number above 0, at most 0.03"),
        ({}, {"rate_sum": 0.031}, "rate_sum: found 0.031, expected a number above 0, at most 0.03"),
        ({}, {"rate_sum": 10**400}, "rate_sum: found 1000.*000, expected a number above 0"),
        ({}, {"steps": "3"}, "steps: found '3', expected 1 to 3, the federation's"),
        ({}, {"steps": 10**9}, "steps: found 1000000000, expected 1 to 3"),
        ({}, {"steps": 1.5}, "steps: found 1.5, expected 1 to 3"),
        ({}, {"tracked": "yes"}, "tracked: found 'yes', expected true or false"),
        ({}, {"tracked": False}, r"found tensors \['d', 'y'\], expected \['d'\]"),
    ],
)
def test_a_bad_upload_is_rejected_and_counts_nowhere(
    served: tuple[Server, Upload], tensors: dict, head: dict, message: str
) -> None:
    server, upload = served
    why = server.add(changed(upload, tensors, **head), client=7)
    assert why is not None
    assert torch.equal(server.x, torch.zeros(DIM))
    assert server.rejected == {7: why}
    with pytest.raises(RunError, match=r"round 1: 0 accepted uploads[\s\S]*client 7: " + message):
        server.aggregate()
    assert server.add(upload, client=7) is None
    assert server.rejected == {}
    torch.testing.assert_close(server.aggregate(), upload["d"][0])
    assert server.round == 1


def test_an_upload_counts_once_and_needs_its_round(served: tuple[Server, Upload]) -> None:
    server, upload = served
    assert server.add(upload, client=1) is None
    assert server.add(upload, client=1) == "has sent its upload already"
    why = "found dict, expected an Upload, as Client.finish gives it, or its bytes"
    assert server.add({"d": upload["d"]}, client=2) == why  # type: ignore[arg-type]
    assert list(server.rejected) == [2]
    server.aggregate()
    assert server.add(upload, client=1) == "round: found 0, expected 1"


def test_weights_by_size_need_samples() -> None:
    client = client_of("fedavg", weights="size")
    server = Server(client.algorithm, torch.zeros(DIM), client.info)
    upload = client.fit(server.broadcast(), batches(), squared)
    assert server.add(changed(upload, samples=0), client=0) == "samples: found 0, expected a whole number above 0"
    assert server.add(upload, client=0, samples=3) is None
    assert server.add(changed(upload, {"d": upload["d"] + 1}), client=1, samples=1) is None
    torch.testing.assert_close(server.aggregate(), upload["d"][0] + 0.25)


SPARSE, META = torch.zeros(1, DIM).to_sparse(), torch.zeros(1, DIM, device="meta")


@pytest.mark.parametrize(
    ("upload", "message"),
    [
        (None, r"found NoneType, expected tensors \['d'\]"),
        ([1.0], r"found list, expected tensors \['d'\]"),
        ({"d": None}, r"tensor 'd': found NoneType, expected \[2, 4\] torch.float32"),
        ({"d": [[0.0] * DIM]}, r"tensor 'd': found list, expected \[2, 4\]"),
        ({"d": torch.zeros(2, DIM).numpy()}, "tensor 'd': found ndarray, expected"),
        ({"d": SPARSE}, "tensor 'd': found a torch.sparse_coo tensor, expected"),
        ({"d": META}, "tensor 'd': found a meta tensor, expected"),
        ({"d": torch.zeros(2, DIM), 1: torch.zeros(2, DIM)}, r"found tensors \['1', 'd'\], expected \['d'\]"),
    ],
)
def test_malformed_uploads_are_faults_and_no_crash(upload: Any, message: str) -> None:
    found = faults(upload, {"d": DIM}, torch.float32, 2)
    assert list(found) == [0, 1]
    assert re.search(message, found[0])
