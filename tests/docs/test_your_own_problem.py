"""docs/guides/your_own_problem.md does what it says: its script is taken out of the page and run."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from repository import REPO

from fedllm import Problem, load_algorithm, simulate

PAGE = (REPO / "docs" / "guides" / "your_own_problem.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """The names that the script of the page leaves, and what it printed, as `printed`."""
    (script,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    printed: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {"print": lambda *words: printed.append(words)}
    exec(compile(script, "your_own_problem.md", "exec"), names)
    return {**names, "printed": printed}


@pytest.mark.slow
def test_the_algorithms_of_the_page_learn_the_digits(page: dict[str, Any]) -> None:
    assert [name for name, _ in page["printed"]] == ["fedavg", "scaffold", "fadamgc"]
    for name, accuracy in page["printed"]:
        assert len(accuracy) == 3
        assert accuracy[-1] > 0.8, name


def test_a_result_does_not_depend_on_who_trains_together(page: dict[str, Any]) -> None:
    alg, problem = load_algorithm("fadamgc", lr=0.01), page["problem"]
    together = simulate(alg, problem, rounds=2, local_steps=2)
    alone = simulate(alg, problem, rounds=2, local_steps=2, stacked_clients=1)
    torch.testing.assert_close(together.x, alone.x)


def test_the_table_has_what_a_problem_may_have(page: dict[str, Any]) -> None:
    listed = set(re.findall(r"`(\w+)[`(]", PAGE[PAGE.index("## What a problem has") : PAGE.index("A missing number")]))
    public = {name for name in vars(Problem) if not name.startswith("_")} | set(Problem.__annotations__)
    assert public <= listed
