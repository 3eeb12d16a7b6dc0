"""Checks that the keys of a recipe's data section fit together."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING

from fedllm.common.errors import UserError
from fedllm.data.conversations.reading import KNOWN_CONVERSATIONS
from fedllm.data.conversations.templates import is_template_file, read_template
from fedllm.data.known_datasets import KNOWN_DATASETS, label_column
from fedllm.data.known_images import check_image_settings, known_images
from fedllm.data.settings import CAUSAL_LM

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings


def check_settings(settings: DataSettings) -> None:
    """Raises UserError that names the key, before anything is read."""
    label = label_column(settings)
    if not settings.name and not settings.train:
        raise UserError("data: expected `name` (a data set) or `train` (a file or folder), found neither")
    check_image_settings(settings)
    if settings.text is not None and len(settings.text) not in (1, 2):
        raise UserError(f"data.text={settings.text}: expected one or two columns")
    if settings.task != CAUSAL_LM and settings.name in KNOWN_CONVERSATIONS:
        raise UserError(
            f"data.name={settings.name}: conversations, expected data.task={CAUSAL_LM}, found {settings.task}"
        )
    if settings.task == CAUSAL_LM and is_template_file(str(settings.template)):
        read_template(str(settings.template))  # before a model is loaded
    if settings.task != CAUSAL_LM and settings.text and label in settings.text:
        raise UserError(f"data.text={settings.text}: '{label}' is the label column; expected columns of text")
    if settings.regression is not None and settings.name in KNOWN_DATASETS:
        raise UserError(f"data.regression={settings.regression}: '{settings.name}' says itself; leave it out")
    _check_csv(settings)
    _check_rows(settings, known=settings.name in KNOWN_DATASETS or known_images(settings) is not None)
    if not 0 < settings.holdout < 1:
        raise UserError(f"data.holdout={settings.holdout}: expected a fraction between 0 and 1")
    known = KNOWN_DATASETS.get(settings.name or "")
    if settings.classes is not None and (declares := known or known_images(settings)) and declares.classes:
        raise UserError(f"data.classes={settings.classes}: '{settings.name}' declares its classes itself; leave it out")
    if settings.task == CAUSAL_LM and known:
        raise UserError(
            f"data.name={settings.name}: labelled texts, expected data.task=classification, found {CAUSAL_LM}"
        )
    if settings.strip is not None and not (known and known.strip):
        named = ", ".join(name for name, each in KNOWN_DATASETS.items() if each.strip)
        raise UserError(
            f"data.strip={settings.strip}: found data set '{settings.name or settings.train}', expected one whose "
            f"texts have known parts: {named}; leave it out"
        )
    for key, limit in (("max_train", settings.max_train), ("max_validation", settings.max_validation)):
        if limit is not None and limit < 1:
            raise UserError(f"data.{key}={limit}: expected at least 1, or null for all")


def _check_csv(settings: DataSettings) -> None:
    try:
        is_text = codecs.lookup(settings.encoding)._is_text_encoding
    except LookupError:
        is_text = False
    if not is_text:
        raise UserError(
            f"data.encoding={settings.encoding}: no known encoding of text, expected for example utf-8 or cp1252"
        )
    mark = settings.delimiter
    if mark is not None and (len(mark) != 1 or not mark.isascii() or mark in '"\r\n'):
        raise UserError(
            f"data.delimiter={mark!r}: expected one ASCII character between cells, for example ';', and no quote or "
            "line end"
        )


def _check_rows(settings: DataSettings, known: bool) -> None:
    if settings.drop_missing and settings.task == CAUSAL_LM:
        raise UserError("data.drop_missing: is for labelled texts and images, found conversations; leave it out")
    if settings.label_map is None:
        return
    if settings.task == CAUSAL_LM or settings.regression or known:
        what = (
            "conversations" if settings.task == CAUSAL_LM else "a regression" if settings.regression else settings.name
        )
        raise UserError(f"data.label_map: is for the classes of your own files, found {what}; leave it out")
    if not settings.label_map:
        raise UserError("data.label_map: found {}, expected {old: new}, or null")
