"""A finished run whose classes have names."""

from __future__ import annotations

from pathlib import Path

from fedllm import run_recipe
from fedllm.experiment.run import RunResult

ROUNDS = ["federation.rounds=2", "algorithm.lr=0.05"]


def run_with_names(tiny: Path, folder: Path) -> RunResult:
    """Two rounds of the recipe in `tiny`, whose two classes are called no and yes here, in folder/run."""
    words = []
    for name in ("train", "validation"):
        text = (tiny / f"{name}.csv").read_text()
        (folder / f"{name}.csv").write_text(text.replace(",0,", ",no,").replace(",1,", ",yes,"))
        words.append(f"data.{name}={folder / name}.csv")
    return run_recipe(tiny / "recipe.yaml", [*words, *ROUNDS], folder / "run")
