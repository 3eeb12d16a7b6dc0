"""What every reference script needs: gradients, rates, means, and the settings with their defaults."""

from __future__ import annotations

import math


class Script:
    """A run: `problem` supplies gradients, `who` says which clients are sampled and tracked in each round.

    A reference fills `history` (x after each round), `server` {name: vector} and `clients` {name: {client: vector}}.
    sizes: of the blocks, in order. given: the algorithm's settings that differ from ALGORITHMS.md's defaults.
    """

    def __init__(self, problem, who, *, K, steps=None, samples=None, sizes=None, given=None):
        self.problem, self.who, self.K = problem, who, K
        self.N, self.d, self.T_total = problem.num_clients, problem.dim, len(who)
        self.S = len(who[0][0])
        self.x0 = problem.initial()
        self.zero = 0 * self.x0
        self.given = dict(given or {})
        self._steps = steps or [K] * self.N
        self._samples = samples or [1] * self.N
        self._sizes = sizes or [1] * self.d
        self.history, self.server, self.clients = [self.x0], {}, {}
        self.lr = self.get("lr", None)
        self.eta_g = self.get("server_lr", 1.0)
        self.lam = self.get("weight_decay", 0.0)

    def get(self, key, default):
        """A setting as given, or its default."""
        return self.given.get(key, default)

    def rounds(self):
        """(t, sampled, tracked) of each round."""
        for t, (sampled, tracked) in enumerate(self.who):
            yield t, sampled, tracked

    def everyone(self, start):
        """{client: vector} for all N clients, each starting at `start`."""
        return dict.fromkeys(range(self.N), start)

    def gradient(self, x, i, t, k, plus=0.0):
        """Stochastic gradient of client i in round t at step k = 1, 2, ..., clipped before anything else. plus: the
        gradient of what an algorithm adds to the loss."""
        g = self.problem.gradient(x[None], [i], t, k - 1)[0] + plus
        limit, norm = self.get("clip_norm", None), math.sqrt(float((g * g).sum()))
        return g if limit is None or norm <= limit else g * (limit / norm)

    def loss(self, x, i):
        """Client i's quadratic at x."""
        apart = x - self.problem.a[i]
        return float(apart @ self.problem.H[i] @ apart) / 2

    def full_gradient(self, i):
        """Gradient of client i's whole objective at x0."""
        return self.problem.full_gradient(self.x0, [i])[0]

    def steps(self, i, t):
        """(k, eta) of each local step of client i in round t."""
        count, schedule = self._steps[i], self.get("schedule", "constant")
        eta = self.lr
        if self.get("warmup_rounds", 0) > t:
            eta = eta * (t + 1) / self.get("warmup_rounds", 0)
        if schedule == "cosine_rounds":
            eta = 0.5 * eta * (1 + math.cos(math.pi * t / self.T_total))
        if schedule == "linear":
            eta = eta * (1 - t / self.T_total)
        for k in range(count):
            yield k + 1, 0.5 * eta * (1 + math.cos(math.pi * k / count)) if schedule == "cosine_steps" else eta

    def count(self, i):
        """Local steps K_i of client i."""
        return self._steps[i]

    def rate_sum(self, i, t):
        """ "K eta": the sum of the rates that client i uses in round t."""
        return sum(eta for _, eta in self.steps(i, t))

    def mean(self, values):
        """Mean of {client: value}, uniform or by sample count."""
        weight = {i: self._samples[i] if self.get("weights", "uniform") == "size" else 1 for i in values}
        return sum(weight[i] * values[i] for i in values) / sum(weight.values())

    def server_rate_sum(self, sampled, t):
        """ "K eta" in a server formula: the mean of the clients' sums of rates."""
        return self.mean({i: self.rate_sum(i, t) for i in sampled})

    def block_means(self, v):
        """[number of blocks]: the mean of each block of consecutive coordinates."""
        means, start = [], 0
        for size in self._sizes:
            means.append(float(v[start : start + size].sum()) / size)
            start += size
        return v.new_tensor(means)

    def expand(self, b):
        """[d]: each block's number at each of its coordinates."""
        numbers = []
        for size, number in zip(self._sizes, b.tolist(), strict=True):
            numbers += [number] * size
        return b.new_tensor(numbers)


def divide(m, root, eps):
    """m/(root+eps), a coordinate with 0/0 taking no step."""
    out = 0 * m
    for j in range(len(m)):
        below = float(root[j]) + eps
        out[j] = float(m[j]) / below if below > 0 else 0.0
    return out


def maximum(a, b):
    """The larger of two vectors, coordinate by coordinate."""
    return a.new_tensor([max(p, q) for p, q in zip(a.tolist(), b.tolist(), strict=True)])
