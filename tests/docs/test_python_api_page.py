"""docs/guides/python_api.md: its code runs on a tiny model, and its table has every public function."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from repository import REPO

import fedllm
from fedllm.reporting.report import Report

PAGE = (REPO / "docs" / "guides" / "python_api.md").read_text(encoding="utf-8")
CODE = re.findall(r"^```python\n(.*?)^```$", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_code_of_the_page_runs(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in CODE:
        exec(block.replace("recipes/quickstart.yaml", str(tiny / "recipe.yaml")), names)
    made = names["made"]
    assert isinstance(made, Report)
    assert [line["run"] for line in made.scores] == ["fadamgc", "localadam"]
    assert Path("runs/comparison/report.html") in made.files
    assert (tmp_path / "runs" / "methods" / "report" / "report.html").is_file()
    assert {path.name for path in (tmp_path / "runs" / "methods").glob("*-s?")} == {
        "fadamgc-s0", "fadamgc-s1", "localadam-s0", "localadam-s1",
    }  # fmt: skip
    assert [(tmp_path / "runs" / f"clients.{kind}").is_file() for kind in ("json", "png")] == [True, True]
    assert (tmp_path / "runs" / "short-adapter" / "adapter_config.json").is_file()


def test_every_public_function_is_on_the_page() -> None:
    functions = {name for name in fedllm.__all__ if name[0].islower()} - {"load_algorithm"}
    assert {name for name in functions if f"`{name}`" not in PAGE} == set()
