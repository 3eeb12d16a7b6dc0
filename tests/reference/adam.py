"""References of the client-side adaptive methods."""

from __future__ import annotations

from .script import divide, maximum


def localadam(run):
    (b1, b2), eps = run.get("betas", (0.9, 0.99)), run.get("eps", 1e-8)
    persist = run.get("second_moment", "persist") == "persist"
    amsgrad, corrected = run.get("amsgrad", True), run.get("bias_correction", "none") == "local"
    coupled = run.get("decay", "decoupled") == "coupled"
    x, v, vhat = run.x0, run.everyone(run.zero), run.everyone(run.zero)
    for t, sampled, _ in run.rounds():
        d = {}
        for i in sampled:
            xi, m = x, run.zero
            vi, vhi = (v[i], vhat[i]) if persist else (run.zero, run.zero)
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                if coupled:
                    g = g + run.lam * xi
                m = b1 * m + (1 - b1) * g
                vi = b2 * vi + (1 - b2) * g**2
                vhi = maximum(vhi, vi)
                mh, vh = m, vhi if amsgrad else vi
                if corrected:
                    mh, vh = mh / (1 - b1**k), vh / (1 - b2**k)
                xi = xi - eta * (divide(mh, vh**0.5, eps) + (0 if coupled else run.lam * xi))
            d[i] = xi - x
            v[i], vhat[i] = vi, vhi
        x = x + run.eta_g * run.mean(d)
        run.history.append(x)
    kept = {"v": v, "vhat": vhat} if amsgrad else {"v": v}
    run.clients = kept if persist else {}


def localadamw(run):
    (b1, b2), eps = run.get("betas", (0.9, 0.999)), run.get("eps", 1e-8)
    lam, aggregate = run.get("weight_decay", 0.01), run.get("aggregate", "none")
    x, m0, v0 = run.x0, run.zero, run.zero
    for t, sampled, _ in run.rounds():
        d, last_m, last_v = {}, {}, {}
        for i in sampled:
            xi, m, v = x, m0, v0
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g**2
                whole = t * run.K + k
                mh = m / (1 - b1 ** (whole if aggregate in ("m", "vm") else k))
                vh = v / (1 - b2 ** (whole if aggregate in ("v", "vm", "mean_v") else k))
                xi = xi - eta * (divide(mh, vh**0.5, eps) + lam * xi)
            d[i], last_m[i], last_v[i] = xi - x, m, v
        x = x + run.eta_g * run.mean(d)
        if aggregate == "m":
            m0 = run.mean(last_m)
            run.server = {"m": m0}
        elif aggregate == "v":
            v0 = run.mean(last_v)
            run.server = {"v": v0}
        elif aggregate == "vm":
            m0, v0 = run.mean(last_m), run.mean(last_v)
            run.server = {"m": m0, "v": v0}
        elif aggregate == "mean_v":
            means = run.mean({i: run.block_means(last_v[i]) for i in sampled})
            v0 = run.expand(means)
            run.server = {"v": means}
        run.history.append(x)


def fadamgc(run):
    (b1, b2), eps, local = run.get("betas", (0.9, 0.99)), run.get("eps", 1e-8), run.get("local", "adam")
    x, y, yi = run.x0, run.zero, run.everyone(run.zero)
    v, vhat = run.everyone(run.zero), run.everyone(run.zero)
    if run.get("tracking_init", "zero") == "gradient":
        yi = {i: run.full_gradient(i) for i in range(run.N)}
        y = sum(yi.values()) / run.N
    for t, sampled, tracked in run.rounds():
        d, change = {}, {}
        for i in sampled:
            xi, m, raw = x, run.zero, []
            vi, vhi = v[i], vhat[i]
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                raw.append(g)
                gh = g + y - yi[i]
                m = b1 * m + (1 - b1) * gh
                vi = b2 * vi + (1 - b2) * gh**2
                vhi = maximum(vhi, vi)
                direction = divide(gh, vi**0.5, eps) if local == "rmsprop" else divide(m, vhi**0.5, eps)
                xi = xi - eta * (direction + run.lam * xi)
            d[i] = xi - x
            v[i], vhat[i] = vi, vhi
            if i in tracked:
                new = sum(raw) / run.count(i)
                change[i] = new - yi[i]
                yi[i] = new
        x = x + run.eta_g * run.mean(d)
        y = y + sum(change.values()) / run.N
        run.history.append(x)
    kept = {"v": v} if local == "rmsprop" else {"v": v, "vhat": vhat}
    run.server, run.clients = {"y": y}, {"y": yi, **kept}


def fadamgc_b(run):
    (b1, b2), eps = run.get("betas", (0.9, 0.99)), run.get("eps", 1e-8)
    x, y, yi, vbar = run.x0, run.zero, run.everyone(run.zero), run.block_means(run.zero)
    if run.get("tracking_init", "zero") == "gradient":
        yi = {i: run.full_gradient(i) for i in range(run.N)}
        y = sum(yi.values()) / run.N
    for t, sampled, tracked in run.rounds():
        d, change, vbar_i = {}, {}, {}
        for i in sampled:
            xi, m, raw = x, run.zero, []
            v = vhat = run.expand(vbar)
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                raw.append(g)
                gh = g + y - yi[i]
                m = b1 * m + (1 - b1) * gh
                v = b2 * v + (1 - b2) * gh**2
                vhat = maximum(vhat, v)
                xi = xi - eta * (divide(m, vhat**0.5, eps) + run.lam * xi)
            d[i], vbar_i[i] = xi - x, run.block_means(v)
            if i in tracked:
                new = sum(raw) / run.count(i)
                change[i] = new - yi[i]
                yi[i] = new
        x = x + run.eta_g * run.mean(d)
        y = y + sum(change.values()) / run.N
        vbar = run.mean(vbar_i)
        run.history.append(x)
    run.server, run.clients = {"y": y, "vbar": vbar}, {"y": yi}


def fa_nt(run):
    (b1, b2), eps = run.get("betas", (0.9, 0.99)), run.get("eps", 1e-8)
    x, y, yi = run.x0, run.zero, run.everyone(run.zero)
    v, vhat = run.everyone(run.zero), run.everyone(run.zero)
    for t, sampled, tracked in run.rounds():
        d, change = {}, {}
        for i in sampled:
            xi, m = x, run.zero
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                m = b1 * m + (1 - b1) * g
                v[i] = b2 * v[i] + (1 - b2) * g**2
                vhat[i] = maximum(vhat[i], v[i])
                xi = xi - eta * (divide(m, vhat[i] ** 0.5, eps) + y - yi[i] + run.lam * xi)
            d[i] = xi - x
            if i in tracked:
                new = yi[i] - y + (x - xi) / run.rate_sum(i, t)
                change[i] = new - yi[i]
                yi[i] = new
        x = x + run.eta_g * run.mean(d)
        y = y + sum(change.values()) / run.N
        run.history.append(x)
    run.server, run.clients = {"y": y}, {"y": yi, "v": v, "vhat": vhat}


def fedadamw(run):
    (b1, b2), eps = run.get("betas", (0.9, 0.999)), run.get("eps", 1e-8)
    alpha, lam = run.get("alpha", 0.5), run.get("weight_decay", 0.01)
    form, bias_time, decay = run.get("form", "alg2"), run.get("bias_time", "local"), run.get("decay", "decoupled")
    aggregate_v = run.get("aggregate_v", True)
    if form == "alg3":
        b1, lam = 0.0, 0.0
    x, Delta, vbar = run.x0, run.zero, run.block_means(run.zero)
    for t, sampled, _ in run.rounds():
        d, vbar_i = {}, {}
        for i in sampled:
            xi, m, v = x, run.zero, run.expand(vbar) if aggregate_v else run.zero
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                if decay == "coupled":
                    g = g + lam * xi
                step = t * run.K + k
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g**2
                mh = m / (1 - b1 ** (step if bias_time == "global" else k))
                vh = v / (1 - b2 ** (step if aggregate_v else k))
                shrink = lam * xi if decay == "decoupled" else 0
                if form == "alg2":
                    xi = xi - eta * (divide(mh, vh**0.5, eps) + alpha * Delta + shrink)
                else:
                    xi = xi - eta * (alpha * divide(g, vh**0.5, eps) + (1 - alpha) * Delta)
            d[i], vbar_i[i] = xi - x, run.block_means(v)
        D = run.mean(d)
        x = x + run.eta_g * D
        vbar = run.mean(vbar_i)
        Delta = -D / run.server_rate_sum(sampled, t)
        run.history.append(x)
    run.server = {"Delta": Delta, "vbar": vbar} if aggregate_v else {"Delta": Delta}


def fedlada(run):
    (b1, b2), eps, a = run.get("betas", (0.9, 0.99)), run.get("eps", 1e-8), run.get("alpha", 0.5)
    x, v0, ga = run.x0, run.zero + eps**2, run.zero
    for t, sampled, _ in run.rounds():
        d, vhat_i = {}, {}
        for i in sampled:
            xi, m, v, vhat = x, run.zero, v0, v0
            for k, eta in run.steps(i, t):
                g = run.gradient(xi, i, t, k)
                m = b1 * m + (1 - b1) * g
                v = b2 * v + (1 - b2) * g**2
                vhat = maximum(vhat, v)
                xi = xi - eta * (a * divide(m, vhat**0.5, 0.0) + (1 - a) * ga + run.lam * xi)
            d[i], vhat_i[i] = xi - x, vhat
        D = run.mean(d)
        x = x + run.eta_g * D
        v0 = run.mean(vhat_i)
        ga = -D / run.server_rate_sum(sampled, t)
        run.history.append(x)
    run.server = {"v": v0, "ga": ga}
