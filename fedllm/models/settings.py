"""The recipe sections `model:` and `lora:`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from fedllm.common.errors import UserError
from fedllm.common.schema import setting

ATTENTION_ROLES = ("query", "key", "value", "output")
MLP_ROLES = ("mlp_in", "mlp_gate", "mlp_out")
MLP = "mlp"
ALL_LINEAR = "all-linear"
BUILT_NAMES = ("cnn", "resnet18", "resnet18_gn", "vit_tiny")
"""Models of images that are built by name, with random weights; see image_models."""
ROLES = (*ATTENTION_ROLES, *MLP_ROLES, MLP, ALL_LINEAR)
"""What lora.targets may name; lora_targets.find_targets says what each stands for."""


@dataclass(frozen=True)
class ModelSettings:
    """The base model. It is frozen, unless `lora` is null."""

    name: str = setting(
        "openai-community/gpt2",
        "hub id, folder, or package:<module>; for images also cnn, resnet18, resnet18_gn, vit_tiny (random values)",
    )
    pretrained: bool = setting(True, "load its weights; false asks for a random start")
    dtype: Literal["float32", "bfloat16"] = setting("float32", "dtype of the frozen weights")
    quantize: Literal["none", "4bit", "8bit"] = setting("none", "bitsandbytes quantisation of the frozen weights")
    head: Literal["auto", "keep", "new"] = setting(
        "auto",
        "first values of the head: auto = the checkpoint's where its classes are the data's, else new random ones",
    )
    dropout: float | None = setting(
        None,
        "rate of the model's own dropout layers, null = the model's own rates; attention probabilities have none",
    )
    norm: Literal["average", "local", "group"] = setting(
        "average",
        "batch norm where all weights are trained: average = the server averages the clients' running statistics with "
        "the model; local = each client goes on from its own; group = group norm takes its place before training",
    )


@dataclass(frozen=True)
class LoraSettings:
    """The adapter. `lora: null` trains all weights of the model instead."""

    rank: int = setting(16, "rank r")
    alpha: float = setting(32.0, "scale: the adapter counts alpha/r, or alpha/sqrt(r) with scaling rslora")
    scaling: Literal["standard", "rslora"] = setting(
        "standard",
        "standard = the adapter counts alpha/r; rslora = alpha/sqrt(r), with which a high rank learns as fast as a low "
        "one (Kalajdzievski 2023)",
    )
    dora: bool = setting(
        False,
        "DoRA: an adapted layer keeps the direction of each row of its weights W + s B A, and its length is trained "
        "apart (Liu et al. 2024)",
    )
    dropout: float = setting(0.0, "dropout on the adapter's input")
    targets: str | list[str] = setting(
        ["query", "value"],
        "roles of the layers that get an adapter: query, key, value, output, mlp_in, mlp_gate, mlp_out, mlp (all of "
        "the MLP), or all-linear alone (every linear layer of the blocks)",
    )
    train: Literal["AB", "B", "turns"] = setting(
        "AB",
        "AB = both matrices of the adapter; B = B alone, A stays as drawn (FFA-LoRA); turns = B and the head in odd "
        "rounds, A in even rounds (RoLoRA). With B and turns the mean of the clients' matrices is exactly the mean of "
        "their products B A, and about half as many values are sent",
    )

    def __post_init__(self) -> None:
        if isinstance(self.targets, str):
            object.__setattr__(self, "targets", [self.targets])
        unknown = [role for role in self.targets if role not in ROLES]
        if unknown or not self.targets:
            found = f"unknown {', '.join(unknown)}" if unknown else "no role"
            raise UserError(f"targets: found {found}, expected some of: {', '.join(ROLES)}")
        if self.dora and self.train != "AB":
            raise UserError(
                f"train: found {self.train} with dora=true, expected AB: the lengths of the rows of W + s B A mix B "
                "and A, so that means over clients are not exact; leave one of the two out"
            )
        if self.dora and self.dropout > 0:
            raise UserError(
                f"dropout: found {self.dropout:g} with dora=true, expected 0: DoRA would drop the input of the base's "
                "weights as well; set lora.dropout=0"
            )
        if ALL_LINEAR in self.targets and (others := sorted({*self.targets} - {ALL_LINEAR})):
            raise UserError(
                f"targets: found {ALL_LINEAR} beside {', '.join(others)}, expected it alone: it takes every layer"
            )
