"""Decides whether a checkpoint's trained head is kept, and puts its outputs into the order of the data's classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from fedllm.common.errors import UserError, listed
from fedllm.models.settings import ModelSettings
from fedllm.tasks.heads import Head


@dataclass(frozen=True)
class HeadStart:
    """Where the head's first values come from: the checkpoint (`kept`), or random draws. why: the reason in words.

    own: whether it is the output embedding of a language model, which begins as the model does.
    """

    kept: bool
    why: str
    own: bool = False

    @property
    def setting(self) -> Literal["keep", "new"]:
        """The value of model.head that asks for this start."""
        return "keep" if self.kept else "new"

    def __str__(self) -> str:
        if self.own:
            return self.why
        return f"{'kept from the checkpoint' if self.kept else 'new'} ({self.why})"


@dataclass(frozen=True)
class Loaded:
    """What a checkpoint gave: the names of the parameters that it lacks, and of those that it has in another shape."""

    missing: frozenset[str] = frozenset()
    reshaped: frozenset[str] = frozenset()

    @property
    def absent(self) -> list[str]:
        """The parameters that are random."""
        return sorted(self.missing | self.reshaped)


def choose_start(
    model: ModelSettings,
    net: nn.Module,
    paths: Sequence[str],
    loaded: Loaded,
    head: Head,
    own_classes: Callable[[], Mapping[int, str]],
) -> HeadStart:
    """The start of the head at `paths` of a loaded model. Outputs that are kept are reordered in place.

    own_classes: gives the checkpoint's id2label; called only if the checkpoint has a head.

    model.head: "new" always draws the head. "keep" keeps the checkpoint's, whatever its classes are called, and raises
    UserError if there is none of this shape. "auto" keeps it if the checkpoint's classes have no names (LABEL_0, ...)
    or the names of the data's classes, apart from case, blanks and their order. A language model, which has no head of
    its own, keeps its output embedding; "new" is then an error.
    """
    if not paths:
        if model.head == "new":
            raise UserError(
                f"model.head=new: model '{model.name}' is a language model, whose head is its output embedding; leave "
                f"it out"
            )
        begin = "from the checkpoint" if model.pretrained else "from random weights, as the whole model"
        return HeadStart(True, f"the language model's output embedding, {begin}", own=True)
    if model.head == "new":
        return HeadStart(False, "model.head=new asks for it")
    if why := _without_head(model, paths, loaded, own_classes):
        if model.head == "keep":
            raise UserError(f"model.head=keep: model '{model.name}' has no head to keep: {why}")
        return HeadStart(False, why)
    theirs, ours = _names(own_classes()), list(head.classes)
    if not ours or not _are_names(theirs):
        return HeadStart(True, "it has as many outputs as the data need")
    if (order := _order(theirs, ours)) is None:
        differ = f"the checkpoint's classes are {listed(theirs)}, the data's {listed(ours)}"
        return (
            HeadStart(True, f"{differ}; model.head=keep asks for it")
            if model.head == "keep"
            else HeadStart(False, differ)
        )
    if order == list(range(len(ours))):
        return HeadStart(True, "its classes are the data's")
    _reorder(model.name, net, paths, order)
    return HeadStart(True, "its classes are the data's, its outputs now in their order")


def _without_head(
    model: ModelSettings, paths: Sequence[str], loaded: Loaded, own_classes: Callable[[], Mapping[int, str]]
) -> str:
    """Why the checkpoint has no head of the right shape; "" if it has."""
    if not model.pretrained:
        return "the whole model starts from random weights"
    starts = tuple(f"{path}." for path in paths)
    if lacking := sorted(name for name in loaded.missing if name.startswith(starts)):
        return f"the checkpoint has no {lacking[0]}"
    if other := sorted(name for name in loaded.reshaped if name.startswith(starts)):
        return f"the checkpoint's {other[0]} has another shape, for {len(own_classes())} outputs"
    return ""


def _names(id2label: Mapping[int, str]) -> list[str]:
    return [str(id2label[index]) for index in sorted(id2label)]


def _are_names(names: list[str]) -> bool:
    """Whether they are more than transformers' LABEL_0, LABEL_1, ..."""
    return names != [f"LABEL_{index}" for index in range(len(names))]


def _order(theirs: list[str], ours: list[str]) -> list[int] | None:
    """The place in `theirs` of each of our classes; None if the names are not the same."""
    folded, wanted = ([_folded(name) for name in names] for names in (theirs, ours))
    if len(set(folded)) < len(folded) or sorted(folded) != sorted(wanted):
        return None
    return [folded.index(name) for name in wanted]


def _folded(name: str) -> str:
    return "".join(name.casefold().replace("_", " ").split())


def _reorder(name: str, net: nn.Module, paths: Sequence[str], order: list[int]) -> None:
    """Puts the rows of the head's output layer, its last Linear, into another order."""
    layers = [each for path in paths for each in net.get_submodule(path).modules() if isinstance(each, nn.Linear)]
    if not layers or layers[-1].out_features != len(order):
        raise UserError(
            f"model '{name}': its head is for the data's classes in another order, and its output layer is not found; "
            f"set model.head=new"
        )
    with torch.no_grad():
        for value in layers[-1].parameters():
            value.copy_(value[order])
