"""docs/containers: the Dockerfile and compose.yaml, read by a parser of their own, as no container engine is needed."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import yaml
from repository import REPO

from fedllm.cli.commands import make_parser

FOLDER = REPO / "docs" / "containers"
PAGE = (REPO / "docs" / "guides" / "sites" / "containers.md").read_text(encoding="utf-8")
# Keys of a service in the Compose specification that these files use.
SERVICE = {
    "image", "build", "user", "environment", "init", "restart", "stop_grace_period", "cap_drop", "security_opt",
    "command", "ports", "volumes", "deploy",
}  # fmt: skip


def instructions() -> list[tuple[str, str]]:
    """Each instruction of the Dockerfile with its words, continued lines as one."""
    text = re.sub(r"^\s*#.*\n", "", (FOLDER / "Dockerfile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    lines = [line for line in re.sub(r"\\\n\s*", "", text).splitlines() if line.strip()]
    return [(name, words.strip()) for name, _, words in (line.partition(" ") for line in lines)]


def of(name: str) -> list[str]:
    return [words for found, words in instructions() if found == name]


def services() -> dict[str, dict[str, Any]]:
    return dict(yaml.safe_load((FOLDER / "compose.yaml").read_text(encoding="utf-8"))["services"])


def test_the_image_is_pinned_and_knows_no_other_instruction() -> None:
    known = {"FROM", "ARG", "ENV", "WORKDIR", "COPY", "RUN", "USER", "STOPSIGNAL", "ENTRYPOINT", "CMD"}
    assert {name for name, _ in instructions()} == known
    assert instructions()[0][0] == "FROM"
    assert all(re.fullmatch(r"python:3\.\d+\.\d+-slim-\w+", image) for image in of("FROM"))
    assert re.search(r'requires-python = ">=3.11"', (REPO / "pyproject.toml").read_text())


def test_what_is_copied_exists() -> None:
    sources = [source for words in of("COPY") for source in shlex.split(words)[:-1]]
    assert {"constraints.txt", "pyproject.toml", "fedllm"} <= set(sources)
    assert [source for source in sources if not (REPO / source).exists()] == []
    assert not (REPO / ".dockerignore").exists()


def test_packages_are_installed_at_the_pinned_versions() -> None:
    installed = [line for words in of("RUN") for line in words.split("&&") if "pip install" in line]
    assert ["-c constraints.txt" in line for line in installed] == [True, True, False, False]
    assert "-c constraints-flower.txt" in installed[2]
    (flower,) = re.findall(r"flwr==([\d.]+)", installed[2])
    assert f"flwr=={flower}\n" in (REPO / "constraints-flower.txt").read_text()
    assert f"flwr=={flower}\n" in (REPO / "Makefile").read_text()
    assert "--no-deps" in installed[3]
    (torch,) = re.findall(r"torch==([\d.]+)", installed[0])
    assert f"torch=={torch}\n" in (REPO / "constraints.txt").read_text()
    (extras,) = re.findall(r'"\.\[([\w,]+)\]"', installed[1])
    for extra in extras.split(","):
        assert re.search(rf"^{extra} = \[", (REPO / "pyproject.toml").read_text(), flags=re.MULTILINE)


def test_it_runs_as_a_user_and_stops_as_by_ctrl_c() -> None:
    names = [name for name, _ in instructions()]
    assert of("USER") == ["1000"], "a number, which hosts can check (hadolint's DL3066)"
    assert any("useradd --create-home --uid 1000 fedllm" in words for words in of("RUN"))
    assert names.index("USER") < names.index("ENTRYPOINT")
    assert of("STOPSIGNAL") == ["SIGINT"]
    assert [json.loads(words) for words in of("ENTRYPOINT") + of("CMD")] == [["fedllm"], ["--help"]]


@pytest.mark.parametrize("name", services())
def test_a_service(name: str) -> None:
    service = services()[name]
    assert set(service) <= SERVICE
    assert (REPO / service["build"]["dockerfile"]).is_file()
    make_parser().parse_args(service["command"])
    (volume,) = service["volumes"]
    assert volume == f"./federation/{name}:/federation"
    assert service.get("ports", []) == (["18000:18000"] if name == "server" else [])
    assert service["restart"].startswith("on-failure:"), "a mistake in a file, exit code 2, is not tried for ever"


def test_the_services_are_the_folders_of_a_new_federation() -> None:
    assert list(services()) == ["server", "site-0", "site-1", "site-2"]


def test_the_pages_gpu_lines_are_a_services() -> None:
    (text,) = re.findall(r"^ +```yaml\n +# compose.yaml\n(.*?)```", PAGE, flags=re.DOTALL | re.MULTILINE)
    (device,) = yaml.safe_load(text)["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
