"""What the plan shows of the data: classes, sites, notes and warnings."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from fedllm import load_recipe
from fedllm.experiment.run import dry_run


def test_the_plan_names_classes_and_sites_and_warns(
    tiny: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    labels = ["[routine] follow-up"] * 70 + ["urgent"] * 20 + ["Urgent "] * 9 + ["x" * 50]
    names = [*labels, *(f"kind {row % 12}" for row in range(24))]
    with (tmp_path / "train.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "site"])
        for row, name in enumerate(names):
            writer.writerow([f"cat {'the ' * row}dog", name, f"site {row % 13 if row % 2 else 0}"])
        writer.writerow(["cat dog", "urgent", "site 0"])
    data = f"data={{name: null, train: {tmp_path}/train.csv, text: [text], label: label, max_length: 16}}"
    partition = "partition={scheme: by_column, column: site, clients: null, min_size: null, max_size: 20}"
    dry_run(load_recipe(tiny / "recipe.yaml", [data, "data.validation=null", partition]))
    said = " ".join(capsys.readouterr().out.split())
    assert "classes '[routine] follow-up' 56 (" in said
    assert "and 6 more clients 13, 5 per round" in said
    assert "sites 'site 0' " in said
    assert ", ..., 'site" in said
    assert re.search(r"partition.max_size leaves out \d+ of \d+ samples, of 1 of 13 clients: 'site 0' \(\d+\)", said)
    assert "1 of 125 rows repeat the text of another row" in said
    assert "the classes 'Urgent ', 'urgent' differ only in case or blanks" in said
    assert f"classes with one sample only: '{'x' * 37}...'" in said
    assert "texts that have different labels in different rows: 1" in said
    assert "cat the" not in said, "the plan shows no text"


def test_the_plan_states_the_share_of_trained_weights(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """BERT of two layers of width 32: LoRA of rank 2 on six linear layers each, and a head of two classes."""
    dry_run(load_recipe(tiny / "recipe.yaml", ["lora.targets=all-linear"]))
    said = " ".join(capsys.readouterr().out.split())
    trained = 2 * 2 * (4 * (32 + 32) + 2 * (32 + 48)) + 2 * 33
    layer = 4 * (32 * 32 + 32) + (32 * 48 + 48) + (48 * 32 + 32) + 2 * 2 * 32
    frozen = (32 + 64 + 2) * 32 + 2 * 32 + 2 * layer + (32 * 32 + 32) + 2 * 33  # the last is the head as it was before
    assert (
        f"trainable parameters {trained:,}, {trained / (frozen + trained):.2%} of all (LoRA rank 2 on all-lin" in said
    )


def test_the_plan_states_the_risk_of_a_robust_rule(tiny: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keys = ["robust={rule: median, faulty: 1}", "algorithm=localadamw", "partition.clients=20"]
    dry_run(load_recipe(tiny / "recipe.yaml", [*keys, "federation={clients_per_round: 3, rounds: 10}"]))
    said = " ".join(capsys.readouterr().out.split())
    assert "robust median, up to 1 bad clients of 3 in a round; the chance of more, if there are 2 of 20: 1.6%" in said
    several = (6 * 16 + 4) / 1140  # of 4 bad clients two or three are among the 3 of a round
    assert f"4 of 20: {several:.1%}, once in 10 rounds {1 - (1 - several) ** 10:.0%}" in said
