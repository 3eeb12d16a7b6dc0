"""fedllm: federated LoRA fine-tuning with the optimizers that work on non-IID data, exact to their papers."""

from __future__ import annotations

import logging
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

# bitsandbytes, which peft imports, warns at every start that it has no packed 4-bit kernels for this CPU. fedllm does
# not use them (models.quantization.keep_as_stored).
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
# tqdm, which transformers imports, asks for widgets in a notebook; fedllm prints lines there.
warnings.filterwarnings("ignore", message="IProgress not found")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from fedllm.algorithms import Algorithm, load_algorithm
    from fedllm.common.errors import RunError, UserError
    from fedllm.config.recipe import load_recipe
    from fedllm.experiment.client_partition import partition_clients
    from fedllm.experiment.evaluate_run import evaluate_run
    from fedllm.experiment.export import export_adapter, export_gguf, export_merged
    from fedllm.experiment.prediction import load_predictor, predict_file
    from fedllm.experiment.push import push_adapter
    from fedllm.experiment.run import plan_run, run_recipe
    from fedllm.federation.simulation import simulate
    from fedllm.problems.base import Problem
    from fedllm.problems.quadratic import QuadraticProblem
    from fedllm.reporting.report import report
    from fedllm.results.listing import list_runs
    from fedllm.results.reader import load_run
    from fedllm.sweeps.sweep import sweep

_HOME = {
    "Algorithm": "algorithms",
    "load_algorithm": "algorithms",
    "Problem": "problems.base",
    "QuadraticProblem": "problems.quadratic",
    "simulate": "federation.simulation",
    "load_recipe": "config.recipe",
    "run_recipe": "experiment.run",
    "plan_run": "experiment.run",
    "partition_clients": "experiment.client_partition",
    "sweep": "sweeps.sweep",
    "report": "reporting.report",
    "list_runs": "results.listing",
    "load_run": "results.reader",
    "evaluate_run": "experiment.evaluate_run",
    "predict_file": "experiment.prediction",
    "load_predictor": "experiment.prediction",
    "push_adapter": "experiment.push",
    "export_adapter": "experiment.export",
    "export_gguf": "experiment.export",
    "export_merged": "experiment.export",
    "RunError": "common.errors",
    "UserError": "common.errors",
}
__all__ = [
    "Algorithm",
    "Problem",
    "QuadraticProblem",
    "RunError",
    "UserError",
    "evaluate_run",
    "export_adapter",
    "export_gguf",
    "export_merged",
    "list_runs",
    "load_algorithm",
    "load_predictor",
    "load_recipe",
    "load_run",
    "partition_clients",
    "plan_run",
    "predict_file",
    "push_adapter",
    "report",
    "run_recipe",
    "simulate",
    "sweep",
]


def __getattr__(name: str) -> Any:
    """Public names are imported when first used, so that `fedllm.blocks` alone needs torch and nothing else."""
    if name not in _HOME:
        raise AttributeError(f"module 'fedllm' has no attribute '{name}'")
    return getattr(import_module(f"fedllm.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
