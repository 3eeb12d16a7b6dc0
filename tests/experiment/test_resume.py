"""What may change in a run folder's recipe: more rounds, other evaluations, the same data and model elsewhere."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from adapters import same_bits
from safetensors.torch import load_file, save_file

from fedllm import load_algorithm, run_recipe
from fedllm.algorithms import algorithm_names
from fedllm.cli.commands import main
from fedllm.common.errors import RunError, UserError
from fedllm.config.recipe import load_recipe
from fedllm.experiment import session
from fedllm.experiment.resume import OtherRunError, check_folder
from fedllm.experiment.run import RunResult
from fedllm.results.reader import load_run

QUICK = ["run.threads=1", "run.trackers=[]"]


def rounds(count: int) -> list[str]:
    return [*QUICK, f"federation.rounds={count}"]


@pytest.fixture(scope="module")
def two(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_recipe(tiny / "recipe.yaml", rounds(2), tmp_path_factory.mktemp("two") / "run")


@pytest.fixture(scope="module")
def three(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_recipe(tiny / "recipe.yaml", rounds(3), tmp_path_factory.mktemp("three") / "run")


@pytest.fixture
def folder(two: RunResult, tmp_path: Path) -> Path:
    """A copy of the finished run of two rounds."""
    return shutil.copytree(two.folder, tmp_path / "run")


def scores(result: RunResult) -> list[object]:
    return [(line["round"], line["train_loss"], line.get("accuracy")) for line in result.metrics]


# More rounds


@pytest.mark.slow
def test_a_finished_run_gets_more_rounds_and_the_bits_of_a_run_of_that_length(
    tiny: Path, folder: Path, three: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    longer = run_recipe(tiny / "recipe.yaml", rounds(3), folder)
    assert "going on after round 2 of 3" in capsys.readouterr().out
    assert same_bits(folder, three.folder)
    assert scores(longer) == scores(three)
    assert (longer.result["rounds"], longer.result["final"]) == (3, three.result["final"])
    assert load_run(folder).finished
    assert load_run(folder).key == load_run(three.folder).key, "reports average them as seeds of one run"
    assert yaml.safe_load((folder / "recipe.yaml").read_text())["federation"]["rounds"] == 3


@pytest.mark.parametrize("then", [2, 3])
@pytest.mark.slow
def test_a_kill_while_it_begins_to_go_on_loses_nothing(
    tiny: Path, folder: Path, two: RunResult, three: RunResult, then: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut off where the old result is gone and recipe.yaml is the old one: with either recipe the run is finished."""

    def killed(path: Path, text: str) -> None:
        raise RunError("killed")

    with monkeypatch.context() as patch:
        patch.setattr(session, "replace_text", killed)
        with pytest.raises(RunError, match=r"killed\. The checkpoint of round 2 is intact"):
            run_recipe(tiny / "recipe.yaml", rounds(3), folder)
    assert not load_run(folder).finished
    run_recipe(tiny / "recipe.yaml", rounds(then), folder)
    assert same_bits(folder, {2: two, 3: three}[then].folder)


def test_a_run_whose_rates_depend_on_its_length_does_not_get_longer(tiny: Path, tmp_path: Path) -> None:
    words = ["algorithm={name: fadamgc, lr: 0.01, schedule: cosine_rounds}", "federation.rounds=1", *QUICK]
    folder = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
    before = (folder / "result.json").read_text()
    expected = r"rounds: 1 there, 2 here \(schedule=cosine_rounds depends on the number of rounds\)"
    with pytest.raises(UserError, match=expected):
        run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=2"], folder)
    assert (folder / "result.json").read_text() == before


def test_a_run_does_not_get_shorter(tiny: Path, folder: Path) -> None:
    with pytest.raises(UserError, match=r"federation.rounds: 2 there, 1 here \(a run can only get longer\)"):
        run_recipe(tiny / "recipe.yaml", rounds(1), folder)


def test_a_finished_run_without_an_intact_checkpoint_keeps_its_result(tiny: Path, folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")
    with pytest.raises(UserError, match="is finished and has no intact checkpoint to go on from; choose another"):
        run_recipe(tiny / "recipe.yaml", rounds(3), folder)
    assert load_run(folder).finished
    assert run_recipe(tiny / "recipe.yaml", rounds(2), folder).result["rounds"] == 2


def test_which_algorithms_depend_on_the_number_of_rounds() -> None:
    for name in algorithm_names():
        defaults = load_algorithm(name)
        assert bool(defaults.depends_on_total()) == (name == "padamfed"), name
        for schedule in ("cosine_rounds", "linear"):
            assert load_algorithm(name, schedule=schedule).depends_on_total() == f"schedule={schedule}"
        assert load_algorithm(name, lr=0.1, schedule="cosine_steps", warmup_rounds=3).depends_on_total() == (
            "beta=null, gamma=null" if name == "padamfed" else ""
        )
    assert load_algorithm("padamfed", total_rounds=50).depends_on_total() == ""
    assert load_algorithm("padamfed", lr=0.1, beta=0.1, gamma=0.1).depends_on_total() == ""


# Other evaluations


@pytest.mark.slow
def test_a_run_goes_on_with_another_spacing_of_its_evaluations_and_another_target(
    tiny: Path, tmp_path: Path, three: RunResult
) -> None:
    folder = shutil.copytree(three.folder, tmp_path / "run")
    for path in (folder / "result.json", folder / "checkpoints" / "000003"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    found = run_recipe(tiny / "recipe.yaml", [*rounds(5), "eval={every: 2, target: {accuracy: 0.01}}"], folder)
    assert [line["round"] for line in found.metrics if "accuracy" in line] == [1, 2, 4, 5]
    assert found.result["rounds_to_target"] == 1
    record = load_run(folder)
    assert record.finished
    assert record.curve("accuracy")[0] == [1, 2, 4, 5]
    assert main(["report", str(folder), str(three.folder), "--out", str(tmp_path / "report")]) == 0


@pytest.mark.slow
def test_a_run_that_stopped_at_its_target_goes_on_without_it(tiny: Path, tmp_path: Path, two: RunResult) -> None:
    stops = "eval={target: {accuracy: 0.01}, stop_at_target: true}"
    first = run_recipe(tiny / "recipe.yaml", [*rounds(2), stops], tmp_path / "run")
    assert first.result["rounds"] == 1
    assert run_recipe(tiny / "recipe.yaml", [*rounds(2), stops], tmp_path / "run").result["rounds"] == 1
    assert run_recipe(tiny / "recipe.yaml", rounds(2), tmp_path / "run").result["rounds"] == 2
    assert same_bits(tmp_path / "run", two.folder)


# Other places


def moved(tiny: Path, place: Path) -> list[str]:
    """The data and the model copied to another folder, as overrides."""
    place.mkdir()
    for name in ("train.csv", "validation.csv"):
        shutil.copy(tiny / name, place / name)
    shutil.copytree(tiny / "bert", place / "model")
    return [f"data.train={place}/train.csv", f"data.validation={place}/validation.csv", f"model.name={place}/model"]


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.slow
def test_data_and_model_may_lie_elsewhere(
    tiny: Path, tmp_path: Path, folder: Path, two: RunResult, finished: bool
) -> None:
    if not finished:
        (folder / "result.json").unlink()
        shutil.rmtree(folder / "checkpoints" / "000002")
    words = [*rounds(2), *moved(tiny, tmp_path / "scratch")]
    assert scores(run_recipe(tiny / "recipe.yaml", words, folder)) == scores(two)
    assert same_bits(folder, two.folder)
    assert load_recipe(folder / "recipe.yaml").model.name == str(tmp_path / "scratch" / "model")
    assert load_run(folder).finished


def other_weights(place: Path) -> None:
    path = place / "model" / "model.safetensors"
    save_file({name: value + 1 for name, value in load_file(path).items()}, path, metadata={"format": "pt"})


def other_tokens(place: Path) -> None:
    path = place / "model" / "tokenizer.json"
    words = json.loads(path.read_text())
    vocabulary = words["model"]["vocab"]
    vocabulary["red"], vocabulary["blue"] = vocabulary["blue"], vocabulary["red"]
    path.write_text(json.dumps(words))


def other_data(place: Path) -> None:
    text = (place / "validation.csv").read_text()
    (place / "validation.csv").write_text(text[: text.rindex("red")])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (other_weights, "the run began with another model.name, and .* has other weights or another tokenizer"),
        (other_tokens, "the run began with another model.name, and .* has other weights or another tokenizer"),
        (other_data, "the run began with another validation split"),
    ],
)
def test_other_content_at_another_place_is_refused_and_the_folder_keeps_its_recipe(
    tiny: Path, tmp_path: Path, folder: Path, change: Callable[[Path], None], said: str
) -> None:
    words = [*rounds(3), *moved(tiny, tmp_path / "scratch")]
    change(tmp_path / "scratch")
    before = {name: (folder / name).read_bytes() for name in ("recipe.yaml", "result.json", "partition.json")}
    with pytest.raises(UserError, match=said):
        run_recipe(tiny / "recipe.yaml", words, folder)
    assert {name: (folder / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_a_checkpoint_without_a_digest_of_the_model_keeps_its_place(tiny: Path, tmp_path: Path, folder: Path) -> None:
    for path in (folder / "checkpoints").glob("*/manifest.json"):
        manifest = json.loads(path.read_text())
        del manifest["facts"]["base"]
        path.write_text(json.dumps(manifest))
    with pytest.raises(UserError, match=r"another model.name, and its checkpoint is of an earlier version"):
        run_recipe(tiny / "recipe.yaml", [*rounds(2), *moved(tiny, tmp_path / "scratch")], folder)
    assert run_recipe(tiny / "recipe.yaml", rounds(3), folder).result["rounds"] == 3


# Another recipe


def test_another_recipe_is_refused_with_a_folder_that_is_free(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (tmp_path / "run-2").mkdir()
    (folder / "recipe.yaml").write_text(load_recipe(tiny / "recipe.yaml").yaml())
    with pytest.raises(
        OtherRunError, match=rf"for example run.dir={folder}-3\. They differ in\n  algorithm.lr: 0.01 t"
    ):
        check_folder(folder, load_recipe(tiny / "recipe.yaml", ["algorithm.lr=0.02"]))


def test_a_dry_run_says_that_the_folder_holds_another_run_and_goes_on(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "recipe.yaml").write_text(load_recipe(tiny / "recipe.yaml").yaml())
    command = ["run", str(tiny / "recipe.yaml"), "--dry-run", f"run.dir={tmp_path}", "algorithm.lr=0.02"]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "holds the run of another recipe" in said
    assert "algorithm.lr: 0.01 there, 0.02 here" in said
    assert "trainable parameters" in said
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_setting_that_is_newer_than_the_folder_had_its_default_there(tiny: Path, tmp_path: Path) -> None:
    recipe = load_recipe(tiny / "recipe.yaml")
    before = recipe.sections()
    for section, key in (("model", "quantize"), ("local", "steps"), ("algorithm", "weights"), ("run", "max_hours")):
        del before[section][key]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(before))
    assert check_folder(tmp_path, recipe) == []
    with pytest.raises(OtherRunError, match=r"algorithm.weights: 'uniform' there, 'size' here"):
        check_folder(tmp_path, load_recipe(tiny / "recipe.yaml", ["algorithm.weights=size"]))


def test_a_link_to_nowhere_is_named(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for place in ("link", "link/run"):
        assert main(["run", str(tiny / "recipe.yaml"), f"run.dir={tmp_path / place}"]) == 2
        error = capsys.readouterr().err
        assert f"run.dir={tmp_path / place}: {tmp_path}/link is a link to {tmp_path}/nowhere, which does not" in error


# Damaged checkpoints


def test_a_damaged_manifest_is_told_in_plain_words_and_no_checkpoint_left_means_round_1(
    tiny: Path, folder: Path, two: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "result.json").unlink()
    for number, text in (("000002", "{}"), ("000001", "{")):
        (folder / "checkpoints" / number / "manifest.json").write_text(text)
    run_recipe(tiny / "recipe.yaml", rounds(2), folder)
    said = capsys.readouterr().out
    assert "000002 is damaged (manifest.json has no 'round'); it is not used" in said
    assert "000001 is damaged (manifest.json is not JSON" in said
    assert f"{folder}: no checkpoint is intact; the run starts from round 1" in said
    assert same_bits(folder, two.folder)


@pytest.mark.parametrize("every", [1, 10])
def test_an_error_names_the_checkpoint_that_is_kept_if_there_is_one(tiny: Path, tmp_path: Path, every: int) -> None:
    """A learning rate that makes every upload overflow, from the second round on."""
    words = [*rounds(3), "algorithm={name: fedavg, lr: 1.0e+30}", f"run.checkpoint_every={every}"]
    with pytest.raises(RunError) as error:
        run_recipe(tiny / "recipe.yaml", words, tmp_path / "run")
    text = str(error.value)
    assert "the learning rate may be too large" in text
    kept = sorted(path.name for path in (tmp_path / "run").glob("checkpoints/*"))
    if kept:
        assert text.endswith(f"\nThe checkpoint of round {int(kept[-1])} is intact: the same command goes on from it")
    else:
        assert text.endswith("\nThere is no checkpoint yet: the same command starts from round 1")
