"""Lines of `serve` about loading, without a terminal."""

import pytest

from services.cli import display
from services.cli.display import Display
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
