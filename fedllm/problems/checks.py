"""Calls a problem's methods and checks their results. A mistake is a UserError that names class and method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fedllm.common.errors import UserError
from fedllm.common.tensors import require_vector, shown

if TYPE_CHECKING:
    from fedllm.algorithms.base import Contrast
    from fedllm.problems.base import Problem

NO_BUFFERS = (
    "has running statistics (batch norm), expected a model without for MOON; set model.norm=group, or choose another "
    "algorithm"
)


def require_counts(problem: Problem) -> None:
    """Raises UserError unless the problem says how many coordinates and clients it has."""
    for name, meaning in (("dim", "d, the number of coordinates"), ("num_clients", "N, the number of clients")):
        found = getattr(problem, name, None)
        if found is None:
            raise UserError(f"{type(problem).__name__}.{name}: missing; set self.{name} in __init__: {meaning}")
        if not isinstance(found, int) or found < 1:
            raise UserError(f"{type(problem).__name__}.{name}: found {found!r}, expected {meaning}, 1 or more")


def start(problem: Problem, x0: Tensor | None = None) -> Tensor:
    """A copy of x0 [d] in the dtype and on the device of problem.initial(); by default a copy of problem.initial()."""
    initial = problem.initial()
    require_vector(f"{type(problem).__name__}.initial", initial, problem.dim)
    if x0 is None:
        return initial.detach().clone()
    require_vector("x0", x0, problem.dim)
    return x0.detach().to(initial, copy=True)


def loss_and_gradient(
    problem: Problem,
    X: Tensor,
    clients: Sequence[int],
    round: int,
    step: int,
    buffers: Tensor | None = None,
    contrast: Contrast | None = None,
) -> tuple[Tensor | None, Tensor]:
    """Calls problem.loss_and_gradient, or problem.train_step where there are buffers [C, b], which it changes in place,
    or problem.contrastive_gradient where the algorithm gives a contrast.

    Checks shape, dtype, that there is no graph, and that X is unchanged.
    """
    before = _version(X)
    if contrast is not None:
        if buffers is not None:
            raise UserError(f"{type(problem).__name__}: {NO_BUFFERS}")
        loss, g = problem.contrastive_gradient(X, contrast, clients, round, step)
    elif buffers is None:
        loss, g = problem.loss_and_gradient(X, clients, round, step)
    else:
        loss, g = problem.train_step(X, buffers, clients, round, step)
    _require_rows(problem, "gradient", g, X)
    if _version(X) != before:
        raise UserError(
            f"{type(problem).__name__}.gradient: changed X in place, expected it untouched; work on X.clone()"
        )
    return loss, g


def full_gradient(problem: Problem, x: Tensor, clients: Sequence[int]) -> Tensor:
    """Calls problem.full_gradient and checks its result."""
    found = problem.full_gradient(x, clients)
    _require_rows(problem, "full_gradient", found, x.expand(len(clients), -1))
    return found


def sizes(problem: Problem, clients: Sequence[int]) -> Tensor:
    """problem.sizes, checked: [C], one positive number per client."""
    found = problem.sizes(clients)
    if not isinstance(found, Tensor) or found.shape != (len(clients),) or not bool((found > 0).all()):
        values = found.tolist() if isinstance(found, Tensor) else found
        raise UserError(
            f"{type(problem).__name__}.sizes: found {values}, expected a tensor of {len(clients)} positive numbers"
        )
    return found


def steps(problem: Problem, clients: Sequence[int], round: int) -> list[int] | None:
    """problem.steps, checked: one whole number per client, or None."""
    found = problem.steps(clients, round)
    if found is None:
        return None
    counts: list[int | float] = torch.as_tensor(found).flatten().tolist()
    if len(counts) != len(clients) or any(count != int(count) for count in counts):
        raise UserError(
            f"{type(problem).__name__}.steps: found {counts}, expected {len(clients)} whole numbers, one per client"
        )
    return [int(count) for count in counts]


def _version(X: Tensor) -> int:
    """How often X was changed in place, 0 in torch.inference_mode, where it is not counted."""
    return 0 if X.is_inference() else X._version


def _require_rows(problem: Problem, method: str, g: Any, X: Tensor) -> None:
    if isinstance(g, Tensor) and g.shape == X.shape and g.dtype == X.dtype and not g.requires_grad:
        return
    graph = " with its graph" if isinstance(g, Tensor) and g.requires_grad else ""
    raise UserError(
        f"{type(problem).__name__}.{method}: found {shown(g)}{graph}, expected {shown(X)}, one row per client, detached"
    )
