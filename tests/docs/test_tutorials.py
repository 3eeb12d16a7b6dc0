"""docs/tutorials: each page is followed from top to bottom in an empty folder, with a tiny model instead of its own."""

from __future__ import annotations

import json
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from causal_checkpoints import save_causal
from federations import ThreadLink
from repository import REPO

from fedllm.cli.commands import main, make_parser
from fedllm.config.recipe import load_recipe
from fedllm.deployment.site_settings import load_site
from fedllm.experiment.serve import serve

FOLDER = REPO / "docs" / "tutorials"
MODELS = re.compile(r'"package:\w+"')
SHORTER = {
    "threads: 2": "threads: 1",
    "{rounds: 10}": "{rounds: 2}",
    "{rounds: 6}": "{rounds: 3}",
    "{rounds: 3,": "{rounds: 1,",
}
BLOCKS = re.compile(r"^```(\w+)\n(.*?)^```$|^    (fedllm [^\n]*)$", flags=re.DOTALL | re.MULTILINE)


def steps(page: str, model: str) -> Iterator[tuple[str, str]]:
    """The blocks of a page in order, as (language, text); a line of indented text is of the language `shown`."""
    text = (FOLDER / f"{page}.md").read_text(encoding="utf-8")
    for language, block, line in BLOCKS.findall(text):
        block = MODELS.sub(json.dumps(model), block)
        for long, short in SHORTER.items():
            block = block.replace(long, short)
        yield (language, block) if language else ("shown", line)


def follow(page: str, model: str) -> list[str]:
    """Writes a page's files, whose first line is their name, runs its commands, returns those that it only shows."""
    shown = []
    for language, text in steps(page, model):
        if language in ("python", "yaml"):
            Path(text.split("\n", 1)[0].removeprefix("# ")).write_text(text, encoding="utf-8")
        elif language == "sh":
            for command in text.splitlines():
                run_command(command)
        elif language == "shown":
            make_parser().parse_args(shlex.split(text)[1:])
            shown.append(text)
    return shown


def run_command(command: str) -> None:
    program, *words = [part for word in shlex.split(command) for part in expanded(word)]
    if program == "python":
        exec(compile(Path(words[0]).read_text(encoding="utf-8"), words[0], "exec"), {})
        return
    assert program == "fedllm"
    if words[0] == "report" or words[:2] == ["predict", "runs/hospitals"]:  # drawn already, or not trained yet
        make_parser().parse_args(words)
        return
    assert main(words) == 0, command


def expanded(word: str) -> list[str]:
    """A word with a star, as a shell does it."""
    return sorted(map(str, Path().glob(word))) if "*" in word else [word]


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


@pytest.mark.slow
def test_compare_two_optimizers(tiny: Path, empty: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert follow("compare_two_optimizers", str(tiny / "bert")) == []
    folder = empty / "runs" / "messages-optimizers"
    assert (folder / "report" / "report.html").is_file()
    assert (folder / "trials.md").is_file()
    runs = [json.loads(path.read_text()) for path in sorted(folder.glob("*-s[01]/result.json"))]
    assert len(runs) == 4
    partition = json.loads(next(folder.glob("*-s0/partition.json")).read_text())
    assert "north" in json.dumps(partition)


@pytest.mark.slow
def test_a_federation_of_three_sites(tiny: Path, empty: Path) -> None:
    """Its commands, and then the rounds of its recipe with the page's sites, joined by threads in place of Flower."""
    shown = follow("three_sites", str(tiny / "bert"))
    assert [line.split()[1] for line in shown] == ["serve", "site", "site", "site"]
    sites = [load_site(Path(line.split()[2])) for line in shown[1:]]
    link = ThreadLink(sites)
    try:
        result = serve(load_recipe(Path(shown[0].split()[2]), ["federation.rounds=1", "run.device=cpu"]), link)
    finally:
        link.close()
    assert len(result.metrics) == 1
    assert all(line["missing"] == [] for line in result.metrics)
    assert 0 <= result.metrics[-1]["accuracy"] <= 1
    assert main(["report", "runs/hospitals"]) == 0
    table = "hospitals/site-0/validation.csv"
    assert main(["predict", "runs/hospitals", table, "--out", "predicted.csv"]) == 0
    lines = (empty / "predicted.csv").read_text().splitlines()
    assert len(lines) == 1 + 20
    assert {line.rsplit(",", 1)[1] for line in lines[1:]} <= {"cardiology", "surgery"}


@pytest.mark.slow
def test_instruct_a_small_model(empty: Path) -> None:
    model = save_causal(empty / "model", "llama", max_position_embeddings=128)
    assert follow("instruct_a_small_model", model) == ["fedllm chat runs/teams-s0"]
    run = empty / "runs" / "teams-s0"
    assert set(json.loads((run / "result.json").read_text())["by"]["values"]) == {"billing", "network", "travel"}
    samples = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 3
    assert all("prediction" in json.loads(line) for line in (empty / "answers.jsonl").read_text().splitlines())


def test_every_tutorial_is_followed() -> None:
    assert {path.stem for path in FOLDER.glob("*.md")} == {
        "compare_two_optimizers", "three_sites", "instruct_a_small_model",
    }  # fmt: skip


def test_files_and_recipes_of_the_pages_are_named() -> None:
    for path in FOLDER.glob("*.md"):
        for language, text in steps(path.stem, "model"):
            if language in ("python", "yaml"):
                assert re.match(r"# \S+\.(py|yaml)\n", text)
            if language == "yaml":
                yaml.safe_load(text)


@pytest.mark.slow
def test_client_drift(capsys: pytest.CaptureFixture[str]) -> None:
    """docs/explanation/client_drift.md: its program prints what the page says, to a hundredth."""
    page = (REPO / "docs" / "explanation" / "client_drift.md").read_text(encoding="utf-8")
    (program,), (said,) = (
        re.findall(rf"```{language}\n(.*?)```", page, flags=re.DOTALL) for language in ("python", "text")
    )
    exec(compile(program, "page", "exec"), {})
    shown, expected = (re.findall(r": (\d+\.\d+)", text) for text in (capsys.readouterr().out, said))
    assert len(expected) == 12
    assert list(map(float, shown)) == pytest.approx(list(map(float, expected)), abs=0.011)
