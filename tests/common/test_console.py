"""What is shown while work goes on: a bar where there is a terminal, lines elsewhere."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from fedllm.common import console
from fedllm.common.console import LongLoop, RoundProgress, line_now_and_then, say_all, stage


@pytest.mark.parametrize("width", [40, 60, 120])
def test_the_bar_keeps_the_round_number_on_a_narrow_terminal(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    screen = io.StringIO()
    monkeypatch.setattr(console, "console", Console(file=screen, width=width, force_terminal=True, color_system=None))
    progress = RoundProgress(rounds=100, start=0)
    progress.finish(57, "train loss 0.1234  accuracy 0.8123 (best 0.8200)")
    console.console.print(progress._bar.get_renderable())
    assert "round 57/100" in screen.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_a_loop_is_shown_after_two_seconds_and_not_before(terminal: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    screen, now = io.StringIO(), 0.0
    monkeypatch.setattr(console.time, "monotonic", lambda: now)
    monkeypatch.setattr(
        console, "Console", lambda **_: Console(file=screen, force_terminal=terminal, width=80, color_system=None)
    )
    with LongLoop("round", 2000) as loop:
        loop.update(1)
        now = 1.9
        loop.update(500)
        assert screen.getvalue() == ""
        for now in (2.1, 5.0, 11.0, 12.2):
            loop.update(int(100 * now))
    if terminal:
        assert "round" in screen.getvalue()
    else:
        assert screen.getvalue() == "round 210 of 2,000\nround 1,220 of 2,000\n"


def test_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    tell = line_now_and_then("steps", 2000)
    for done, now[0] in ((1200, 5.0), (1201, 10.5), (1202, 15.0), (1203, 21.0)):
        tell(done)
    assert capsys.readouterr().out == "steps: 1,201 of 2,000\nsteps: 1,203 of 2,000\n"


def test_a_slow_stage_says_at_once_what_it_does(capsys: pytest.CaptureFixture[str]) -> None:
    with stage("loading a model", at_once=True):
        assert capsys.readouterr().out == "loading a model\n"
    with stage("tokenizing"):
        pass
    assert capsys.readouterr().out == ""


def test_warnings_come_after_notes_and_are_called_so(capsys: pytest.CaptureFixture[str]) -> None:
    say_all(["5 rows repeat"], ["two classes are alike"])
    assert capsys.readouterr().out == "5 rows repeat\nwarning: two classes are alike\n"
