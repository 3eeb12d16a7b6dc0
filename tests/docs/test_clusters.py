"""docs/clusters.md: its launcher files start two machines, emulated on one, and these give the bits of one process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
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


def slurm_environment(folder: Path, machines: int, processes: int, srun: str) -> dict[str, str]:
    """Of a job, with a stand-in for srun, and for scontrol, which names the machines."""
    commands = {
        "srun": srun,
        "scontrol": "echo 127.0.0.1; echo 127.0.0.2",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, script in commands.items():
        (folder / name).write_text(f"#!/bin/bash\n{script}\n")
        (folder / name).chmod(0o755)
    return {
        **ENVIRONMENT, "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_JOB_NUM_NODES": str(machines), "SLURM_JOB_ID": "7",
        "PROCESSES_PER_NODE": str(processes), "PORT": str(free_port()), "PATH": f"{folder}:{os.environ['PATH']}",
    }  # fmt: skip


@pytest.mark.slow
def test_the_slurm_script(tiny: Path, tmp_path: Path, one: Path) -> None:
    """srun starts the command once per machine."""
    environment = slurm_environment(tmp_path, 2, 1, '"$@" & first=$!; "$@"; status=$?; wait $first && exit $status')
    words = [str(tiny / "recipe.yaml"), f"run.dir={tmp_path / 'run'}", *OVERRIDES]
    done = subprocess.run(
        ["bash", str(FILES / "slurm.sh"), *words], env=environment, cwd=tmp_path, capture_output=True, text=True,
        timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert same_bits(tmp_path / "run", one)


@pytest.mark.slow
def test_the_slurm_script_ends_after_a_round_when_its_time_is_nearly_over(tiny: Path, tmp_path: Path) -> None:
    """Slurm sends SIGUSR1 to every process that srun has started; torchrun must outlive it."""
    folder = tmp_path / "run"
    environment = slurm_environment(tmp_path, 1, 2, '"$@" & echo $! > step; wait')
    words = [str(tiny / "recipe.yaml"), f"run.dir={folder}", "run.threads=1", "federation.rounds=1000"]
    command = ["bash", str(FILES / "slurm.sh"), *words, "run.checkpoint_every=1000"]
    with subprocess.Popen(command, env=environment, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as job:
        until = time.monotonic() + 120
        while not (folder / "metrics.jsonl").is_file() or not (folder / "metrics.jsonl").read_text():
            assert time.monotonic() < until
            time.sleep(0.1)
        step = psutil.Process(int((tmp_path / "step").read_text()))
        for process in [step, *step.children(recursive=True)]:
            process.send_signal(signal.SIGUSR1)
        _, said = job.communicate(timeout=120)
    assert job.returncode == 0, said
    (checkpoint,) = (folder / "checkpoints").iterdir()
    assert f"{folder}: stopped after round {int(checkpoint.name)}; the same command goes on (SIGUSR1)" in said
    assert not (folder / "result.json").exists()


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
