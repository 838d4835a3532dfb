"""Finds the engines of an application: their schedulers are actors with names.

The list is a file, which a frontend reads again when it changes (`--engines FILE`).
"""

import logging
import threading
import time
from typing import Any

import ray
from ray.exceptions import RayError

from services.private import write_whole
from services.ray.actors import JOIN_INTERVAL, JOIN_TIMEOUT, SchedulerAddress
from services.ray.keys import KeyDirectory

log = logging.getLogger("runahead.ray")


def prefix(application: str) -> str:
    """Return how the names of an application's schedulers begin. The name of the engine follows."""
    return f"runahead:{application}:"


class Discovery:
    """Keeps a file with the engines, from a thread of its own.

    While Ray's head does not answer, the file stays as it is. `only`: name of an engine; "": all of the application.
    """

    def __init__(self, application: str, keys: KeyDirectory, only: str = "") -> None:
        self.file = keys.path / "engines"
        self._prefix, self._keys, self._only = prefix(application), keys, only
        self._actors: dict[str, Any] = {}
        self._known: dict[str, SchedulerAddress] = {}
        self._written = ""
        self.file.touch()
        threading.Thread(target=self._run, name="engines", daemon=True).start()

    def _run(self) -> None:
        while True:
            try:
                self._look()
            except (RayError, ValueError, OSError) as error:
                log.warning("the engines are those of before: %s", error)
            time.sleep(JOIN_INTERVAL)

    def _look(self) -> None:
        names = [name for name in ray.util.list_named_actors() if name.startswith(self._prefix + self._only)]
        for name in names:
            if name not in self._actors:
                self._actors[name] = ray.get_actor(name)
        self._actors = {name: self._actors[name] for name in names}
        self._known = {name: address for name, address in self._known.items() if name in names}
        calls = {actor.join.remote("frontend", self._keys.public_key): name for name, actor in self._actors.items()}
        ready, _ = ray.wait([*calls], num_returns=len(calls), timeout=JOIN_TIMEOUT) if calls else ([], [])
        for call in ready:
            try:
                self._known[calls[call]] = ray.get(call)
            except RayError as error:  # Ray starts it again
                log.info("%s does not answer: %s", calls[call], error)
        self._write()

    def _write(self) -> None:
        lines = (
            f"{address.clients} {address.public_key} {name.removeprefix(self._prefix)}\n"
            for name, address in sorted(self._known.items())
        )
        if (text := "".join(lines)) != self._written:
            write_whole(self.file, text)
            self._written = text
