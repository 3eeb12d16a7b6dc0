"""docs/guides/privacy_samples.md: its recipe and the tests that it names."""

from __future__ import annotations

import re

import yaml
from repository import REPO

from fedllm import load_recipe

TEXT = (REPO / "docs/guides/privacy_samples.md").read_text(encoding="utf-8")


def test_the_recipe_is_accepted() -> None:
    (code,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    overrides = [
        f"{section}={yaml.safe_dump(keys, default_flow_style=True)}" for section, keys in yaml.safe_load(code).items()
    ]
    recipe = load_recipe(REPO / "recipes" / "quickstart.yaml", overrides)
    assert recipe.privacy is not None
    assert recipe.privacy.level == "sample"


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)(?:::(test_\w+))?`", TEXT)
    assert len(named) == 10
    for file, test in named:
        assert f"def {test}" in (REPO / "tests" / file).read_text(encoding="utf-8"), test
