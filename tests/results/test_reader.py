"""Run folders read back; what is damaged is named and left out."""

import json
import shutil
from pathlib import Path

import pytest
import yaml
from made_runs import SCORES, make_run

from fedllm.reporting.groups import group_runs
from fedllm.reporting.page import Section, page
from fedllm.reporting.report import report
from fedllm.reporting.summary import csv_text, summarise
from fedllm.results.reader import load_run, read_runs


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
@pytest.mark.slow
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
            for written in (summary.markdown(), csv_text([summary]), summary.latex(), *problems):
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
        f"not a run folder, but it holds run folders; name these: {tmp_path}/runs/*",
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
    assert problems == [
        f"{folders[2]}: the same recipe as {folders[0]}, but with other clients' data (partition.json differs)"
    ]


# Runs of an earlier version, whose recipes said run.cohort


def made_earlier(folder: Path, **options: object) -> Path:
    """A run as an earlier version left it: recipe.yaml and result.json say cohort."""
    make_run(folder, precision="float32", **options)
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    recipe["run"]["cohort"] = recipe["run"].pop("stacked_clients")
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    result = json.loads((folder / "result.json").read_text())
    result["machine"] |= {"cohort": 5, "stepped_down": [{"round": 2, "cohort": 5}]}
    (folder / "result.json").write_text(json.dumps(result))
    return folder


def test_runs_of_an_earlier_version_are_seeds_of_the_same_recipe_under_one_name(tmp_path):
    earlier, later = made_earlier(tmp_path / "earlier"), make_run(tmp_path / "later", seed=1, precision="float32")
    result = json.loads((later / "result.json").read_text())
    steps = [{"round": 2, "cohort": 5}]
    result["machine"] |= {"cohort": 5, "stacked_clients": 5, "stepped_down": steps}
    (later / "result.json").write_text(json.dumps(result))
    runs, problems = read_runs([earlier, later])
    assert problems == []
    for run in runs:
        assert run.recipe["run"]["stacked_clients"] == "auto"
        assert run.result["machine"] == {
            "precision": "float32", "stacked_clients": 5, "stepped_down": [{"round": 2, "stacked_clients": 5}],
        }  # fmt: skip
    (group,) = groups = group_runs(runs)
    assert len(group.runs) == 2
    assert "cohort" not in page([Section(summarise(groups), groups, {})], [], [])
