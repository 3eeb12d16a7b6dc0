"""Reports tell data sets apart by their content, and name each one by what tells it from the others."""

import json

import pytest
from made_runs import groups_of, make_run

from fedllm.common.console import console
from fedllm.reporting.groups import by_task
from fedllm.reporting.report import report
from fedllm.results.reader import load_run, read_runs

NEWS, SNLI = ("news-train", "news-validation"), ("snli-train", "snli-validation")


def tasks(*folders):
    return {task: [group.label for group in groups] for task, groups in by_task(groups_of(*folders)).items()}


def test_files_of_one_name_are_two_data_sets_named_by_their_folders(tmp_path):
    news = make_run(tmp_path / "a", train="/data/agnews/train.parquet", digests=NEWS)
    snli = make_run(tmp_path / "b", train="/data/snli/train.parquet", digests=SNLI, seed=1)
    assert tasks(news, snli) == {"agnews/train.parquet": ["fadamgc"], "snli/train.parquet": ["fadamgc"]}


@pytest.mark.parametrize(
    ("train", "name"),
    [("/data/agnews/train.csv", "agnews/train.csv"), ("/data/news.csv", "news.csv"), ("train.csv", "train.csv")],
)
def test_a_file_alone_has_its_folder_in_its_name_if_it_is_called_train(tmp_path, train, name):
    assert list(tasks(make_run(tmp_path / "a", train=train))) == [name]
    assert load_run(tmp_path / "a").task == name


def test_names_have_as_many_folders_as_tell_them_apart(tmp_path):
    paths = ["/x/one/files/news.csv", "/x/two/files/news.csv", "/x/snli.csv"]
    folders = [make_run(tmp_path / str(i), train=path, digests=(path, path)) for i, path in enumerate(paths)]
    assert list(tasks(*folders)) == ["one/files/news.csv", "two/files/news.csv", "snli.csv"]


def test_a_title_names_the_data_set_of_all_its_runs_and_tells_nothing_apart(tmp_path):
    plain = make_run(tmp_path / "a", train="/data/agnews/train.parquet", digests=NEWS)
    titled = make_run(tmp_path / "b", "data.title=AG News", train="/data/agnews/train.parquet", digests=NEWS, seed=1)
    (group,) = groups_of(plain, titled)
    assert (group.task, len(group.runs)) == ("AG News", 2)


def test_the_same_files_at_another_place_are_the_same_data(tmp_path):
    """A cluster's scratch folder has another path for each job."""
    folders = [make_run(tmp_path / str(i), train=f"/scratch/{i}/train.csv", digests=NEWS, seed=i) for i in range(2)]
    (group,) = groups_of(*folders)
    assert (group.name, len(group.runs)) == ("fadamgc", 2)


def test_a_file_that_changed_is_another_data_set_named_by_its_digest(tmp_path):
    folders = [make_run(tmp_path / name, train="/d/news.csv", digests=(name, name * 4)) for name in ("aaa", "bbb")]
    assert tasks(*folders) == {
        "news.csv (sha256 aaaaaaaa)": ["fadamgc"],
        "news.csv (sha256 bbbbbbbb)": ["fadamgc"],
    }


def test_other_samples_of_one_data_set_are_named_by_their_settings(tmp_path):
    cut = make_run(tmp_path / "a", "data.max_validation=300", digests=("t", "cut"))
    whole = make_run(tmp_path / "b", digests=("t", "whole"))
    assert list(tasks(cut, whole)) == ["glue/sst2 (max_validation=300)", "glue/sst2 (max_validation=null)"]


def test_runs_trained_on_other_samples_are_compared_but_never_averaged(tmp_path):
    """The same validation samples: one table. The same recipe, but its file has changed: two groups."""
    paths = ["/d/half.csv", "/d/all.csv"]
    folders = [make_run(tmp_path / str(i), train=path, digests=(path, "v")) for i, path in enumerate(paths)]
    (labels,) = tasks(*folders).values()
    assert labels == ["fadamgc data.train=/d/half.csv", "fadamgc data.train=/d/all.csv"]
    changed = [
        make_run(tmp_path / n, train="/d/x.csv", digests=(n * 4, "v"), seed=i) for i, n in enumerate(("aa", "bb"))
    ]
    (labels,) = tasks(*changed).values()
    assert labels == ["fadamgc data.training digest=aaaaaaaa", "fadamgc data.training digest=bbbbbbbb"]


@pytest.mark.parametrize("name", [".", "/", "~", "./", "x/."])
def test_a_folder_without_a_name_is_called_as_it_was_given(tmp_path, name):
    assert load_run(make_run(tmp_path / "a", task=name)).task == name


@pytest.mark.parametrize("finished", [True, False])
def test_digests_of_older_runs_are_in_their_checkpoints(tmp_path, finished):
    folder = make_run(tmp_path / "a", digests=NEWS, checkpoint=True, counts=[(3, 1)], finished=finished)
    assert load_run(folder).data == {"training": NEWS[0], "validation": NEWS[1]}
    manifest = folder / "checkpoints" / "000004" / "manifest.json"
    for damaged in ("{", '{"facts": []}', '{"facts": {"data": {"training": 1}}}', "[" * 10_000):
        manifest.write_text(damaged)
        assert load_run(folder).data == {}


def test_a_run_without_digests_has_the_data_of_the_runs_with_its_settings(tmp_path):
    old = make_run(tmp_path / "old", train="/d/a.csv")
    new = make_run(tmp_path / "new", train="/d/a.csv", digests=NEWS, seed=1)
    other = make_run(tmp_path / "other", train="/d/b.csv", seed=2)
    assert tasks(old, new, other) == {"a.csv": ["fadamgc"], "b.csv": ["fadamgc"]}
    assert [len(group.runs) for group in groups_of(old, new, other)] == [2, 1]
    changed = make_run(tmp_path / "changed", train="/d/a.csv", digests=SNLI, seed=3)
    assert len(tasks(old, new, changed)) == 3  # which of the two it had is unknown


def test_a_digest_that_is_no_text_is_damage(tmp_path):
    folder = make_run(tmp_path / "a", digests=NEWS)
    found = json.loads((folder / "partition.json").read_text())
    (folder / "partition.json").write_text(json.dumps(found | {"data": {"training": 1}}))
    _, (problem,) = read_runs([folder])
    assert "partition.json: data is {'training': 1}, expected a digest for each split" in problem


# Twelve runs of five algorithms on two data sets

ALGORITHMS = ("fadamgc", "fedadamw", "localadam", "scaffold", "fedavg")


def twelve(folder):
    made = []
    for name, digests in (("agnews", NEWS), ("snli", SNLI)):
        for number, algorithm in enumerate((*ALGORITHMS, "fadamgc")):
            scores = [0.3 + number / 50, 0.5 + number / 50, 0.7 + number / 50]
            run = folder / f"{name}{number}"
            train = f"/data/{name}/train.parquet"
            seed = number // len(ALGORITHMS)
            made.append(make_run(run, algorithm=algorithm, train=train, digests=digests, scores=scores, seed=seed))
    return made


@pytest.mark.parametrize("width", [60, 80])
@pytest.mark.slow
def test_two_data_sets_are_two_tables_that_fit_the_terminal(tmp_path, width, monkeypatch):
    folders = twelve(tmp_path)
    monkeypatch.setattr(console, "width", width)
    with console.capture() as capture:
        report(folders, tmp_path / "out", formats=["md"])
    lines = [line.rstrip() for line in capture.get().splitlines()]
    shown = lines[: next(i for i, line in enumerate(lines) if line.startswith("written to"))]
    tables = "\n".join(line for line in shown if "drawn" not in line)
    news, snli = tables.split("snli/train.parquet; accuracy")
    title = "agnews/train.parquet; accuracy, target 0.85; mean ± standard deviation over seeds"
    assert " ".join(news.split()).startswith(title)
    assert "agnews/train.parquet; costs to the target; accuracy, target 0.85" in " ".join(news.split())
    for table in (part for both in (news, snli) for part in both.split("costs to the target")):
        assert all(len(line) <= width for line in table.splitlines())
        parts = table.count("fedavg")
        assert 1 <= parts <= 3
        assert [sum(name in line for line in table.splitlines()) for name in ALGORITHMS] == [parts] * 5
        assert len(table.splitlines()) < 40


@pytest.mark.slow
def test_the_files_of_two_data_sets(tmp_path):
    written = report(twelve(tmp_path), tmp_path / "out").files
    names = {path.name for path in written}
    assert {"score_by_round.agnews-train-parquet.png", "train_loss.snli-train-parquet.svg"} < names
    for text in ("summary.md", "report.html"):
        found = (tmp_path / "out" / text).read_text()
        assert "agnews/train.parquet" in found
        assert "snli/train.parquet" in found
    assert (tmp_path / "out" / "summary.md").read_text().count("| run |") == 4
    assert (tmp_path / "out" / "summary.tex").read_text().count(r"\begin{tabular}") == 4
    assert len((tmp_path / "out" / "summary.csv").read_text().splitlines()) == 11
    again = report([tmp_path / "agnews0"], tmp_path / "out", formats=["svg"]).files
    assert sorted((tmp_path / "out").iterdir()) == sorted(again)  # nothing of the earlier report is left


@pytest.mark.slow
def test_figures_of_two_data_sets_never_share_axes(tmp_path):
    report(twelve(tmp_path), tmp_path / "out", formats=["html"])
    page = (tmp_path / "out" / "report.html").read_text()
    for name in ("agnews", "snli"):
        assert f"<h2>{name}/train.parquet: Scores and costs</h2>" in page
        assert f"<h2>{name}/train.parquet: Figures</h2>" in page
    assert page.count('aria-label="Score over rounds"') == 2


# Groups that differ in many settings


@pytest.mark.slow
def test_groups_that_differ_in_many_settings_are_numbered_and_a_legend_tells_them(tmp_path):
    many = ["lora.rank=4", "local.batch_size=8", "data.max_length=64", "federation.clients_per_round=5"]
    first, second = make_run(tmp_path / "a"), make_run(tmp_path / "b", *many)
    stopped = make_run(tmp_path / "c", *many, seed=1, finished=False)
    with console.capture() as capture:
        report([first, second, stopped], tmp_path / "out")
    settings = "lora.rank=4, data.max_length=64, federation.clients_per_round=5, local.batch_size=8"
    groups = groups_of(first, second, stopped)
    assert [group.name for group in groups] == ["1 fadamgc", "2 fadamgc", "2 fadamgc"]
    assert groups[1].settings == settings
    said = " ".join(capture.get().split())
    assert said.count(settings) == 1
    for name in ("summary.md", "report.html"):
        text = (tmp_path / "out" / name).read_text().replace("\\_", "_")
        assert settings in text
        assert "2 fadamgc" in text
    assert settings in (tmp_path / "out" / "summary.csv").read_text()


def test_three_settings_still_stand_in_the_name(tmp_path):
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "lora.rank=4", "local.batch_size=8")]
    assert [group.settings for group in groups_of(*folders)] == ["", ""]
    long = make_run(tmp_path / "c", f"model.name={'x' * 50}")
    assert groups_of(folders[0], long)[1].settings == f"model.name={'x' * 50}"
