"""The seam: which scores fall, and that only the rooms of tasks and data know of logits and regressions."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fedllm
from fedllm.results import format as written
from fedllm.tasks.base import LOSS, PERPLEXITY, lower_is_better
from fedllm.tasks.metrics import METRICS

PACKAGE = Path(fedllm.__file__).parent
KNOWING = ("tasks", "data")
# Where errors tell the user of logits, the losses of a language model are computed from them, a chunk at a time, or a
# model's output is named so by transformers.
TELLING = {
    "models/conv_nets.py",
    *(
        f"problems/full/{name}.py"
        for name in (
            "batch_reader",
            "learned_places",
            "plain_model",
            "stacked_step",
            "token_losses",
        )
    ),
    *(f"problems/lora/{name}.py" for name in ("compatibility", "frozen_head", "readout")),
}


def words(source: str) -> set[str]:
    """Of `logits` and `regression` those that a source has, but for where it reads a transformers model's `.logits`."""
    return set(re.findall(r"logits|regression", re.sub(r"\.logits\b(?!\()", "", source.lower())))


def test_the_loss_falls_and_metrics_rise() -> None:
    assert lower_is_better(LOSS)
    assert lower_is_better(PERPLEXITY)
    assert not any(lower_is_better(name) for names, _ in METRICS.values() for name in names)
    assert written.LOSS == LOSS == "eval_loss"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("x = model(**inputs).logits.float()", set()),
        ("logits = model(**inputs).logits", {"logits"}),
        ("def logits(self):", {"logits"}),
        ("problem.logits(x)", {"logits"}),
        ('"""Logits [n, labels]"""', {"logits"}),
        ("LoraProblem(regression=True)", {"regression"}),
    ],
)
def test_what_counts_as_knowing(source: str, found: set[str]) -> None:
    assert words(source) == found


def test_no_other_room_knows_of_logits_or_regressions() -> None:
    files = [path.relative_to(PACKAGE) for path in sorted(PACKAGE.rglob("*.py"))]
    assert len(files) > 100
    outside = [path for path in files if path.parts[0] not in KNOWING]
    assert {str(path) for path in outside if words((PACKAGE / path).read_text(encoding="utf-8"))} == TELLING
