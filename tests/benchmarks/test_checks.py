"""The scripts that look at runs: the classes of a round's clients, and the length of steps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.checks import round_labels, step_length
from fedllm.cli.commands import main as fedllm
from fedllm.experiment.build import ReadCache


def test_the_share_of_the_first_class(tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    assert fedllm(["run", str(tiny / "recipe.yaml"), f"run.dir={run}"]) == 0
    counts = json.loads((run / "partition.json").read_text())["counts"]
    lines = [json.loads(text) for text in (run / "metrics.jsonl").read_text().splitlines()]
    shares = []
    for line in lines:
        first = sum(counts[client][0] for client in line["clients"])
        shares.append(first / sum(sum(counts[client]) for client in line["clients"]))
    middle = sorted(shares)[1]  # rounds below it are outside the bound, this one is not
    below = min(middle, 0.5)
    outside = [number for number, share in enumerate(shares, 1) if share < below or share > 1 - below]
    capsys.readouterr()
    assert round_labels.main([str(run), "--below", repr(below)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"run: seed 0, 4 rounds, share {sum(shares) / 4:.2f} ± ")
    assert printed.strip().endswith(f": {', '.join(map(str, outside))}")
    assert f" {len(outside)} rounds outside" in printed
    assert round_labels.main([str(run), "--rounds", "1", "--below", "0"]) == 0
    assert "seed 0, 1 rounds" in (once := capsys.readouterr().out)
    assert once.strip().endswith("0 rounds outside 0 to 1: none")


@pytest.mark.parametrize(
    ("algorithm", "rounds", "expected"), [("fedadamw", 2, 1.0), ("fedlada", 1, (1 - 0.99**3) ** -0.5)]
)
def test_steps_have_the_length_of_the_rate_where_the_gradient_stays(
    algorithm: str, rounds: int, expected: float, tiny: Path, tmp_path: Path
) -> None:
    """Every client trains, on all its samples in every step, and x stays where it is: the gradient g is the same in
    all steps. FedAdamW's vbar, corrected, is then g^2. FedLADA does not correct its v; from the second round on it
    takes the maximum of unequal moments, so that one round is compared."""
    run = tmp_path / "run"
    whole = ["local={steps: 3, batch_size: 120}", f"federation={{rounds: {rounds}, clients_per_round: 8}}"]
    still = [
        "model.dropout=0.0",
        f"algorithm={{name: {algorithm}, lr: 1.0e-9, eps: 1.0e-12}}",
        "lora={rank: 2, alpha: 4, dropout: 0.0, train: B}",
    ]
    assert fedllm(["run", str(tiny / "recipe.yaml"), f"run.dir={run}", *whole, *still]) == 0
    found = step_length.step_length(run, ReadCache())
    assert found.round == rounds
    assert found.loss == pytest.approx(json.loads((run / "metrics.jsonl").read_text().splitlines()[0])["train_loss"])
    assert found.ratios.sub(expected).abs().max() < 1e-3 * expected
    assert len(found.ratios) > 10


@pytest.mark.parametrize("main", [round_labels.main, step_length.main])
def test_a_folder_without_a_run(
    main: Callable[[list[str]], int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(tmp_path)])
    assert f"{tmp_path}: not a run folder" in capsys.readouterr().err


def test_a_method_without_a_second_moment_on_the_server(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert fedllm(["run", str(tiny / "recipe.yaml"), f"run.dir={run}", "federation.rounds=1"]) == 0
    with pytest.raises(SystemExit, match="2"):
        step_length.main([str(run)])
    assert "fadamgc keeps no second moment on the server; expected fedadamw" in capsys.readouterr().err
