"""A model as it was loaded: with a task's head, and what it reads texts or images with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fedllm.data.pixels import ImageFormat
from fedllm.models.head_start import HeadStart


@dataclass(frozen=True)
class Backbone:
    """A frozen model with a task's head, and its tokenizer or, of a model of images, `images`: how it reads them.

    name: as the user wrote it. source: the folder or GGUF file it was read from, "hub" (Hugging Face cache or hub), or
    "built" (by its name, see image_models).
    head: paths of the task head's modules, all of which are trained; () for a language model, whose output embedding is
    frozen. task_type: PEFT's name for this kind of head.
    max_length: the number of tokens that the model has positions for, or None if it has no limit.
    base_name: the base model in adapter_config.json, see `_base_name`. start: whether the checkpoint's head is kept.
    notes: what a user should know of the model.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    name: str
    source: Path | Literal["hub", "built"]
    head: tuple[str, ...]
    task_type: str | None
    max_length: int | None
    base_name: str = ""
    start: HeadStart = HeadStart(False, "random values")
    notes: tuple[str, ...] = ()
    images: ImageFormat | None = None

    @property
    def encoder(self) -> PreTrainedTokenizerBase | ImageFormat:
        """What samples are encoded with, see Task.encode."""
        found = self.tokenizer or self.images
        assert found is not None, "a model reads texts or images"
        return found

    @property
    def text_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of a model of texts."""
        assert self.tokenizer is not None, "a model of images has no tokenizer"
        return self.tokenizer

    @property
    def pad_id(self) -> int:
        """The id of the padding token; 0 for images, which have no padding."""
        return 0 if self.tokenizer is None else int(self.tokenizer.pad_token_id or 0)
