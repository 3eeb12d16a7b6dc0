"""`fedllm.blocks` needs torch and what torch needs, and nothing else: here in an environment that has no more."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from repository import REPO

PROGRAM = """
import sys
sys.path[:0] = sys.argv[1:]
import torch
from fedllm.blocks import partition
layer = torch.nn.TransformerEncoderLayer(8, 2, 16)
found = partition(layer, unknown="tensor")
print(found.dim == sum(p.numel() for p in layer.parameters()), found.num_blocks)
v = torch.arange(found.dim, dtype=torch.float32)
print(found.expand(found.means(v)).shape == v.shape)
print(sorted({name.partition(".")[0] for name in sys.modules} & {"numpy", "rich", "transformers", "yaml", "peft"}))
"""


@pytest.mark.slow
def test_it_is_imported_and_used_with_torch_alone(tmp_path: Path) -> None:
    """-I -S: Python reads no site-packages, so that it finds what the folder has alone."""
    needed = _with_requirements("torch")
    for name in needed:
        _link(name, tmp_path / "site")
    assert not (tmp_path / "site" / "numpy").exists()
    assert not (tmp_path / "site" / "transformers").exists()
    command = [sys.executable, "-I", "-S", "-c", PROGRAM, str(tmp_path / "site"), str(REPO)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    first, second, modules = done.stdout.splitlines()
    assert first.startswith("True ")
    assert second == "True"
    assert modules == "[]"


def _with_requirements(name: str) -> set[str]:
    """The installed distributions that this one needs, itself among them."""
    found, todo = set(), [name]
    while todo:
        each = canonicalize_name(todo.pop())
        if each in found:
            continue
        try:
            requires = distribution(each).requires or []
        except PackageNotFoundError:  # of another platform
            continue
        found.add(each)
        wanted = map(Requirement, requires)
        todo += [one.name for one in wanted if one.marker is None or one.marker.evaluate({"extra": ""})]
    return found


def _link(name: str, site: Path) -> None:
    """Links the modules of an installed distribution into a folder."""
    site.mkdir(exist_ok=True)
    for file in distribution(name).files or []:
        top = file.parts[0]
        if top not in ("..", "__pycache__") and not (site / top).exists():
            (site / top).symlink_to(Path(str(distribution(name).locate_file(top))))
