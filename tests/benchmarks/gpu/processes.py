"""Processes with a limit of time. Nothing of them stays behind, because it would keep memory of the GPU."""

import os
import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


def run_within(command: Sequence[str], seconds: float, log: Path) -> int | None:
    """Run a command; its output is appended to `log`. Return its exit status.

    After `seconds`, or an exception such as that of Ctrl-C, it is killed with all that it has started. Then the result
    is None.
    """
    with log.open("ab") as output:
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            if process.poll() is None:
                kill_tree(process.pid)
                process.wait()


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, also what has a session of its own. A process that is stopped starts
    no others."""
    stopped: set[int] = set()
    while new := {pid, *_descendants(pid)} - stopped:
        _send(new, signal.SIGSTOP)
        stopped |= new
    _send(stopped, signal.SIGKILL)


def _send(pids: set[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def _descendants(pid: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            _, parent = file.read_text().rpartition(")")[2].split()[:2]
            children.setdefault(int(parent), []).append(int(file.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[1:]
