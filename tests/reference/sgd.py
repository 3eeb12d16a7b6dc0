"""References of the SGD-side methods and of PAdaMFed."""

from __future__ import annotations

import math


def fedavg(run):
    x = run.x0
    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                xi = xi - eta * (g + run.lam * xi)
            d[i] = xi - x
        x = x + run.eta_g * run.mean(d)
        run.history.append(x)


def fedavgm(run):
    beta = run.get("beta", 0.1)
    x, G = run.x0, run.zero
    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                u = beta * g + (1 - beta) * G
                xi = xi - eta * (u + run.lam * xi)
            d[i] = xi - x
        D = run.mean(d)
        G = -D / run.server_rate_sum(sampled, t)
        x = x + run.eta_g * D
        run.history.append(x)
    run.server = {"G": G}


def fedcm(run):
    a = run.get("alpha", 0.1)
    x, Delta = run.x0, run.zero
    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                u = a * g + (1 - a) * Delta
                xi = xi - eta * (u + run.lam * xi)
            d[i] = xi - x
        D = run.mean(d)
        Delta = -D / run.server_rate_sum(sampled, t)
        x = x + run.eta_g * D
        run.history.append(x)
    run.server = {"Delta": Delta}


def scaffold(run):
    x, c, ci = run.x0, run.zero, run.everyone(run.zero)
    for t, sampled, tracked in run.rounds():
        d, change = {}, {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                xi = xi - eta * (g + c - ci[i] + run.lam * xi)
            d[i] = xi - x
            if i in tracked:
                new = ci[i] - c + (x - xi) / run.rate_sum(i, t)
                change[i] = new - ci[i]
                ci[i] = new
        x = x + run.eta_g * run.mean(d)
        c = c + sum(change.values()) / run.N
        run.history.append(x)
    run.server, run.clients = {"c": c}, {"c": ci}


def scaffoldm(run):
    beta = run.get("beta", 0.1)
    x, c, G, ci = run.x0, run.zero, run.zero, run.everyone(run.zero)
    for t, sampled, tracked in run.rounds():
        d, change = {}, {}
        for i in sampled:
            xi, raw = x, []
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                raw.append(g)
                u = beta * (g - ci[i] + c) + (1 - beta) * G
                xi = xi - eta * (u + run.lam * xi)
            d[i] = xi - x
            if i in tracked:
                new = sum(raw) / run.count(i)
                change[i] = new - ci[i]
                ci[i] = new
        D = run.mean(d)
        G = -D / run.server_rate_sum(sampled, t)
        x = x + run.eta_g * D
        c = c + sum(change.values()) / run.N
        run.history.append(x)
    run.server, run.clients = {"c": c, "G": G}, {"c": ci}


def padamfed(run):
    T_total = run.get("total_rounds", run.T_total)
    SK = run.S * run.K
    beta = run.get("beta", min(1, (SK / T_total) ** (1 / 2)))
    gamma = run.get("gamma", SK ** (1 / 4) / T_total ** (3 / 4))
    run.lr = run.get("lr", 1 / (run.K * (SK * T_total) ** (1 / 4)))
    x, c, G, ci = run.x0, run.zero, run.zero, run.everyone(run.zero)
    for t, sampled, tracked in run.rounds():
        d, change = {}, {}
        for i in sampled:
            xi, raw = x, []
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                raw.append(g)
                u = beta * (g - ci[i] + c) + (1 - beta) * G
                norm = float((u * u).sum()) ** 0.5
                xi = xi - eta * ((u / norm if norm > 0 else 0 * u) + run.lam * xi)
            d[i] = xi - x
            if i in tracked:
                new = sum(raw) / run.count(i)
                change[i] = new - ci[i]
                ci[i] = new
        x = x + run.eta_g * (gamma / run.server_rate_sum(sampled, t)) * run.mean(d)
        mean_change = sum(change.values()) / len(change) if change else 0
        G = beta * (mean_change + c) + (1 - beta) * G
        c = c + sum(change.values()) / run.N
        run.history.append(x)
    run.server, run.clients = {"c": c, "G": G}, {"c": ci}


def fedprox(run):
    mu = run.get("mu", 0.01)
    x = run.x0
    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                xi = xi - eta * (g + mu * (xi - x) + run.lam * xi)
            d[i] = xi - x
        x = x + run.eta_g * run.mean(d)
        run.history.append(x)


def moon(run):
    """A client's one sample is represented by the parameters themselves, as in fedllm.QuadraticProblem."""
    mu, T = run.get("mu", 1.0), run.get("temperature", 0.5)
    x, w = run.x0, run.everyone(run.x0)

    def cosine_and_slope(z, other):
        lengths = float((z * z).sum()) ** 0.5, float((other * other).sum()) ** 0.5
        cosine = float((z * other).sum()) / (lengths[0] * lengths[1])
        return cosine, other / (lengths[0] * lengths[1]) - cosine * z / lengths[0] ** 2

    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                near, near_slope = cosine_and_slope(xi, x)
                far, far_slope = cosine_and_slope(xi, w[i])
                drawn = math.exp(near / T) / (math.exp(near / T) + math.exp(far / T))
                contrast = (1 - drawn) * (far_slope - near_slope) / T
                g = run.gradient(xi, i, t, k, plus=mu * contrast)
                xi = xi - eta * (g + run.lam * xi)
            d[i] = xi - x
            w[i] = xi
        x = x + run.eta_g * run.mean(d)
        run.history.append(x)
    run.clients = {"w": w}


def feddyn(run):
    alpha = run.get("alpha", 0.1)
    x, h, hi = run.x0, run.zero, run.everyone(run.zero)
    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                xi = xi - eta * (g - hi[i] + alpha * (xi - x) + run.lam * xi)
            d[i] = xi - x
        for i in sampled:
            hi[i] = hi[i] - alpha * d[i]
        h = h - alpha * sum(d.values()) / run.N
        x = x + run.eta_g * run.mean(d) - h / alpha
        run.history.append(x)
    run.server, run.clients = {"h": h}, {"h": hi}


def qfedavg(run):
    q, x = run.get("q", 1.0), run.x0
    L = 1 / run.lr
    for t, sampled, _ in run.rounds():
        Delta, h = {}, {}
        for i in sampled:
            F = run.loss(x, i) + 1e-10
            xi = x
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                xi = xi - eta * (g + run.lam * xi)
            Dw = L * (x - xi)
            Delta[i] = F**q * Dw
            h[i] = q * F ** (q - 1) * float((Dw * Dw).sum()) + L * F**q
        x = x - run.eta_g * run.mean(Delta) / run.mean(h)
        run.history.append(x)
