"""FA-NT's one-vector form: the iterates of the tracked form, from x alone (GC eq. 65 and 66)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from small_clients import Point, slope
from torch import Tensor

from fedllm import QuadraticProblem, load_algorithm, simulate
from fedllm.blocks import BlockPartition
from fedllm.client import Client, model_info
from fedllm.common.errors import RunError, UserError
from fedllm.federation.costs import traffic, vectors_per_round
from fedllm.federation.info import round_info, run_info
from fedllm.server import Server

N, DIM, K, ROUNDS = 6, 5, 4, 60
EXACT = {"rtol": 1e-10, "atol": 0.0}


def problem(**keys: Any) -> QuadraticProblem:
    base = QuadraticProblem.random(N, DIM, seed=2, spread=3.0)
    return QuadraticProblem(base.H, base.a, x0=torch.linspace(1, 2, DIM).double(), noise=0.2, **keys)


def history(form: str, local_steps: int = K, **keys: Any) -> Tensor:
    alg = load_algorithm("fa_nt", lr=0.02, form=form, **keys)
    return simulate(alg, problem(), rounds=ROUNDS, local_steps=local_steps).history


@pytest.mark.parametrize(
    "keys",
    [
        {}, {"local_steps": 1}, {"weight_decay": 0.1}, {"clip_norm": 0.5}, {"schedule": "linear"},
        {"schedule": "cosine_steps", "warmup_rounds": 5}, {"schedule": "cosine_rounds"},
    ],
    ids=str,
)  # fmt: skip
def test_both_forms_have_the_same_iterates(keys: dict[str, Any]) -> None:
    found, expected = history("one_vector", **keys), history("tracked", **keys)
    torch.testing.assert_close(found, expected, **EXACT)
    assert float((expected[-1] - expected[0]).norm()) > 0.1


def test_z_is_the_clients_y_less_the_servers() -> None:
    """w_i = z_i - x_i/(K eta), so that z_i' = w_i + x'/(K eta) is y_i' - y' of the tracked form."""
    runs = {
        form: simulate(load_algorithm("fa_nt", lr=0.02, form=form), problem(), rounds=9, local_steps=K)
        for form in ("tracked", "one_vector")
    }
    z = runs["one_vector"].clients["w"] + runs["one_vector"].x / (K * 0.02)
    tracked = runs["tracked"]
    torch.testing.assert_close(z, tracked.clients["y"] - tracked.server["y"], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(z.sum(0), torch.zeros(DIM).double(), rtol=0, atol=1e-11)


def deployed(form: str, rounds: int) -> tuple[Tensor, int]:
    """x after some rounds of clients and a server that exchange bytes, and the tensors that a client exchanged."""
    alg, task = load_algorithm("fa_nt", lr=0.02, form=form), problem()
    x0 = task.initial()
    info = model_info(alg, Point(x0), rounds=rounds, num_clients=N, sampled=N, local_steps=K)
    server, clients = Server(alg, x0, info), [Client(Point(x0), alg, info) for _ in range(N)]
    exchanged = 0
    for t in range(rounds):
        for number, client in enumerate(clients):
            broadcast = server.broadcast(number)
            upload = client.fit(broadcast, [(task, number, t, k) for k in range(K)], slope)
            exchanged = 1 + len(broadcast.server) + len(upload)
            assert server.add(upload.to_bytes(), client=number) is None
        server.aggregate()
    return server.x, exchanged


def test_clients_and_server_exchange_x_alone() -> None:
    found, exchanged = deployed("one_vector", 30)
    assert exchanged == 2
    torch.testing.assert_close(found, history("tracked")[30], **EXACT)
    assert deployed("tracked", 2)[1] == 4


def test_costs_show_two_vectors() -> None:
    alg = load_algorithm("fa_nt", form="one_vector")
    info = run_info(BlockPartition.elementwise(7), rounds=1, num_clients=N, sampled=N, tracked=N, local_steps=K)
    assert vectors_per_round(alg, info, 7) == 2
    tracked = load_algorithm("fa_nt")
    assert vectors_per_round(tracked, info, 7) == 4
    assert vectors_per_round(tracked, info, 7, derive=True) == 2
    assert vectors_per_round(tracked, info, 7, derive=True, equal_steps=False) == 4
    assert vectors_per_round(load_algorithm("fa_nt", server_lr=0.5), info, 7, derive=True) == 4
    assert vectors_per_round(tracked, replace(info, tracked=N // 2), 7, derive=True) == 3.5
    sent = traffic(alg, info, 7)
    assert (sent.bytes_down, sent.bytes_up) == (4 * 7 * N, 4 * 7 * N)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"server_lr": 0.5}, "algorithm.server_lr: found 0.5, expected 1"),
        ({"weights": "size"}, "algorithm.weights: found size, expected uniform"),
    ],
)
def test_settings_that_do_not_fit_are_errors(keys: dict[str, Any], expected: str) -> None:
    with pytest.raises(UserError, match=expected):
        load_algorithm("fa_nt", form="one_vector", **keys)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (
            {"clients_per_round": 5},
            "clients_per_round: found 5, expected 6, all clients, with algorithm.form=one_vector",
        ),
        ({"tracked_per_round": 5}, "tracked_per_round: found 5, expected 6"),
        ({"schedule": [(range(N), range(N)), (range(N), [0])]}, "expected .* from every client, all of them tracked"),
    ],
)
def test_federations_that_do_not_fit_are_errors(keys: dict[str, Any], expected: str) -> None:
    alg = load_algorithm("fa_nt", form="one_vector")
    with pytest.raises(UserError, match=expected):
        simulate(alg, problem(), rounds=2, local_steps=K, **keys)


def test_unequal_steps_are_an_error_before_the_first_round() -> None:
    alg, task = load_algorithm("fa_nt", form="one_vector"), problem(local_steps=[4, 4, 4, 3, 4, 4])
    with pytest.raises(UserError, match=r"algorithm\.form: found one_vector with a client that takes 3 local steps"):
        round_info(alg, task, rounds=1, sampled=N, tracked=None, local_steps=K)


def test_sites_that_do_not_fit_are_errors() -> None:
    alg, x0 = load_algorithm("fa_nt", form="one_vector"), problem().initial()
    with pytest.raises(UserError, match="clients_per_round: found 2, expected 6"):
        model_info(alg, Point(x0), rounds=1, num_clients=N, sampled=2, local_steps=K)
    info = model_info(alg, Point(x0), rounds=1, num_clients=N, sampled=N, local_steps=K)
    client = Client(Point(x0), alg, info)
    with pytest.raises(UserError, match="takes 3 local steps, expected 4 from every client"):
        client.begin(Server(alg, x0, info).broadcast(0), steps=K - 1)
    optimizer = client.begin(Server(alg, x0, info).broadcast(0), steps=K)
    optimizer.param_groups[0]["lr"] *= 0.5  # as a scheduler of the training loop does
    for k in range(K):
        optimizer.zero_grad()
        slope(client.model, (problem(), 0, 0, k)).backward()  # type: ignore[arg-type, no-untyped-call]
        optimizer.step()
    with pytest.raises(UserError, match=r"algorithm\.form: found one_vector with clients of K eta"):
        client.finish(optimizer)


def test_a_missing_upload_is_an_error() -> None:
    alg, everyone = load_algorithm("fa_nt", lr=0.02, form="one_vector"), list(range(N))
    with pytest.raises(RunError, match=r"round 1: algorithm\.form=one_vector needs the upload of every client"):
        simulate(alg, problem(), rounds=1, local_steps=K, clients_per_round=N, schedule=[(everyone[:4], everyone[:4])])


def test_a_server_waits_for_the_last_upload() -> None:
    alg, task = load_algorithm("fa_nt", lr=0.02, form="one_vector"), problem()
    x0 = task.initial()
    info = model_info(alg, Point(x0), rounds=1, num_clients=N, sampled=N, local_steps=K)
    server, steps = Server(alg, x0, info), [[(task, number, 0, k) for k in range(K)] for number in range(N)]
    sent = [Client(Point(x0), alg, info).fit(server.broadcast(i), steps[i], slope) for i in range(N)]
    for number in range(N - 1):
        server.add(sent[number], client=number)
    with pytest.raises(RunError, match=r"needs the upload of every client, found 5 of 6; set algorithm\.form=tracked"):
        server.aggregate()
    assert server.add(sent[N - 1], client=N - 1) is None
    torch.testing.assert_close(server.aggregate(), history("tracked")[1], **EXACT)
