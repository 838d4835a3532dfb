"""The stack of docker-compose.yml as a project of its own, and load on it."""

import contextlib
import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from openai import OpenAI

from tests.docker.engine import DockerEngine, output
from tests.e2e.server import HttpServer

PATIENCE = 180.0
"""Seconds after which a condition that does not hold is a failure."""
USER = "12345:0"
"""A user without an account: the images must work with any user id."""
VERSION = "test"


def free_ports(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    for first in range(18000, 28000, count):
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            for port in range(first, first + count):
                stack.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


@dataclass
class Container:
    """Output of `docker inspect` for one container."""

    details: dict[str, Any]

    @property
    def id(self) -> str:
        return str(self.details["Id"])

    @property
    def service(self) -> str:
        return str(self.details["Config"]["Labels"]["com.docker.compose.service"])

    @property
    def is_running(self) -> bool:
        return bool(self.details["State"]["Running"])

    @property
    def is_healthy(self) -> bool:
        return self.is_running and self.details["State"]["Health"]["Status"] == "healthy"

    @property
    def host_port(self) -> int:
        (bound,) = self.details["NetworkSettings"]["Ports"]["8000/tcp"]
        assert bound["HostIp"] == "127.0.0.1"
        return int(bound["HostPort"])


class Stack(HttpServer):
    """One Compose project."""

    def __init__(self, engine: DockerEngine, name: str, overlays: Sequence[str] = (), **environment: str) -> None:
        self.engine = engine
        self.name = name
        files = ["docker-compose.yml", *(f"deploy/compose/{overlay}.yml" for overlay in overlays)]
        self._command = [*engine.compose, "--project-name", name]
        for file in files:
            self._command += ["--file", file]
        clean = {key: value for key, value in engine.environment.items() if not key.startswith("RUNAHEAD_")}
        self.environment = {
            **clean,
            "RUNAHEAD_VERSION": VERSION,
            "RUNAHEAD_MODEL": "/app/deploy/demo_model",
            "RUNAHEAD_USER": USER,
            "RUNAHEAD_PORT": str(free_ports(1)),
            "RUNAHEAD_THREADS": "1",
            "RUNAHEAD_KV_CACHE_MEMORY_BYTES": str(256 << 20),
            **environment,
        }

    def compose(self, *arguments: str) -> str:
        return output([*self._command, *arguments], self.environment, timeout=300)

    def up(self, workers: int = 1) -> None:
        self.compose("up", "--detach", "--no-build", "--scale", f"worker={workers}")

    def down(self) -> None:
        self.compose("down", "--volumes", "--timeout", "30")

    def containers(self, service: str = "") -> list[Container]:
        """Return the containers, also those that have ended, in the order of their names.

        Without a service: of all services but `keys`, which ends when the others begin.
        """
        label = f"label=com.docker.compose.project={self.name}"
        ids = self.engine.run("ps", "--all", "--quiet", "--no-trunc", "--filter", label).split()
        details = json.loads(self.engine.run("inspect", *ids)) if ids else []
        found = sorted(map(Container, details), key=lambda container: str(container.details["Name"]))
        return [c for c in found if c.service == service or (not service and c.service != "keys")]

    def wait_until(self, condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not condition():
            if time.monotonic() >= deadline:
                logs = self.compose("logs", "--no-color", "--tail", "30")
                raise AssertionError(f"not true in time: {what}; last lines of the containers:\n{logs}")
            time.sleep(0.2)

    def wait_healthy(self) -> None:
        self.wait_until(lambda: all(c.is_healthy for c in self.containers()), f"{self.name} is healthy")

    def logs(self, service: str) -> str:
        return self.compose("logs", "--no-color", service)

    def groups(self) -> list[int]:
        """Return the number of ranks of each epoch so far."""
        found = re.findall(r"ready: epoch \d+, (\d+) x (\d+) ranks", self.logs("scheduler"))
        return [int(tensor) * int(stages) for tensor, stages in found]

    @property
    def url(self) -> str:  # type: ignore[override]  # containers may be replaced
        return f"http://127.0.0.1:{self.containers('frontend')[0].host_port}"


@contextmanager
def running(engine: DockerEngine, name: str, overlays: Sequence[str] = (), **environment: str) -> Iterator[Stack]:
    """Start a stack, wait until it is healthy, and remove all of it at the end."""
    stack = Stack(engine, name, overlays, **environment)
    try:
        stack.down()  # containers of a killed session
        stack.up()
        stack.wait_healthy()
        yield stack
    finally:
        stack.down()
    assert not stack.containers()


def streamed(client: OpenAI, prompt: str, max_tokens: int, on_first: Callable[[], object] = lambda: None) -> str:
    """Return the text of a greedy stream with `max_tokens` tokens. `on_first` is called after its first chunk."""
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt=prompt, max_tokens=max_tokens, temperature=0, stream=True, extra_body={"ignore_eos": True}
    )
    chunks = [next(stream).choices[0]]
    on_first()
    chunks += [chunk.choices[0] for chunk in stream]
    assert chunks[-1].finish_reason == "length"
    return "".join(chunk.text for chunk in chunks)


PROMPTS = ("The os module provides", "Return a new", "A sequence is", "def __init__(self")
TOKENS = 48


@dataclass
class StreamingLoad:
    """Streams one after the other on several connections. Each text is compared with the expected one."""

    stack: Stack
    expected: dict[str, str]
    streams: int = 4
    completed: int = 0
    failures: list[str] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def on(self) -> Iterator["StreamingLoad"]:
        threads = [threading.Thread(target=self._run, args=(number,)) for number in range(self.streams)]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert not self.failures

    def wait_for_more(self) -> None:
        """Wait until every connection can have completed a stream that began after this call."""
        goal = self.completed + 2 * self.streams
        self.stack.wait_until(lambda: self.completed >= goal or self.failures, "streams complete")
        assert not self.failures

    def _run(self, number: int) -> None:
        prompt = PROMPTS[number % len(PROMPTS)]
        with self.stack.client() as client:
            while not self._stop.is_set() and not self.failures:
                try:
                    text = streamed(client, prompt, TOKENS)
                except Exception as error:
                    self.failures.append(f"{prompt!r}: {type(error).__name__}: {error}")
                    return
                if text != self.expected[prompt]:
                    self.failures.append(f"{prompt!r}: {text!r} instead of {self.expected[prompt]!r}")
                    return
                self.completed += 1
