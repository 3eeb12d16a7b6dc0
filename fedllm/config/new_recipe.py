"""A recipe to start from, with a comment on each section."""

from __future__ import annotations

from pathlib import Path

from fedllm.common.errors import UserError

TEMPLATES = Path(__file__).with_name("templates")
TASKS = ("classification", "causal_lm", "image_classification")


def write_recipe(path: Path, task: str) -> None:
    """Writes the recipe for one of TASKS. Raises UserError if something is at `path` or its name is no recipe's."""
    if path.suffix not in (".yaml", ".yml"):
        raise UserError(f"{path}: found the ending '{path.suffix}', expected .yaml")
    text = (TEMPLATES / f"{task}.yaml").read_text(encoding="utf-8")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text.replace("FILE", str(path)).replace("STEM", path.stem))
    except FileExistsError:
        raise UserError(f"{path}: is there already; choose another name, or move it away") from None
    except FileNotFoundError:
        raise UserError(f"{path.parent}: no such folder; make it first, or choose another") from None
