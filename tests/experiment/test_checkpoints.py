"""Which of the checkpoints in a run folder is the newest."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedllm.experiment.checkpoints import Checkpoints


def test_the_newest_is_that_of_the_highest_round(tmp_path: Path) -> None:
    """Also beyond the six digits of a folder's name."""
    for name in ("000002", "999999", "1000000", ".writing-1", "notes"):
        (tmp_path / name).mkdir()
    checkpoints = Checkpoints(tmp_path, warn=pytest.fail)
    assert checkpoints.kept() == "The checkpoint of round 1000000 is intact: the same command goes on from it"
