"""`fedllm completion`: what the shells read."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from fedllm.cli import main
from fedllm.cli.completion import SHELLS


@pytest.mark.parametrize("shell", SHELLS)
def test_each_shell_gets_every_command(capsys: pytest.CaptureFixture[str], shell: str) -> None:
    assert main(["completion", shell]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("sweep", "federation", "gguf", "dry-run"))


@pytest.mark.skipif(not shutil.which("bash"), reason="needs bash")
@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["fedllm", "rep"], "report"),
        (["fedllm", "export", "--g"], "--gguf"),
        (["fedllm", "export", "my"], "mine.yaml"),
        (["fedllm", "run", "mi"], "mine.yaml"),
        (["fedllm", "run", "--dry-run", "mi"], "mine.yaml"),
        (["fedllm", "completion", "z"], "zsh"),
        (["fedllm", "federation", "t"], "try"),
    ],
)
def test_bash_completes(capsys: pytest.CaptureFixture[str], tmp_path: Path, words: list[str], found: str) -> None:
    assert main(["completion", "bash"]) == 0
    script = tmp_path / "completion.sh"
    script.write_text(capsys.readouterr().out)
    (tmp_path / ("mine.yaml" if found == "mine.yaml" else "other.yaml")).touch()
    typed = " ".join(word.replace("my", "mi") for word in words)
    code = f"source {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}; _shtab_fedllm; echo ${{COMPREPLY[@]}}"
    done = subprocess.run(["bash", "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.split() == [found], done.stderr


def test_another_shell(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["completion", "fish"])
    assert stop.value.code == 2
    assert "invalid choice: 'fish'" in capsys.readouterr().err
