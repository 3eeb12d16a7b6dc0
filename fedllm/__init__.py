"""fedllm: federated LoRA fine-tuning with the optimizers that work on non-IID data, exact to their papers."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedllm.algorithms import Algorithm, load_algorithm
    from fedllm.errors import RunError, UserError
    from fedllm.problem import Problem, QuadraticProblem
    from fedllm.recipe import load_recipe
    from fedllm.run import run_recipe
    from fedllm.simulation import simulate

_HOME = {
    "Algorithm": "algorithms",
    "load_algorithm": "algorithms",
    "Problem": "problem",
    "QuadraticProblem": "problem",
    "simulate": "simulation",
    "load_recipe": "recipe",
    "run_recipe": "run",
    "RunError": "errors",
    "UserError": "errors",
}
__all__ = [
    "Algorithm",
    "Problem",
    "QuadraticProblem",
    "RunError",
    "UserError",
    "load_algorithm",
    "load_recipe",
    "run_recipe",
    "simulate",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `fedllm.blocks` alone needs torch and nothing else."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedllm' has no attribute '{name}'")
    return getattr(import_module(f"fedllm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
