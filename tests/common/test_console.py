"""What is said of a stage of preparation where there is no terminal."""

from __future__ import annotations

import pytest

from fedllm.common.console import say_all, stage


def test_a_slow_stage_says_at_once_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("loading a model", at_once=True):
        assert capsys.readouterr().out == "loading a model\n"
    with stage("tokenizing"):
        pass
    assert capsys.readouterr().out == ""


def test_warnings_come_after_notes_and_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    say_all(["5 rows repeat"], ["two classes are alike"])
    assert capsys.readouterr().out == "5 rows repeat\nwarning: two classes are alike\n"
