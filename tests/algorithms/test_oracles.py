"""The oracles of ALGORITHMS.md: what each algorithm must give where the answer is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedllm import Problem, QuadraticProblem, load_algorithm, simulate
from fedllm.common.errors import UserError

N, DIM = 5, 4
START = torch.tensor([0.7, -1.2, 0.4, 2.0], dtype=torch.float64)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def different_clients(**options: object) -> QuadraticProblem:
    base = QuadraticProblem.random(N, DIM, seed=1, spread=2.0)
    return QuadraticProblem(base.H, base.a, x0=START, **options)  # type: ignore[arg-type]


def identical_clients() -> QuadraticProblem:
    base = QuadraticProblem.random(1, DIM, seed=1, spread=2.0)
    return QuadraticProblem(base.H.expand(N, -1, -1), base.a.expand(N, -1), x0=START)


def flat_problem(num_clients: int = 2) -> QuadraticProblem:
    """Every gradient is zero."""
    zero = torch.zeros(num_clients, DIM, dtype=torch.float64)
    return QuadraticProblem(torch.zeros(num_clients, DIM, DIM, dtype=torch.float64), zero, x0=START)


def single_machine(
    make: Callable[[list[Tensor]], torch.optim.Optimizer], steps: int, scale: float = 1.0, start: Tensor = START
) -> Tensor:
    """x after `steps` steps of a torch optimizer on scale times client 0's objective of identical_clients()."""
    problem = identical_clients()
    x = start.clone().requires_grad_()
    optimizer = make([x])
    for _ in range(steps):
        x.grad = scale * problem.full_gradient(x.detach(), [0])[0]
        optimizer.step()
    return x.detach()


class Recorded(QuadraticProblem):
    """Keeps every gradient it hands out: seen[round, client] = [g of step 1, g of step 2, ...]."""

    seen: dict[tuple[int, int], list[Tensor]]

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        self.seen = {} if (round, step) == (0, 0) and not hasattr(self, "seen") else self.seen
        g = super().gradient(X, clients, round, step)
        for row, client in enumerate(clients):
            self.seen.setdefault((round, int(client)), []).append(g[row].clone())
        return g


# Oracle 1: the optimum.


@pytest.mark.parametrize(("name", "keys"), [("scaffold", {}), ("scaffoldm", {"beta": 0.5})])
@pytest.mark.slow
def test_scaffold_reaches_the_optimum(name: str, keys: dict) -> None:
    problem = different_clients()
    result = simulate(load_algorithm(name, lr=0.02, **keys), problem, rounds=400, local_steps=5)
    close(result.x, problem.optimum(), 1e-10)
    close(result.clients["c"], problem.full_gradient(problem.optimum(), range(N)), 1e-9)


@pytest.mark.slow
def test_scaffold_reaches_the_optimum_under_partial_participation() -> None:
    problem = different_clients()
    alg = load_algorithm("scaffold", lr=0.02)
    close(simulate(alg, problem, rounds=900, local_steps=5, clients_per_round=3).x, problem.optimum(), 1e-10)


@pytest.mark.slow
def test_fedavg_reaches_the_biased_point_of_its_own_equation() -> None:
    """After K exact steps x_i = a_i + P_i (x - a_i), P_i = (I - eta H_i)^K; at rest mean_i (I-P_i)(x-a_i) = 0."""
    problem, eta = different_clients(), 0.1
    for K in (1, 5):
        P = torch.linalg.matrix_power(torch.eye(DIM, dtype=torch.float64) - eta * problem.H, K)
        A = torch.eye(DIM, dtype=torch.float64) - P
        rest = torch.linalg.solve(A.mean(0), (A @ problem.a[..., None]).mean(0)[..., 0])
        found = simulate(load_algorithm("fedavg", lr=eta), problem, rounds=400, local_steps=K).x
        close(found, rest, 1e-10)
        bias = (found - problem.optimum()).norm()
        assert bias < 1e-9 if K == 1 else bias > 1e-2


@pytest.mark.parametrize("name", ["fadamgc", "fadamgc_b"])
def test_fadamgc_stands_still_at_the_optimum_where_localadam_leaves_it(name: str) -> None:
    """eps = 0.1, since with 1e-8 the optimum is an unstable rest of any Adam whose v is 0: rounding is blown up."""
    problem = different_clients()
    optimum = problem.optimum()

    def drift(name: str, **keys: object) -> float:
        alg = load_algorithm(name, lr=1e-2, eps=0.1, **keys)
        history = simulate(alg, problem, rounds=20, local_steps=5, x0=optimum).history
        return float((history - optimum).norm(dim=1).max())

    assert drift(name, tracking_init="gradient") < 1e-12
    assert drift("localadam") > 1e-2


@pytest.mark.parametrize("local", ["adam", "rmsprop", "adamw"])
def test_first_step_of_fadamgc_at_the_optimum_is_nought(local: str) -> None:
    problem = different_clients()
    alg = load_algorithm("fadamgc", lr=1e-2, local=local, tracking_init="gradient")
    found = simulate(alg, problem, rounds=1, local_steps=1, x0=problem.optimum()).x
    assert float((found - problem.optimum()).norm()) < 1e-8


@pytest.mark.slow
def test_fadamgc_reaches_the_optimum_and_localadam_does_not() -> None:
    problem = different_clients()
    corrected, plain = (
        simulate(load_algorithm(name, lr=0.1), problem, rounds=200, local_steps=5).x
        for name in ("fadamgc", "localadam")
    )
    close(corrected, problem.optimum(), 1e-10)
    assert float((plain - problem.optimum()).norm()) > 1


# Oracle 2: identical clients, everybody, exact gradients: the single-machine optimizer.


@pytest.mark.parametrize("name", ["fedavg", "scaffold"])
def test_equals_sgd(name: str) -> None:
    found = simulate(load_algorithm(name, lr=0.05, weight_decay=0.1), identical_clients(), rounds=4, local_steps=3).x
    close(found, single_machine(lambda x: torch.optim.SGD(x, lr=0.05, weight_decay=0.1), 12))


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("localadamw", {}),
        ("fedadamw", {"blocks": "elementwise"}),
        ("fedadamw", {"bias_time": "global"}),
    ],
)
def test_one_round_equals_adamw(name: str, keys: dict) -> None:
    found = simulate(load_algorithm(name, lr=0.05, **keys), identical_clients(), rounds=1, local_steps=25).x
    close(found, single_machine(lambda x: torch.optim.AdamW(x, lr=0.05), 25))


def test_fedadamw_over_rounds_equals_adamw_without_first_moment() -> None:
    """With b1 = 0 nothing but v lives on between rounds, and elementwise vbar and t' = t K + k carry it over."""
    alg = load_algorithm("fedadamw", lr=0.05, betas=[0, 0.999], alpha=0, blocks="elementwise")
    found = simulate(alg, identical_clients(), rounds=5, local_steps=4).x
    close(found, single_machine(lambda x: torch.optim.AdamW(x, lr=0.05, betas=(0.0, 0.999)), 20))


def test_fedadamw_with_coupled_decay_equals_adam_with_l2() -> None:
    alg = load_algorithm("fedadamw", lr=0.05, weight_decay=0.1, decay="coupled")
    found = simulate(alg, identical_clients(), rounds=1, local_steps=25).x
    close(found, single_machine(lambda x: torch.optim.Adam(x, lr=0.05, betas=(0.9, 0.999), weight_decay=0.1), 25))


@pytest.mark.parametrize("amsgrad", [False, True])
def test_fw_localadam_equals_adam_started_anew_each_round(amsgrad: bool) -> None:
    """FW's "Local Adam" (sec. Q2): torch.optim.Adam with L2 decay, one optimizer a round."""
    common = {"lr": 0.05, "betas": (0.9, 0.999), "weight_decay": 0.1, "amsgrad": amsgrad}
    options = {"second_moment": "reset", "bias_correction": "local", "decay": "coupled"}
    history = [START]
    for _ in range(4):
        history.append(single_machine(lambda x: torch.optim.Adam(x, **common), 7, start=history[-1]))
    found = simulate(load_algorithm("localadam", **common, **options), identical_clients(), rounds=4, local_steps=7)
    close(found.history, torch.stack(history))


def test_bias_correction_by_the_local_step_needs_a_second_moment_that_is_reset() -> None:
    with pytest.raises(UserError, match="bias_correction: found local, expected none while second_moment is persist"):
        load_algorithm("localadam", bias_correction="local")


class ConstantGradients(QuadraticProblem):
    """Every gradient is START."""

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        return START.expand_as(X).clone()


@pytest.mark.parametrize("shared", ["m", "v", "vm", "mean_v"])
def test_aggregated_moments_keep_the_length_of_a_step(shared: str) -> None:
    """FW Alg. 2, line 12: under constant gradients a round is as long as without aggregation, within 5%."""
    base = flat_problem()
    problem = ConstantGradients(base.H, base.a, x0=START)

    def lengths(**keys: object) -> Tensor:
        alg = load_algorithm("localadamw", lr=1e-3, weight_decay=0.0, **keys)
        return simulate(alg, problem, rounds=6, local_steps=5).history.diff(dim=0).abs()

    longer = lengths(aggregate=shared) / lengths()
    torch.testing.assert_close(longer, torch.ones_like(longer), rtol=0.05, atol=0.0)


def test_adamw_of_fadamgc_is_fadamgc_with_decoupled_decay() -> None:
    """GC App. J: "operates identically to FAdamGC, the only difference being decoupled weight decay"."""
    problem = different_clients(noise=0.3)

    def history(rounds: int = 4, local_steps: int = 3, **keys: object) -> Tensor:
        alg = load_algorithm("fadamgc", lr=0.05, **keys)
        return simulate(alg, problem, rounds=rounds, local_steps=local_steps).history

    assert torch.equal(history(local="adamw"), history())
    step = history(1, 1, local="adamw", weight_decay=0.2)[1] - history(1, 1)[1]
    close(step, -0.05 * 0.2 * START)


def test_fadamgc_with_rmsprop_equals_rmsprop() -> None:
    """v_i persists and there is no other memory, so the rounds leave no trace."""
    alg = load_algorithm("fadamgc", lr=0.05, local="rmsprop", betas=[0.9, 0.99])
    found = simulate(alg, identical_clients(), rounds=5, local_steps=4).x
    close(found, single_machine(lambda x: torch.optim.RMSprop(x, lr=0.05, alpha=0.99), 20))


def test_fedprox_descends_on_the_proximal_objective() -> None:
    """f_i + mu/2 |x - x0|^2 is quadratic: H + mu I, with its minimiser at (H + mu I)^-1 (H a + mu x0)."""
    problem, mu, eye = different_clients(), 0.4, torch.eye(DIM, dtype=torch.float64)
    H = problem.H + mu * eye
    a = torch.linalg.solve(H, (problem.H @ problem.a[..., None])[..., 0] + mu * START)
    found = simulate(load_algorithm("fedprox", lr=0.05, mu=mu), problem, rounds=1, local_steps=9).x
    near = QuadraticProblem(H, a, x0=START)
    close(found, simulate(load_algorithm("fedavg", lr=0.05), near, rounds=1, local_steps=9).x)


def test_fedprox_without_its_term_is_fedavg() -> None:
    problem = different_clients(noise=0.3, sizes=[1, 5, 2, 3, 9])
    found = simulate(load_algorithm("fedprox", lr=0.05, mu=0), problem, rounds=5, local_steps=4).history
    assert torch.equal(found, simulate(load_algorithm("fedavg", lr=0.05), problem, rounds=5, local_steps=4).history)


@pytest.mark.parametrize("sampled", [N, 2])
@pytest.mark.slow
def test_feddyn_reaches_the_optimum(sampled: int) -> None:
    problem = different_clients()
    alg = load_algorithm("feddyn", lr=0.1, alpha=1.0)
    result = simulate(alg, problem, rounds=400, local_steps=10, clients_per_round=sampled)
    close(result.x, problem.optimum(), 1e-8)
    close(result.clients["h"], problem.full_gradient(problem.optimum(), range(N)), 1e-7)
    close(result.server["h"], result.clients["h"].mean(0), 1e-10)


@pytest.mark.parametrize("sampled", [N, 2])
def test_qfedavg_with_q_zero_is_fedavg(sampled: int) -> None:
    problem = different_clients()
    found = [
        simulate(
            load_algorithm(name, lr=0.1, weights="uniform", **keys),
            problem,
            rounds=5,
            local_steps=3,
            clients_per_round=sampled,
        )
        for name, keys in (("qfedavg", {"q": 0}), ("fedavg", {}))
    ]
    assert torch.equal(found[0].history, found[1].history)


def test_a_problem_without_losses_is_refused() -> None:
    class Lossless(QuadraticProblem):
        loss_and_gradient = Problem.loss_and_gradient

    base = different_clients()
    with pytest.raises(UserError, match=r"Lossless.loss_and_gradient: gives no loss, but QFedAvg reads the loss of"):
        simulate(load_algorithm("qfedavg"), Lossless(base.H, base.a), rounds=1, local_steps=1)


def test_a_higher_q_makes_the_losses_more_even() -> None:
    """The paper's claim: the spread of the clients' losses falls with q, and that of the worst client falls."""
    problem = different_clients()
    spreads, worst = [], []
    for q in (0.0, 1.0, 5.0):
        x = simulate(load_algorithm("qfedavg", lr=0.1, q=q), problem, rounds=300, local_steps=1).x
        losses = problem.loss_and_gradient(x.expand(N, -1), range(N), 0, 0)[0]
        spreads.append(float(losses.std()))
        worst.append(float(losses.max()))
    assert spreads[0] > spreads[1] > spreads[2]
    assert worst[0] > worst[1] > worst[2]


def test_fedadagrad_of_one_local_step_equals_adagrad() -> None:
    """D = -eta g, so the server's Adagrad is Adagrad on eta f, from an accumulator of tau^2."""
    alg = load_algorithm("fedadagrad", lr=0.3, server_lr=0.05, tau=1e-2)
    found = simulate(alg, identical_clients(), rounds=30, local_steps=1).x
    make = {"lr": 0.05, "eps": 1e-2, "initial_accumulator_value": 1e-4}
    close(found, single_machine(lambda x: torch.optim.Adagrad(x, **make), 30, scale=0.3))


def test_fedyogi_of_one_round() -> None:
    """v = tau^2 -+ (1-b2) D^2, downwards where tau^2 is above D^2."""
    tau, b1, b2 = 0.3, 0.9, 0.8
    alg = load_algorithm("fedyogi", lr=0.1, server_lr=0.5, betas=[b1, b2], tau=tau)
    problem = different_clients()
    D = -0.1 * problem.full_gradient(START, range(N)).mean(0)
    assert {True, False} == set((D.abs() > tau).tolist())
    v = torch.where(D.abs() > tau, tau**2 + (1 - b2) * D**2, tau**2 - (1 - b2) * D**2)
    found = simulate(alg, problem, rounds=1, local_steps=1).x
    close(found, START + 0.5 * (1 - b1) * D / (v.sqrt() + tau))


def test_fedadam_of_one_local_step_equals_adam() -> None:
    """D = -eta g, so the server's corrected Adam is Adam on eta f with eps = tau."""
    alg = load_algorithm("fedadam", lr=0.3, server_lr=0.05, betas=[0.9, 0.99], tau=1e-3, bias_correction=True)
    found = simulate(alg, identical_clients(), rounds=30, local_steps=1).x
    close(found, single_machine(lambda x: torch.optim.Adam(x, lr=0.05, betas=(0.9, 0.99), eps=1e-3), 30, scale=0.3))


@pytest.mark.parametrize(("name", "key"), [("fedavgm", "beta"), ("fedcm", "alpha"), ("scaffoldm", "beta")])
def test_client_momentum_of_one_local_step_equals_heavy_ball(name: str, key: str) -> None:
    """With K = 1, G is the last u: u = a g + (1-a) u, which is a times torch's buffer b = g + (1-a) b."""
    found = simulate(load_algorithm(name, lr=0.3, **{key: 0.2}), identical_clients(), rounds=30, local_steps=1).x
    close(found, single_machine(lambda x: torch.optim.SGD(x, lr=0.3 * 0.2, momentum=0.8), 30))


@pytest.mark.parametrize("name", ["fadamgc", "fa_nt"])
def test_identical_clients_need_no_correction(name: str) -> None:
    problem = identical_clients()
    found = simulate(load_algorithm(name, lr=0.05), problem, rounds=6, local_steps=3)
    close(found.history, simulate(load_algorithm("localadam", lr=0.05), problem, rounds=6, local_steps=3).history)


# Oracle 3: the tracking invariant, and the length of FAdamGC's first step.

TRACKING = [
    ("scaffold", "c", {}),
    ("scaffoldm", "c", {}),
    ("padamfed", "c", {}),
    ("fa_nt", "y", {}),
    ("fadamgc", "y", {}),
    ("fadamgc", "y", {"tracking_init": "gradient"}),
    ("fadamgc_b", "y", {"tracking_init": "gradient"}),
]


@st.composite
def participation(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    clients = st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)
    sampled = draw(st.lists(clients, min_size=1, max_size=4))
    return [(chosen, chosen[: draw(st.integers(0, len(chosen)))]) for chosen in sampled]


@pytest.mark.parametrize(("name", "vector", "keys"), TRACKING)
@settings(max_examples=15, deadline=None)
@given(who=participation(), seed=st.integers(0, 9))
def test_server_tracks_the_mean_of_all_clients(name: str, vector: str, keys: dict, who: list, seed: int) -> None:
    problem = different_clients(noise=0.3, seed=seed, local_steps=[1, 2, 3, 1, 2])
    result = simulate(load_algorithm(name, lr=0.05, **keys), problem, rounds=len(who), local_steps=3, schedule=who)
    close(result.server[vector], result.clients[vector].mean(0))
    tracked = {client for _, some in who for client in some}
    moved = {i for i in range(N) if not torch.equal(result.clients[vector][i], start_of(problem, keys, vector, i))}
    assert moved == tracked


def start_of(problem: QuadraticProblem, keys: dict, vector: str, client: int) -> Tensor:
    if keys.get("tracking_init") == "gradient":
        return problem.full_gradient(START, [client])[0]
    return torch.zeros(DIM, dtype=torch.float64)


@pytest.mark.parametrize("name", ["fadamgc", "fadamgc_b", "localadam", "fa_nt"])
def test_first_step_of_a_fresh_client(name: str) -> None:
    alg = load_algorithm(name, lr=0.05, betas=[0.8, 0.96], eps=0)
    result = simulate(alg, different_clients(), rounds=1, local_steps=1, clients_per_round=1)
    close((result.x - START).abs(), torch.full_like(START, 0.05 * (1 - 0.8) / math.sqrt(1 - 0.96)))


def test_tracked_vector_is_the_mean_raw_gradient() -> None:
    base = different_clients(noise=0.3)
    for name, vector in [("fadamgc", "y"), ("fadamgc_b", "y"), ("scaffoldm", "c"), ("padamfed", "c")]:
        problem = Recorded(base.H, base.a, x0=START, noise=0.3, local_steps=[1, 2, 3, 1, 2])
        result = simulate(load_algorithm(name, lr=0.05), problem, rounds=3, local_steps=3)
        last = torch.stack([torch.stack(problem.seen[2, i]).mean(0) for i in range(N)])
        close(result.clients[vector], last)


# Oracle 4: FA-NT.


def test_fa_nt_tracks_the_mean_adam_direction() -> None:
    b1, b2, eps = 0.9, 0.99, 1e-8
    base = different_clients()
    problem = Recorded(base.H, base.a, x0=START, noise=0.3, local_steps=[1, 2, 3, 1, 2])
    who = [([0, 1, 2], [1, 2]), ([1, 2, 4], [2, 4]), ([2, 3, 0], [2, 0])]
    result = simulate(load_algorithm("fa_nt", lr=0.05), problem, rounds=3, local_steps=3, schedule=who)
    last = {0: 2, 1: 0, 2: 2, 4: 1}  # the round in which each client was last tracked; client 3 never was
    for client in range(N):
        v = vhat = mean = torch.zeros_like(START)
        for t, (sampled, _) in enumerate(who):
            directions, m = [], torch.zeros_like(START)
            for g in problem.seen[t, client] if client in sampled else []:
                m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
                vhat = torch.maximum(vhat, v)
                directions.append(m / (vhat.sqrt() + eps))
            if last.get(client) == t:
                mean = torch.stack(directions).mean(0)
        close(result.clients["y"][client], mean, 1e-11)


def test_fa_nt_one_vector_form() -> None:
    """With S = N and eta_g = 1, z_i = y - y_i obeys z_i' = z_i + (x_i - x')/(K eta): GC eq. 65 and 66."""
    problem, eta, K = different_clients(), 0.05, 3
    b1, b2, eps = 0.9, 0.99, 1e-8
    x, z = START, torch.zeros(N, DIM, dtype=torch.float64)
    v = vhat = torch.zeros_like(z)
    history = [x]
    for t in range(6):
        X, m = x.expand(N, -1), torch.zeros_like(z)
        for k in range(K):
            g = problem.gradient(X, range(N), t, k)
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            vhat = torch.maximum(vhat, v)
            X = X - eta * (m / (vhat.sqrt() + eps) + z)
        x = X.mean(0)
        z = z + (X - x) / (K * eta)
        history.append(x)
    found = simulate(load_algorithm("fa_nt", lr=eta), problem, rounds=6, local_steps=K)
    close(found.history, torch.stack(history), 1e-11)
    close(found.server["y"] - found.clients["y"], z, 1e-10)


# Oracles 5 to 8: single steps in closed form.


def test_fedadamw_without_gradient_is_pure_decay() -> None:
    alg = load_algorithm("fedadamw", lr=0.1, weight_decay=0.3)
    close(simulate(alg, flat_problem(), rounds=1, local_steps=4).x, (1 - 0.1 * 0.3) ** 4 * START)


def test_decoupled_decay_of_every_algorithm_is_pure_decay() -> None:
    for name in ("fedavg", "fedavgm", "fedcm", "localadam", "localadamw", "fedlada", "fadamgc", "fadamgc_b", "fa_nt"):
        alg = load_algorithm(name, lr=0.1, weight_decay=0.3)
        close(simulate(alg, flat_problem(), rounds=1, local_steps=4).x, (1 - 0.1 * 0.3) ** 4 * START)


def test_fedadam_first_round() -> None:
    problem, (b1, b2), tau, eta_g = different_clients(), (0.9, 0.99), 0.01, 0.5
    D = simulate(load_algorithm("fedavg", lr=0.05), problem, rounds=1, local_steps=3).x - START
    alg = load_algorithm("fedadam", lr=0.05, server_lr=eta_g, betas=[b1, b2], tau=tau)
    found = simulate(alg, problem, rounds=1, local_steps=3).x
    close(found, START + eta_g * (1 - b1) * D / (math.sqrt(1 - b2) * D.abs() + tau))


def test_fedadam_second_moment_is_of_the_update_not_of_the_momentum() -> None:
    """Two equal rounds of D (one linear step each): v = (1-b2)(1+b2) D^2, whatever m is."""
    slope = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    class Linear(QuadraticProblem):
        def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
            return slope.expand_as(X)

    flat = flat_problem()
    problem = Linear(flat.H, flat.a, x0=START)
    result = simulate(load_algorithm("fedadam", lr=0.1, betas=[0.9, 0.99]), problem, rounds=2, local_steps=1)
    close(result.server["v"], (1 - 0.99) * (1 + 0.99) * (0.1 * slope) ** 2)
    close(result.server["m"], (1 - 0.9) * (1 + 0.9) * (-0.1 * slope))


@pytest.mark.parametrize("option", [1, 2])
def test_fedams_without_update_stands_still(option: int) -> None:
    result = simulate(load_algorithm("fedams", option=option), flat_problem(), rounds=3, local_steps=2)
    assert torch.equal(result.x, START)
    assert torch.equal(result.server["vhat"], torch.full_like(START, 1e-3))


def test_fedams_floor_bounds_the_first_step() -> None:
    """|D| is small against the floor, so the step is (1-b1) D/(sqrt(floor)+eps), and under option 1 without the eps."""
    problem, eta = different_clients(), 1e-4
    D = simulate(load_algorithm("fedavg", lr=eta), problem, rounds=1, local_steps=2).x - START
    for option, root in [(2, math.sqrt(0.04) + 0.01), (1, math.sqrt(0.04))]:
        alg = load_algorithm("fedams", lr=eta, floor=0.04, eps=0.01, option=option)
        close(simulate(alg, problem, rounds=1, local_steps=2).x, START + (1 - 0.9) * D / root)


def test_fedlada_first_step_is_a_signed_one() -> None:
    """b1 = b2 = 0: vhat = max(eps^2, g^2), so the first step is a eta g/max(|g|, eps)."""
    problem = different_clients()
    g = problem.full_gradient(START, [0])[0]
    eps = float(g.abs().median())
    alg = load_algorithm("fedlada", lr=0.05, betas=[0, 0], eps=eps, alpha=0.7)
    found = simulate(alg, problem, rounds=1, local_steps=1, schedule=[([0], [])])
    close(found.x, START - 0.05 * 0.7 * g / g.abs().clamp(min=eps))
    close(found.server["ga"], 0.7 * g / g.abs().clamp(min=eps))
    close(found.server["v"], torch.maximum(g**2, torch.full_like(g, eps**2)))


@pytest.mark.parametrize(("server_lr", "keys"), [(1.0, {}), (0.5, {"gamma": 0.3, "schedule": "cosine_steps"})])
def test_padamfed_moves_by_at_most_gamma(server_lr: float, keys: dict) -> None:
    T_total, S, K = 20, 3, 4
    problem = different_clients(noise=1.0, local_steps=[4, 2, 3, 1, 4])
    alg = load_algorithm("padamfed", server_lr=server_lr, **keys)
    history = simulate(alg, problem, rounds=T_total, local_steps=K, clients_per_round=S).history
    gamma = keys.get("gamma", (S * K) ** 0.25 / T_total**0.75)
    moved = history.diff(dim=0).norm(dim=1)
    assert float(moved.max()) <= server_lr * gamma * (1 + 1e-12)
    assert float(moved.max()) > server_lr * gamma / 10


def test_padamfed_of_one_identical_step_moves_by_exactly_gamma() -> None:
    history = simulate(load_algorithm("padamfed", gamma=0.2), identical_clients(), rounds=5, local_steps=1).history
    close(history.diff(dim=0).norm(dim=1), torch.full((5,), 0.2, dtype=torch.float64))


def test_padamfed_rates_are_free_of_the_problem() -> None:
    """beta = min(1, sqrt(SK/T)), gamma = (SK)^(1/4)/T^(3/4), eta = 1/(K (SKT)^(1/4)); one client, one step, T = 1:
    beta = gamma = eta = 1, so x' = x - g/||g||."""
    problem = different_clients()
    g = problem.full_gradient(START, [2])[0]
    found = simulate(load_algorithm("padamfed"), problem, rounds=1, local_steps=1, schedule=[([2], [2])])
    close(found.x, START - g / g.norm())
    close(found.server["G"], g)
    close(found.server["c"], g / N)


# Oracle 9: first rounds that must agree.


@pytest.mark.parametrize("name", ["fadamgc", "fa_nt"])
def test_first_round_equals_localadam(name: str) -> None:
    problem = different_clients(noise=0.3)
    found = simulate(load_algorithm(name, lr=0.05), problem, rounds=2, local_steps=3).history
    expected = simulate(load_algorithm("localadam", lr=0.05), problem, rounds=2, local_steps=3).history
    close(found[1], expected[1])
    assert float((found[2] - expected[2]).abs().max()) > 1e-6


def test_fedadamw_stripped_equals_localadamw() -> None:
    problem = different_clients(noise=0.3)
    stripped = load_algorithm("fedadamw", lr=0.05, alpha=0, aggregate_v=False)
    found = simulate(stripped, problem, rounds=4, local_steps=3).history
    close(found, simulate(load_algorithm("localadamw", lr=0.05), problem, rounds=4, local_steps=3).history)
    whole = simulate(load_algorithm("fedadamw", lr=0.05), problem, rounds=4, local_steps=3).history
    close(whole[1], found[1])
    assert float((whole[2] - found[2]).abs().max()) > 1e-4


def test_scaffold_of_one_step_with_everybody_is_fedavg() -> None:
    problem = different_clients(noise=0.3)
    found = simulate(load_algorithm("scaffold", lr=0.05), problem, rounds=5, local_steps=1).history
    close(found, simulate(load_algorithm("fedavg", lr=0.05), problem, rounds=5, local_steps=1).history)


# Schedules: what divides by K eta must divide by the sum of the rates really used.


@pytest.mark.parametrize("schedule", ["constant", "cosine_rounds", "cosine_steps", "linear"])
@pytest.mark.parametrize(("name", "vector"), [("fedavgm", "G"), ("fedcm", "Delta"), ("scaffoldm", "G")])
def test_global_direction_is_exact_under_any_schedule(schedule: str, name: str, vector: str) -> None:
    """One client with a constant gradient g and weight 1 on it: the mean direction is g whatever the rates were."""
    flat = flat_problem(1)
    slope = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=torch.float64)

    class Linear(QuadraticProblem):
        def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
            return slope.expand_as(X)

    keys = {"alpha": 1.0} if name == "fedcm" else {"beta": 1.0}
    alg = load_algorithm(name, lr=0.1, schedule=schedule, warmup_rounds=2, **keys)
    result = simulate(alg, Linear(flat.H, flat.a, x0=START), rounds=3, local_steps=4)
    close(result.server[vector], slope)


def test_rates_of_every_schedule() -> None:
    def used(schedule: str, warmup: int = 0) -> list[float]:
        """Rates of 4 rounds of 2 steps, read off a problem whose gradient is minus one."""
        problem = flat_problem(1)
        seen: list[float] = []

        class Unit(QuadraticProblem):
            def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
                seen.append(float(X[0, 0]))
                return -torch.ones_like(X)

        alg = load_algorithm("fedavg", lr=0.8, schedule=schedule, warmup_rounds=warmup)
        last = simulate(alg, Unit(problem.H, problem.a), rounds=4, local_steps=2).x[0]
        return [after - before for before, after in zip(seen, [*seen[1:], float(last)], strict=True)]

    def twice(rates: list[float]) -> list[float]:
        return [rate for rate in rates for _ in range(2)]

    assert used("constant") == pytest.approx([0.8] * 8)
    assert used("constant", warmup=3) == pytest.approx(twice([0.8 / 3, 1.6 / 3, 0.8, 0.8]))
    assert used("linear") == pytest.approx(twice([0.8, 0.6, 0.4, 0.2]))
    cosine = [0.4 * (1 + math.cos(math.pi * t / 4)) for t in range(4)]
    assert used("cosine_rounds") == pytest.approx(twice(cosine))
    assert used("cosine_steps") == pytest.approx([0.8, 0.4] * 4)
