"""Which rounds of a run have a checkpoint, told without torch."""

from __future__ import annotations

from pathlib import Path

from fedllm.common.errors import UserError
from fedllm.results.reader import require_run_folder


def kept_rounds(folder: Path) -> list[int]:
    """The rounds of a run folder that have a checkpoint, intact or not, in rising order."""
    found = (path for path in (folder / "checkpoints").glob("[0-9]*") if path.name.isdigit() and path.is_dir())
    return sorted(int(path.name) for path in found)


def require_rounds(folder: Path, round: int | None = None) -> None:
    """Raises UserError if `folder` is no run folder, has no checkpoint, or has none of `round`."""
    require_run_folder(folder)
    kept = kept_rounds(folder)
    if not kept:
        raise UserError(
            f"{folder}: has no checkpoint yet, expected one of a finished or interrupted run; run its recipe up to the "
            f"first checkpoint (run.checkpoint_every)"
        )
    if round is not None and round not in kept:
        raise UserError(f"{folder}: has no checkpoint of round {round}; it has those of {rounds_text(kept)}")


def rounds_text(rounds: list[int]) -> str:
    """Rounds as an error lists them: round 4, or rounds 3 and 4."""
    if len(rounds) == 1:
        return f"round {rounds[0]}"
    return f"rounds {', '.join(map(str, rounds[:-1]))} and {rounds[-1]}"
