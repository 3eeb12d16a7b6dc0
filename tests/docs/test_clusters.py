"""docs/clusters.md: its launcher files start two machines, emulated on one, and these give the bits of one process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from adapters import same_bits
from launched import ENVIRONMENT, free_port
from repository import REPO

from fedllm import run_recipe

FILES = REPO / "docs" / "clusters"
OVERRIDES = ["federation.rounds=2"]


@pytest.fixture(scope="module")
def one(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run in one process, with the parts that two have."""
    return run_recipe(tiny / "recipe.yaml", [*OVERRIDES, "run.shares=2"], tmp_path_factory.mktemp("one") / "run").folder


@pytest.mark.slow
def test_the_slurm_script(tiny: Path, tmp_path: Path, one: Path) -> None:
    """With a stand-in for srun, which starts the command once per machine, and for scontrol, which names the first."""
    commands = {
        "srun": '"$@" & first=$!; "$@"; status=$?; wait $first && exit $status',
        "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, script in commands.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    environment = {
        **ENVIRONMENT, **job, "PROCESSES_PER_NODE": "1", "PORT": str(free_port()),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }  # fmt: skip
    words = [str(tiny / "recipe.yaml"), f"run.dir={tmp_path / 'run'}", *OVERRIDES]
    done = subprocess.run(
        ["bash", str(FILES / "slurm.sh"), *words], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert same_bits(tmp_path / "run", one)


@pytest.mark.slow
def test_the_accelerate_config(tiny: Path, tmp_path: Path, one: Path) -> None:
    """With one process per machine and the loopback address; without a GPU, Accelerate opens gloo."""
    words = [str(tiny / "recipe.yaml"), f"run.dir={tmp_path / 'run'}", "run.device=cpu", *OVERRIDES]
    port = str(free_port())
    machines = [
        subprocess.Popen(
            [
                sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(FILES / "accelerate_2x8.yaml"),
                "--machine_rank", rank, "--num_processes", "2", "--main_process_ip", "127.0.0.1",
                "--main_process_port", port, str(REPO / "scripts" / "fedtune.py"), *words,
            ],
            env=ENVIRONMENT, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in ("0", "1")
    ]  # fmt: skip
    said = [machine.communicate(timeout=300)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], said
    assert same_bits(tmp_path / "run", one)
