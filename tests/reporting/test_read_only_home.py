"""Figures where the home folder is read-only."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from repository import REPO


@pytest.mark.slow
def test_matplotlib_does_not_warn() -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPO), "MPLCONFIGDIR": "/proc/no-such-folder"}
    command = [sys.executable, "-c", "import fedllm.reporting.style"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stderr == ""
