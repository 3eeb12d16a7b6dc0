"""Runs read back, grouped and put into tables. Expected numbers are worked out by hand."""

import csv
import json
import re
import shutil
from pathlib import Path

import pytest
import yaml
from made_runs import SCORES, column, groups_of, make_run
from rich.console import Console

from fedllm.cli import main
from fedllm.console import console
from fedllm.errors import UserError
from fedllm.folders import load_run, read_runs
from fedllm.groups import group_runs
from fedllm.page import page
from fedllm.report import report
from fedllm.summary import in_markdown, summarise

# Reading


def test_a_run_is_read_back(tmp_path):
    run = load_run(make_run(tmp_path / "a", scores=(0.5, None, 0.9), seed=7))
    assert (run.finished, run.seed, run.algorithm, run.task, run.primary) == (
        True,
        7,
        "fadamgc",
        "glue/sst2",
        "accuracy",
    )
    assert run.curve("accuracy") == ([1, 3], [0.5, 0.9])
    assert run.curve("accuracy", "bytes") == ([1500, 4500], [0.5, 0.9])
    assert run.curve("train_loss", "simulated_seconds") == ([3, 6, 9], [1, 1 / 2, 1 / 3])


def test_an_unfinished_run_says_what_the_finished_one_would(tmp_path):
    finished = load_run(make_run(tmp_path / "a")).result
    so_far = load_run(make_run(tmp_path / "b", finished=False, torn=True)).result
    assert so_far["status"] == "unfinished"
    for key in ("primary", "target", "rounds", "rounds_to_target", "totals"):
        assert so_far[key] == finished[key]
    assert so_far["final"]["accuracy"] == finished["final"]["accuracy"]
    assert so_far["best"]["accuracy"] == finished["best"]["accuracy"]


START = {"bytes_up": 4000, "bytes_down": 4000, "seconds": 5.0, "simulated_seconds": 4.5}


@pytest.mark.parametrize("finished", [True, False])
def test_what_came_before_the_first_round_counts_in_totals_and_curves(tmp_path, finished):
    folder = make_run(tmp_path / "a", scores=(0.5, 0.9), start=START, finished=finished)
    run = load_run(folder)
    expected = {"bytes_up": 6000, "bytes_down": 5000, "seconds": 9.0, "simulated_seconds": 10.5}
    assert run.result["totals"] == expected
    assert run.curve("accuracy", "bytes")[0] == [9500, 11000]
    assert run.curve("accuracy", "simulated_seconds")[0] == [7.5, 10.5]
    assert run.curve("accuracy")[0] == [1, 2]
    if finished:  # as an older version left it: the totals alone tell
        (folder / "start.json").unlink()
        assert load_run(folder) == run


def test_a_score_that_is_not_a_number_is_not_drawn(tmp_path):
    folder = make_run(tmp_path / "a")
    text = (folder / "metrics.jsonl").read_text()
    (folder / "metrics.jsonl").write_text(text.replace('"accuracy": 0.7', '"accuracy": null'))
    assert load_run(folder).curve("accuracy") == ([1, 3, 4], [0.5, 0.9, 0.8])


def edit(name: str, old: str, new: str):
    def damage(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return damage


def _line(number: int) -> str:
    """The last line of make_run's metrics.jsonl."""
    return json.dumps({
        "round": number, "train_loss": 1 / number, "bytes_up": 1000, "bytes_down": 500, "seconds": 2.0,
        "simulated_seconds": 3.0, "clients": [0, 1], "rejected": {}, "eval_loss": 1 - SCORES[number - 1],
        "accuracy": SCORES[number - 1], "f1": SCORES[number - 1] / 2, "eval_seconds": 0.1,
    }) + "\n"  # fmt: skip


BROKEN = {
    "cut result": (edit("result.json", '"seed"', "}{"), "result.json is not JSON"),
    "result without totals": (edit("result.json", '"totals"', '"other"'), "result.json lacks totals"),
    "totals without bytes": (
        edit("result.json", '"bytes_up"', '"up"'),
        "expected numbers bytes_up, bytes_down",
    ),
    "final is a number": (
        edit("result.json", '"final": {', '"final": 0.8, "last": {'),
        "result.json: final is 0.8, expected a number for each metric",
    ),
    "torn in the middle": (edit("metrics.jsonl", "}\n", "\n"), "metrics.jsonl, line 1 is not JSON"),
    "line without bytes": (edit("metrics.jsonl", '"bytes_up": 1000, ', ""), "line 1 lacks bytes_up"),
    "bytes in words": (edit("metrics.jsonl", '"bytes_up": 1000', '"bytes_up": "many"'), "bytes_up is 'many'"),
    "no metrics": (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl has no rounds"),
    "broken recipe": (lambda folder: (folder / "recipe.yaml").write_text("a: [b"), "recipe.yaml is not YAML"),
    "another recipe": (lambda folder: (folder / "recipe.yaml").write_text("name: x"), "recipe.yaml has no sections"),
    "cut at a line": (edit("metrics.jsonl", _line(4), ""), "result.json: rounds is 4, by metrics.jsonl it is 3"),
    "a round twice": (
        edit("metrics.jsonl", '"round": 2', '"round": 1'),
        "metrics.jsonl, line 2: found round 1, expected round 2",
    ),
    "a round missing": (edit("metrics.jsonl", _line(2), ""), "line 2: found round 3, expected round 2"),
    "the first round missing": (edit("metrics.jsonl", _line(1), ""), "line 1: found round 2, expected round 1"),
    "rounds from 0": (edit("metrics.jsonl", '"round": 1', '"round": 0'), "line 1: found round 0, expected round 1"),
    "bytes below 0": (edit("metrics.jsonl", '"bytes_up": 1000', '"bytes_up": -1'), "bytes_up is -1, expected a number"),
    "endless seconds": (edit("metrics.jsonl", '"seconds": 2.0', '"seconds": Infinity'), "seconds is inf, expected a"),
    "time runs back": (
        edit("metrics.jsonl", '"simulated_seconds": 3.0', '"simulated_seconds": -3.0'),
        "simulated_seconds is -3.0, expected a number of 0 or more",
    ),
    **{
        f"accuracy {value}": (
            edit("metrics.jsonl", '"accuracy": 0.7', f'"accuracy": {value}'),
            f"metrics.jsonl, line 2: accuracy is {found}, expected a number or null",
        )
        for value, found in {"true": "True", '"0.9"': "'0.9'", "NaN": "nan", "-Infinity": "-inf"}.items()
    },
    "loss in words": (edit("metrics.jsonl", '"eval_loss": 0.5', '"eval_loss": "low"'), "eval_loss is 'low', expected"),
    "no word on rejections": (edit("metrics.jsonl", '"rejected": {}', '"rejected": 0'), "rejected is 0, expected a"),
    "another seed": (edit("result.json", '"seed": 1', '"seed": 7'), "result.json: seed is 7, recipe.yaml has 1"),
    "another algorithm": (
        edit("result.json", '"algorithm": "fadamgc"', '"algorithm": "fedavg"'),
        "result.json: algorithm is 'fedavg', recipe.yaml has 'fadamgc'",
    ),
    "another target": (
        edit("result.json", '"target": {"accuracy": 0.85}', '"target": {"accuracy": 0.9}'),
        "result.json: target is {'accuracy': 0.9}, recipe.yaml has {'accuracy': 0.85}",
    ),
    "another final score": (
        edit("result.json", '"final": {"accuracy": 0.8', '"final": {"accuracy": 0.81'),
        "result.json: final is {'accuracy': 0.81, 'f1': 0.4",
    ),
    "another best score": (
        edit("result.json", '{"value": 0.9, "round": 3}', '{"value": 0.9, "round": 2}'),
        "result.json: best is {'accuracy': {'value': 0.9, 'round': 2}",
    ),
    "another end": (edit("result.json", '"rounds": 4', '"rounds": 5'), "rounds is 5, by metrics.jsonl it is 4"),
    "another way to the target": (
        edit("result.json", '"rounds_to_target": 3', '"rounds_to_target": 1'),
        "rounds_to_target is 1, by metrics.jsonl it is 3",
    ),
    "other rejections": (edit("result.json", '"rejected": 0', '"rejected": 2'), "rejected is 2, by metrics.jsonl it"),
    "another headline": (
        edit("result.json", '"primary": "accuracy"', '"primary": "f1"'),
        "result.json: primary is 'f1', by metrics.jsonl it is 'accuracy'",
    ),
    "not at its end": (edit("result.json", '"finished"', '"stopped"'), "status is 'stopped', expected 'finished'"),
    "more bytes up": (edit("result.json", '"bytes_up": 4000', '"bytes_up": 5000'), "totals differ from the lines"),
    "fewer bytes": (
        edit("result.json", '"bytes_up": 4000, "bytes_down": 2000', '"bytes_up": 3000, "bytes_down": 1000'),
        "totals differ from the lines",
    ),
    "more seconds": (edit("result.json", '"seconds": 8.0', '"seconds": 9.0'), "totals differ from the lines"),
    "totals beside the start": (
        lambda folder: (folder / "start.json").write_text(
            '{"bytes_up": 9, "bytes_down": 9, "seconds": 0, "simulated_seconds": 0}'
        ),
        "result.json: totals.bytes_up is 4000, by metrics.jsonl it is 4009",
    ),
    "start cut": (lambda folder: (folder / "start.json").write_text("{"), "start.json is not JSON"),
    "no number of bytes": (edit("metrics.jsonl", '"bytes_up": 1000', '"bytes_up": NaN'), "bytes_up is nan, expected a"),
    "best in words": (edit("result.json", '"value": 0.9', '"value": "high"'), "expected a value and a round for each"),
    "target in words": (edit("result.json", '"target": {"accuracy": 0.85}', '"target": "high"'), "target is 'high'"),
    "seed in words": (edit("recipe.yaml", "seed: 1", "seed: one"), "recipe.yaml: run.seed is 'one', expected a whole"),
    "clients cut": (edit("partition.json", "]]", ""), "partition.json is not JSON"),
    "a client without classes": (edit("partition.json", "[3, 1]", "[3]"), "counts has another form than clients x"),
    "half a client": (edit("partition.json", "[3, 1]", "[3, 0.5]"), "counts is [[3, 0.5], [0, 2]], expected null or a"),
    "recipe without seed": (edit("recipe.yaml", "seed: 1", "sed: 1"), "recipe.yaml lacks run.seed"),
    "no recipe": (lambda folder: (folder / "recipe.yaml").unlink(), "not a run folder"),
    "gone": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_folder_is_named_and_the_rest_goes_on(tmp_path, name):
    damage, reason = BROKEN[name]
    counts = [(3, 1), (0, 2)]
    good, bad = (make_run(tmp_path / name, seed=i, counts=counts) for i, name in enumerate(("good", "bad")))
    damage(bad)
    runs, problems = read_runs([bad, good])
    assert [run.folder for run in runs] == [good]
    assert len(problems) == 1
    assert problems[0].startswith(f"{bad}: ")
    assert reason in problems[0]


@pytest.mark.parametrize("junk", [None, True, [], {"a": [1]}, "x\n\x1b\ud800", float("nan"), 10**400], ids=ascii)
def test_no_value_in_a_result_or_a_round_is_more_than_a_report_can_bear(tmp_path, junk):
    """Either the folder is left out with a reason, or all tables can be made of it."""
    good = make_run(tmp_path / "good")
    for number, name in enumerate(("result.json", "metrics.jsonl"), 1):
        text = (good / name).read_text().splitlines()
        for key in json.loads(text[0]):
            bad = make_run(tmp_path / f"{number}{key}", seed=number)
            (bad / name).write_text("\n".join([json.dumps({**json.loads(text[0]), key: junk}), *text[1:]]))
            runs, problems = read_runs([good, bad])
            assert len(runs) + len(problems) == 2
            summary = summarise(group_runs(runs))
            for written in (summary.markdown(), summary.csv(), summary.latex(), *problems):
                assert "\x1b" not in written
                written.encode()


def alias(folder: Path, text: str) -> None:
    (folder / "recipe.yaml").write_text((folder / "recipe.yaml").read_text() + text)


BOMB = "bomb:\n  a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"  a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 12)
)


@pytest.mark.parametrize("text", ["more: &a {b: *a}\n", "more: {b: &a [*a]}\n", BOMB], ids=["itself", "list", "bomb"])
def test_a_recipe_with_aliases_costs_no_more_than_its_own_folder(tmp_path, text):
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", seed=1)
    alias(bad, text)
    runs, problems = read_runs([good, bad])
    assert [run.folder for run in runs] == [good]
    assert problems == [f"{bad}: recipe.yaml has an alias (*), which fedllm never writes; not a run folder, or damaged"]


def test_a_symlink_to_itself_costs_no_more_than_its_own_folder(tmp_path, capsys):
    make_run(tmp_path / "good")
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "link").symlink_to("good")
    report(sorted(tmp_path.iterdir()), tmp_path / "out", formats=["csv"])
    said = capsys.readouterr().out
    assert f"left out: {tmp_path / 'loop'}: " in said
    assert said.count("left out") == 1  # the same folder under two names is one


def test_what_is_no_run_folder_is_told_apart(tmp_path):
    make_run(tmp_path / "runs" / "a")
    waiting = make_run(tmp_path / "waiting", finished=False)
    (waiting / "metrics.jsonl").write_text("")
    (tmp_path / "notes.txt").write_text("")
    _, problems = read_runs([tmp_path / "runs", waiting, tmp_path / "notes.txt"])
    assert [text.split(": ", 1)[1] for text in problems] == [
        f"not a run folder, but it holds some; name them: {tmp_path}/runs/*",
        "no round has finished yet",
        "not a folder",
    ]


def test_a_seed_counts_once(tmp_path):
    stopped, first = make_run(tmp_path / "stopped", finished=False), make_run(tmp_path / "first")
    copy = make_run(tmp_path / "copy")
    runs, problems = read_runs([stopped, first, tmp_path / "copy" / ".." / "first", copy])
    assert [run.folder.name for run in runs] == ["first"]
    assert len(problems) == 2
    assert all("same recipe and seed" in text for text in problems)


def test_runs_of_one_recipe_over_other_data_are_not_seeds_of_one_another(tmp_path):
    first, other = ([(3, 1), (0, 2)], [(3, 1), (1, 2)])
    folders = [make_run(tmp_path / str(seed), seed=seed, counts=first if seed < 2 else other) for seed in range(3)]
    runs, problems = read_runs([*folders, make_run(tmp_path / "older", seed=3)])
    assert [run.seed for run in runs] == [0, 1, 3]
    assert problems == [f"{folders[2]}: the same recipe as {folders[0]}, but over other data: see partition.json"]


# Grouping


@pytest.mark.parametrize("same", ["run.dir=elsewhere", "run.resume=never", "run.checkpoint_every=3", "run.local_hub=x"])
def test_seeds_are_averaged_wherever_they_ran(tmp_path, same):
    (group,) = groups_of(make_run(tmp_path / "a"), make_run(tmp_path / "b", same, seed=1))
    assert (group.label, len(group.runs)) == ("fadamgc", 2)


@pytest.mark.parametrize(
    ("other", "names"),
    [
        ("algorithm.lr=3e-4", ["fadamgc lr=0.001", "fadamgc lr=0.0003"]),
        ("partition.seed=1", ["fadamgc partition.seed=0", "fadamgc partition.seed=1"]),
        ("run.cohort=3", ["fadamgc run.cohort=auto", "fadamgc run.cohort=3"]),
        ("data.max_train=9", ["fadamgc data.max_train=null", "fadamgc data.max_train=9"]),
    ],
)
def test_runs_that_differ_in_more_than_the_seed_are_never_averaged(tmp_path, other, names):
    first = make_run(tmp_path / "a", "algorithm.lr=1e-3")
    groups = groups_of(first, make_run(tmp_path / "b", "algorithm.lr=1e-3", other, seed=1))
    assert [group.label for group in groups] == names


def test_runs_of_another_precision_or_version_are_never_averaged(tmp_path):
    """run.precision=auto is bfloat16 on one machine and float32 on another; an older run does not tell."""
    made = [("float32", "0.1.0"), ("float32", "0.1.0"), ("bfloat16", "0.1.0"), ("float32", "0.2.0"), (None, None)]
    folders = [make_run(tmp_path / str(s), seed=s, precision=p, version=v) for s, (p, v) in enumerate(made)]
    stopped = make_run(tmp_path / "stopped", seed=9, finished=False)
    assert [(group.label, len(group.runs)) for group in groups_of(*folders, stopped)] == [
        ("fadamgc machine.precision=float32, versions.fedllm=0.1.0", 2),
        ("fadamgc machine.precision=bfloat16, versions.fedllm=0.1.0", 1),
        ("fadamgc machine.precision=float32, versions.fedllm=0.2.0", 1),
        ("fadamgc machine.precision=absent, versions.fedllm=absent", 1),
        ("fadamgc (seed 9 unfinished, round 4 of 4)", 1),
    ]
    assert next(group.label for group in groups_of(folders[0], stopped)) == "fadamgc"


def test_one_seed_in_two_precisions_is_two_runs(tmp_path):
    folders = [make_run(tmp_path / kind, precision=kind) for kind in ("float32", "bfloat16")]
    stopped = make_run(tmp_path / "stopped", finished=False)
    runs, problems = read_runs([*folders, stopped])
    assert [run.folder for run in runs] == folders
    assert problems == [f"{stopped}: the same recipe and seed as {folders[0]}, which stands for both"]


@pytest.mark.parametrize("label", ["1", None])
def test_settings_that_only_look_the_same_are_told_apart(tmp_path, label):
    """A column named '1' and the number 1; a setting that is null and one that an older recipe did not have."""
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", seed=1)
    for folder, value in ((first, 1), (second, label)):
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        recipe["data"]["label"] = value
        if label is None and folder == first:
            del recipe["data"]["label"]
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    groups = groups_of(first, second)
    assert [len(group.runs) for group in groups] == [1, 1]
    if label is None:
        assert [group.label for group in groups] == ["fadamgc data.label=absent", "fadamgc data.label=null"]


def test_a_label_says_only_what_tells_groups_apart(tmp_path):
    """FedAvg's lr is not compared with FAdamGC's: their own settings differ anyway."""
    groups = groups_of(
        make_run(tmp_path / "a", "algorithm.lr=1e-3"),
        make_run(tmp_path / "b", "algorithm.lr=1e-4"),
        make_run(tmp_path / "c", "algorithm.lr=1e-1", algorithm="fedavg"),
        make_run(tmp_path / "d", task="glue/rte"),
    )
    assert [group.label for group in groups] == ["fadamgc lr=0.001", "fadamgc lr=0.0001", "fedavg", "fadamgc"]


def test_an_unfinished_run_is_shown_but_not_averaged(tmp_path):
    folders = [make_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    stopped = make_run(tmp_path / "2", "federation.rounds=9", scores=SCORES[:2], seed=2, finished=False)
    more = [make_run(tmp_path / f"more{seed}", "federation.rounds=9", seed=seed) for seed in range(2)]
    groups = groups_of(*folders, stopped, *more)
    assert [(group.label, len(group.runs)) for group in groups] == [
        ("fadamgc federation.rounds=4", 2),
        ("fadamgc federation.rounds=9", 2),
        ("fadamgc federation.rounds=9 (seed 2 unfinished, round 2 of 9)", 1),
    ]


# Tables


def test_means_and_sample_deviations_over_seeds(tmp_path):
    scores = [(0.9, 0.8), (0.9, 0.9), (0.9, 1.0)]
    groups = groups_of(*(make_run(tmp_path / str(seed), scores=s, seed=seed) for seed, s in enumerate(scores)))
    assert column(groups, "final") == ["0.9000 ± 0.1000"]
    assert column(groups, "best") == ["0.9333 ± 0.0577"]  # 0.9, 0.9, 1.0: deviation 0.1/sqrt(3)
    assert column(groups, "seeds") == ["3"]
    assert column(groups, "simulated s") == ["6.00 ± 0.00"]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ([(0.9, 0.9)], "1"),
        ([(0.1, 0.1, 0.1)], ">3"),
        ([(0.9, 0.1), (0.1, 0.9)], "1.5 ± 0.7"),
        ([(0.9, 0.1), (0.1, 0.1)], ">2 (1 of 2 reached)"),
        ([(0.1, 0.1), (0.1, 0.1)], ">2 (0 of 2 reached)"),
    ],
)
def test_rounds_to_target_are_a_mean_only_if_every_seed_got_there(tmp_path, seeds, expected):
    folders = [make_run(tmp_path / str(seed), scores=scores, seed=seed) for seed, scores in enumerate(seeds)]
    assert column(groups_of(*folders), "rounds to target") == [expected]


def test_rounds_to_targets_asked_for(tmp_path, capsys):
    """Counted from the curves, whatever target the runs had."""
    runs = [
        make_run(tmp_path / name, seed=seed, scores=s) for name, seed, s in (("a", 0, (0.5, 0.9)), ("b", 1, (0.7, 0.7)))
    ]
    command = ["report", *map(str, runs), "--out", str(tmp_path / "out"), "--target", "accuracy=0.7", "--target"]
    assert main([*command, "accuracy=0.8"]) == 0
    lines = (tmp_path / "out" / "summary.md").read_text().splitlines()
    assert lines[2].startswith("| run | rounds to accuracy 0.7 | rounds to accuracy 0.8 | best |")
    assert lines[4].startswith("| fadamgc | 1.5 ± 0.7 | >2 (1 of 2 reached) |")
    (row,) = csv.DictReader((tmp_path / "out" / "summary.csv").open())
    assert (row["rounds_to_accuracy_0.7_mean"], row["rounds_to_accuracy_0.8_mean"]) == ("1.5", "")
    capsys.readouterr()
    assert main([*command, "0.8"]) == 2
    assert "--target: found '0.8', expected metric=value" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["=0.5", "accuracy=nan", "accuracy=inf", "accuracy=-Infinity", "accuracy=", "0.8"])
def test_a_target_that_is_none_ends_the_report(tmp_path, capsys, text):
    assert main(["report", str(make_run(tmp_path / "a")), "--target", text]) == 2
    assert f"--target: found '{text}', expected metric=value" in capsys.readouterr().err
    assert not (tmp_path / "report").exists()


def test_a_target_of_a_metric_that_no_run_has_ends_the_report(tmp_path, capsys):
    folders = [make_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    assert main(["report", *map(str, folders), "--target", "accurcy=0.9"]) == 2
    assert (
        "--target: found metric 'accurcy' (did you mean 'accuracy'?), but these runs were measured in accuracy, f1, "
        "eval_loss" in capsys.readouterr().err
    )
    waiting = make_run(tmp_path / "waiting", scores=(None,), finished=False)
    assert main(["report", str(waiting), "--target", "accuracy=0.9"]) == 2
    assert "no run was evaluated yet" in capsys.readouterr().err


def test_a_loss_is_reached_from_above_and_close_targets_are_told_apart(tmp_path):
    """Losses of 0.5, 0.3, 0.1 and 0.2; accuracies of 0.5, 0.7, 0.9 and 0.8."""
    groups = groups_of(make_run(tmp_path / "a"))
    targets = [{"eval_loss": 0.35}, {"eval_loss": 0.05}, {"accuracy": 0.9}, {"accuracy": 0.90000001}]
    summary = summarise(groups, targets)
    headings = ["eval loss 0.35", "eval loss 0.05", "accuracy 0.9", "accuracy 0.90000001"]
    row = dict(zip(summary.headings, summary.rows[0], strict=True))
    assert [row[f"rounds to {heading}"] for heading in headings] == ["2", ">4", "3", ">4"]
    (numbers,) = csv.DictReader(summary.csv().splitlines())
    assert numbers["rounds_to_accuracy_0.9_mean"] == "3.0"
    assert numbers["rounds_to_accuracy_0.90000001_mean"] == ""


def test_a_target_in_a_metric_of_another_task_is_no_bound(tmp_path):
    cola = make_run(tmp_path / "b", task="glue/cola", metric="matthews_correlation", target=None)
    summary = summarise(groups_of(make_run(tmp_path / "a"), cola), [{"accuracy": 0.6}])
    assert [row[summary.headings.index("rounds to accuracy 0.6")] for row in summary.rows] == ["2", "-"]


def test_without_a_target_there_are_no_rounds_to_it(tmp_path):
    assert column(groups_of(make_run(tmp_path / "a", target=None)), "rounds to target") == ["-"]


def test_traffic_is_in_megabytes(tmp_path):
    folder = make_run(tmp_path / "a", bytes_up=[1234567890, 0, 0, 0], finished=False)
    assert column(groups_of(folder), "MB up") == ["1,235"]


def test_client_memory_is_a_mean_over_seeds_that_all_tell(tmp_path):
    told = [make_run(tmp_path / f"a{seed}", seed=seed, memory=(40 + 10 * seed) * 10**6) for seed in range(3)]
    older = [
        make_run(tmp_path / f"b{seed}", seed=seed, algorithm="fedavg", memory=[None, 7][seed]) for seed in range(2)
    ]
    groups = groups_of(*told, *older)
    assert column(groups, "client MB") == ["50.0 ± 10.0", "-"]
    summary = summarise(groups)
    assert [line.split(" | ")[-1] for line in summary.markdown().splitlines()[2:]] == [
        "client MB |", "--: |", "50.0 ± 10.0 |", "- |"
    ]  # fmt: skip
    assert r"& 50.0 $\pm$ 10.0 \\" in summary.latex()
    known, unknown = csv.DictReader(summary.csv().splitlines())
    assert (known["client_memory_mb_mean"], known["client_memory_mb_std"]) == ("50.0", "10.0")
    assert (unknown["client_memory_mb_mean"], unknown["client_memory_mb_std"]) == ("", "")
    assert (known["vectors_per_round_mean"], known["vectors_per_round_std"]) == ("4.0", "0.0")


def test_rejected_uploads_are_a_column_where_there_were_any(tmp_path):
    clean = make_run(tmp_path / "clean", algorithm="fedavg")
    assert "rejected" not in summarise(groups_of(clean)).headings
    faulty = [{}, {"3": "not finite"}, {"3": "not finite", "5": "not finite"}, {}]
    folders = [make_run(tmp_path / f"a{seed}", seed=seed, rejected=faulty) for seed in range(2)]
    stopped = make_run(tmp_path / "stopped", seed=2, rejected=faulty, finished=False)
    groups = groups_of(clean, *folders, stopped)
    assert column(groups, "rejected") == ["0.00", "3.00 ± 0.00", "3.00"]
    rows = list(csv.DictReader(summarise(groups).csv().splitlines()))
    assert [row["rejected_mean"] for row in rows] == ["0.0", "3.0", "3.0"]
    assert '<td class="number">3</td>' in page(summarise(groups), groups, {}, [], [])


def test_what_all_rows_share_is_said_once(tmp_path):
    alone = summarise(groups_of(make_run(tmp_path / "a")))
    assert alone.caption == "glue/sst2; accuracy, target 0.85"
    assert alone.headings[:2] == ["run", "rounds to target"]
    cola = make_run(tmp_path / "b", task="glue/cola", metric="matthews_correlation", target=0.4, seed=1)
    both = summarise(groups_of(tmp_path / "a", cola))
    assert both.headings[:3] == ["task", "run", "score"]
    assert [row[:3] for row in both.rows] == [
        ("glue/sst2", "fadamgc", "accuracy, target 0.85"),
        ("glue/cola", "fadamgc", "Matthews correlation, target 0.4"),
    ]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_a_narrow_terminal_gets_the_table_in_parts(tmp_path, width):
    seeds = [make_run(tmp_path / str(seed), seed=seed) for seed in range(3)]
    summary = summarise(groups_of(*seeds, make_run(tmp_path / "b", algorithm="fedavg")))
    tables = summary.tables(width)
    assert (len(tables) == 1) == (width == 200)
    terminal = Console(width=width)
    with terminal.capture() as capture:
        for table in tables:
            terminal.print(table)
    lines = capture.get().splitlines()
    assert all(len(line.rstrip()) <= width for line in lines)
    for heading in summary.headings[1:]:
        assert sum(heading in line for line in lines) == 1
    assert sum("fedavg" in line for line in lines) == len(tables)


def test_numbers_of_the_csv_file(tmp_path):
    seeds = [make_run(tmp_path / str(seed), scores=(0.1, 0.8 + seed / 10), seed=seed) for seed in range(3)]
    (row,) = csv.DictReader(summarise(groups_of(*seeds)).csv().splitlines())
    assert (row["run"], row["seeds"], row["rounds"], row["reached"]) == ("fadamgc", "0 1 2", "2", "2")
    assert row["target"] == "accuracy=0.85"
    assert row["rounds_to_target_mean"] == ""
    assert float(row["final_mean"]) == pytest.approx(0.9)
    assert float(row["final_std"]) == pytest.approx(0.1)
    assert float(row["mb_up_mean"]) == pytest.approx(0.002)


def test_markup_characters_are_escaped(tmp_path):
    groups = groups_of(*(make_run(tmp_path / column, f"data.label={column}") for column in ("a_b|c", "50%")))
    summary = summarise(groups)
    rows = summary.markdown().splitlines()[2:]
    assert all(len(re.split(r"(?<!\\)\|", row)) == len(summary.headings) + 2 for row in rows)
    assert r"data.label=a\_b|c & 3 &" in summary.latex()
    assert r"data.label=50\%" in summary.latex()
    hostile = summarise(groups_of(make_run(tmp_path / "x", "data.label=<b>a"), make_run(tmp_path / "y")))
    assert "data.label=&lt;b>a" in hostile.markdown()
    linked = [make_run(tmp_path / name) for name in ("img", "link")]
    for folder, name in zip(linked, ("<img src=x onerror=alert(1)>.csv", "[a](b).csv"), strict=True):
        recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
        recipe["data"] |= {"name": None, "train": name}
        (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    text = summarise(groups_of(*linked)).markdown()
    assert r"| \[a\](b).csv |" in text
    assert "| &lt;img src=x onerror=alert(1)>.csv |" in text
    assert summarise(groups_of(linked[0])).markdown().startswith("&lt;img src=x onerror=alert(1)>.csv; ")
    assert r"\\" + "\n{[}a](b).csv & " in summarise(groups_of(*linked)).latex()
    assert in_markdown(r"\[x](y) `z` *w* &lt;") == r"\\\[x\](y) \`z\` \*w\* &amp;lt;"
    seeds = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    assert r"3.0 $\pm$ 0.0" in summarise(groups_of(*seeds)).latex()


# The command


def test_report_writes_what_it_lists_and_says_what_it_left_out(tmp_path):
    seeds = [make_run(tmp_path / "runs" / str(seed), seed=seed) for seed in range(2)]
    (tmp_path / "runs" / "junk").mkdir()
    with console.capture() as capture:
        written = report([*seeds, tmp_path / "runs" / "junk"])
    out = tmp_path / "runs" / "report"
    assert sorted(written) == sorted(out.iterdir())
    assert {path.suffix for path in written} == {".html", ".md", ".csv", ".tex", ".png", ".svg"}
    said = capture.get()
    assert f"left out: {tmp_path}/runs/junk: not a run folder" in said
    assert "0.8000 ± 0.0000" in said
    assert all(path.name in said for path in written)


def test_a_second_report_passes_over_the_first_and_writes_the_same(tmp_path):
    make_run(tmp_path / "a")
    first = {path: path.read_bytes() for path in report([tmp_path / "a"])}
    with console.capture() as capture:
        second = report(sorted(tmp_path.glob("*")))
    assert "left out" not in capture.get()
    assert {path: path.read_bytes() for path in second} == first


def test_a_report_leaves_nothing_of_an_earlier_one(tmp_path):
    """The figures of client drift and of labels are not made of the second run; what is not fedllm's stays."""
    drift = {"update_cosine": [0.5] * 4, "update_norm": [1.0] * 4}
    out = tmp_path / "out"
    report([make_run(tmp_path / "a", counts=[(3, 1), (0, 2)], **drift)], out)
    assert {"client_drift.png", "client_labels.svg"} < {path.name for path in out.iterdir()}
    (out / "mine.png").write_bytes(b"")
    written = report([make_run(tmp_path / "b")], out)
    assert sorted(out.iterdir()) == sorted([*written, out / "mine.png"])


def test_a_report_of_the_folder_that_one_stands_in_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(make_run(tmp_path / "runs" / "a"))
    (written,) = report(["."], formats=["csv"])
    assert written == tmp_path / "runs" / "report" / "summary.csv"


def test_formats_and_folder_can_be_chosen(tmp_path):
    written = report([make_run(tmp_path / "a")], tmp_path / "deep" / "out", formats=["csv"])
    assert written == [tmp_path / "deep" / "out" / "summary.csv"]
    assert list(written[0].parent.iterdir()) == written


def test_nothing_to_report_is_an_error_that_names_every_folder(tmp_path):
    (tmp_path / "junk").mkdir()
    with pytest.raises(UserError, match=r"(?s)none of the folders.*junk: not a run folder.*gone: no such folder"):
        report([tmp_path / "junk", tmp_path / "gone"])
    assert not (tmp_path / "report").exists()
    with pytest.raises(UserError, match="no run folder was named"):
        report([])
    with pytest.raises(UserError, match="format 'pdf'"):
        report([make_run(tmp_path / "a")], formats=["pdf"])
