"""Exports the adapter of a run, or the whole model with the adapter merged into it. The run may be unfinished."""

from __future__ import annotations

from pathlib import Path

from peft import PeftModel

from fedllm.experiment.export_plan import plan_export
from fedllm.experiment.trained import load_trained
from fedllm.experiment.trained_files import processor_of, save_trained
from fedllm.models.gguf_adapter import SUFFIX, require_gguf, save_gguf_adapter
from fedllm.models.merged_files import require_free, save_merged


def export_adapter(
    folder: str | Path, out: str | Path | None = None, *, round: int | None = None, best: bool = False
) -> Path:
    """Writes the adapter of a run's newest intact checkpoint to `out`, and returns its folder.

    Of a run that trained all weights it writes the model, as a folder of transformers, by default to <run>/model.
    round: a round whose checkpoint is still there, instead of the newest. best: the round with the best headline score.
    out: by default <run>/adapter, or <run>/adapter-round-N for a given round. An adapter there is replaced.
    It loads the base model; it needs no data. Raises UserError if `folder` is not a run with such a checkpoint.
    """
    plan = plan_export(folder, out, round, best=best)
    run = load_trained(folder, plan.round)
    return save_trained(run.recipe, run.model, plan.out, run.backbone, run.task, run.card())


def export_merged(
    folder: str | Path, out: str | Path | None = None, *, round: int | None = None, best: bool = False
) -> Path:
    """Writes the model of a run, the adapter merged into its base, as a folder of transformers; see export_adapter.

    out: by default <run>/merged, or <run>/merged-round-N; a folder that is not empty is not replaced. The weights have
    the dtype of the base. Raises UserError also for a quantised base, which cannot take up an adapter.
    """
    plan = plan_export(folder, out, round, best=best, merge=True)
    require_free(plan.out)
    run = load_trained(folder, plan.round)
    assert isinstance(run.model, PeftModel), "plan_export refuses runs without adapters"
    card = run.card(merged=True)
    return save_merged(run.model, plan.out, processor_of(run.backbone, run.task), card)


def export_gguf(
    folder: str | Path, out: str | Path | None = None, *, round: int | None = None, best: bool = False
) -> Path:
    """Writes the adapter of a causal language model as a GGUF file for llama.cpp; see export_adapter.

    out: by default <run>/adapter.gguf, or <run>/adapter-round-N.gguf; a file there is replaced. Raises UserError also
    for another model, and for an architecture that is not among gguf_adapter.ARCHITECTURES.
    """
    plan = plan_export(folder, out, round, best=best, gguf=True)
    file = plan.out.with_name(f"{plan.out.name}{SUFFIX}") if out is None else plan.out
    require_gguf(file)
    run = load_trained(folder, plan.round)
    assert isinstance(run.model, PeftModel), "plan_export refuses runs without adapters"
    return save_gguf_adapter(run.model, file, run.recipe.name)
