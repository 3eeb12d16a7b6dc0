"""The built wheel has all that the commands need: it works in an empty folder, without the repository."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from repository import REPO

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel."""
    folder = tmp_path_factory.mktemp("wheel")
    words = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(folder), str(REPO)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


def ran(installed: Path, folder: Path, *words: str) -> str:
    """What Python prints, started in a folder of its own with the installed package."""
    environment = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment.pop("FEDLLM_LOCAL_HUB", None)
    done = subprocess.run([sys.executable, "-P", *words], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_has_every_file_of_the_package_and_every_recipe(installed: Path) -> None:
    packed = {path.relative_to(installed) for path in (installed / "fedllm").rglob("*") if path.is_file()}
    listed = subprocess.run(["git", "ls-files", "fedllm", "recipes"], cwd=REPO, capture_output=True, text=True)
    names = [Path(line) for line in listed.stdout.splitlines()]
    assert len(names) > 300
    assert {name if name.parts[0] == "fedllm" else Path("fedllm") / name for name in names} == packed


def test_the_quickstart_is_ready_in_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    assert ran(installed, tmp_path, "-c", "import fedllm; print(fedllm.__file__)").startswith(str(installed))
    plan = ran(installed, tmp_path, "-m", "fedllm", "run", "recipes/quickstart.yaml", "data.max_train=400", "--dry-run")
    assert "20, 10 per round, 10 of them tracked" in plan


def test_a_suite_finds_its_recipes(installed: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from fedllm.config.shipped_recipes import find_recipes_folder; "
        "from fedllm.sweeps.suite_plan import plan_suite; "
        "print(len(plan_suite('glue', recipes=find_recipes_folder(Path('recipes'))).recipes))"
    )
    assert ran(installed, tmp_path, "-c", code) == "7\n"
