"""The recipe sections `model:` and `lora:`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedllm.common.schema import setting


@dataclass(frozen=True)
class ModelSettings:
    """The frozen base model."""

    name: str = setting("openai-community/gpt2", "hub id, folder, or package:<module>")
    pretrained: bool = setting(True, "load its weights; false asks for a random start")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of the frozen weights")
    quantize: Literal["none", "4bit", "8bit"] = setting("none", "bitsandbytes quantisation of the frozen weights")
    head: Literal["auto", "keep", "new"] = setting(
        "auto",
        "first values of the head: auto = the checkpoint's where its classes are the data's, else new random ones",
    )
    dropout: float | None = setting(None, "rate of the model's own dropout layers; null = the model's own rates")


@dataclass(frozen=True)
class LoraSettings:
    """The adapter."""

    rank: int = setting(16, "rank r")
    alpha: float = setting(32.0, "scale: the adapter counts alpha/r")
    dropout: float = setting(0.0, "dropout on the adapter's input")
    targets: list[str] = setting(["query", "value"], "roles that get an adapter: query, key, value, output")
