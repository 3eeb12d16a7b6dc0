"""Commands that need no model import nothing that computes with one. benchmarks/startup/measure.py times them."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from repository import REPO

HEAVY = {
    "accelerate", "datasets", "evaluate", "matplotlib", "numpy", "pandas", "peft", "scipy", "sklearn", "torch",
    "transformers",
}  # fmt: skip
PROGRAM = """
import json, sys
from fedllm.cli import main
try:
    code = main(sys.argv[1:])
except SystemExit as stop:
    code = stop.code
print(json.dumps([code, sorted(sys.modules)]))
"""
RECIPE, GRID = "recipes/quickstart.yaml", "recipes/sweeps/fedadamw_alpha.yaml"


def command(*words: str, **environment: str) -> tuple[int, set[str], str]:
    """Exit code, the imported top-level modules, and what was printed, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words], cwd=REPO, capture_output=True, text=True, timeout=60,
        env={**os.environ, **environment},
    )  # fmt: skip
    said, _, last = done.stdout.rstrip().rpartition("\n")
    code, modules = json.loads(last)
    return code, {name.partition(".")[0] for name in modules}, said + done.stderr


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["--help"], 0, "exit codes:"),
        (["--version"], 0, "fedllm 0.1.0"),
        (["run", "--help"], 0, "federation.clients_per_round"),
        (["sweep", "--help"], 0, "choose"),
        (["run", "missing.yaml"], 2, "missing.yaml: no such recipe file"),
        (["run", RECIPE, "algorithm.lrr=1"], 2, "did you mean 'lr'?"),
        (["tune", RECIPE, "run.sed=1"], 2, "did you mean 'seed'?"),
        (["partition", "missing.yaml"], 2, "missing.yaml: no such recipe file"),
        (["sweep", RECIPE, "missing.yaml"], 2, "missing.yaml: cannot be read"),
        (["sweep", RECIPE, GRID, "algorithm.lrr=1"], 2, "cell alpha=0: "),
        (["sweep", RECIPE, GRID, "--dry-run"], 0, "\nalpha=0.25\n"),
        ([], 2, "run a recipe"),
        (["suite", "glue", "--model", "minilm", "lora.rnk=1"], 2, "did you mean 'rank'?"),
        (["report"], 2, "the following arguments are required: runs"),
        (["report", "missing", "recipes"], 2, "recipes: not a run folder"),
        (["export", "missing"], 2, "missing: no such folder"),
        (["export", "missing", "--merge", "--best"], 2, "missing: no such folder"),
        (["push", "missing", "me/mine"], 2, "missing: no such folder"),
        (["export", "recipes"], 2, "recipes: not a run folder"),
        (["evaluate", "missing"], 2, "missing: no such folder"),
        (["predict", "missing", "texts.csv", "--out", "out.csv"], 2, "missing: no such folder"),
        (["predict", "missing", "texts.csv"], 2, "the following arguments are required: --out"),
        (["hessian", "--algorithm", "fedadamv"], 2, "did you mean 'fedadam'?"),
        (["algorithms"], 0, "fadamgc_b"),
        (["algorithms", "fedadamw"], 0, "Delta"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
@pytest.mark.slow
def test_what_needs_no_model_answers_without_torch(words: list[str], code: int, said: str) -> None:
    found, modules, output = command(*words)
    assert said in output
    assert found == code
    assert not modules & HEAVY


def test_reading_a_recipe_imports_neither_torch_nor_transformers_nor_numpy() -> None:
    program = "import sys, fedllm; fedllm.load_recipe(sys.argv[1]).load_algorithm(); print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program, RECIPE], cwd=REPO, capture_output=True, text=True, check=True, timeout=60
    )
    assert not HEAVY & set(done.stdout.split())


@pytest.mark.parametrize(
    "words", [["run", "missing.yaml"], ["sweep", RECIPE, "missing.yaml"], ["run", "a", "--profle"]]
)
@pytest.mark.slow
def test_of_the_processes_of_a_launcher_one_says_what_is_wrong_and_none_waits(words: list[str]) -> None:
    """Nobody listens at the address, so that a process that asked for the others would not end."""
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    first, second = (command(*words, RANK=rank, LOCAL_RANK=rank, **group) for rank in "01")
    assert first[0] == second[0] == 2
    assert first[2].count(words[-1]) == 1
    assert second[2] == ""


def test_a_usage_error_is_two_lines_and_no_list_of_all_keys() -> None:
    assert len(command("run", "recipe.yaml", "--profle")[2].splitlines()) == 2


def test_the_first_process_of_every_machine_speaks() -> None:
    """A recipe may be missing on one machine alone."""
    code, _, said = command("run", "missing.yaml", RANK="2", LOCAL_RANK="0", WORLD_SIZE="4", LOCAL_WORLD_SIZE="2")
    assert (code, said) == (2, "fedllm: missing.yaml: no such recipe file\n")


@pytest.mark.slow
def test_what_fedllm_builds_on_says_nothing_when_it_is_imported() -> None:
    """On a CPU with fast bfloat16, bitsandbytes would ask for a kernel that fedllm does not use."""
    done = subprocess.run(
        [sys.executable, "-c", "import fedllm.experiment.build"], cwd=REPO, capture_output=True, text=True, timeout=300
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
