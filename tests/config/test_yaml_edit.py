"""A few keys change; every other byte of the file stays."""

from __future__ import annotations

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from fedllm.common.errors import UserError
from fedllm.config.yaml_edit import with_keys

CHOICE = {"cohort": 5, "slices": "auto"}


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("extends: base.yaml\n# why\n", "extends: base.yaml\n# why\nrun:        {cohort: 5, slices: auto}\n"),
        ("extends: base.yaml  # no end", "extends: base.yaml  # no end\nrun:        {cohort: 5, slices: auto}\n"),
        ("extends: b.yaml\r\n", "extends: b.yaml\r\nrun:        {cohort: 5, slices: auto}\r\n"),
        (
            "run: {seed: 1}  # one\nlocal: {}\n",
            "run: {cohort: 5, slices: auto, seed: 1}  # one\nlocal: {}\n",
        ),
        (
            "run: {seed: 1, cohort: auto, slices: 4}  # two\n",
            "run: {seed: 1, cohort: 5, slices: auto}  # two\n",
        ),
        (
            "run:\n  # the seed\n  seed: 1   # one\n  cohort: 12 # large\nlocal: {}\n",
            "run:\n  # the seed\n  slices: auto\n  seed: 1   # one\n  cohort: 5 # large\nlocal: {}\n",
        ),
        ("run:\nlocal: {}\n", "run: {cohort: 5, slices: auto}\nlocal: {}\n"),
        ("run: {}\n", "run: {cohort: 5, slices: auto}\n"),
        ('"run":\n    "cohort": auto\n', '"run":\n    slices: auto\n    "cohort": 5\n'),
    ],
)
def test_only_the_keys_change(before: str, after: str) -> None:
    assert with_keys(before, "run", CHOICE, "x.yaml") == after
    assert with_keys(after, "run", CHOICE, "x.yaml") == after


@pytest.mark.parametrize(
    "text",
    [
        "eval: &shared {every: 2}\nrun: *shared\n",
        "eval: &shared {every: 2}\nrun: &mine {<<: *shared, seed: 1}\nlocal: *mine\n",
        "run: words\n",
        "eval: {every: 2}\n...\n",
    ],
)
def test_what_cannot_be_changed_safely_is_refused(text: str) -> None:
    with pytest.raises(UserError, match=r"x\.yaml: run: is written in a way .* run: {cohort: 5, slices: auto}"):
        with_keys(text, "run", CHOICE, "x.yaml")


WORDS = st.sampled_from(["seed", "cohort", "slices", "threads", "dir"])
VALUES = st.one_of(st.integers(0, 99), st.none(), st.sampled_from(["auto", "a: b", "# x", "it's", ""]))
SECTION = st.one_of(st.none(), st.dictionaries(WORDS, VALUES))


@settings(deadline=None)
@given(run=SECTION, local=st.dictionaries(WORDS, VALUES), flow=st.booleans(), first=st.booleans())
def test_any_recipe_that_yaml_writes(run: dict | None, local: dict, flow: bool, first: bool) -> None:
    sections = {"run": run, "local": local} if first else {"local": local, "run": run}
    text = yaml.safe_dump(sections, default_flow_style=flow, sort_keys=False)
    assert yaml.safe_load(with_keys(text, "run", CHOICE, "x.yaml")) == {**sections, "run": {**(run or {}), **CHOICE}}
