"""docs/guides/privacy.md: its recipe, its figures, its code and the tests that it names."""

from __future__ import annotations

import math
import re

import pytest
import yaml
from repository import REPO

from fedllm import load_recipe
from fedllm.aggregation.accounting import full_epsilon
from fedllm.aggregation.privacy import noise_length

TEXT = (REPO / "docs/guides/privacy.md").read_text(encoding="utf-8")
SIZES = (10_000, 75_000, 300_000, 8_400_000)
ROWS = [
    [float(cell.replace(",", "")) for cell in line.strip("| \n").split("|")]
    for line in re.findall(r"^\| \d[\d,]* \| \d+ \|.*$", TEXT, flags=re.MULTILINE)
]


def test_the_recipe_is_accepted() -> None:
    (code,) = re.findall(r"```yaml\n(.*?)```", TEXT, flags=re.DOTALL)
    overrides = [
        f"{section}={yaml.safe_dump(keys, default_flow_style=True)}" for section, keys in yaml.safe_load(code).items()
    ]
    more = ["partition.clients=1000", "partition.min_size=1", "algorithm=fedcm"]
    recipe = load_recipe(REPO / "recipes" / "quickstart.yaml", [*overrides, *more])
    assert recipe.privacy is not None
    assert recipe.privacy.delta is not None
    assert recipe.privacy.delta < 1 / 1000


def test_lengths_of_the_noise() -> None:
    assert len(ROWS) == 4
    for _, sampled, _, z, *lengths in ROWS:
        for values, length in zip(SIZES, lengths, strict=True):
            assert noise_length(z, 1.0, 1, values, int(sampled)) == pytest.approx(length, rel=0.07)
    assert full_epsilon(1.0, 100, 1e-5) == pytest.approx(91.8, abs=0.05)
    assert "epsilon is 91.8\nwith fixed and 7.05 with Poisson sampling" in TEXT


@pytest.mark.slow
def test_the_code_runs_and_prints_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", TEXT, flags=re.DOTALL)
    exec(code, {})
    epsilon, length = map(float, capsys.readouterr().out.split())
    assert epsilon == pytest.approx(7.05, abs=0.005)
    assert math.isclose(length, 19, abs_tol=0.5)


def test_the_tests_that_it_names_exist() -> None:
    named = re.findall(r"`(\w+/test_\w+\.py)::(test_\w+)`", TEXT)
    assert len(named) == 14
    for file, test in named:
        assert f"def {test}(" in (REPO / "tests" / file).read_text(encoding="utf-8"), test
