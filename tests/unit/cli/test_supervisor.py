"""The supervisor with real child processes: order of stopping, restarts, and the reason of a failure."""

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

from services.cli import child_process
from services.cli import supervisor as supervisor_module
from services.cli.child_process import RESTART_WINDOW, RESTARTS, Child
from services.cli.serve import FINAL
from services.cli.supervisor import Supervisor
from services.frontend import service as frontend_service
from services.scheduler.service import EXIT_WORKER_LOST
from services.worker.service import EXIT_MODEL, EXIT_REFUSED
from tests.waiting import is_alive, wait_until

PRELUDE = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.SIG_IGN)
name, journal = sys.argv[1:3]
def note(what):
    with open(journal, "a") as file:
        file.write(f"{name} {what}\\n")
"""
STOPPING = """
def stop(*_):
    note("signalled")
    time.sleep(0.1)
    note("ended")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("up")
while True:
    signal.pause()
"""
IGNORING = """
signal.signal(signal.SIGTERM, lambda *_: note("signalled"))
note("up")
while True:
    signal.pause()
"""
SIGNALLING_PARENT = """
def stop(*_):
    signal.signal(signal.SIGTERM, lambda *_: note("signalled"))
    note("signalled")
    os.kill(os.getppid(), signal.SIGTERM)
signal.signal(signal.SIGTERM, stop)
note("up")
while True:
    signal.pause()
"""
FAILING = """
note("up")
print("2026-01-01 00:00:00,000 ERROR some.logger: the disk is full", file=sys.stderr)
print("bye")
sys.exit(7)
"""
RAISING = """
note("up")
raise RuntimeError("no such luck")
"""
EXITING = """
note("up")
sys.exit(0)
"""
EXITING_WITH_9 = EXITING.replace("0", "9")
EXITING_ONCE_WITH_9 = (
    """
if f"{name} up" not in open(journal).read():
    note("up")
    sys.exit(9)
"""
    + STOPPING
)
ENDING_ONCE_WITH_AN_HEIR = (
    """
import subprocess
if f"{name} up" not in open(journal).read():
    note("up")
    subprocess.Popen(["sleep", "1"])
    sys.exit(9)
"""
    + STOPPING
)
FLOODING = """
note("up")
while True:
    os.write(1, b"x" * (1 << 20))
"""
FAILING_TWICE = """
first = f"{name} up" not in open(journal).read()
note("up")
print("2026-01-01 00:00:00,000 ERROR some.logger: the disk is full" if first else "bye", end="")
sys.exit(9 if first else 3)
"""
HANGING_ONCE = (
    """
import ctypes
from services.process import HangAlarm
def spin():
    while True:
        pass
def wedged():
    WEDGE
if f"{name} up" not in open(journal).read():
    note("up")
    HangAlarm.install(0.2).set()
    wedged()
"""
    + STOPPING
)
LIVING = """
from services.process import HangAlarm
alarm = HangAlarm.install(1.0)
note("up")
for _ in range(15):
    alarm.set()
    time.sleep(0.1)
alarm.cancel()
sys.exit(7)
"""
DYING_WITH_PARENT = """
import sys, time
from services.process import die_with_parent
die_with_parent(int(sys.argv[1]))
print("up", flush=True)
time.sleep(600)
"""
PARENT = """
import os, subprocess, sys
command = [sys.executable, "-c", sys.argv[1], str(os.getpid())]
child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
print(child.stdout.readline().strip(), child.pid, flush=True)
child.wait()
"""

STARTING = """
from services.process import STARTED, print_phases, start_log
print_phases()
start_log.debug("importing torch")
print("a line", flush=True)
note("up")
while not os.path.exists(journal + ".seen"):
    time.sleep(0.01)
start_log.debug(STARTED)
note("started")
signal.pause()
"""
NAMES = ("frontend", "scheduler", "worker")
EVERY_STATUS = range(-signal.NSIG, 256)


class SupervisedChildren:
    """A supervisor with three children that write their events into a journal."""

    def __init__(self, tmp_path: Path) -> None:
        self.journal = tmp_path / "journal"
        self.journal.touch()
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(lambda name, line: self.lines.append((name, line)))

    def run(
        self,
        scripts: tuple[str, str, str],
        tick: Callable[[], object] = lambda: None,
        restarted: str = "",
        final: Collection[int] = (),
    ) -> int:
        """Start one child per script and wait until all have ended. Return the supervisor's status.

        Args:
            tick: called every 20 ms once all children are up.
            restarted: the child that is restarted after an unexpected end, unless its status is in `final`. For the
                others, every status is final.
        """

        def when_up() -> float:
            if all(f"{name} up" in self.events() for name in NAMES):
                tick()
            return 0.02

        with self.supervisor.signals():
            for name, script in reversed([*zip(NAMES, scripts, strict=True)]):
                command = [sys.executable, "-c", PRELUDE + script, name, str(self.journal)]
                self.supervisor.start(name, command, dict(os.environ), final if name == restarted else EVERY_STATUS)
            status = self.supervisor.wait(when_up)
        assert not any(child.alive for child in self.supervisor.children)
        return status

    def events(self) -> str:
        return self.journal.read_text()

    def stop_after_restart(self) -> None:
        """Stop in order when the worker is up for the second time."""
        if self.events().count("worker up") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    @property
    def failure(self) -> str:
        return self.supervisor.failure.describe_end()


@pytest.fixture
def supervised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SupervisedChildren:
    monkeypatch.setattr(supervisor_module, "ABORT_GRACE", 1.0)
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 0.01)
    return SupervisedChildren(tmp_path)


def signal_myself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_children_one_after_the_other(supervised: SupervisedChildren, number: int) -> None:
    assert supervised.run((STOPPING, STOPPING, STOPPING), signal_myself(number)) == 0
    after_up = [line for line in supervised.events().splitlines() if not line.endswith("up")]
    assert after_up == [f"{name} {what}" for name in NAMES for what in ("signalled", "ended")]
    assert supervised.supervisor.failure is None


def test_child_that_writes_without_end_holds_up_nobody(supervised: SupervisedChildren) -> None:
    assert supervised.run((STOPPING, STOPPING, FLOODING), signal_myself(signal.SIGTERM)) == 0
    assert max(len(line) for _, line in supervised.lines) < 3 * child_process.MAX_READ


def test_phases_of_the_start_are_collected_and_not_shown(supervised: SupervisedChildren) -> None:
    seen = list[str]()

    def tick() -> None:
        phase = supervised.supervisor.phase()
        seen.extend([phase] if phase not in seen else [])
        if phase == "importing torch (worker, scheduler, frontend)":
            Path(f"{supervised.journal}.seen").touch()
        if not phase:
            os.kill(os.getpid(), signal.SIGTERM)

    assert supervised.run((STARTING, STARTING, STARTING), tick) == 0
    assert "importing torch (worker, scheduler, frontend)" in seen
    assert seen[-1] == ""
    assert {line for _, line in supervised.lines} == {"a line"}


def test_second_signal_stops_all_at_once(supervised: SupervisedChildren) -> None:
    """The second signal arrives while the first child is stopping and does not end."""
    status = supervised.run((SIGNALLING_PARENT, IGNORING, IGNORING), signal_myself(signal.SIGTERM))
    assert status == 128 + signal.SIGTERM
    signalled = [line for line in supervised.events().splitlines() if line.endswith("signalled")]
    assert signalled[0] == "frontend signalled"
    assert {f"{name} signalled" for name in NAMES} == set(signalled)
    assert {child.process.returncode for child in supervised.supervisor.children} == {-signal.SIGKILL}


@pytest.mark.parametrize(
    ("scripts", "status", "failure"),
    [
        ((FAILING, STOPPING, STOPPING), 7, "frontend exited with status 7: the disk is full"),
        ((STOPPING, FAILING, STOPPING), 7, "scheduler exited with status 7: the disk is full"),
        ((STOPPING, STOPPING, FAILING), 7, "worker exited with status 7: the disk is full"),
        ((STOPPING, RAISING, STOPPING), 1, "scheduler exited with status 1: RuntimeError: no such luck"),
        ((STOPPING, STOPPING, EXITING), 1, "worker exited with status 0"),
    ],
    ids=["frontend", "scheduler", "worker", "traceback", "status 0"],
)
def test_child_that_fails_ends_all_with_its_status_and_reason(
    supervised: SupervisedChildren, scripts: tuple[str, str, str], status: int, failure: str
) -> None:
    assert supervised.run(scripts) == status
    assert supervised.failure == failure
    assert ("bye" in [line for _, line in supervised.lines]) is (FAILING in scripts)


@pytest.mark.parametrize(("number", "name"), [(signal.SIGKILL, "SIGKILL"), (40, "signal 40")])
def test_failure_names_the_signal_and_children_that_ignore_sigterm_are_killed(
    supervised: SupervisedChildren, number: int, name: str
) -> None:
    def kill() -> None:
        supervised.supervisor.children[2].process.send_signal(number)

    assert supervised.run((IGNORING, STOPPING, STOPPING), kill) == 128 + number
    assert supervised.failure == f"worker was killed by {name}"


def drain_then_kill(supervised: SupervisedChildren, position: int) -> Callable[[], None]:
    def kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        supervised.supervisor.children[position].process.send_signal(signal.SIGKILL)

    return kill


def test_failure_during_an_orderly_stop_is_a_failure(supervised: SupervisedChildren) -> None:
    status = supervised.run((IGNORING, STOPPING, STOPPING), drain_then_kill(supervised, 1))
    assert status == 128 + signal.SIGKILL
    assert supervised.failure == "scheduler was killed by SIGKILL"


# -- restarts ----------------------------------------------------------------------------------------------------


def test_child_is_restarted_while_the_first_one_drains(supervised: SupervisedChildren) -> None:
    draining = STOPPING.replace(
        "time.sleep(0.1)", 'while open(journal).read().count("worker up") < 2: time.sleep(0.01)'
    )
    scripts = draining, STOPPING, STOPPING
    assert supervised.run(scripts, drain_then_kill(supervised, 2), restarted="worker") == 0
    assert supervised.lines == [("worker", "worker was killed by SIGKILL; restarting")]


def test_restarted_child_leaves_the_others_running(supervised: SupervisedChildren) -> None:
    scripts = STOPPING, STOPPING, EXITING_ONCE_WITH_9
    assert supervised.run(scripts, supervised.stop_after_restart, restarted="worker") == 0
    assert supervised.supervisor.failure is None
    assert supervised.lines == [("worker", "worker exited with status 9; restarting")]
    for name in NAMES:
        assert supervised.events().count(f"{name} signalled") == supervised.events().count(f"{name} ended") == 1


def test_child_that_was_stopped_is_killed_and_restarted(
    supervised: SupervisedChildren, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor_module, "STOPPED_GRACE", 0.05)
    worker = supervised.supervisor.children
    signalled: list[int] = []

    def stop_once() -> None:
        if not signalled and supervised.events().count("worker up") == 1:
            signalled.append(worker[-1].process.pid)
            os.kill(signalled[0], signal.SIGSTOP)
        supervised.stop_after_restart()

    assert supervised.run((STOPPING, STOPPING, STOPPING), stop_once, restarted="worker") == 0
    assert supervised.lines == [
        ("worker", "worker was stopped for 0.05 s and is killed"),
        ("worker", "worker was killed by SIGKILL; restarting"),
    ]


@pytest.mark.parametrize("wedge", ["ctypes.PyDLL(None).sleep(1000)", "spin()"])
def test_child_that_hangs_ends_itself_and_is_restarted(supervised: SupervisedChildren, wedge: str) -> None:
    """One that no signal has stopped: in C with the interpreter's lock, and in a loop of Python."""
    scripts = STOPPING, STOPPING, HANGING_ONCE.replace("WEDGE", wedge)
    assert supervised.run(scripts, supervised.stop_after_restart, restarted="worker") == 0
    *stacks, (_, end) = supervised.lines
    assert end == "worker hung and ended itself; the lines before have the stacks of its threads; restarting"
    assert any("in wedged" in line for _, line in stacks)


def test_a_process_that_gives_signs_of_life_does_not_hang(supervised: SupervisedChildren) -> None:
    assert supervised.run((LIVING, STOPPING, STOPPING)) == 7, "it lived longer than its alarm"


def test_child_whose_output_another_process_holds_is_restarted(supervised: SupervisedChildren) -> None:
    scripts = STOPPING, STOPPING, ENDING_ONCE_WITH_AN_HEIR
    assert supervised.run(scripts, supervised.stop_after_restart, restarted="worker") == 0


def test_restart_that_fails_is_tried_again(supervised: SupervisedChildren, monkeypatch: pytest.MonkeyPatch) -> None:
    started = []

    class Limited(subprocess.Popen[bytes]):
        def __init__(self, *arguments: Any, **settings: Any) -> None:
            started.append(arguments)
            if len(started) == len(NAMES) + 1:
                raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))
            super().__init__(*arguments, **settings)

    def stop() -> None:
        if len(started) == len(NAMES) + 2 and len(supervised.lines) == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Limited)
    assert supervised.run((STOPPING, STOPPING, EXITING_ONCE_WITH_9), stop, restarted="worker") == 0
    reason = ": cannot be started again: Resource temporarily unavailable"
    assert [line for _, line in supervised.lines] == [
        f"worker exited with status 9{why}; restarting" for why in ("", reason)
    ]


def test_reason_of_a_failure_is_in_the_output_of_the_last_process(supervised: SupervisedChildren) -> None:
    assert supervised.run((STOPPING, STOPPING, FAILING_TWICE), restarted="worker", final=(3,)) == 3
    assert supervised.lines[-1] == ("worker", "bye")
    assert supervised.failure == "worker exited with status 3: bye"


@pytest.mark.parametrize(("final", "starts"), [((), 1 + RESTARTS), ((3, 9), 1)])
def test_child_that_ends_too_often_or_with_a_final_status_stops_all(
    supervised: SupervisedChildren, final: tuple[int, ...], starts: int
) -> None:
    exiting = 'print("2026-11-22 10:00:00,000 INFO runahead: no reason", flush=True)' + EXITING_WITH_9
    assert supervised.run((STOPPING, STOPPING, exiting), restarted="worker", final=final) == 9
    assert supervised.events().count("worker up") == starts
    assert supervised.failure == "worker exited with status 9"


def test_failure_names_the_child_that_is_not_restarted_when_both_end_together(supervised: SupervisedChildren) -> None:
    """A worker ends when its scheduler ends, and the supervisor may notice both at once."""

    def kill_both() -> None:
        for child in supervised.supervisor.children[1:]:
            child.process.kill()
            child.process.wait()

    assert supervised.run((STOPPING, STOPPING, STOPPING), kill_both, restarted="worker") == 128 + signal.SIGKILL
    assert supervised.failure == "scheduler was killed by SIGKILL"


def test_final_statuses_are_those_of_services_that_cannot_serve() -> None:
    assert FINAL == {
        "frontend": (1, frontend_service.EXIT_MODEL, frontend_service.EXIT_REFUSED),
        "scheduler": (1, EXIT_WORKER_LOST),
        "worker": (EXIT_MODEL, EXIT_REFUSED),
    }


@pytest.mark.parametrize("name", NAMES)
def test_stop_does_not_wait_for_a_restart(
    supervised: SupervisedChildren, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The pause before the restart is an hour here. The child would have been restarted, so the stop is orderly."""
    monkeypatch.setattr(child_process, "FIRST_PAUSE", 3600.0)

    def stop_after_end() -> None:
        if supervised.lines:
            os.kill(os.getpid(), signal.SIGTERM)

    first, second, third = (EXITING_WITH_9 if each == name else STOPPING for each in NAMES)
    assert supervised.run((first, second, third), stop_after_end, restarted=name) == 0
    assert supervised.events().count(f"{name} up") == 1
    assert supervised.events().splitlines()[-4:] == [
        f"{other} {what}" for other in NAMES if other != name for what in ("signalled", "ended")
    ]


def test_pauses_grow_until_the_limit_of_restarts_in_the_window() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"]) as process:
        process.wait()
    child = Child("worker", process, lambda: process)
    for now, pause in ((0.0, 0.5), (10.0, 1.0), (20.0, 2.0)):
        assert child.schedule_restart(now)
        assert child.restart_at == now + pause
    assert not child.schedule_restart(30.0)
    child.unexpected_ends.pop()
    now = RESTART_WINDOW + 15.0  # the first two are outside of the window
    assert child.schedule_restart(now)
    assert child.restart_at == now + 1.0
    for _ in range(2):  # once for each child before it that is stopped
        child.expect_end()
        assert (child.restart_at, child.restart_dropped) == (None, True)


def test_children_end_with_a_killed_parent() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, DYING_WITH_PARENT], stdout=subprocess.PIPE, text=True
    ) as process:
        word, pid = process.stdout.readline().split()
        assert word == "up"
        child = psutil.Process(int(pid))
        process.kill()
    wait_until(lambda: not is_alive(child), "it has ended")
