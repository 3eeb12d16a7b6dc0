"""The problem of a recipe: the model with its samples, and how many clients are trained together."""

from __future__ import annotations

from typing import Any

from peft import PeftModel
from transformers import PreTrainedModel

from fedllm.algorithms import Algorithm
from fedllm.algorithms.base import RoundInfo
from fedllm.blocks import RoleError
from fedllm.blocks import partition as block_partition
from fedllm.common.errors import UserError
from fedllm.config.recipe import Recipe
from fedllm.data.client_batches import ClientBatches
from fedllm.data.samples import Samples
from fedllm.experiment.full_memory import FullNeed, full_pass_bytes, require_memory
from fedllm.experiment.machine import Machine
from fedllm.experiment.memory_plan import choose_stacked_clients, least_tokens, pass_bytes
from fedllm.experiment.sample_privacy import sample_level
from fedllm.federation.personal import require_personal
from fedllm.models.head_coordinates import head_coordinates
from fedllm.models.loading import Backbone
from fedllm.problems.full.problem import FullProblem
from fedllm.problems.full.settings import FullSettings
from fedllm.problems.lora.engine_settings import EngineSettings
from fedllm.problems.lora.problem import LoraProblem
from fedllm.tasks.base import Task


def build_problem(
    recipe: Recipe,
    machine: Machine,
    algorithm: Algorithm,
    task: Task,
    backbone: Backbone,
    model: PeftModel | PreTrainedModel,
    train: Samples,
    batches: ClientBatches,
) -> LoraProblem | FullProblem:
    """The problem of the clients of `batches`, whose samples are those of `train`."""
    blocks = _blocks(model, algorithm, recipe, machine)
    personal = None
    if recipe.deployment.keep_local is not None:
        require_personal(algorithm, recipe.algorithm["name"])
        personal = head_coordinates(model, backbone).to(machine.device)
    given = (model, train, batches, task.losses)
    problem: LoraProblem | FullProblem
    if recipe.lora is None:
        problem = FullProblem(*given, _full_settings(recipe, machine, backbone), blocks)
    else:
        problem = LoraProblem(*given, _engine_settings(recipe, machine, backbone), blocks)
    problem.personal = personal
    return problem


def clients_together(
    recipe: Recipe, algorithm: Algorithm, problem: LoraProblem | FullProblem, info: RoundInfo, machine: Machine
) -> int:
    """How many clients are trained together: with all weights one, unless the recipe says more.

    Raises UserError where training all weights does not fit into memory.
    """
    wanted, private = recipe.run.stacked_clients, sample_level(recipe) is not None
    if isinstance(problem, LoraProblem):
        return choose_stacked_clients(wanted, algorithm, problem, info, machine.device, private)
    together = 1 if wanted == "auto" else min(wanted, info.sampled)
    need = FullNeed.of(algorithm, problem, info, together, private)
    require_memory(need, machine.device, recipe.algorithm["name"])
    return together


def _engine_settings(recipe: Recipe, machine: Machine, backbone: Backbone) -> EngineSettings:
    return EngineSettings(
        autocast=machine.autocast,
        slices=None if recipe.run.slices == "auto" else recipe.run.slices,
        pass_bytes=pass_bytes(machine.device),
        least_tokens=least_tokens(machine.device, machine.autocast),
        checkpointing=recipe.run.gradient_checkpointing,
        pad_id=backbone.pad_id,
    )


def _full_settings(recipe: Recipe, machine: Machine, backbone: Backbone) -> FullSettings:
    return FullSettings(
        autocast=machine.autocast,
        pass_bytes=full_pass_bytes(machine.device),
        pad_id=backbone.pad_id,
        stacked=recipe.run.stacked_clients not in ("auto", 1),
        local_buffers=recipe.model.norm == "local",
    )


def _blocks(model: PeftModel | PreTrainedModel, algorithm: Algorithm, recipe: Recipe, machine: Machine) -> Any:
    """The block partition, for algorithms that send block means."""
    if not algorithm.needs_blocks():
        return None
    try:
        blocks = block_partition(model, scheme=getattr(algorithm, "blocks", "hessian"))
    except RoleError as error:
        raise UserError(f"model.name={recipe.model.name}: {error}; or set algorithm.blocks=tensor") from error
    return blocks.to(machine.device)
