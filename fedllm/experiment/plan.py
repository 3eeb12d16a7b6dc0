"""The table of numbers that --dry-run prints."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np
from rich.markup import escape
from rich.table import Column, Table

from fedllm.aggregation.product_gap import MOST_VALUES
from fedllm.common.errors import cut_name
from fedllm.data.conversations.sample_view import BEGIN, END, learned_share, marked_text
from fedllm.data.samples import Samples
from fedllm.data.tokenization import Tokens
from fedllm.experiment.build import run_folder
from fedllm.experiment.client_samples import count_samples
from fedllm.experiment.full_memory import FullNeed
from fedllm.experiment.job import Job
from fedllm.experiment.recipe_data import grouped_by
from fedllm.experiment.records import partition_summary
from fedllm.experiment.sample_privacy import sample_level
from fedllm.federation.costs import client_memory, round_bytes, vectors_per_round
from fedllm.federation.sampling import chance_of_more
from fedllm.models.quantization import frozen_size
from fedllm.problems.full.problem import FullProblem

_BAD_SHARES = (0.1, 0.2, 0.3)  # of all clients, for the risk of a robust rule
_CLASSES, _SITES = 10, 5  # the most classes named, and of many sites the largest and the smallest ones


def plan_table(job: Job) -> Table:
    """The plan of a run as a table. It is the output of --dry-run."""
    table = Table("", Column(overflow="fold"), show_header=False, box=None, pad_edge=False)
    for name, value in plan_rows(job).items():
        table.add_row(f"[bold]{name}[/]", escape(value))
    return table


def plan_rows(job: Job) -> dict[str, str]:
    """The plan of a run: what is trained with which sizes, memory, communication, notes and warnings."""
    recipe, info, machine = job.recipe, job.info, job.machine
    settings, dim = recipe.algorithm, job.problem.dim
    up, down = round_bytes(job.setup, job.problem.initial())
    frozen, frozen_bytes = frozen_size(job.model, dim)
    state = sum(client_memory(job.algorithm, info, dim, 0).values())
    processes = f"{machine.processes} processes, each on " if machine.processes > 1 else ""
    where = f"{machine.device.type}, {machine.threads} threads" if machine.device.type == "cpu" else str(machine.device)
    return {
        "algorithm": f"{settings['name']}, lr {settings['lr']}, server_lr {settings['server_lr']}",
        "model": f"{recipe.model.name} ({job.backbone.source}), {frozen:,} frozen parameters",
        "trainable parameters": _trainable(job, frozen),
        **_norm(job),
        "blocks": f"{info.blocks.num_blocks:,}" if job.problem.blocks is not None else "not used by this algorithm",
        "head": _head(job),
        "data": _data(job),
        **_classes(job),
        **_learned(job),
        "clients": f"{len(job.parts)}, {info.sampled} per round, {info.tracked} of them tracked",
        **(_deployment(job) if _serves(job) else _sizes(job)),
        **({} if job.own is None else job.own.counts),
        "local steps": f"up to {info.local_steps} of batch {recipe.local.batch_size}",
        "rounds": f"{info.total}, evaluated every {recipe.eval.every}",
        **({} if job.guarantee is None else job.guarantee.rows()),
        "bytes per round": f"{up:,} up, {down:,} down",
        "vectors per round": _vectors(job),
        **_robust(job),
        **_gap(job),
        "client memory": f"{(frozen_bytes + 4 * state) / 2**20:,.1f} MiB of weights and state; "
        f"{job.algorithm.held_vectors()} vectors as GC Table 6 counts",
        "runs on": f"{processes}{where}, {machine.precision}, {job.stacked_clients} clients together",
        **_memory(job),
        "rows": _rows(job),
        "run folder": str(run_folder(recipe)),
        **{f"note {number}": note for number, note in enumerate((*job.dataset.notes, *job.backbone.notes), 1)},
        **{f"warning {number}": text for number, text in enumerate(job.warnings, 1)},
        **_sample(job),
    }


def _trainable(job: Job, frozen: int) -> str:
    dim, lora = job.problem.dim, job.recipe.lora
    if lora is None:
        return f"{dim:,}, all weights"
    head = ", and the head" if job.backbone.head else ""
    if turns := job.setup.turns:
        head += "; in turn " + " and ".join(f"{len(turn.coordinates):,}" for turn in turns)
    kind = "DoRA" if lora.dora else "LoRA"
    adapter = f"{kind} rank {lora.rank}{'' if lora.scaling == 'standard' else f', {lora.scaling},'}"
    return f"{dim:,}, {dim / (frozen + dim):.2%} of all ({adapter} on {', '.join(lora.targets)}{head})"


def _head(job: Job) -> str:
    if (places := job.problem.personal) is not None:
        return f"{job.backbone.start}; each client keeps its own, {len(places):,} values, and sends nothing of it"
    if job.recipe.lora is None and not job.backbone.head:
        return "the language model's own, trained with it"
    return str(job.backbone.start)


def _norm(job: Job) -> dict[str, str]:
    """What becomes of batch norm, where the model has it."""
    if (buffers := job.problem.buffers) is None:
        return {}
    kept = "each client goes on from its own" if buffers.local else "averaged with the model"
    return {"batch norm": f"{len(buffers.initial):,} running statistics, {kept}"}


def _robust(job: Job) -> dict[str, str]:
    """What the robust rule withstands, and how likely a round has more bad clients than that."""
    settings, info = job.recipe.robust, job.info
    bound = "" if settings.norm is None else f"norms up to {settings.norm:g} times the median; "
    if settings.faulty is None:
        return {"robust": bound.removesuffix("; ")} if bound else {}
    risks = []
    for share in _BAD_SHARES:
        bad = max(1, round(share * info.num_clients))
        chance = chance_of_more(settings.faulty, bad, info.num_clients, info.sampled)
        ever = 1 - (1 - chance) ** info.total
        risks.append(f"{bad} of {info.num_clients}: {chance:.1%}, once in {info.total} rounds {ever:.0%}")
    withstands = f"{settings.rule}, up to {settings.faulty} bad clients of {info.sampled} in a round"
    return {"robust": f"{bound}{withstands}; the chance of more, if there are {'; '.join(risks)}"}


def _gap(job: Job) -> dict[str, str]:
    """That lora_gap is not measured, where that is so."""
    if job.recipe.lora is None or job.products:
        return {}
    most = f"{job.info.sampled} updates of {job.problem.dim:,} values are more than {MOST_VALUES:,}"
    return {"lora_gap": f"not measured: {most}"}


def _memory(job: Job) -> dict[str, str]:
    """The memory that training all weights takes."""
    if not isinstance(job.problem, FullProblem):
        return {}
    private = sample_level(job.recipe) is not None
    return {"memory": str(FullNeed.of(job.algorithm, job.problem, job.info, job.stacked_clients, private))}


def _serves(job: Job) -> bool:
    """Whether the job is that of a server, whose training samples are at the sites."""
    return "train" in job.dataset.stand_ins


def _data(job: Job) -> str:
    training = "" if _serves(job) else f"{len(job.dataset.train):,} training, "
    validation = "no" if "validation" in job.dataset.stand_ins else f"{len(job.dataset.validation):,}"
    return f"{job.dataset.name}: {training}{validation} validation samples, {job.task.describe()}"


def _deployment(job: Job) -> dict[str, str]:
    """When a deployed run goes on without a site, and when it ends."""
    settings, count, least = job.recipe.deployment, job.info.num_clients, job.recipe.federation.min_clients
    return {
        "sites": f"{count}; round 1 begins when {settings.start or count} have joined",
        "a site without an answer": f"is asked again after {settings.ask_again:g} s, and at once when it was started "
        "again",
        "a round goes on without": f"missing sites after {settings.deadline:g} s, if {least} or more have answered",
        "the run ends": f"when fewer have answered {settings.patience:g} s later; the same command goes on",
    }


def _sizes(job: Job) -> dict[str, str]:
    """How many samples the clients have."""
    sizes = np.array([len(part) for part in job.parts])
    text = f"min {sizes.min():,}, median {int(np.median(sizes)):,}, max {sizes.max():,}"
    return {"samples per client": text, **_sites(job, sizes)}


def _classes(job: Job) -> dict[str, str]:
    """The largest classes, or values of the column that stands in for them, with their training samples."""
    train = job.dataset.train
    if _serves(job):
        return {"classes": ", ".join(f"'{cut_name(name)}'" for name in job.task.classes)} if job.task.classes else {}
    if (found := count_samples(job.dataset, job.task, [np.arange(len(train))])) is None:
        return {}
    ranked = sorted(zip(found.counts[0], found.names, strict=True), key=lambda pair: -pair[0])
    named = [f"'{cut_name(name)}' {count:,} ({count / len(train):.0%})" for count, name in ranked[:_CLASSES]]
    column = grouped_by(job.recipe)
    more = f" and {len(ranked) - _CLASSES:,} more" if len(ranked) > _CLASSES else ""
    return {"classes" if column is None else f"values of {column}": ", ".join(named) + more}


def _learned(job: Job) -> dict[str, str]:
    """How many tokens a causal language model learns."""
    splits = {"training tokens": job.problem.samples, "validation tokens": job.validation}
    if _serves(job):
        return {}
    return {name: learned_share(each.to("cpu")) for name, each in splits.items() if _learns_tokens(each)}


def _sample(job: Job) -> dict[str, str]:
    """The first training sample as a causal language model sees it."""
    tokens = job.problem.samples
    if _serves(job) or not _learns_tokens(tokens):
        return {}
    shown = f"the first sample; what is learned stands between {BEGIN} and {END}"
    return {shown: marked_text(tokens.to("cpu"), 0, job.backbone.tokenizer)}


def _learns_tokens(samples: Samples) -> TypeGuard[Tokens]:
    return isinstance(samples, Tokens) and samples.learned is not None


def _sites(job: Job, sizes: np.ndarray) -> dict[str, str]:
    """The largest and the smallest clients by name, where a column's values name the clients."""
    if (names := partition_summary(job)["names"]) is None:
        return {}
    ranked = [f"'{cut_name(names[client])}' {sizes[client]:,}" for client in np.argsort(-sizes, kind="stable")]
    if len(ranked) <= 2 * _SITES:
        return {"sites": ", ".join(ranked)}
    return {"sites": f"{', '.join(ranked[:_SITES])}, ..., {', '.join(ranked[-_SITES:])}"}


def _rows(job: Job) -> str:
    unit = "tokens" if job.backbone.images is None else "patches"
    if sample_level(job.recipe) is not None:
        return (
            f"one sample per row with a gradient of its own, passes of {int(job.problem.pass_tokens):,} {unit} at most"
        )
    if isinstance(job.problem, FullProblem):
        together = "clients share a pass" if job.problem.stacked else "a client's batch is a pass"
        whole = "" if job.problem.buffers is not None else f", cut above {int(job.problem.pass_tokens):,} {unit}"
        return f"one sample per row, {together}{whole}"
    if job.backbone.images is not None:
        rows = "one image per row"
    elif job.problem.packed:
        rows = "several samples per row"
    else:
        rows = "one sample per row" if job.recipe.run.slices != "auto" else "one sample per row, as this model needs it"
    if job.recipe.run.gradient_checkpointing:
        rows += ", blocks computed again"
    return f"{rows}, passes of {int(job.problem.pass_tokens):,} {unit} unless a client alone has more"


def _vectors(job: Job) -> str:
    alg, equal = job.algorithm, job.equal_steps
    all_, derived = (
        vectors_per_round(alg, job.info, job.problem.dim, derive=way, equal_steps=equal) for way in (False, True)
    )
    names = ", ".join(alg.computable(job.info, equal))
    less = f", {derived:.3g} where {names} is worked out from x" if derived < all_ else ""
    return f"{all_:.3g} model-sized, per sampled client{less}"
