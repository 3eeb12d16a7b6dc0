"""Runs read back, grouped, put into tables and drawn. Expected numbers are worked out by hand."""

import csv
import json
import re
import shutil
from itertools import combinations, pairwise
from pathlib import Path

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text
from PIL import Image
from rich.console import Console

from fedllm import plots
from fedllm.cli import main
from fedllm.console import console
from fedllm.errors import UserError
from fedllm.folders import load_run, read_runs
from fedllm.groups import group_runs
from fedllm.look import apart
from fedllm.plots import figures
from fedllm.recipe import load_recipe
from fedllm.report import report
from fedllm.run_plot import plot_run, subtitle
from fedllm.summary import summarise

SCORES = (0.5, 0.7, 0.9, 0.8)


def make_run(
    folder: Path, *overrides: str, scores=SCORES, algorithm="fadamgc", task="glue/sst2", metric="accuracy",
    target: float | None = 0.85, seed=0, finished=True, torn=False,
) -> Path:  # fmt: skip
    """A run folder as fedllm.run leaves it; round t sends 1000 bytes up, 500 down, and takes 2 s, simulated 3 s.

    scores: the headline metric of each round, None for a round without an evaluation.
    """
    folder.mkdir(parents=True)
    given_recipe = folder / "recipe.yaml"
    given_recipe.write_text(yaml.safe_dump({"data": {"name": task}, "algorithm": {"name": algorithm}}))
    wanted = "null" if target is None else f"{{{metric}: {target}}}"
    more = (f"run.seed={seed}", f"eval.target={wanted}", f"federation.rounds={len(scores)}")
    given_recipe.write_text(load_recipe(given_recipe, [*more, *overrides]).yaml())
    lines = []
    for number, score in enumerate(scores, 1):
        line = {"round": number, "train_loss": 1 / number, "bytes_up": 1000, "bytes_down": 500, "seconds": 2.0,
                "simulated_seconds": 3.0, "clients": [0, 1], "rejected": {}}  # fmt: skip
        if score is not None:
            line |= {"eval_loss": 1 - score, metric: score, "f1": score / 2, "eval_seconds": 0.1}
        lines.append(line)
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "metrics.jsonl").write_text(text + ('{"round": 99, "train_l' if torn else ""))
    if finished:
        scored = [line for line in lines if metric in line]
        best = max(scored, key=lambda line: line[metric])
        hits = [line["round"] for line in scored if target is not None and line[metric] >= target]
        result = {
            "status": "finished", "primary": metric, "algorithm": algorithm, "seed": seed,
            "final": {metric: scored[-1][metric]}, "best": {metric: {"value": best[metric], "round": best["round"]}},
            "target": None if target is None else {metric: target}, "rounds": len(lines),
            "rounds_to_target": hits[0] if hits else None, "client_memory": {}, "versions": {},
            "totals": {"bytes_up": 1000 * len(lines), "bytes_down": 500 * len(lines), "seconds": 2.0 * len(lines),
                       "simulated_seconds": 3.0 * len(lines)},
        }  # fmt: skip
        (folder / "result.json").write_text(json.dumps(result))
    return folder


def groups_of(*folders: Path):
    runs, problems = read_runs(folders)
    assert not problems
    return group_runs(runs)


def column(groups, heading: str) -> list[str]:
    summary = summarise(groups)
    return [row[summary.headings.index(heading)] for row in summary.rows]


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


BROKEN = {
    "cut result": (edit("result.json", '"seed"', "}{"), "result.json is not JSON"),
    "result without totals": (edit("result.json", '"totals"', '"other"'), "result.json lacks totals"),
    "totals without bytes": (edit("result.json", '"bytes_up"', '"up"'), "result.json: totals lacks bytes_up"),
    "final is a number": (
        edit("result.json", '{"accuracy": 0.8}', "0.8"),
        "result.json: final is 0.8, expected a number for each metric",
    ),
    "torn in the middle": (edit("metrics.jsonl", "}\n", "\n"), "metrics.jsonl, line 1 is not JSON"),
    "line without bytes": (edit("metrics.jsonl", '"bytes_up": 1000, ', ""), "line 1 lacks bytes_up"),
    "bytes in words": (edit("metrics.jsonl", '"bytes_up": 1000', '"bytes_up": "many"'), "bytes_up is 'many'"),
    "no metrics": (lambda folder: (folder / "metrics.jsonl").unlink(), "metrics.jsonl has no rounds"),
    "broken recipe": (lambda folder: (folder / "recipe.yaml").write_text("a: [b"), "recipe.yaml is not YAML"),
    "another recipe": (lambda folder: (folder / "recipe.yaml").write_text("name: x"), "recipe.yaml has no sections"),
    "recipe without seed": (edit("recipe.yaml", "seed: 1", "sed: 1"), "recipe.yaml lacks run.seed"),
    "no recipe": (lambda folder: (folder / "recipe.yaml").unlink(), "not a run folder"),
    "gone": (shutil.rmtree, "no such folder"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_damaged_folder_is_named_and_the_rest_goes_on(tmp_path, name):
    damage, reason = BROKEN[name]
    good, bad = make_run(tmp_path / "good"), make_run(tmp_path / "bad", seed=1)
    damage(bad)
    runs, problems = read_runs([bad, good])
    assert [run.folder for run in runs] == [good]
    assert len(problems) == 1
    assert problems[0].startswith(f"{bad}: ")
    assert reason in problems[0]


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


def test_without_a_target_there_are_no_rounds_to_it(tmp_path):
    assert column(groups_of(make_run(tmp_path / "a", target=None)), "rounds to target") == ["-"]


def test_traffic_is_in_megabytes(tmp_path):
    folder = make_run(tmp_path / "a")
    edit("result.json", '"bytes_up": 4000', '"bytes_up": 1234567890')(folder)
    assert column(groups_of(folder), "MB up") == ["1,235"]


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
    seeds = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    assert r"3.0 $\pm$ 0.0" in summarise(groups_of(*seeds)).latex()


# Figures


def test_seeds_are_joined_where_all_were_measured():
    x, seeds = plots._together([([1, 2, 4], [0.0, 1.0, 3.0]), ([2, 3], [5.0, 7.0])])
    assert x.tolist() == [2, 3]
    assert seeds.tolist() == [[1, 2], [5, 7]]


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10), st.floats(0.01, 0.1))
def test_names_are_moved_apart_and_keep_their_order_and_centre(heights, gap):
    heights = sorted(heights)
    moved = apart(heights, gap)
    assert all(later - earlier > 0.9 * gap for earlier, later in pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights), abs=1e-6)


def test_names_of_close_lines_do_not_overlap(tmp_path):
    folders = [make_run(tmp_path / "a", algorithm="fedavg", scores=(0.5, 0.849), target=0.85)]
    for number, name in enumerate(("fadamgc", "localadam", "fedadamw", "scaffold")):
        folders.append(make_run(tmp_path / name, algorithm=name, scores=(0.5, 0.85 + number / 1000)))
    for figure in figures(groups_of(*folders)).values():
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [text for text in figure.axes[0].texts if text.get_text()]
        boxes = [Text.get_window_extent(text, canvas.get_renderer()) for text in texts]  # without their leaders
        assert len(boxes) >= 5
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_a_panel_a_task_and_a_figure_an_axis(tmp_path):
    folders = [make_run(tmp_path / task, task=f"glue/{task}") for task in ("sst2", "rte", "qnli", "cola")]
    folders.append(make_run(tmp_path / "waiting", task="glue/wnli", scores=(None,), finished=False))
    drawn = figures(groups_of(*folders))
    assert list(drawn) == ["score_by_round", "score_by_traffic", "score_by_time", "train_loss"]
    panels = {
        name: [axes.get_title("left") for axes in figure.axes if axes.get_visible()] for name, figure in drawn.items()
    }
    assert panels["score_by_round"] == ["glue/sst2", "glue/rte", "glue/qnli", "glue/cola"]
    assert panels["train_loss"] == [*panels["score_by_round"], "glue/wnli"]


def test_where_nothing_was_evaluated_only_the_loss_is_drawn(tmp_path):
    groups = groups_of(make_run(tmp_path / "a", scores=(None,), finished=False))
    assert list(figures(groups)) == ["train_loss"]
    assert column(groups, "best") == ["-"]


@pytest.mark.parametrize("rounds", [1, 12, 300])
def test_a_run_leaves_its_picture(tmp_path, rounds):
    folder = make_run(tmp_path / "a", scores=[0.9 - 0.5 / t for t in range(1, rounds + 1)])
    picture = plot_run(folder)
    assert picture == folder / "curves.png"
    with Image.open(picture) as image:
        assert image.width > 1200
        assert image.height > 800


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("partition.alpha=0.5", "Dirichlet(0.5) over classes · 100 clients · 10 a round · seed 0"),
        ("partition={scheme: by_column, column: site}", "a client for each site · 10 a round · seed 0"),
        ("partition={file: partitions/x_n7.json}", "clients of x_n7.json · 10 a round · seed 0"),
    ],
)
def test_a_picture_says_how_the_data_was_shared(tmp_path, setting, said):
    folder = make_run(tmp_path / "a")
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    key, value = setting.split("=")
    section, _, name = key.partition(".")
    recipe[section] |= {name: yaml.safe_load(value)} if name else yaml.safe_load(value)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert subtitle(load_run(folder)).splitlines() == [
        said,
        "accuracy 0.8000 after 4 rounds · best 0.9000 in round 3 · target reached in round 3",
    ]


def test_a_picture_without_an_evaluation(tmp_path):
    assert plot_run(make_run(tmp_path / "a", scores=(None, None), finished=False)).is_file()


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
