"""Sums, decisions, errors and clients' vectors of several processes, against those of one."""

from __future__ import annotations

from pathlib import Path

import pytest
from launched import launch


@pytest.mark.slow
@pytest.mark.parametrize("processes", [2, 3])
def test_several_processes_agree_with_one(tmp_path: Path, processes: int) -> None:
    done = launch("tests/support/collective_checks.py", str(tmp_path), processes=processes)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("all agree") == processes
