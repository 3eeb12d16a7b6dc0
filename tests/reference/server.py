"""References of the server-side adaptive methods, whose clients do plain SGD."""

from __future__ import annotations

from .script import divide, maximum


def fedadam(run):
    (b1, b2), tau = run.get("betas", (0.9, 0.99)), run.get("tau", 1e-3)
    x, m, v = run.x0, run.zero, run.zero
    for t, sampled, _ in run.rounds():
        D = run.mean(sgd_updates(run, x, sampled, t))
        m = b1 * m + (1 - b1) * D
        v = b2 * v + (1 - b2) * D**2
        if run.get("bias_correction", False):
            mh, vh = m / (1 - b1 ** (t + 1)), v / (1 - b2 ** (t + 1))
            x = x + run.eta_g * mh / (vh**0.5 + tau)
        else:
            x = x + run.eta_g * m / (v**0.5 + tau)
        run.history.append(x)
    run.server = {"m": m, "v": v}


def fedams(run):
    (b1, b2), eps, floor = run.get("betas", (0.9, 0.99)), run.get("eps", 1e-8), run.get("floor", 1e-3)
    x, m, v, vhat = run.x0, run.zero, run.zero, run.zero
    for t, sampled, _ in run.rounds():
        D = run.mean(sgd_updates(run, x, sampled, t))
        m = b1 * m + (1 - b1) * D
        v = b2 * v + (1 - b2) * D**2
        vhat = maximum(maximum(vhat, v), run.zero + floor)
        if run.get("option", 2) == 1:
            x = x + run.eta_g * m / maximum(vhat, run.zero + eps) ** 0.5
        else:
            x = x + run.eta_g * divide(m, vhat**0.5, eps)
        run.history.append(x)
    run.server = {"m": m, "v": v, "vhat": vhat}


def fedyogi(run):
    (b1, b2), tau = run.get("betas", (0.9, 0.99)), run.get("tau", 1e-3)
    x, m, v = run.x0, run.zero, run.zero + tau**2
    for t, sampled, _ in run.rounds():
        D = run.mean(sgd_updates(run, x, sampled, t))
        m = b1 * m + (1 - b1) * D
        v = v.new_tensor(
            [a - (1 - b2) * q * ((a > q) - (a < q)) for a, q in zip(v.tolist(), (D**2).tolist(), strict=True)]
        )
        x = x + run.eta_g * m / (v**0.5 + tau)
        run.history.append(x)
    run.server = {"m": m, "v": v}


def fedadagrad(run):
    b1, tau = run.get("beta", 0.0), run.get("tau", 1e-3)
    x, m, v = run.x0, run.zero, run.zero + tau**2
    for t, sampled, _ in run.rounds():
        D = run.mean(sgd_updates(run, x, sampled, t))
        m = b1 * m + (1 - b1) * D
        v = v + D**2
        x = x + run.eta_g * m / (v**0.5 + tau)
        run.history.append(x)
    run.server = {"m": m, "v": v}


def sgd_updates(run, x, sampled, t):
    """{client: d_i} after plain local SGD."""
    d = {}
    for i in sampled:
        xi = x
        for k, eta in run.steps(i, t):
            xi = xi - eta * (run.gradient(xi, i, t, k) + run.lam * xi)
        d[i] = xi - x
    return d
