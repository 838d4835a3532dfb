"""Real child processes under the supervisor: who is stopped when, and what is said about those who fail."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from services.cli.supervisor import Supervisor

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
MORTAL = """
import sys, time
from services.cli.child import die_with_parent
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

    def run(self, scripts: tuple[str, str, str], tick: Callable[[], object] = lambda: None) -> int:
        """Starts one child per script; once all are up, `tick` is called every 20 ms."""

        def when_up() -> float:
            if self.events().count("up") == len(NAMES):
                tick()
            return 0.02

        with self.supervisor.signals():
            for name, script in zip(NAMES, scripts, strict=True):
                command = [sys.executable, "-c", PRELUDE + script, name, str(self.journal)]
                self.supervisor.start(name, command, dict(os.environ))
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
    def twice() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        later = f"import os, time; time.sleep(0.3); os.kill({os.getpid()}, {int(signal.SIGTERM)})"
        subprocess.run([sys.executable, "-c", later], check=True)

    assert world.run((DEAF, DEAF, DEAF), twice) == 128 + signal.SIGTERM
    for name in NAMES:
        assert f"{name} asked" in world.events()
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
