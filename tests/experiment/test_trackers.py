"""Trackers: TensorBoard by default, wandb and trackio where asked for, no round twice, and no trouble for the run."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from fedllm import run_recipe
from fedllm.cli.commands import main

Log = list[tuple[int, dict[str, float]]]


class StandIn(ModuleType):
    """A package that keeps what it is given: wandb and trackio share this part of their interface."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = ModuleSpec(name, None)
        self.inits: list[dict[str, Any]] = []
        self.logged: Log = []
        self.finished = 0
        self.config = self

    def init(self, **settings: Any) -> StandIn:
        self.inits.append(settings)
        return self

    def update(self, values: dict[str, Any], **_: Any) -> None:
        self.recipe = values

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def finish(self) -> None:
        self.finished += 1


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], StandIn]:
    def install(name: str) -> StandIn:
        module = StandIn(name)
        monkeypatch.setitem(sys.modules, name, module)
        return module

    for variable in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(variable, raising=False)
    return install


def again_from_round(folder: Path, round: int, last: int) -> None:
    """Takes a finished run back to its checkpoint after `round`, as if killed before the next."""
    (folder / "result.json").unlink()
    for later in range(round + 1, last + 1):
        shutil.rmtree(folder / "checkpoints" / f"{later:06d}", ignore_errors=True)


def run_tiny(tiny: Path, folder: Path, trackers: str, *more: str) -> list[dict[str, Any]]:
    overrides = [f"run.trackers={trackers}", "run.threads=1", "federation.rounds=3", *more]
    return run_recipe(tiny / "recipe.yaml", overrides, folder).metrics


@pytest.mark.slow
def test_tensorboard_is_the_default_and_repeats_no_round(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    for _ in range(2):
        lines = run_recipe(tiny / "recipe.yaml", ["run.threads=1", "federation.rounds=3"], folder).metrics
        events = EventAccumulator(str(folder / "tensorboard"))
        events.Reload()
        for name in ("accuracy", "update_cosine", "v_spread", "bytes_up"):
            points = [(point.step, point.value) for point in events.Scalars(name)]
            assert points == [(line["round"], pytest.approx(line[name])) for line in lines], name
        again_from_round(folder, 2, 3)
    assert not (folder / "trackers.json").exists()


@pytest.mark.parametrize("name", ["wandb", "trackio"])
@pytest.mark.slow
def test_a_tracker_is_sent_each_round_once_over_a_resume(
    tiny: Path, tmp_path: Path, stand_in: Callable[[str], StandIn], name: str
) -> None:
    module = stand_in(name)
    lines = run_tiny(tiny, tmp_path / "run", f"[{name}]")
    again_from_round(tmp_path / "run", 2, 3)
    run_tiny(tiny, tmp_path / "run", f"[{name}]", "run.checkpoint_every=2")
    assert [step for step, _ in module.logged] == [1, 2, 3]
    assert [values["accuracy"] for _, values in module.logged] == [line["accuracy"] for line in lines]
    assert not {"round", "clients", "rejected"} & set(module.logged[0][1])
    assert module.recipe["algorithm"]["name"] == "fadamgc"
    first, second = module.inits
    assert first["project"] == "fedllm"
    assert first["name"] == second["name"]
    assert first["name"].startswith("run-")
    assert module.finished == 2
    assert not (tmp_path / "run" / "tensorboard").exists()


class MLflow(ModuleType):
    """As much of MLflow as accelerate's tracker calls; it refuses a parameter that changes, as MLflow does."""

    def __init__(self) -> None:
        super().__init__("mlflow")
        self.__spec__ = ModuleSpec("mlflow", None)
        self.utils = SimpleNamespace(
            validation=SimpleNamespace(MAX_PARAM_VAL_LENGTH=500, MAX_PARAMS_TAGS_PER_BATCH=100)
        )
        self.begun: list[str | None] = []
        self.logged: Log = []
        self.params: dict[str, Any] = {}

    def search_experiments(self, filter_string: str) -> list[Any]:
        return [SimpleNamespace(experiment_id="7")]

    def start_run(self, run_id: str | None, **_: Any) -> Any:
        self.begun.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id="abc"))

    def log_params(self, values: dict[str, Any]) -> None:
        assert not self.params.keys() & values.keys(), "a parameter is logged again"
        self.params |= values

    def log_metrics(self, values: dict[str, float], step: int) -> None:
        self.logged.append((step, values))

    def end_run(self) -> None:
        self.begun.append("ended")


@pytest.mark.slow
def test_mlflow_goes_on_in_its_own_run_over_a_resume(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = MLflow()
    monkeypatch.setitem(sys.modules, "mlflow", module)
    monkeypatch.delenv("MLFLOW_RUN_ID", raising=False)
    lines = run_tiny(tiny, tmp_path / "run", "[mlflow]")
    again_from_round(tmp_path / "run", 2, 3)
    run_tiny(tiny, tmp_path / "run", "[mlflow]", "run.checkpoint_every=2")
    assert module.begun == [None, "ended", "abc", "ended"]
    assert [step for step, _ in module.logged] == [1, 2, 3]
    assert [values["accuracy"] for _, values in module.logged] == [line["accuracy"] for line in lines]
    assert module.params["algorithm.name"] == "fadamgc"
    assert module.params["run.checkpoint_every"] == 1


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, "offline"),
        ({"WANDB_API_KEY": "k"}, "online"),
        ({"WANDB_API_KEY": "k", "WANDB_MODE": "offline"}, "offline"),
        ({"WANDB_MODE": "online"}, "online"),
    ],
)
def test_wandb_goes_online_only_where_its_environment_says_so(
    tiny: Path, tmp_path: Path, stand_in: Callable[[str], StandIn], monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str], mode: str,
) -> None:  # fmt: skip
    from fedllm.experiment.trackers import Trackers

    module = stand_in("wandb")
    for variable, value in variables.items():
        monkeypatch.setenv(variable, value)
    with Trackers(["wandb"], tmp_path, 0, {}):
        assert module.inits[0]["mode"] == mode
        assert module.inits[0]["dir"] == str(tmp_path)


@pytest.mark.slow
def test_a_tracker_that_fails_does_not_end_the_run(
    tiny: Path, tmp_path: Path, stand_in: Callable[[str], StandIn], capsys: pytest.CaptureFixture[str]
) -> None:
    module = stand_in("trackio")

    def broken(values: dict[str, float], step: int) -> None:
        raise ConnectionError("no route to its server")

    module.log = broken  # type: ignore[method-assign]
    assert len(run_tiny(tiny, tmp_path / "run", "[trackio, tensorboard]")) == 3
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("trackio failed and is left out from here on: ConnectionError: no route to its server") == 1
    assert list((tmp_path / "run" / "tensorboard").glob("events*"))


def test_a_tracker_that_is_not_installed_is_named_before_anything_is_loaded(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "fedllm.experiment.trackers.find_spec", lambda name: None if name == "wandb" else ModuleSpec(name, None)
    )
    for more in (["--dry-run"], []):
        command = ["run", str(tiny / "recipe.yaml"), "run.trackers=[wandb]", f"run.dir={tmp_path / 'run'}", *more]
        assert main(command) == 2
        assert "run.trackers: wandb is not installed; pip install wandb" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_an_unknown_tracker_is_a_mistake(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", str(tiny / "recipe.yaml"), "run.trackers=[wanda]"]) == 2
    error = capsys.readouterr().err
    assert "run.trackers: found ['wanda'], expected a list of any of: tensorboard, wandb, trackio, mlflow" in error


@pytest.mark.slow
def test_no_trackers_and_other_trackers_are_the_same_run(tiny: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    first = run_tiny(tiny, folder, "[]")
    assert not (folder / "tensorboard").exists()
    again_from_round(folder, 2, 3)
    timed = {"seconds", "simulated_seconds", "eval_seconds"}
    second = run_tiny(tiny, folder, "[tensorboard]")
    assert [{k: v for k, v in line.items() if k not in timed} for line in first] == [
        {k: v for k, v in line.items() if k not in timed} for line in second
    ]
    assert json.loads((folder / "partition.json").read_text())["classes"] == ["0", "1"]
