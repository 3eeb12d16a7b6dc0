"""Tiny random image models, and small images whose class shows in their colour."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import AutoModelForImageClassification, SwinConfig, ViTConfig

from fedllm.data.pixels import Pixels

SIDE = 16
CLASSES = ["blue", "green", "red"]
CONFIGS: dict[str, Any] = {
    "vit": lambda **keys: ViTConfig(
        image_size=SIDE, patch_size=4, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        **keys,
    ),
    # 8 x 8 patches in windows of 4: four windows, shifted in the second layer; then 4 x 4 patches in one window
    "swin": lambda **keys: SwinConfig(
        image_size=SIDE, patch_size=2, embed_dim=16, depths=[2, 1], num_heads=[2, 4], window_size=4, mlp_ratio=2.0,
        **keys,
    ),
}  # fmt: skip


def save_model(folder: Path, family: str, processor: dict[str, Any] | None = None, **keys: Any) -> str:
    """A folder with a random checkpoint, and with an image processor's file if given; returns its path."""
    torch.manual_seed(0)
    config = CONFIGS[family](num_labels=5, **keys)
    AutoModelForImageClassification.from_config(config).save_pretrained(folder)
    if processor is not None:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return str(folder)


def coloured(count: int, seed: int, side: int = SIDE) -> tuple[np.ndarray, np.ndarray]:
    """uint8 images [n, 3, side, side] and labels [n]: noise, and more of one channel: 0 of the last, 2 the first."""
    draw = np.random.default_rng(seed)
    labels = np.arange(count) % 3
    images = draw.integers(0, 128, (count, 3, side, side))
    images[np.arange(count), 2 - labels] += 100
    return images.astype(np.uint8), labels.astype(np.int64)


def pixels(count: int, *, augment: bool = False, seed: int = 0) -> Pixels:
    images, labels = coloured(count, seed)
    half = (0.5, 0.5, 0.5)
    return Pixels(torch.from_numpy(images), torch.from_numpy(labels), SIDE, half, half, augment, patches=16)


def encoded(image: np.ndarray, kind: str = "PNG") -> bytes:
    """uint8 [3, H, W] as the bytes of an image file."""
    made = io.BytesIO()
    Image.fromarray(image.transpose(1, 2, 0)).save(made, kind)
    return made.getvalue()


def write_parquet(path: Path, count: int, seed: int, image: str = "image") -> Path:
    """A table of images as {"bytes", "path"}, and of their classes by name."""
    images, labels = coloured(count, seed)
    values = [{"bytes": encoded(each), "path": f"{row}.png"} for row, each in enumerate(images)]
    pq.write_table(pa.table({image: values, "label": [CLASSES[label] for label in labels]}), path)
    return path


def write_folders(folder: Path, count: int, seed: int) -> Path:
    """A folder per class with images."""
    for row, (image, label) in enumerate(zip(*coloured(count, seed), strict=True)):
        place = folder / CLASSES[label] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(encoded(image))
    return folder
