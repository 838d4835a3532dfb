"""Processor time of the processes of `runahead serve` and of this one, the client of a benchmark."""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import psutil

from tests.benchmarks.support.servers import ServerProcess

_SERVICE = re.compile(r"services\.cli\.child\0(\w+)")
WORKER_THREADS = {"compute": "worker: compute thread", "kernels": "worker: helper threads"}
"""Name of a worker's thread in /proc -> its row. Its other threads share one row."""


class Seconds(NamedTuple):
    user: float
    system: float

    def plus(self, other: "Seconds", sign: int = 1) -> "Seconds":
        return Seconds(self.user + sign * other.user, self.system + sign * other.system)


def processor_times(server: ServerProcess) -> dict[str, Seconds]:
    """Return the processor time so far: of each service, the worker's by threads, and of this process as the client."""
    times: defaultdict[str, Seconds] = defaultdict(lambda: Seconds(0.0, 0.0))
    for process in server.processes():
        if (match := _SERVICE.search((process / "cmdline").read_text())) is None:
            continue
        for thread in psutil.Process(int(process.name)).threads():
            row = match[1]
            if row == "worker":
                name = (process / "task" / str(thread.id) / "comm").read_text().strip()
                row = WORKER_THREADS.get(name, "worker: other threads")
            times[row] = times[row].plus(Seconds(thread.user_time, thread.system_time))
    client = os.times()
    return {**times, "client": Seconds(client.user, client.system)}


def seconds_by_process(server: ServerProcess) -> dict[str, float]:
    """Return the processor time so far of each service and of the supervisor, with the resolution of the kernel's
    scheduler: a tick of `processor_times` is too long for what an idle process uses."""

    def precise(process: Path) -> float:
        return sum(int((task / "schedstat").read_text().split()[0]) for task in (process / "task").iterdir()) / 1e9

    return _by_service(server, precise)


def cpu_seconds(server: ServerProcess) -> dict[str, float]:
    """Return the processor time so far of each service, also of threads that have ended, and of all other processes of
    the server as that of the supervisor."""

    def ticks(process: Path) -> float:
        times = psutil.Process(int(process.name)).cpu_times()
        return float(times.user + times.system)

    return _by_service(server, ticks)


def _by_service(server: ServerProcess, seconds: Callable[[Path], float]) -> dict[str, float]:
    found = defaultdict[str, float](float)
    for process in server.processes():
        match = _SERVICE.search((process / "cmdline").read_text())
        found[match[1] if match else "supervisor"] += seconds(process)
    return found


def usage_rows(
    before: Mapping[str, Seconds], after: Mapping[str, Seconds], seconds: float, tokens: int
) -> list[dict[str, object]]:
    """Return the rows of a table: share of a core over `seconds`, and microseconds for each of `tokens`."""
    used = {row: total.plus(before[row], -1) for row, total in after.items()}
    used["all"] = Seconds(sum(each.user for each in used.values()), sum(each.system for each in used.values()))
    return [
        {
            "process": row,
            "user": spent.user / seconds,
            "system": spent.system / seconds,
            "share of a core": sum(spent) / seconds,
            "us/token": 1e6 * sum(spent) / tokens,
        }
        for row, spent in used.items()
    ]
