"""Checks a chat's run and settings before the model is loaded. It needs no torch."""

from __future__ import annotations

import math
from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.config.recipe import load_recipe
from fedllm.data.settings import CAUSAL_LM
from fedllm.results.kept_rounds import require_rounds


def check_chat(folder: Path, round: int | None, temperature: float, new_tokens: int) -> None:
    """Raises UserError for what is wrong with them."""
    require_rounds(folder, round)
    if (task := load_recipe(folder / "recipe.yaml").data.task) != CAUSAL_LM:
        raise UserError(f"{folder}: was trained with data.task={task}; chat needs a run with data.task={CAUSAL_LM}")
    if not (temperature >= 0 and math.isfinite(temperature)):
        raise UserError(f"--temperature={temperature:g}: expected a number, 0 or more")
    if new_tokens < 1:
        raise UserError(f"--new-tokens={new_tokens}: expected at least 1")
