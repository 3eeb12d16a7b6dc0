"""The facts of a run that an algorithm may know."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from fedllm.algorithms.base import Algorithm, RoundInfo
from fedllm.blocks import BlockPartition
from fedllm.common.errors import UserError
from fedllm.problems import checks
from fedllm.problems.base import Problem


class Names(NamedTuple):
    """What S, T and K are called where the user gave them, for errors. By default: the keys of a recipe."""

    sampled: str = "federation.clients_per_round"
    tracked: str = "federation.tracked_per_round"
    local_steps: str = "local.steps"


RECIPE_NAMES = Names()


def round_info(
    alg: Algorithm,
    problem: Problem,
    *,
    rounds: int,
    sampled: int,
    tracked: int | None,
    local_steps: int,
    turns: int = 1,
    names: Names = RECIPE_NAMES,
) -> RoundInfo:
    """The facts of the run, as of round 0. turns: see RoundInfo.

    Raises UserError where S or T do not fit the federation or `alg`, or `alg` declares a vector whose length is none
    of "d", "B" and, in its uploads, "1"."""
    _check_declared(alg)
    blocks = problem.blocks
    if blocks is not None and blocks.dim != problem.dim:
        raise UserError(
            f"{type(problem).__name__}.blocks: found {blocks.dim:,} coordinates, expected {problem.dim:,}, its dim"
        )
    if blocks is None or getattr(alg, "blocks", None) == "elementwise":
        blocks = BlockPartition.elementwise(problem.dim)
    info = run_info(
        blocks,
        rounds=rounds,
        num_clients=problem.num_clients,
        sampled=sampled,
        tracked=tracked,
        local_steps=local_steps,
        names=names,
    )
    info = replace(info, turns=turns)
    alg.check(info, checks.steps(problem, range(problem.num_clients), 0) or ())
    return info


def run_info(
    blocks: BlockPartition,
    *,
    rounds: int,
    num_clients: int,
    sampled: int,
    tracked: int | None,
    local_steps: int,
    names: Names = RECIPE_NAMES,
) -> RoundInfo:
    """The same without a problem. Raises UserError where S or T do not fit the federation."""
    if not 1 <= sampled <= num_clients:
        raise UserError(f"{names.sampled}: found {sampled}, expected 1 to {num_clients}, the number of clients")
    tracked = sampled if tracked is None else tracked
    if not 0 <= tracked <= sampled:
        raise UserError(f"{names.tracked}: found {tracked}, expected 0 to {sampled}, which is clients_per_round")
    if local_steps < 1:
        raise UserError(f"{names.local_steps}: found {local_steps}, expected 1 or more")
    return RoundInfo(0, rounds, num_clients, sampled, tracked, local_steps, blocks)


def _check_declared(alg: Algorithm) -> None:
    """Raises UserError, naming method and vector, if `alg` declares a vector of unknown length."""
    for method in ("server_vectors", "client_vectors", "downloads", "uploads", "tracked_uploads"):
        for name, of in getattr(alg, method)().items():
            if of not in (("d", "B", "1") if method == "uploads" else ("d", "B")):
                raise UserError(
                    f"{type(alg).__name__}.{method}: '{name}' has length {of!r}, expected 'd', one number per "
                    "coordinate, or 'B', one per block; '1', one alone, is for uploads"
                )
