"""docs/guides/your_own_algorithm.md does what it says: its code is taken out of the page and run."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from repository import REPO

from fedllm import QuadraticProblem, load_algorithm, load_recipe, simulate
from fedllm.cli.algorithm_entries import entry
from fedllm.cli.commands import main
from fedllm.common.errors import UserError

MISTAKES = """
from dataclasses import dataclass
from fedllm.algorithms.base import Algorithm
def own(**methods):
    return dataclass(frozen=True, kw_only=True)(type("Own", (Algorithm,), {"step": lambda *_: None, **methods}))
@dataclass(frozen=True, kw_only=True)
class Needy(Algorithm):
    q: float
M = {"server_vectors": lambda self: {"m": "d"}}
Forgetful = own(**M)
Short = own(**M, aggregate=lambda self, x, server, reduced, info: (x, {"m": x[:2]}))
Cut = own(aggregate=lambda self, x, server, reduced, info: (x[:2], {}))
Alone = own(aggregate=lambda self, x, server, reduced, info: x)
Careless = own(client_vectors=lambda self: {"c": "d"})
Silent = own(uploads=lambda self: {"d": "d", "z": "d"})
Misread = own(server_vectors=lambda self: {"m": "D"})
for name, cls in list(vars().items()):
    if isinstance(cls, type):
        cls.__name__ = name
"""
PAGE = (REPO / "docs" / "guides" / "your_own_algorithm.md").read_text(encoding="utf-8")


@pytest.fixture
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's folder with fedsign.py in it, as the current one."""
    (module,) = re.findall(r"```python\n(# fedsign\.py\n.*?)```", PAGE, re.DOTALL)
    (tmp_path / "fedsign.py").write_text(module, encoding="utf-8")
    (tmp_path / "mistakes.py").write_text(MISTAKES, encoding="utf-8")
    (tmp_path / "broken.py").write_text("def f(:", encoding="utf-8")
    (tmp_path / "raising.py").write_text("1 / 0", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for module in ("fedsign", "mistakes"):
        sys.modules.pop(module, None)


def test_first_rounds_go_along_the_sign_of_the_update(own_folder: Path) -> None:
    problem = QuadraticProblem.random(4, 6, seed=1)
    D = -0.05 * problem.full_gradient(problem.initial(), range(4)).mean(0)
    alg = load_algorithm("fedsign:FedSign", lr=0.05, server_lr=0.3, beta=0.8)
    result = simulate(alg, problem, rounds=1, local_steps=1)
    torch.testing.assert_close(result.x, 0.3 * D.sign())
    torch.testing.assert_close(result.server["m"], 0.2 * D)


def test_the_script_of_the_page_comes_near_the_optimum(own_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (script,) = re.findall(r"```python\n(from fedllm import .*?)```", PAGE, re.DOTALL)
    exec(compile(script, "your_own_algorithm.md", "exec"), {})
    before, after = map(float, capsys.readouterr().out.split(" -> "))
    assert before > 0.5
    assert after < before / 5


def test_the_recipe_command_of_the_page_is_a_valid_recipe(own_folder: Path) -> None:
    recipe, overrides = re.findall(r"fedllm run (\S+) (.*algorithm\.name=fedsign:FedSign.*)", PAGE)[0]
    algorithm = load_recipe(REPO / recipe, overrides.split()).load_algorithm()
    assert type(algorithm).__name__ == "FedSign"
    assert (algorithm.lr, algorithm.server_lr) == (0.1, 1e-3)


def test_the_catalog_describes_it(own_folder: Path) -> None:
    found = entry("fedsign:FedSign")
    assert "m = beta m + (1-beta) D" in found.equations
    assert [setting.key for setting in found.own] == ["beta"]
    assert (found.footprint.server, found.footprint.down) == ({"m": "d"}, {"x": "d"})


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("fedsign:FedSign", {"beta": 2}, r"algorithm.beta: found 2.0, expected a number in \[0, 1\]"),
        ("fedsign:FedSign", {"bta": 0.2}, r"algorithm.bta: unknown key \(did you mean 'beta'\?\)"),
        ("fedsign:FedSing", {}, "algorithm.name: 'fedsign:FedSing' could not be loaded"),
        (
            ".fedsign:FedSign",
            {},
            "algorithm.name: '.fedsign:FedSign' could not be loaded: .*expected package.module:Class",
        ),
        (":FedSign", {}, "algorithm.name: ':FedSign' could not be loaded: .*expected package.module:Class"),
        ("mistakes:Needy", {}, r"algorithm.name: Needy.q has no default; write q = setting\(default, \.\.\.\)"),
        ("broken:X", {}, r"algorithm.name: 'broken:X' could not be loaded: SyntaxError: .*broken.py, line 1"),
        ("raising:X", {}, "algorithm.name: 'raising:X' could not be loaded: ZeroDivisionError: division by zero"),
        ("fedsing:FedSign", {}, "algorithm.name: 'fedsing:FedSign' could not be loaded: No module named 'fedsing'"),
        ("pathlib:Path", {}, "algorithm.name: 'pathlib:Path' is not a subclass of fedllm.algorithms.Algorithm"),
    ],
)
def test_mistakes_are_named(own_folder: Path, name: str, keys: dict, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_algorithm(name, **keys)


@pytest.mark.parametrize("name", [".fedsign:X", ":X", "mistakes:Needy", "broken:X", "raising:X"])
def test_the_command_shows_no_traceback(own_folder: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["algorithms", name]) == 2
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "Forgetful",
            r"Forgetful.aggregate: found tensors \[\], expected \['m'\], as server_v",
        ),
        ("Short", r"Short.aggregate: tensor 'm': found \[2\] .*, expected \[6\]"),
        ("Cut", r"Cut.aggregate: tensor 'x': found \[2\] .*, expected \[6\]"),
        ("Alone", r"Alone.aggregate: found Tensor, expected \(x, server vectors\)"),
        (
            "Careless",
            r"Careless.end: of what it keeps, found tensors \[\], expected \['c'\], as client_vectors declares",
        ),
        ("Silent", r"Silent.end: of what it sends, found tensors \['d'\], expected \['d', 'z'\], as uploads and"),
        (
            "Misread",
            r"Misread.server_vectors: 'm' has length 'D', expected 'd', one number per coordinate, or 'B'",
        ),
    ],
)
def test_what_a_method_forgets_is_named(own_folder: Path, name: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        simulate(load_algorithm(f"mistakes:{name}"), QuadraticProblem.random(4, 6), rounds=2, local_steps=1)
