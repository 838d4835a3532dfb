"""Real child processes under the supervisor: who is stopped when, and what is said about those who fail."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from services.cli import supervisor as module
from services.cli.serve import FINAL
from services.cli.supervisor import RESTART_WINDOW, RESTARTS, Child, Supervisor
from services.worker.service import EXIT_MODEL, EXIT_REFUSED

PRELUDE = """
import os, signal, sys, time
name, journal = sys.argv[1:3]
def note(what):
    with open(journal, "a") as file:
        file.write(f"{name} {what}\\n")
"""
OBEDIENT = """
def stop(*_):
    note("asked")
    time.sleep(0.1)
    note("gone")
    sys.exit(0)
signal.signal(signal.SIGTERM, stop)
note("up")
while True:
    signal.pause()
"""
DEAF = """
signal.signal(signal.SIGTERM, lambda *_: note("asked"))
note("up")
while True:
    signal.pause()
"""
DEAF_AND_IMPATIENT = """
def stop(*_):
    signal.signal(signal.SIGTERM, lambda *_: note("asked"))
    note("asked")
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
CRASHING = """
note("up")
raise RuntimeError("no such luck")
"""
LEAVING = """
note("up")
sys.exit(0)
"""
DYING = """
note("up")
sys.exit(9)
"""
DYING_ONCE = (
    """
if f"{name} up" not in open(journal).read():
    note("up")
    sys.exit(9)
"""
    + OBEDIENT
)
MORTAL = """
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

NAMES = ("frontend", "scheduler", "worker")


class World:
    """A supervisor whose children write down what happens to them."""

    def __init__(self, tmp_path: Path) -> None:
        self.journal = tmp_path / "journal"
        self.journal.touch()
        self.lines: list[tuple[str, str]] = []
        self.supervisor = Supervisor(lambda name, line: self.lines.append((name, line)))

    def run(
        self,
        scripts: tuple[str, str, str],
        tick: Callable[[], object] = lambda: None,
        comes_back: bool = False,
        final: Collection[int] = (),
    ) -> int:
        """Starts one child per script; the last may come back. Once all are up, `tick` is called every 20 ms."""

        def when_up() -> float:
            if all(f"{name} up" in self.events() for name in NAMES):
                tick()
            return 0.02

        with self.supervisor.signals():
            for name, script in zip(NAMES, scripts, strict=True):
                command = [sys.executable, "-c", PRELUDE + script, name, str(self.journal)]
                again = comes_back and name == NAMES[-1]
                self.supervisor.start(name, command, dict(os.environ), comes_back=again, final=final)
            status = self.supervisor.wait(when_up)
        assert not any(child.alive for child in self.supervisor.children)
        return status

    def events(self) -> str:
        return self.journal.read_text()

    @property
    def failure(self) -> str:
        assert self.supervisor.failure is not None
        return self.supervisor.failure.how_it_ended()


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def signal_myself(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_signal_stops_each_after_the_one_before(world: World, number: int) -> None:
    assert world.run((OBEDIENT, OBEDIENT, OBEDIENT), signal_myself(number)) == 0
    after_up = [line for line in world.events().splitlines() if not line.endswith("up")]
    assert after_up == [f"{name} {what}" for name in NAMES for what in ("asked", "gone")]
    assert world.supervisor.failure is None


def test_second_signal_stops_all_at_once(world: World) -> None:
    """It comes when the first child has been asked and does not end."""
    status = world.run((DEAF_AND_IMPATIENT, DEAF, DEAF), signal_myself(signal.SIGTERM))
    assert status == 128 + signal.SIGTERM
    asked = [line for line in world.events().splitlines() if line.endswith("asked")]
    assert asked[0] == "frontend asked"
    assert {f"{name} asked" for name in NAMES} == set(asked)
    assert {child.process.returncode for child in world.supervisor.children} == {-signal.SIGKILL}


@pytest.mark.parametrize("position", range(3))
def test_child_that_fails_ends_all_with_its_status_and_reason(world: World, position: int) -> None:
    scripts = [OBEDIENT, OBEDIENT, OBEDIENT]
    scripts[position] = FAILING
    assert world.run((scripts[0], scripts[1], scripts[2])) == 7
    assert world.failure == f"{NAMES[position]} exited with status 7: the disk is full"
    assert (NAMES[position], "bye") in world.lines


def test_traceback_s_last_line_is_the_reason(world: World) -> None:
    assert world.run((OBEDIENT, CRASHING, OBEDIENT)) == 1
    assert world.failure == "scheduler exited with status 1: RuntimeError: no such luck"


def test_leaving_unasked_is_a_failure_even_with_status_0(world: World) -> None:
    assert world.run((OBEDIENT, OBEDIENT, LEAVING)) == 1
    assert world.failure == "worker exited with status 0"


def test_killed_child_is_named_with_its_signal_and_the_deaf_are_killed(world: World) -> None:
    def kill() -> None:
        world.supervisor.children[2].process.send_signal(signal.SIGKILL)

    assert world.run((DEAF, OBEDIENT, OBEDIENT), kill) == 128 + signal.SIGKILL
    assert world.failure == "worker was killed by SIGKILL"


def test_failure_during_the_drain_is_still_a_failure(world: World) -> None:
    def drain_then_kill() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        world.supervisor.children[1].process.send_signal(signal.SIGKILL)

    assert world.run((DEAF, OBEDIENT, OBEDIENT), drain_then_kill) == 128 + signal.SIGKILL
    assert world.failure == "scheduler was killed by SIGKILL"


# -- children that come back -------------------------------------------------------------------------------------


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_PAUSE", 0.01)


@pytest.mark.usefixtures("quickly")
def test_child_that_may_come_back_does_and_the_others_do_not_notice(world: World) -> None:
    def stop_when_it_is_back() -> None:
        if world.events().count("worker up") == 2:
            os.kill(os.getpid(), signal.SIGTERM)

    assert world.run((OBEDIENT, OBEDIENT, DYING_ONCE), stop_when_it_is_back, comes_back=True) == 0
    assert world.supervisor.failure is None
    assert world.lines == [("worker", "worker exited with status 9; it is started again")]
    for name in NAMES:
        assert world.events().count(f"{name} asked") == world.events().count(f"{name} gone") == 1


@pytest.mark.usefixtures("quickly")
def test_child_that_keeps_dying_ends_all_in_the_end(world: World) -> None:
    """F6: it does not spin."""
    assert world.run((OBEDIENT, OBEDIENT, DYING), comes_back=True) == 9
    assert world.events().count("worker up") == 1 + RESTARTS
    assert world.failure == "worker exited with status 9"


@pytest.mark.usefixtures("quickly")
def test_child_that_would_end_in_the_same_way_is_not_started_again(world: World) -> None:
    assert world.run((OBEDIENT, OBEDIENT, DYING), comes_back=True, final=(3, 9)) == 9
    assert world.events().count("worker up") == 1
    assert world.failure == "worker exited with status 9"


@pytest.mark.usefixtures("quickly")
@pytest.mark.parametrize("position", range(2))
def test_child_that_may_not_come_back_does_not(world: World, position: int) -> None:
    scripts = [OBEDIENT, OBEDIENT, OBEDIENT]
    scripts[position] = DYING
    assert world.run((scripts[0], scripts[1], scripts[2]), comes_back=True) == 9
    assert world.failure == f"{NAMES[position]} exited with status 9"


def test_child_that_may_come_back_is_not_blamed_for_one_that_may_not(world: World) -> None:
    """Workers end when their scheduler does, and both may be seen in one look."""

    def kill_both() -> None:
        for child in world.supervisor.children[1:]:
            child.process.kill()
            child.process.wait()

    assert world.run((OBEDIENT, OBEDIENT, OBEDIENT), kill_both, comes_back=True) == 128 + signal.SIGKILL
    assert world.failure == "scheduler was killed by SIGKILL"


def test_only_what_would_happen_again_is_final() -> None:
    assert FINAL == (EXIT_MODEL, EXIT_REFUSED)


def test_stop_does_not_wait_for_a_child_that_would_come_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pause is an hour long here. What it died of was to be recovered from, so the stop is an orderly one."""
    monkeypatch.setattr(module, "FIRST_PAUSE", 3600.0)

    def stop_when_it_is_gone() -> None:
        if world.lines:
            os.kill(os.getpid(), signal.SIGTERM)

    assert world.run((OBEDIENT, OBEDIENT, DYING), stop_when_it_is_gone, comes_back=True) == 0
    assert world.events().count("worker up") == 1
    assert world.events().splitlines()[-4:] == [
        f"{name} {what}" for name in NAMES[:2] for what in ("asked", "gone")
    ]


def test_pauses_grow_until_there_have_been_too_many_in_a_while() -> None:
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(9)"]) as process:
        process.wait()
    child = Child("worker", process, respawn=lambda: process)
    for now, pause in ((0.0, 0.5), (10.0, 1.0), (20.0, 2.0)):
        assert child.comes_back(now)
        assert child.due == now + pause
    assert not child.comes_back(30.0)
    child.ended.pop()
    now = RESTART_WINDOW + 15.0  # the first two are forgotten
    assert child.comes_back(now)
    assert child.due == now + 1.0
    for _ in range(2):  # when each of several before it is asked to stop
        child.expect_end()
        assert (child.due, child.excused) == (None, True)


def test_children_die_with_a_supervisor_that_is_killed(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, MORTAL], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        word, pid = process.stdout.readline().split()
        assert word == "up"
        process.kill()
    while _exists(int(pid)):
        time.sleep(0.02)


def _exists(pid: int) -> bool:
    """A zombie that nobody has collected yet is gone, too."""
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
