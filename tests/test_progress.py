"""Progress: plain lines without a terminal, a bar on one, silence on request."""

import io
from typing import Any

import pytest

from jem_robust import progress as module
from jem_robust.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(show: bool = True, **settings: Any) -> None:
    with Progress(4, "attack [pgd]", "F", show=show, **settings) as progress:
        for i in range(4):
            progress.advance(1, "judge [x]" if i == 3 else None, gap=0.25, cross_entropy=1.5)
        progress.note("note [/nothing] [red]")


def test_plain_lines(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LINE_EVERY_SECONDS", 0.0)
    work()
    captured = capsys.readouterr()
    lines = captured.err.splitlines()
    assert captured.out == ""
    assert len(lines) == 6
    assert lines[0].startswith("attack [pgd]: 1/4 ")
    assert "F/s, " in lines[0]
    assert "s left  gap 0.25  cross entropy 1.5" in lines[0]
    assert lines[4] == "note [/nothing] [red]"
    assert lines[5].startswith("judge [x]: 4/4")
    assert "0 s left" in lines[5]


def test_lines_come_every_ten_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    with Progress(100, "long", done=20) as progress:
        for _ in range(40):
            now[0] += 1
            progress.advance(2)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5
    assert lines[0] == "long: 40/100 2 it/s, 30 s left"


def test_silence(capsys: pytest.CaptureFixture[str]) -> None:
    work(show=False)
    assert capsys.readouterr() == ("", "")


def test_nothing_done_and_too_much_done(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(0, "nothing"):
        pass
    with Progress(2, "more") as progress:
        progress.advance(5)
    with Progress(10, "back", done=6) as progress:
        progress.done = 3  # a rollback
    lines = capsys.readouterr().err.splitlines()
    assert "nothing: 0/0" in lines[0]
    assert "time left unknown" in lines[0]
    assert lines[1].startswith("more: 5/5")
    assert "0 s left" in lines[1]
    assert "time left unknown" in lines[2]
    assert not any("nan" in line for line in lines)


def test_an_error_passes_without_a_last_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RuntimeError, match="stop"), Progress(2, "work"):
        raise RuntimeError("stop")
    assert capsys.readouterr().err == ""


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "160")
    work()
    shown = terminal.getvalue()
    for text in ("judge [x]", "F/s", "eta", "gap 0.25", "note [/nothing] [red]", "100%"):
        assert text in shown
