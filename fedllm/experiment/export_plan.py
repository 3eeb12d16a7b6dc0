"""Which checkpoint an export takes, and where it goes. It needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.results.kept_rounds import kept_rounds, require_rounds, rounds_text
from fedllm.results.reader import load_run


@dataclass(frozen=True)
class ExportPlan:
    """round: None for the newest intact checkpoint. out: the folder to write. kind: adapter, model or merged."""

    round: int | None
    out: Path
    kind: str


def plan_export(
    folder: str | Path,
    out: str | Path | None = None,
    round: int | None = None,
    *,
    best: bool = False,
    merge: bool = False,
    gguf: bool = False,
) -> ExportPlan:
    """The plan of export_adapter, with `merge` of export_merged, with `gguf` of export_gguf. Raises UserError for what
    is wrong."""
    folder = Path(folder).expanduser()
    if round is not None and best:
        raise UserError(f"--round={round} and --best: found both, expected one of them")
    require_rounds(folder, round)
    recipe = load_recipe(folder / "recipe.yaml")
    if (merge or gguf) and recipe.lora is None:
        option = "--merge" if merge else "--gguf"
        raise UserError(f"{option}: {folder} trained all weights, so there is no adapter; export it without {option}")
    if merge and (quantize := recipe.model.quantize) != "none":
        raise UserError(
            f"--merge: {folder} was trained on a base with model.quantize={quantize}, whose weights cannot take up an "
            f"adapter; export it without --merge, and load it on the quantised base"
        )
    if best:
        round = _best_round(folder)
    kind = "merged" if merge else recipe.trained_folder
    if out is None:
        out = folder / (kind if round is None else f"{kind}-round-{round}")
    return ExportPlan(round, Path(out).expanduser(), kind)


def _best_round(folder: Path) -> int:
    """The round with the best headline score. Raises UserError unless its checkpoint is kept."""
    run = load_run(folder)
    name = run.result.get("best_by", run.result["primary"])
    if name not in run.result["best"]:
        raise UserError(f"{folder}: no round has been evaluated yet, so none is the best; export with --round instead")
    best, kept = run.result["best"][name], kept_rounds(folder)
    if (round := best["round"]) in kept:
        return round
    if load_recipe(folder / "recipe.yaml").load_algorithm().depends_on_total():  # fewer rounds would change its rates
        again = f"run.checkpoint_every=1 and another run.dir, end it with Ctrl-C after round {round}, and export that"
    else:
        again = f"federation.rounds={round} and another run.dir"
    raise UserError(
        f"{folder}: {name} is best in round {round} ({best['value']:.4f}), whose weights are not kept; there are "
        f"checkpoints of {rounds_text(kept)}, which --round exports. To have round {round}, run its recipe with "
        f"{again}; eval.keep_best=true keeps the best round of a run"
    )
