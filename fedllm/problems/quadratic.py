"""Quadratic clients with a known optimum, for tests and theory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedllm.algorithms.base import Contrast
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.common.seeding import torch_rng
from fedllm.common.tensors import require_vector, shown
from fedllm.problems.base import Problem


class QuadraticProblem(Problem):
    """f_i(x) = 0.5 (x - a_i)' H_i (x - a_i), with exact gradients or gradients under Gaussian noise.

    H [N, d, d] symmetric positive definite, a [N, d], both in the dtype the runs will have. x0 [d]: taken over into
    that dtype; default 0. noise: standard deviation of each coordinate's noise, drawn from (seed, round, client, step).
    local_steps, sizes: one number per client. Raises UserError where these do not fit together.
    """

    def __init__(
        self,
        H: Tensor,
        a: Tensor,
        *,
        x0: Tensor | None = None,
        noise: float = 0.0,
        seed: int = 0,
        local_steps: Sequence[int] | None = None,
        sizes: Sequence[int] | None = None,
        blocks: BlockPartition | None = None,
    ) -> None:
        if not isinstance(a, Tensor) or a.ndim != 2 or len(a) == 0 or not a.is_floating_point():
            raise UserError(f"a: found {shown(a)}, expected [N, d] of floating-point numbers")
        self.num_clients, self.dim = N, d = a.shape
        if not isinstance(H, Tensor) or H.shape != (N, d, d) or H.dtype != a.dtype:
            raise UserError(f"H: found {shown(H)}, expected {[N, d, d]} {a.dtype}, as a {[N, d]} has it")
        for name, numbers in (("local_steps", local_steps), ("sizes", sizes)):
            if numbers is not None and len(numbers) != N:
                raise UserError(f"{name}: found {len(numbers)} numbers, expected {N}, one per client")
        if x0 is not None:
            require_vector("x0", x0, d)
        self.H, self.a, self.noise, self.seed, self.blocks = H, a, noise, seed, blocks
        self._x0 = torch.zeros_like(a[0]) if x0 is None else x0.detach().to(a)
        self._steps = None if local_steps is None else torch.as_tensor(local_steps)
        self._sizes = torch.ones(self.num_clients) if sizes is None else torch.as_tensor(sizes)

    @classmethod
    def random(
        cls, num_clients: int, dim: int, *, seed: int = 0, spread: float = 1.0, noise: float = 0.0
    ) -> QuadraticProblem:
        """Random well-conditioned quadratics (float64) whose minimisers lie `spread` apart."""
        for name, number in (("num_clients", num_clients), ("dim", dim)):
            if not isinstance(number, int) or number < 1:
                raise UserError(f"{name}: found {number!r}, expected a whole number, 1 or more")
        rng = torch_rng(seed, "quadratic")
        root = torch.randn(num_clients, dim, dim, generator=rng, dtype=torch.float64) / dim**0.5
        H = root @ root.mT + 0.5 * torch.eye(dim, dtype=torch.float64)
        a = spread * torch.randn(num_clients, dim, generator=rng, dtype=torch.float64)
        return cls(H, a, noise=noise, seed=seed)

    def optimum(self) -> Tensor:
        """The minimiser [d] of mean_i f_i."""
        solution: Tensor = torch.linalg.solve(self.H.mean(0), (self.H @ self.a[..., None]).mean(0)[..., 0])
        return solution

    def initial(self) -> Tensor:
        return self._x0.clone()

    def gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> Tensor:
        index = torch.as_tensor(clients)
        g = torch.einsum("cij,cj->ci", self.H[index], X - self.a[index])
        if self.noise:
            rows = [
                torch.randn(self.dim, generator=torch_rng(self.seed, "noise", round, int(c), step), dtype=X.dtype)
                for c in clients
            ]
            g = g + self.noise * torch.stack(rows)
        return g

    def loss_and_gradient(self, X: Tensor, clients: Sequence[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        """The losses have no noise."""
        index = torch.as_tensor(clients)
        apart = X - self.a[index]
        return 0.5 * torch.einsum("ci,cij,cj->c", apart, self.H[index], apart), self.gradient(X, clients, round, step)

    def contrastive_gradient(
        self, X: Tensor, contrast: Contrast, clients: Sequence[int], round: int, step: int
    ) -> tuple[Tensor, Tensor]:
        """x is its own representation, and a client is one sample."""
        losses, g = self.loss_and_gradient(X, clients, round, step)
        with torch.enable_grad():
            z = X.detach().requires_grad_()
            terms = contrast.term(z, contrast.near, contrast.far)
            (slope,) = torch.autograd.grad(terms.sum(), z)
        return losses + terms.detach(), g + slope

    def steps(self, clients: Sequence[int], round: int) -> Tensor | None:
        return None if self._steps is None else self._steps[torch.as_tensor(clients)]

    def full_gradient(self, x: Tensor, clients: Sequence[int]) -> Tensor:
        index = torch.as_tensor(clients)
        return torch.einsum("cij,cj->ci", self.H[index], x - self.a[index])

    def sizes(self, clients: Sequence[int]) -> Tensor:
        return self._sizes[torch.as_tensor(clients)]
