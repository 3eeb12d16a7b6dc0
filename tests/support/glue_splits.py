"""Stand-ins for the splits of GLUE tasks, as a local hub has them."""

from __future__ import annotations

from pathlib import Path

import datasets
import torch
from tiny_models import WORDS

from fedllm.data.known_datasets import KNOWN_DATASETS


def save_split(path: Path, task: str, rows: int) -> None:
    """Short texts under the columns of a GLUE task; their first word tells the class."""
    known, draws = KNOWN_DATASETS[f"glue/{task}"], torch.Generator().manual_seed(rows)
    labels = [row % len(known.classes) for row in range(rows)]
    texts = [
        " ".join([WORDS[label], *(WORDS[int(i)] for i in torch.randint(len(WORDS), (4,), generator=draws))])
        for label in labels
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_dict({**dict.fromkeys(known.text, texts), "label": labels}).to_parquet(path)


def save_task(hub: Path, task: str) -> None:
    """Both splits of a GLUE task in a local hub."""
    folder = hub / "datasets" / "glue" / task
    save_split(folder / "train.parquet", task, 24)
    save_split(folder / f"{KNOWN_DATASETS[f'glue/{task}'].validation}.parquet", task, 12)
