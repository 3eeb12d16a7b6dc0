"""Writes a model whose weights were all trained as a plain transformers folder."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from transformers import PreTrainedModel

from fedllm.common.errors import RunError, UserError
from fedllm.common.files import replaced_folder
from fedllm.common.quiet import quiet
from fedllm.models.adapter_files import CARD, Processor, save_processor

CONFIG = "config.json"


def save_model(
    model: PreTrainedModel,
    folder: str | Path,
    processor: Processor | None = None,
    card: str | None = None,
) -> Path:
    """Writes a model as a folder that from_pretrained reads, in safetensors, and returns its path.

    processor: a tokenizer or an image processor; None for a folder without one. card: the text of README.md. The
    folder is written under a temporary name and then renamed. A model there is replaced.
    Raises UserError if `folder` exists and holds no model, OSError or RunError if it cannot be written.
    """
    folder = Path(folder).expanduser().resolve()
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / CONFIG).exists()):
        raise UserError(f"{folder}: is no model ({CONFIG} is not in it), so it is not replaced; name another folder")
    with replaced_folder(folder) as aside:
        _write(model, aside, processor, card)
    return folder


def _write(model: PreTrainedModel, folder: Path, processor: Processor | None, card: str | None) -> None:
    try:
        with quiet():
            model.save_pretrained(str(folder))
    except SafetensorError as error:
        raise RunError(f"{folder}: the weights could not be written: {error}; make room") from error
    if processor is not None:
        save_processor(processor, folder)
    if card is not None:
        (folder / CARD).write_text(card, encoding="utf-8")
