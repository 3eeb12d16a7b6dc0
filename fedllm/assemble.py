"""From a recipe to everything a run needs: device, task, model, partition, algorithm, problem, cohort size."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from accelerate import Accelerator, InitProcessGroupKwargs
from peft import PeftModel
from rich.table import Column, Table

from fedllm.algorithms import Algorithm
from fedllm.algorithms.base import RoundInfo
from fedllm.batches import ClientBatches
from fedllm.blocks import RoleError
from fedllm.blocks import partition as block_partition
from fedllm.console import stage, warn
from fedllm.costs import client_memory, traffic, vectors_per_round
from fedllm.data import Task, load_task
from fedllm.errors import UserError
from fedllm.hub import local_hub
from fedllm.lora import attach_lora
from fedllm.lora_problem import LoraProblem
from fedllm.metrics import metric_for
from fedllm.models import Backbone, load_backbone
from fedllm.partition import digest, get_partition
from fedllm.processes import local_size, size
from fedllm.quantised import frozen_size
from fedllm.recipe import Recipe
from fedllm.rounds import round_info
from fedllm.sizing import choose_cohort, pass_bytes
from fedllm.tokens import Tokens, tokenize

T = TypeVar("T")


@dataclass(frozen=True)
class Machine:
    """Where a run computes. threads: of each process. autocast: dtype of the matrix products, None for float32."""

    device: torch.device
    threads: int
    autocast: torch.dtype | None
    processes: int = 1

    @property
    def precision(self) -> str:
        """The autocast dtype in words."""
        return "float32" if self.autocast is None else str(self.autocast).removeprefix("torch.")


@dataclass(frozen=True)
class Job:
    """A recipe with everything built, ready for its first step."""

    recipe: Recipe
    machine: Machine
    task: Task
    backbone: Backbone
    model: PeftModel
    parts: list[np.ndarray]
    validation: Tokens
    algorithm: Algorithm
    problem: LoraProblem
    info: RoundInfo
    cohort: int

    @property
    def data(self) -> dict[str, str]:
        """Digests of what a result depends on beside the recipe: training and validation split, and who holds what."""
        validation = self.task.validation.fingerprint()
        return {"training": self.task.fingerprint, "validation": validation, "partition": digest(self.parts)}


class Shelf:
    """What the last recipe read, for the next one that reads the same: the recipes of a sweep share task and tokens."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[object, Any]] = {}

    def get(self, kind: str, source: object, read: Callable[[], T]) -> T:
        """What `read` gives, or gave before from an equal source. One thing of a kind is kept."""
        if kind not in self._kept or self._kept[kind][0] != source:
            self._kept[kind] = (source, read())
        kept: T = self._kept[kind][1]
        return kept


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products are faster than float32 ones here: in hardware, not emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def find_machine(recipe: Recipe, processes: int = 1) -> Machine:
    """The device, threads and precision of a run; sets the process's threads.

    accelerate and torchrun start CPU processes with one thread each, so the number is set here, from the cores that the
    processes of this machine share.
    """
    wanted = recipe.run.device
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UserError(
            "run.device=cuda: this machine has no GPU that torch can use; set run.device=auto or cpu, or install "
            "a CUDA build of torch"
        )
    if processes != size():
        raise UserError(
            f"started as {size()} processes, which run_recipe does not join; use torchrun or accelerate launch with "
            f"scripts/fedtune.py, which does"
        )
    # Processes talk through fedllm.processes alone: NCCL would only refuse those that share a GPU.
    gloo = [InitProcessGroupKwargs(backend="gloo")] if processes > 1 else None
    accelerator = Accelerator(cpu=wanted == "cpu" or not torch.cuda.is_available(), kwargs_handlers=gloo)
    local = local_size()
    if accelerator.device.type == "cuda" and local > (gpus := torch.cuda.device_count()):
        warn(
            f"{local} processes share {gpus} GPU{'s' * (gpus > 1)} and divide the memory; one process a GPU, which "
            f"trains all of its clients together, is usually faster"
        )
    threads = recipe.run.threads or max(1, usable_cores() // local)
    torch.set_num_threads(threads)
    chosen = recipe.run.precision
    bfloat16 = chosen == "bfloat16" or (chosen == "auto" and fast_bfloat16(accelerator.device))
    return Machine(accelerator.device, threads, torch.bfloat16 if bfloat16 else None, processes)


def assemble(recipe: Recipe, shelf: Shelf | None = None, processes: int = 1) -> Job:
    """Loads and builds everything a recipe names, up to its first step.

    shelf: what may be shared with other recipes. processes: how many share the work.
    Raises UserError for whatever does not fit.
    """
    shelf = shelf or Shelf()
    machine = find_machine(recipe, processes)
    algorithm = recipe.load_algorithm()
    hub = recipe.run.local_hub
    local_hub(hub)
    with stage(f"reading {recipe.data.name or recipe.data.train}") as progress:
        task = shelf.get("task", (recipe.data, hub), lambda: load_task(recipe.data, hub, progress))
    _check_target(recipe, task)
    parts = get_partition(recipe.partition, task)
    _check_parts(parts, recipe)
    with stage(f"loading {recipe.model.name}"):
        backbone = load_backbone(
            recipe.model,
            num_labels=task.num_labels,
            regression=task.regression,
            label_names=task.label_names or None,
            local_hub=hub,
            seed=recipe.run.seed,
        )
        model = attach_lora(backbone, recipe.lora, seed=recipe.run.seed).to(machine.device)
    _check_length(recipe, backbone)
    with stage("tokenizing") as progress:
        source = (recipe.data, recipe.model.name, hub)
        train, validation = shelf.get(
            "tokens",
            source,
            lambda: [
                tokenize(split, backbone.tokenizer, recipe.data.max_length, progress)
                for split in (task.train, task.validation)
            ],
        )
    local = recipe.local
    epochs = 1 if local.epochs is None and local.steps is None else local.epochs
    batches = ClientBatches(parts, batch_size=local.batch_size, epochs=epochs, steps=local.steps, seed=recipe.run.seed)
    problem = LoraProblem(
        model,
        train,
        batches,
        regression=task.regression,
        seed=recipe.run.seed,
        autocast=machine.autocast,
        slices=None if recipe.run.slices == "auto" else recipe.run.slices,
        pass_bytes=pass_bytes(machine.device),
        checkpointing=recipe.run.gradient_checkpointing,
        blocks=_blocks(model, algorithm, recipe, machine),
        pad_id=int(backbone.tokenizer.pad_token_id or 0),
    )
    info = round_info(
        algorithm,
        problem,
        rounds=recipe.federation.rounds,
        sampled=recipe.federation.clients_per_round,
        tracked=recipe.federation.tracked_per_round,
        local_steps=max(batches.steps(client) for client in range(len(parts))),
    )
    cohort = choose_cohort(recipe.run.cohort, algorithm, problem, info, machine.device)
    return Job(recipe, machine, task, backbone, model, parts, validation, algorithm, problem, info, cohort)


def _blocks(model: PeftModel, algorithm: Algorithm, recipe: Recipe, machine: Machine) -> Any:
    """The block partition, for algorithms that send block means."""
    if not algorithm.needs_blocks():
        return None
    try:
        blocks = block_partition(model, scheme=getattr(algorithm, "blocks", "hessian"))
    except RoleError as error:
        raise UserError(f"model.name={recipe.model.name}: {error}; or set algorithm.blocks=tensor") from error
    return blocks.to(machine.device)


def _check_target(recipe: Recipe, task: Task) -> None:
    names = metric_for(task).names
    for name in recipe.eval.target or {}:
        if name not in names:
            raise UserError(f"eval.target: found metric '{name}', expected one of {', '.join(names)} for {task.name}")


def _check_parts(parts: list[np.ndarray], recipe: Recipe) -> None:
    source = recipe.partition.file or f"partition.scheme={recipe.partition.scheme}"
    for client, part in enumerate(parts):
        if len(part) == 0:
            raise UserError(f"{source}: client {client} has no samples; set partition.min_size to 1 or more")


def _check_length(recipe: Recipe, backbone: Backbone) -> None:
    limit = backbone.max_length
    if limit is not None and recipe.data.max_length > limit:
        raise UserError(
            f"data.max_length: found {recipe.data.max_length}, but {recipe.model.name} has {limit} positions"
        )


def plan_table(job: Job) -> Table:
    """What a run will do, in numbers: the output of --dry-run."""
    recipe, info, machine = job.recipe, job.info, job.machine
    settings, lora, dim = recipe.algorithm, recipe.lora, job.problem.dim
    sizes = np.array([len(part) for part in job.parts])
    sent = traffic(job.algorithm, info, job.problem.dim)
    frozen, frozen_bytes = frozen_size(job.model, dim)
    labels = "a regression" if job.task.regression else f"{job.task.num_labels} classes"
    state = sum(client_memory(job.algorithm, info, dim, 0).values())
    crew = f"{machine.processes} processes, each on " if machine.processes > 1 else ""
    where = f"{machine.device.type}, {machine.threads} threads" if machine.device.type == "cpu" else str(machine.device)
    rows = {
        "algorithm": f"{settings['name']}, lr {settings['lr']}, server_lr {settings['server_lr']}",
        "model": f"{recipe.model.name} ({job.backbone.source}), {frozen:,} frozen parameters",
        "trainable parameters": f"{dim:,} (LoRA rank {lora.rank} on {', '.join(lora.targets)}, and the head)",
        "blocks": f"{info.blocks.num_blocks:,}" if job.problem.blocks is not None else "not used by this algorithm",
        "data": f"{job.task.name}: {len(job.task.train):,} training, {len(job.task.validation):,} validation samples, "
        f"{labels}",
        "clients": f"{len(job.parts)}, {info.sampled} a round, {info.tracked} of them tracked",
        "samples per client": f"min {sizes.min():,}, median {int(np.median(sizes)):,}, max {sizes.max():,}",
        "local steps": f"up to {info.local_steps} of batch {recipe.local.batch_size}",
        "rounds": f"{info.total}, evaluated every {recipe.eval.every}",
        "bytes a round": f"{sent.bytes_up:,} up, {sent.bytes_down:,} down",
        "vectors a round": _vectors(job),
        "client memory": f"{(frozen_bytes + 4 * state) / 2**20:,.1f} MiB of weights and state",
        "runs on": f"{crew}{where}, {machine.precision}, cohorts of {job.cohort}",
        "rows": _rows(job),
        "run folder": str(run_folder(recipe)),
    }
    table = Table("", Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
    for name, value in rows.items():
        table.add_row(f"[bold]{name}[/]", value)
    return table


def _rows(job: Job) -> str:
    if job.problem.layout is not None:
        rows = "several samples a row"
    else:
        rows = "a sample a row" if job.recipe.run.slices != "auto" else "a sample a row, as this model needs it"
    if job.recipe.run.gradient_checkpointing:
        rows += ", blocks computed again"
    return f"{rows}, passes of {int(job.problem.pass_tokens):,} tokens unless a client alone has more"


def _vectors(job: Job) -> str:
    all_, derived = (vectors_per_round(job.algorithm, job.info, job.problem.dim, derive=way) for way in (False, True))
    less = f", {derived:.3g} where {', '.join(job.algorithm.derivable)} is worked out from x" if derived < all_ else ""
    return f"{all_:.3g} model-sized, per sampled client{less}"


def run_folder(recipe: Recipe) -> Path:
    """Where a recipe's run lives: run.dir, or runs/<recipe>-s<seed>."""
    return Path(recipe.run.dir or f"runs/{recipe.name}-s{recipe.run.seed}").expanduser()


def with_dir(recipe: Recipe, folder: str | Path | None) -> Recipe:
    """The recipe with run.dir set, where a folder is given."""
    return recipe if folder is None else replace(recipe, run=replace(recipe.run, dir=str(folder)))
