"""Two threads at most, no network, and a tiny federation that the end-to-end tests share."""

from __future__ import annotations

import csv
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Workers that pytest-xdist starts side by side have one thread each.
THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else min(2, torch.get_num_threads())
torch.set_num_threads(THREADS)

from tiny_models import WORDS, save_tiny  # noqa: E402


@pytest.fixture(autouse=True)
def _same_threads() -> Iterator[None]:
    """A run sets the number of threads of its process. The tests after it have the same number as the tests before."""
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)


def write_rows(path: Path, count: int, seed: int) -> Path:
    """A CSV of short texts whose label is whether 'red' comes before 'blue', and a column to split them by."""
    rng = torch.Generator().manual_seed(seed)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["text", "label", "site"])
        for row in range(count):
            length = int(torch.randint(3, 12, (1,), generator=rng))
            words = [WORDS[int(i)] for i in torch.randint(len(WORDS), (length,), generator=rng)]
            label = row % 2
            words[0] = "red" if label else "blue"
            writer.writerow([" ".join(words), label, f"site{row % 5}"])
    return path


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny BERT (with dropout layers), a training and a validation file, and a recipe over them."""
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder / "bert", "bert", hidden_dropout_prob=0.1)
    write_rows(folder / "train.csv", 120, seed=0)
    write_rows(folder / "validation.csv", 40, seed=1)
    (folder / "recipe.yaml").write_text(
        f"""
model: {{name: {folder / "bert"}}}
lora: {{rank: 2, alpha: 4, dropout: 0.1}}
data:
  {{train: {folder / "train.csv"}, validation: {folder / "validation.csv"}, text: [text], label: label, max_length: 16}}
partition: {{scheme: dirichlet_classes, alpha: 0.5, clients: 8, min_size: 3}}
algorithm: {{name: fadamgc, lr: 1.0e-2}}
federation: {{rounds: 4, clients_per_round: 5, tracked_per_round: 3}}
local: {{epochs: 1, batch_size: 8}}
run: {{precision: float32, threads: 1, checkpoint_every: 1}}
"""
    )
    return folder
