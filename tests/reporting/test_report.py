"""Runs read back, grouped and put into tables. Expected numbers are worked out by hand."""

import csv
import re
import subprocess
import sys

import pytest
import yaml
from made_runs import SCORES, column, groups_of, make_run
from rich.console import Console

from fedllm.cli.commands import main
from fedllm.common.console import console
from fedllm.common.errors import UserError
from fedllm.reporting.page import Section, page
from fedllm.reporting.quantities import mean_and_deviation
from fedllm.reporting.report import report
from fedllm.reporting.summary import csv_text, summarise
from fedllm.reporting.text_tables import in_markdown
from fedllm.results.reader import read_runs

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
        ("run.cohort=3", ["fadamgc run.stacked_clients=auto", "fadamgc run.stacked_clients=3"]),
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
    assert problems == [f"{stopped}: the same recipe and seed as {folders[0]}, which is used instead"]


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
    assert column(groups, "final") == ["0.90 ± 0.10"]
    assert column(groups, "best") == ["0.933 ± 0.058"]  # 0.9, 0.9, 1.0: deviation 0.1/sqrt(3)
    assert column(groups, "seeds") == ["3"]
    assert column(groups, "simulated s") == ["6.00 ± 0.00"]


@pytest.mark.parametrize(
    ("seeds", "expected"),
    [
        ([(0.9, 0.9)], "1"),
        ([(0.1, 0.1, 0.1)], ">3"),
        ([(0.9, 0.1), (0.1, 0.9)], "1.50 ± 0.71"),
        ([(0.9, 0.1), (0.1, 0.1)], ">2 (1 of 2 reached)"),
        ([(0.1, 0.1), (0.1, 0.1)], ">2 (0 of 2 reached)"),
    ],
)
def test_rounds_to_target_are_a_mean_only_if_every_seed_got_there(tmp_path, seeds, expected):
    folders = [make_run(tmp_path / str(seed), scores=scores, seed=seed) for seed, scores in enumerate(seeds)]
    assert column(groups_of(*folders), "rounds to target") == [expected]


@pytest.mark.slow
def test_rounds_to_targets_asked_for(tmp_path, capsys):
    """Counted from the curves, whatever target the runs had."""
    runs = [
        make_run(tmp_path / name, seed=seed, scores=s) for name, seed, s in (("a", 0, (0.5, 0.9)), ("b", 1, (0.7, 0.7)))
    ]
    command = ["report", *map(str, runs), "--out", str(tmp_path / "out"), "--target", "accuracy=0.7", "--target"]
    assert main([*command, "accuracy=0.8"]) == 0
    lines = (tmp_path / "out" / "summary.md").read_text().splitlines()
    assert lines[2].startswith("| run | rounds to accuracy 0.7 | rounds to accuracy 0.8 | best |")
    assert lines[4].startswith("| fadamgc | 1.50 ± 0.71 | >2 (1 of 2 reached) |")
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
    (numbers,) = csv.DictReader(csv_text([summary]).splitlines())
    assert numbers["rounds_to_accuracy_0.9_mean"] == "3.0"
    assert numbers["rounds_to_accuracy_0.90000001_mean"] == ""


def test_a_target_in_a_metric_of_another_data_set_has_no_column(tmp_path):
    sst2 = groups_of(make_run(tmp_path / "a"))
    cola = groups_of(make_run(tmp_path / "b", task="glue/cola", metric="matthews_correlation", target=None))
    assert column(sst2, "rounds to accuracy 0.6", [{"accuracy": 0.6}]) == ["2"]
    assert summarise(cola, [{"accuracy": 0.6}]).headings[1] == "best"


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
    assert column(groups, "client MB") == ["50 ± 10", "-"]
    summary = summarise(groups)
    assert [line.split(" | ")[-1] for line in summary.markdown().splitlines()[2:6]] == [
        "client MB |", "--: |", "50 ± 10 |", "- |"
    ]  # fmt: skip
    assert r"& 50 $\pm$ 10 \\" in summary.latex()
    known, unknown = csv.DictReader(csv_text([summary]).splitlines())
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
    rows = list(csv.DictReader(csv_text([summarise(groups)]).splitlines()))
    assert [row["rejected_mean"] for row in rows] == ["0.0", "3.0", "3.0"]
    assert '<td class="number">3</td>' in page([Section(summarise(groups), groups, {})], [], [])


def test_what_all_rows_share_is_said_once(tmp_path):
    alone = summarise(groups_of(make_run(tmp_path / "a")))
    assert alone.title == "glue/sst2; accuracy, target 0.85"
    assert alone.headings[:2] == ["run", "rounds to target"]
    both = summarise(groups_of(tmp_path / "a", make_run(tmp_path / "b", target=0.4, seed=1)))
    assert both.headings[:2] == ["run", "score"]
    assert [row[1] for row in both.rows] == ["accuracy, target 0.85", "accuracy, target 0.4"]


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
        assert all(word in capture.get() for word in heading.split())
    assert sum("fedavg" in line for line in lines) == len(tables)


def test_numbers_of_the_csv_file(tmp_path):
    seeds = [make_run(tmp_path / str(seed), scores=(0.1, 0.8 + seed / 10), seed=seed) for seed in range(3)]
    (row,) = csv.DictReader(csv_text([summarise(groups_of(*seeds))]).splitlines())
    assert (row["run"], row["seeds"], row["rounds"], row["reached"]) == ("fadamgc", "0 1 2", "2", "2")
    assert row["target"] == "accuracy=0.85"
    assert row["rounds_to_target_mean"] == ""
    assert float(row["final_mean"]) == pytest.approx(0.9)
    assert float(row["final_std"]) == pytest.approx(0.1)
    assert float(row["mb_up_mean"]) == pytest.approx(0.002)


def test_markup_characters_are_escaped(tmp_path):
    groups = groups_of(*(make_run(tmp_path / column, f"model.name={column}") for column in ("a_b|c", "50%")))
    summary = summarise(groups)
    rows = summary.markdown().splitlines()[2:]
    assert all(len(re.split(r"(?<!\\)\|", row)) == len(summary.headings) + 2 for row in rows)
    assert r"model.name=a\_b|c & 3 &" in summary.latex()
    assert r"model.name=50\%" in summary.latex()
    hostile = summarise(groups_of(make_run(tmp_path / "x", "model.name=<b>a"), make_run(tmp_path / "y")))
    assert "model.name=&lt;b>a" in hostile.markdown()
    names = ("<img src=x onerror=alert(1)>.csv", "[a](b).csv")
    image, link = (summarise(groups_of(make_run(tmp_path / str(i), train=name))) for i, name in enumerate(names))
    assert image.markdown().startswith("&lt;img src=x onerror=alert(1)>.csv; ")
    assert link.markdown().startswith(r"\[a\](b).csv; ")
    assert in_markdown(r"\[x](y) `z` *w* &lt;") == r"\\\[x\](y) \`z\` \*w\* &amp;lt;"
    seeds = [make_run(tmp_path / f"s{seed}", seed=seed) for seed in range(2)]
    assert r"3.0 $\pm$ 0.0" in summarise(groups_of(*seeds)).latex()


# The best values and the digits


def marked(summary):
    """The headings and the names of the rows whose cells are bold."""
    return sorted((summary.headings[column], summary.rows[row][0]) for row, column in summary.best)


def test_the_best_mean_of_each_column_is_bold(tmp_path):
    """Scores are best when high, costs and rounds when low. What is equal everywhere is not marked."""
    quick = [make_run(tmp_path / f"a{i}", scores=(0.5, 0.9 - i / 10), seed=i, simulated=1.0) for i in range(2)]
    make_run(tmp_path / "b", scores=(0.1, 0.86), algorithm="fedavg", bytes_up=[500, 500], finished=False)
    good = make_run(tmp_path / "c", scores=(0.1, 0.86), algorithm="scaffold")
    summary = summarise(groups_of(*quick, good, tmp_path / "b"))
    assert marked(summary) == [("best", "scaffold"), ("final", "scaffold"), ("simulated s", "fadamgc")]
    row = next(line for line in summary.markdown().splitlines() if "| scaffold |" in line)
    assert row.startswith("| scaffold | 2 | **0.8600** | **0.8600** | 1 |")
    assert r"scaffold & 2 & \textbf{0.8600} & \textbf{0.8600} & 1 &" in summary.latex()
    assert summary.note == (
        "Bold: the best mean of the finished runs (the highest accuracy; the lowest rounds, bytes, seconds and memory)."
    )
    assert summary.note in summary.markdown()
    terminal = Console(width=200, force_terminal=True, color_system="standard")
    with terminal.capture() as capture:
        terminal.print(*summary.tables(200))
    assert len(re.findall(r"\x1b\[1m *0\.8600", capture.get())) == 2
    groups = groups_of(*quick, good)
    assert '<td class="number best">0.8600</td>' in page([Section(summarise(groups), groups, {})], [], [])


def test_nothing_is_bold_where_nothing_is_compared(tmp_path):
    alone = summarise(groups_of(make_run(tmp_path / "a")))
    same = summarise(groups_of(tmp_path / "a", make_run(tmp_path / "b", algorithm="fedavg")))
    assert [(summary.best, summary.note) for summary in (alone, same)] == [(frozenset(), "")] * 2


def test_rounds_to_a_target_are_compared_where_every_seed_got_there(tmp_path):
    folders = [make_run(tmp_path / name, algorithm=name) for name in ("fadamgc", "fedavg")]
    folders += [make_run(tmp_path / "late", algorithm="scaffold", scores=(0.1, 0.1, 0.1, 0.9))]
    folders += [make_run(tmp_path / "never", algorithm="localadam", scores=(0.1, 0.1, 0.1, 0.1))]
    found = [run for heading, run in marked(summarise(groups_of(*folders))) if heading == "rounds to target"]
    assert found == ["fadamgc", "fedavg"]


@pytest.mark.parametrize(
    ("values", "decimals", "text"),
    [
        ([0.87654], 4, "0.8765"),
        ([0.8, 0.9], 4, "0.850 ± 0.071"),
        ([0.8, 0.8002], 4, "0.80010 ± 0.00014"),
        ([0.8, 0.8000001], 4, "0.80000 ± 0.00000"),
        ([0.5, 0.5], 4, "0.5000 ± 0.0000"),
        ([100, 130], None, "115 ± 21"),
        ([1000, 3000], None, "2,000 ± 1,414"),
        ([2.0, 2.14], None, "2.070 ± 0.099"),
    ],
)
def test_the_deviation_has_two_significant_digits_and_the_mean_as_many_decimals(values, decimals, text):
    assert mean_and_deviation(values, decimals) == text


@pytest.mark.slow
def test_a_target_asked_for_is_the_one_of_titles_figures_and_runs(tmp_path, capsys):
    folder = make_run(tmp_path / "a", target=0.85)
    command = ["report", str(folder), "--out", str(tmp_path / "out"), "--target", "accuracy=0.5"]
    assert main(command) == 0
    assert "0.85" not in capsys.readouterr().out
    drawn = (tmp_path / "out" / "score_by_round.svg").read_text()
    assert "target 0.5" in drawn
    assert "target 0.85" not in drawn
    text = (tmp_path / "out" / "report.html").read_text()
    assert "target 0.85" not in text
    assert '<th class="number">to accuracy 0.5</th>' in text
    assert "0.85" not in (tmp_path / "out" / "summary.md").read_text()


def test_rejected_uploads_are_explained_where_there_were_any(tmp_path):
    explained = "uploads that failed a check"
    for folder, there in (
        (make_run(tmp_path / "a"), False),
        (make_run(tmp_path / "b", rejected=[{}, {"3": "not finite"}, {}, {}]), True),
    ):
        groups = groups_of(folder)
        assert (explained in page([Section(summarise(groups), groups, {})], [], [])) == there


# The command


@pytest.mark.slow
def test_report_writes_what_it_lists_and_says_what_it_left_out(tmp_path):
    seeds = [make_run(tmp_path / "runs" / str(seed), seed=seed) for seed in range(2)]
    (tmp_path / "runs" / "junk").mkdir()
    with console.capture() as capture:
        done = report([*seeds, tmp_path / "runs" / "junk"])
    written = done.files
    out = tmp_path / "runs" / "report"
    assert sorted(written) == sorted(out.iterdir())
    assert {path.suffix for path in written} == {".html", ".md", ".csv", ".tex", ".png", ".svg"}
    said = capture.get()
    assert f"left out: {tmp_path}/runs/junk: not a run folder" in said
    assert "0.8000 ± 0.0000" in said
    assert f"written to {out}: report.html, summary.md, summary.csv, summary.tex, 8 files of figures" in said


@pytest.mark.slow
def test_a_second_report_passes_over_the_first_and_writes_the_same(tmp_path):
    make_run(tmp_path / "a")
    first = {path: path.read_bytes() for path in report([tmp_path / "a"]).files}
    with console.capture() as capture:
        second = report(sorted(tmp_path.glob("*"))).files
    assert "left out" not in capture.get()
    assert {path: path.read_bytes() for path in second} == first


@pytest.mark.slow
def test_a_report_leaves_nothing_of_an_earlier_one(tmp_path):
    """The figures of client drift and of labels are not made of the second run; what is not fedllm's stays."""
    drift = {"update_cosine": [0.5] * 4, "update_norm": [1.0] * 4}
    out = tmp_path / "out"
    report([make_run(tmp_path / "a", counts=[(3, 1), (0, 2)], **drift)], out)
    assert {"client_drift.png", "client_labels.svg"} < {path.name for path in out.iterdir()}
    (out / "mine.png").write_bytes(b"")
    written = report([make_run(tmp_path / "b")], out).files
    assert sorted(out.iterdir()) == sorted([*written, out / "mine.png"])


def test_a_report_of_the_folder_that_one_stands_in_lies_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(make_run(tmp_path / "runs" / "a"))
    (written,) = report(["."], formats=["csv"]).files
    assert written == tmp_path / "runs" / "report" / "summary.csv"


def test_formats_and_folder_can_be_chosen(tmp_path):
    written = report([make_run(tmp_path / "a")], tmp_path / "deep" / "out", formats=["csv"]).files
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


@pytest.mark.slow
def test_a_report_imports_neither_torch_nor_transformers(tmp_path):
    program = (
        "import sys; from fedllm.reporting.report import report; import fedllm.reporting.score_table\n"
        "report([sys.argv[1]]); print(sorted({'torch', 'transformers', 'datasets', 'pandas'} & {*sys.modules}))"
    )
    command = [sys.executable, "-c", program, str(make_run(tmp_path / "a", counts=[(3, 1), (0, 2)]))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
