"""Lines of `serve` about loading, without a terminal."""

import errno
import io
import os
import sys

import pytest

from services.cli import display
from services.cli.display import Display, JsonDisplay, TerminalDisplay
from services.cli.readiness import LoadingState


def test_each_phase_is_one_line_without_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(display, "QUIET_SECONDS", 0.0)
    screen = Display()
    for phase, progress in (("starting", 0.0), ("loading weights", 0.1), ("loading weights", 0.9)):
        for _ in range(3):
            screen.loading(LoadingState(False, phase, progress))
    assert capsys.readouterr().err.splitlines() == [
        "serve     | loading: starting",
        "serve     | loading: loading weights",
    ]


def test_a_fast_start_is_silent_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    Display().loading(LoadingState(False, "starting", 0.0))
    assert capsys.readouterr().err == ""


def test_lines_and_phases_are_shown_as_they_are_on_a_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    screen = TerminalDisplay()
    screen.line("worker | connected to [fe80::a:1]:5602, id:x:")
    screen.loading(LoadingState(False, "reading [/models/x]", 0.5))
    screen.done()
    shown = capsys.readouterr().err
    assert "connected to [fe80::a:1]:5602, id:x:" in shown
    assert "reading [/models/x]" in shown


class UnwritableStream(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("kind", [Display, JsonDisplay, TerminalDisplay])
def test_output_that_cannot_be_written_ends_nothing(kind: type[Display], monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve 2>&1 | tee log`: Ctrl-C ends tee, and open streams still finish."""
    monkeypatch.setattr(sys, "stderr", UnwritableStream())
    kind().line("frontend | draining")


@pytest.mark.parametrize("kind", [Display, JsonDisplay, TerminalDisplay])
def test_lines_that_nobody_reads_are_dropped_and_counted(kind: type[Display], monkeypatch: pytest.MonkeyPatch) -> None:
    """`serve 2>&1 | less`: the supervisor waited for the reader, so dead services were not replaced."""
    reader, writer = os.pipe()
    with open(reader, "rb", 0) as shown, open(writer, "w") as stream:
        monkeypatch.setattr(sys, "stderr", stream)
        monkeypatch.setattr(display, "PATIENCE", 0.0)
        screen = kind()
        for _ in range(100):
            screen.line("x" * (3 * display.PIECE))
        whole = shown.read(1 << 20).count(b"\n")
        assert 10 < whole < 100
        screen.line("read again")
        notice, last = shown.read(1 << 20).splitlines()
        assert b"%d lines were dropped" % (100 - whole) in notice
        assert b"read again" in last
