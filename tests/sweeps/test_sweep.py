"""Sweeps: every cell once, as if run alone; finished cells are skipped, killed ones go on, mistakes show first."""

from __future__ import annotations

import json
import signal
import time
from collections import Counter
from functools import partial
from pathlib import Path

import forked
import pytest
import yaml
from adapters import same_bits

import fedllm.experiment.run
import fedllm.sweeps.sweep
from fedllm import run_recipe
from fedllm.cli.commands import main
from fedllm.common.errors import RunError, UserError
from fedllm.problems.lora.problem import LoraProblem
from fedllm.reporting.report import report
from fedllm.sweeps.grid import cells, load_grid
from fedllm.sweeps.sweep import sweep
from fedllm.tasks import sequence_classification


def write(folder: Path, **grid: object) -> Path:
    path = folder / "grid.yaml"
    path.write_text(yaml.safe_dump(grid))
    return path


def evaluated(folder: Path) -> list[tuple[int, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(line["round"], line["eval_loss"]) for line in lines if "eval_loss" in line]


def names(folder: Path) -> list[str]:
    return sorted(path.parent.name for path in folder.glob("*/result.json"))


def test_cells_are_every_combination(tmp_path: Path) -> None:
    grid = load_grid(
        write(
            tmp_path,
            set={"federation.rounds": 2},
            cases={"a": {"algorithm": {"name": "fedavg"}}, "b": {"algorithm.lr": 0.1, "grid": {"lora.rank": [1, 2]}}},
            grid={"algorithm.server_lr": [0.5, 1], "local.steps": [1]},
        )
    )
    found = list(cells(grid, ["run.threads=1"]))
    assert [cell.name for cell in found] == [
        "a,server_lr=0.5,steps=1",
        "a,server_lr=1,steps=1",
        "b,server_lr=0.5,steps=1,rank=1",
        "b,server_lr=0.5,steps=1,rank=2",
        "b,server_lr=1,steps=1,rank=1",
        "b,server_lr=1,steps=1,rank=2",
    ]
    assert found[0].overrides == (
        "federation.rounds=2", 'algorithm={"name": "fedavg"}', "algorithm.server_lr=0.5", "local.steps=1",
        "run.threads=1",
    )  # fmt: skip


def test_keys_of_two_sections_that_end_alike_keep_their_sections(tmp_path: Path) -> None:
    grid = load_grid(write(tmp_path, grid={"lora.alpha": [1], "partition.alpha": [2]}))
    assert [cell.name for cell in cells(grid)] == ["lora.alpha=1,partition.alpha=2"]


def test_a_grid_may_give_another_name_of_a_key(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("data: {name: glue/sst2}\nalgorithm: fedavg\nrun: {stacked_clients: 9}\n")
    found = list(cells(load_grid(write(tmp_path, grid={"run.cohort": [1, 2]}))))
    assert [cell.name for cell in found] == ["cohort=1", "cohort=2"]
    assert [cell.recipe(str(tmp_path / "r.yaml")).run.stacked_clients for cell in found] == [1, 2]


@pytest.mark.slow
def test_a_sweep_is_its_runs_and_their_table(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenized: list[int] = []
    tokenize = sequence_classification.tokenize
    monkeypatch.setattr(sequence_classification, "tokenize", lambda *args: tokenized.append(1) or tokenize(*args))
    grid = write(tmp_path, set={"federation.rounds": 2}, grid={"algorithm.lr": [0.01, 0.02]}, seeds=[0, 1])
    out = tmp_path / "out"
    assert main(["sweep", str(tiny / "recipe.yaml"), str(grid), "--out", str(out), "run.threads=1"]) == 0
    assert names(out) == ["lr=0.01-s0", "lr=0.01-s1", "lr=0.02-s0", "lr=0.02-s1"]
    said = capsys.readouterr().out
    assert [f"run {n} of 4: {out / name}" in said for n, name in enumerate(names(out), 1)] == [True] * 4
    assert len(tokenized) == 2, "training and validation samples, once for all four runs"
    run_lock = run_recipe(
        tiny / "recipe.yaml",
        ["federation.rounds=2", "algorithm.lr=0.02", "run.seed=1", "run.threads=1"],
        tmp_path / "alone",
    )
    assert same_bits(run_lock.folder, out / "lr=0.02-s1")
    table = (out / "report" / "summary.md").read_text()
    assert "lr=0.01" in table
    assert "mean ± standard deviation over seeds" in table

    def no_work(*_: object) -> None:
        raise AssertionError("a finished cell was run again")

    monkeypatch.setattr(LoraProblem, "loss_and_gradient", no_work)
    capsys.readouterr()
    assert main(["sweep", str(tiny / "recipe.yaml"), str(grid), "--out", str(out), "run.threads=1"]) == 0
    assert "lr=0.02" in capsys.readouterr().out


@pytest.mark.slow
def test_the_best_trial_of_each_case_is_run_in_full(tiny: Path, tmp_path: Path) -> None:
    grid = write(
        tmp_path,
        cases={
            "adam": {"algorithm": {"name": "localadam"}, "grid": {"algorithm.lr": [1e-9, 0.02]}},
            "sgd": {"algorithm": {"name": "fedavg", "lr": 0.1}},
        },
        choose={"rounds": 2, "by": "eval_loss", "set": {"eval.every": 2}},
        seeds=[3, 4],
    )
    out = sweep(tiny / "recipe.yaml", grid, tmp_path / "out", ["run.threads=1"]).folder
    trials = {path.parent.name: json.loads(path.read_text()) for path in out.glob("trials/*/result.json")}
    assert set(trials) == {"adam,lr=1e-09", "adam,lr=0.02"}
    assert {(trial["rounds"], trial["seed"]) for trial in trials.values()} == {(2, 3)}
    assert {
        len((path.parent / "metrics.jsonl").read_text().split("eval_loss")) for path in out.glob("trials/*/result.json")
    } == {2}
    best = min(trials, key=lambda name: trials[name]["best"]["eval_loss"]["value"])
    assert best == "adam,lr=0.02"
    assert names(out) == [f"{best}-s3", f"{best}-s4", "sgd-s3", "sgd-s4"]
    assert json.loads((out / f"{best}-s3" / "result.json").read_text())["rounds"] == 4
    table = (out / "trials.md").read_text()
    assert f"| adam | lr=0.02 | {trials[best]['best']['eval_loss']['value']:.4f} |" in table


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "trial_rounds", "begins"),
    [
        ({}, None, True),
        ({"eval.every": 2}, 2, True),
        ({"eval.every": 3}, 2, False),  # the trial has an evaluation that the run does not have
        ({"algorithm.schedule": "cosine_rounds"}, 2, False),  # the rates depend on the number of rounds
        ({"run.resume": "never"}, None, False),  # a run must not go on from anything
    ],
)
def test_the_run_of_the_first_seed_goes_on_from_the_best_trial_where_its_rounds_are_the_same(
    change: dict[str, object],
    trial_rounds: int | None,
    begins: bool,
    tiny: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = {"algorithm": {"name": "localadam"}, **change, "grid": {"algorithm.lr": [1e-9, 0.02]}}
    choose = {"rounds": trial_rounds, "by": "eval_loss"}
    settings = {"federation.rounds": 4, "run.threads": 1}
    grid = write(tmp_path, set=settings, cases={"adam": case}, choose=choose, seeds=[3, 4])
    began: list[str] = []
    run, compute = fedllm.sweeps.sweep.run, LoraProblem.loss_and_gradient

    def recorded_run(recipe, *args, **more):
        began.append(Path(recipe.run.dir).name)
        return run(recipe, *args, **more)

    computed: Counter[str] = Counter()

    def recorded_compute(*args, **more):
        computed[began[-1]] += 1
        return compute(*args, **more)

    monkeypatch.setattr(fedllm.sweeps.sweep, "run", recorded_run)
    monkeypatch.setattr(LoraProblem, "loss_and_gradient", recorded_compute)
    out = sweep(tiny / "recipe.yaml", grid, tmp_path / "out").folder
    trial, first = "adam,lr=0.02", "adam,lr=0.02-s3"
    assert began == ["adam,lr=1e-09", trial, first, "adam,lr=0.02-s4"]
    cell = {**settings, "algorithm": "localadam", "algorithm.lr": 0.02, "run.seed": 3, **change}
    began.append("alone")
    alone = run_recipe(
        tiny / "recipe.yaml", [f"{key}={value}" for key, value in cell.items()], tmp_path / "alone"
    ).folder
    assert computed[first] == computed["alone"] - (computed[trial] if begins else 0)
    copy = out / first
    assert same_bits(alone, copy)
    assert evaluated(alone) == evaluated(copy)
    assert sorted(path.name for path in copy.iterdir()) == sorted(path.name for path in alone.iterdir())
    recipe = (alone / "recipe.yaml").read_text()
    assert (copy / "recipe.yaml").read_text() == recipe.replace(str(alone), str(copy))
    assert "adam,lr=1e-09" not in (out / "report" / "summary.md").read_text()


@pytest.mark.slow
def test_one_case_alone(tiny: Path, tmp_path: Path) -> None:
    grid = write(
        tmp_path,
        set={"federation.rounds": 1},
        cases={name: {"algorithm": {"name": name, "lr": 0.01}} for name in ("fedavg", "localadam")},
    )
    assert names(sweep(tiny / "recipe.yaml", grid, tmp_path / "out", only=["localadam"]).folder) == ["localadam-s0"]
    with pytest.raises(UserError, match=r"--only localadamm: no such case .*did you mean .localadam.\?"):
        sweep(tiny / "recipe.yaml", grid, tmp_path / "out", only=["localadamm"])


@pytest.mark.slow
def test_one_case_run_alone_leaves_the_others_in_the_tables(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fedllm.experiment.run, "_plot", lambda folder: folder / "curves.png")
    monkeypatch.setattr(fedllm.sweeps.sweep, "report", partial(report, formats=["md"]))
    cases = {
        "fedavg": {"algorithm": {"name": "fedavg"}, "grid": {"algorithm.lr": [0.01, 0.1]}},
        "fedcm": {"algorithm": {"name": "fedcm"}},
    }
    grid = write(tmp_path, set={"federation.rounds": 1}, cases=cases, choose={"rounds": 1})
    for case in cases:
        out = sweep(tiny / "recipe.yaml", grid, tmp_path / "out", ["run.threads=1"], only=[case]).folder
    assert (out / "trials.md").read_text().count("| fedavg |") == 2
    summary = (out / "report" / "summary.md").read_text()
    assert "| fedavg " in summary
    assert "| fedcm " in summary
    assert len(names(out)) == 2, "the best cell of each case"


def test_a_dry_run_lists_the_cells(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cases = {"same": {"algorithm": "FAdamGC"}, "other": {"algorithm": {"name": "fedavg"}, "partition": {"alpha": 1}}}
    grid = write(tmp_path, cases=cases, grid={"algorithm.lr": [0.01, 0.02]}, seeds=[0, 1, 2])
    out, recipe = tmp_path / "out", tmp_path / "r.yaml"
    recipe.write_text(f"extends: {tiny}/recipe.yaml\nalgorithm: {{tracking_init: gradient, schedule: linear}}\n")
    command = ["sweep", str(recipe), str(grid), "--out", str(out), "--dry-run"]
    assert main([*command, "lora.rank=1"]) == 0
    said = capsys.readouterr().out
    assert " ".join(said.split("\n\n")[0].split()) == (
        f"4 cells: 12 runs, every cell with 3 seeds, into {out} Settings of each cell that differ from {recipe}:"
    )
    note = "takes over schedule; drops\n    tracking_init, which it does not have"
    shared = "  lora: {rank: 1}\n  partition: {alpha: 1}\n"
    last = f"  algorithm fedavg in place of fadamgc: {note}"
    assert said.rstrip().split("\n\n")[1:] == [
        f"other,lr=0.01\n{shared}  algorithm: {{name: fedavg, weights: size}}\n{last}",
        f"other,lr=0.02\n{shared}  algorithm: {{name: fedavg, lr: 0.02, weights: size}}\n{last}",
        "same,lr=0.01\n  lora: {rank: 1}",
        "same,lr=0.02\n  lora: {rank: 1}\n  algorithm: {lr: 0.02}",
    ]
    assert not out.exists()


def test_a_dry_run_counts_the_trials(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    grid = write(
        tmp_path,
        cases={"a": {"grid": {"lora.rank": [1, 2, 3]}}, "b": {"lora.alpha": 1}},
        choose={"rounds": 2, "set": {"eval.every": 2}},
        seeds=[0, 1],
    )
    assert main(["sweep", str(tiny / "recipe.yaml"), str(grid), "--out", "out", "--dry-run"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "4 cells: 3 trials of 2 rounds, then 4 runs, the best cell of each of 2 cases with 2 seeds, into out" in said
    assert "Trials also have eval.every: 2." in said
    assert main(["sweep", str(tiny / "recipe.yaml"), str(grid), "--out", "out", "--dry-run", "--only", "b"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "1 cell: 0 trials of 2 rounds, then 2 runs, the best cell with 2 seeds, into out" in said


def test_cells_of_a_recipe_that_needs_the_grid_are_compared_with_each_other(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("data: {name: glue/sst2}\n")
    grid = write(tmp_path, set={"algorithm": "fedavg"}, grid={"lora.rank": [1, 2]})
    assert main(["sweep", str(recipe), str(grid), "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "differ between cells:" in said
    assert said.endswith("\nrank=1\n  lora: {rank: 1}\n\nrank=2\n  lora: {rank: 2}\n")


def test_a_case_changes_the_keys_that_it_gives_and_no_others(tiny: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: {tiny}/recipe.yaml\nalgorithm: {{lr: 3.0e-3, schedule: linear}}\n")
    cases = {name: {"algorithm": {"name": name}, "local": {"batch_size": 4}} for name in ("fadamgc", "fedadamw")}
    for cell in cells(load_grid(write(tmp_path, cases=cases, set={"federation": {"rounds": 2}}))):
        loaded = cell.recipe(str(recipe))
        assert (loaded.algorithm["name"], loaded.algorithm["lr"]) == (cell.case, 3e-3)
        assert loaded.algorithm["schedule"] == "linear"
        assert (loaded.local.epochs, loaded.local.batch_size) == (1, 4)
        assert (loaded.federation.rounds, loaded.federation.clients_per_round) == (2, 5)


def test_a_grid_may_hold_anchors_under_keys_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "grid.yaml"
    path.write_text("x-rates: &r [1.0e-3, 3.0e-3]\ngrid: {algorithm.lr: *r}\n")
    assert load_grid(path).grid == {"algorithm.lr": [1e-3, 3e-3]}


@pytest.mark.slow
def test_a_cell_that_cannot_go_on_does_not_stop_the_others(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = write(tmp_path, set={"federation.rounds": 1}, grid={"algorithm.lr": [1e38, 0.01]})
    command = ["sweep", str(tiny / "recipe.yaml"), str(grid), "--out", str(tmp_path / "out"), "algorithm.eps=1e-30"]
    assert main([*command, "federation.min_clients=5"]) == 1
    assert names(tmp_path / "out") == ["lr=0.01-s0"]
    error = capsys.readouterr().err
    assert "1 runs of the sweep failed" in error
    assert "lr=1e+38-s0" in error


@pytest.mark.slow
def test_a_killed_sweep_goes_on(tiny: Path, tmp_path: Path) -> None:
    """kill -9 in the midst of the second cell; the same command ends with the bits of a sweep left alone."""
    grid = write(tmp_path, grid={"algorithm.lr": [0.01, 0.02]})
    out = tmp_path / "killed"
    command = ["sweep", str(tiny / "recipe.yaml"), str(grid), "run.threads=1", "--out"]
    process = forked.start("-m", "fedllm", *command, str(out), out=tmp_path / "said.txt")
    second = out / "lr=0.02-s0" / "checkpoints" / "000001"
    deadline = time.monotonic() + 120
    while not second.is_dir() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert names(out) == ["lr=0.01-s0"]
    assert main([*command, str(out)]) == 0
    assert main([*command, str(tmp_path / "whole")]) == 0
    assert all(same_bits(out / name, tmp_path / "whole" / name) for name in names(tmp_path / "whole"))
    assert names(out) == names(tmp_path / "whole")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gird: {}", "unknown key (did you mean 'grid'?)"),
        (
            "grid: {algorithm.lr: 0.1}",
            "grid: found {'algorithm.lr': 0.1}, expected a mapping of text to a list of values",
        ),
        ("set: 5", "set: found 5, expected a mapping of text to a value"),
        ("cases: {a: {grid: 5}}", "cases.a.grid: found 5, expected keys, each with a list of values"),
        ("cases: {a: {grid: {1: [2]}}}", "cases.a.grid: found {1: [2]}, expected keys"),
        ("cases: {a: {grid: {algorithm.lr: 0.1}}}", "grid.algorithm.lr: found 0.1, expected a list"),
        ("grid: {algorithm.lr: []}", "grid.algorithm.lr: found [], expected a list"),
        ("grid: {algorithm.lrr: [0.1]}", "cell lrr=0.1: "),
        ("grid: {algorithm.beta2: [1.5]}", "cell beta2=1.5: "),
        ("grid: {algorithm.lr: [0.1, 0.10]}", "two cells are one, lr=0.1 and lr=0.1; expected"),
        ("grid: {algorithm.lr: [1e-3, 1.0e-3]}", "two cells are one, lr=1e-3 and lr=0.001; expected different values"),
        ("grid: {local: [{epochs: 2}, {epochs: 2.0}]}", "two cells are one, local={epochs: 2} and local={epochs: 2}"),
        (
            "grid: {model.name: [a/b, a_b]}",
            "two cells would share the folder name=a_b: name=a/b and name=a_b; make them cases, which have names",
        ),
        (
            "set: {run.stacked_clients: 2}\ngrid: {run.cohort: [3]}",
            "cell cohort=3: override 'run.cohort=3': run.stacked_clients is 2 in another override",
        ),
        ("set: {run.dir: x}", "run.dir: found x, but every run of a sweep has its own folder; give --out"),
        ("grid: {run.dir: [x, y]}", "cell dir=x: run.dir: found x, but every run"),
        (
            "choose: {by: acuracy}",
            "choose.by: found 'acuracy' (did you mean 'accuracy'?), expected one of accuracy, macro",
        ),
        (
            "choose: {by: f1}\nset: {data: {name: glue/sst2}}",
            "choose.by: found 'f1', expected one of accuracy, eval_loss",
        ),
        (
            "choose: {rounds: 5}\ngrid: {lora.rank: [1, 2]}",
            "choose.rounds: found 5, expected at most the 4 of federation.rounds",
        ),
        ("seeds: [1, 1]", "seeds: found [1, 1], expected different whole numbers"),
        ("seeds: [one]", "seeds: found ['one']"),
        ("choose: 3", "choose: found 3, expected keys and values"),
        ("choose: {rounds: 0}", "choose.rounds: found 0, expected a positive number"),
        ("choose: {set: {eval.evry: 3}}\ngrid: {lora.rank: [1]}", "cell rank=1: "),
        ("choose: {round: 3}", "choose.round: unknown key (did you mean 'rounds'?)"),
        ("[1, 2]", "found list, expected keys such as grid: and seeds:"),
        ("grid: [", "not readable as YAML"),
    ],
)
def test_mistakes_in_a_grid_show_before_anything_runs(
    tiny: Path, tmp_path: Path, text: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "grid.yaml").write_text(text)
    out = tmp_path / "out"
    assert main(["sweep", str(tiny / "recipe.yaml"), str(tmp_path / "grid.yaml"), "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fedllm: {tmp_path / 'grid.yaml'}")
    assert said in error
    assert not out.exists()


def test_a_grid_file_that_is_not_there(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", str(tiny / "recipe.yaml"), "nowhere.yaml"]) == 2
    assert "nowhere.yaml: cannot be read: No such file" in capsys.readouterr().err


@pytest.mark.slow
def test_choosing_by_a_metric_that_the_task_has_not(tiny: Path, tmp_path: Path) -> None:
    grid = write(
        tmp_path, set={"federation.rounds": 1}, grid={"algorithm.lr": [0.1, 0.2]}, choose={"rounds": 1, "by": "pearson"}
    )
    with pytest.raises(UserError, match=r"choose\.by: found 'pearson', expected one of accuracy, macro_f1, eval_loss"):
        sweep(tiny / "recipe.yaml", grid, tmp_path / "out")


def test_when_every_trial_fails_the_sweep_says_so(tiny: Path, tmp_path: Path) -> None:
    grid = write(tmp_path, grid={"algorithm.lr": [1e38, 2e38]}, choose={"rounds": 1})
    with pytest.raises(RunError, match="2 runs of the sweep failed"):
        sweep(tiny / "recipe.yaml", grid, tmp_path / "out", ["algorithm.eps=1e-30", "federation.min_clients=5"])
    assert "failed" in (tmp_path / "out" / "trials.md").read_text()


@pytest.mark.slow
def test_two_sweeps_at_once_share_the_cells(tiny: Path, tmp_path: Path) -> None:
    """Each takes a cell that the other one has not. One is killed in the middle of its own, which the other ends."""
    grid = write(tmp_path, set={"federation.rounds": 30}, grid={"algorithm.lr": [0.01, 0.02]})
    out = tmp_path / "out"
    command = ["-m", "fedllm", "sweep", str(tiny / "recipe.yaml"), str(grid), "--out", str(out), "run.threads=1"]
    first, second = (forked.start(*command, out=tmp_path / f"said{number}.txt") for number in range(2))

    def at_work() -> set[str]:
        return {path.parent.name for path in out.glob("*/metrics.jsonl")} - set(names(out))

    end = time.monotonic() + 120
    while len(at_work()) < 2:
        assert time.monotonic() < end, "the two never had a cell each"
        assert first.poll() is second.poll() is None
        time.sleep(0.02)
    first.kill()
    first.wait()
    assert second.wait() == 0, (tmp_path / "said1.txt").read_text()
    assert names(out) == ["lr=0.01-s0", "lr=0.02-s0"]
    assert (out / "report" / "report.html").is_file()
