"""The data sets known by name: GLUE and 20 Newsgroups, with their columns, classes and official metrics."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedllm.common.errors import UserError

if TYPE_CHECKING:
    from fedllm.data.settings import DataSettings

NEWSGROUP_PARTS = ("headers", "footers", "quotes")
_HEADER = re.compile(r"^(From|Subject): ", re.MULTILINE)


@dataclass(frozen=True)
class KnownDataset:
    """A data set known by name: its columns, classes, official metric and place on the Hugging Face hub.

    text: the one or two text columns. classes: class names in the order of the labels; () if labels are numbers.
    metric: the official metric, a key of tasks.metrics.METRICS. hub: arguments of datasets.load_dataset.
    strip: a function that removes parts from a text column, given the texts and the parts' names; by default none.
    parts: the parts that it can remove. By default it removes them all.
    """

    text: tuple[str, ...]
    classes: tuple[str, ...]
    metric: str
    hub: tuple[str, ...]
    validation: str = "validation"
    strip: Callable[[list[str], Collection[str]], list[str]] | None = None
    parts: tuple[str, ...] = ()


def strip_newsgroups(texts: list[str], parts: Collection[str]) -> list[str]:
    """Removes headers, footers (signatures) and quotes from 20 Newsgroups messages, with scikit-learn's functions in
    its order.

    Texts that are already stripped do not change: only raw messages have a From or Subject line before their first
    blank line. Raises UserError if a part shall stay that was already removed from these texts.
    """
    from sklearn.datasets import _twenty_newsgroups as newsgroups

    if not all(_HEADER.search(text.partition("\n\n")[0]) for text in texts):
        if kept := [part for part in NEWSGROUP_PARTS if part not in parts]:
            raise UserError(
                f"data.strip: found {list(parts)}, which keeps {', '.join(kept)}, but this copy of 20 Newsgroups has "
                f"messages without headers: they were removed before; expected the raw messages, or data.strip=null"
            )
        return texts
    functions = {
        "headers": newsgroups.strip_newsgroup_header,
        "footers": newsgroups.strip_newsgroup_footer,
        "quotes": newsgroups.strip_newsgroup_quoting,
    }
    for part in NEWSGROUP_PARTS:
        if part in parts:
            texts = list(map(functions[part], texts))
    return texts


def _glue(
    config: str, text: str, classes: str, metric: str = "accuracy", validation: str = "validation"
) -> KnownDataset:
    return KnownDataset(tuple(text.split()), tuple(classes.split()), metric, ("nyu-mll/glue", config), validation)


_NEWSGROUPS = """
    alt.atheism comp.graphics comp.os.ms-windows.misc comp.sys.ibm.pc.hardware comp.sys.mac.hardware comp.windows.x
    misc.forsale rec.autos rec.motorcycles rec.sport.baseball rec.sport.hockey sci.crypt sci.electronics sci.med
    sci.space soc.religion.christian talk.politics.guns talk.politics.mideast talk.politics.misc talk.religion.misc
"""

KNOWN_DATASETS: dict[str, KnownDataset] = {
    "glue/cola": _glue("cola", "sentence", "unacceptable acceptable", "matthews_correlation"),
    "glue/sst2": _glue("sst2", "sentence", "negative positive"),
    "glue/mrpc": _glue("mrpc", "sentence1 sentence2", "not_equivalent equivalent", "accuracy_f1"),
    "glue/qqp": _glue("qqp", "question1 question2", "not_duplicate duplicate", "accuracy_f1"),
    "glue/stsb": _glue("stsb", "sentence1 sentence2", "", "pearson_spearman"),
    "glue/mnli": _glue(
        "mnli", "premise hypothesis", "entailment neutral contradiction", validation="validation_matched"
    ),
    "glue/qnli": _glue("qnli", "question sentence", "entailment not_entailment"),
    "glue/rte": _glue("rte", "sentence1 sentence2", "entailment not_entailment"),
    "glue/wnli": _glue("wnli", "sentence1 sentence2", "not_entailment entailment"),
    "20newsgroups": KnownDataset(
        text=("text",),
        classes=tuple(_NEWSGROUPS.split()),
        metric="accuracy_macro_f1",
        hub=("SetFit/20_newsgroups",),
        validation="test",
        strip=strip_newsgroups,
        parts=NEWSGROUP_PARTS,
    ),
}


def text_columns(settings: DataSettings) -> tuple[str, ...]:
    """The one or two columns of text: those of `data.text`, else the known data set's, else "text"."""
    known = KNOWN_DATASETS.get(settings.name or "")
    return tuple(settings.text or (known.text if known else ("text",)))


def label_column(settings: DataSettings) -> str:
    """The column of the labels."""
    return settings.label or "label"
