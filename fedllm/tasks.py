"""The data sets known by name: GLUE and 20 Newsgroups, with their columns, classes and official metrics."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

_HEADER = re.compile(r"^(From|Subject): ", re.MULTILINE)


@dataclass(frozen=True)
class KnownTask:
    """text: the one or two text columns. classes: their names by label, none for a regression.

    metric: a key of metrics.METRICS. hub: where the Hugging Face hub has it, as arguments of datasets.load_dataset.
    clean: what is done to a column of its texts, nothing by default.
    """

    text: tuple[str, ...]
    classes: tuple[str, ...]
    metric: str
    hub: tuple[str, ...]
    validation: str = "validation"
    clean: Callable[[list[str]], list[str]] = list


def strip_newsgroups(texts: list[str]) -> list[str]:
    """20 Newsgroups messages without headers, signatures and quotes, by scikit-learn's own functions and in its order.

    Texts stripped before stay as they are: every raw message has a From or Subject line before its first blank line.
    """
    from sklearn.datasets import _twenty_newsgroups as newsgroups

    if not all(_HEADER.search(text.partition("\n\n")[0]) for text in texts):
        return texts
    headless = map(newsgroups.strip_newsgroup_header, texts)
    unsigned = map(newsgroups.strip_newsgroup_footer, headless)
    return list(map(newsgroups.strip_newsgroup_quoting, unsigned))


def _glue(config: str, text: str, classes: str, metric: str = "accuracy", validation: str = "validation") -> KnownTask:
    return KnownTask(tuple(text.split()), tuple(classes.split()), metric, ("nyu-mll/glue", config), validation)


_NEWSGROUPS = """
    alt.atheism comp.graphics comp.os.ms-windows.misc comp.sys.ibm.pc.hardware comp.sys.mac.hardware comp.windows.x
    misc.forsale rec.autos rec.motorcycles rec.sport.baseball rec.sport.hockey sci.crypt sci.electronics sci.med
    sci.space soc.religion.christian talk.politics.guns talk.politics.mideast talk.politics.misc talk.religion.misc
"""

TASKS: dict[str, KnownTask] = {
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
    "20newsgroups": KnownTask(
        text=("text",),
        classes=tuple(_NEWSGROUPS.split()),
        metric="accuracy_macro_f1",
        hub=("SetFit/20_newsgroups",),
        validation="test",
        clean=strip_newsgroups,
    ),
}
