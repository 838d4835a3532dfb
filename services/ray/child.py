"""A service as a child process of an actor, so that its crash or hang ends the child and not the actor."""

import threading
from pathlib import Path

from services.cli.child_process import RESTART_WINDOW
from services.cli.engine_set import child_command
from services.cli.serve import FINAL, child_environment
from services.cli.supervisor import Supervisor
from services.config import ServiceConfig
from services.kv_keeper import keeping

POLL_INTERVAL = 0.2
"""Seconds between two looks for the end of the child."""


class ServiceChild:
    """Runs a service, and restarts it as `runahead serve` does. `directory`: private one for its configuration."""

    def __init__(self, service: str, config: ServiceConfig, directory: Path) -> None:
        self._service, self._directory = service, directory
        settings = config.model_dump(exclude_unset=True)
        self._command = child_command(service, settings, directory / f"{service}.json")
        self._supervisor = Supervisor(lambda _, line: print(line, flush=True))
        self._error = ""
        self._opened = threading.Event()
        self._thread = threading.Thread(target=self._run, name=service, daemon=True)
        self._thread.start()
        self._opened.wait()

    @property
    def failure(self) -> str:
        """End of the service, if it is not started again, or ""."""
        failed = self._supervisor.failure
        return self._error or ("" if failed is None or self._thread.is_alive() else failed.describe_end())

    def stop(self, timeout: float | None) -> None:
        """Stop the service in order and wait for its end."""
        self._supervisor.stop()
        self._thread.join(timeout)

    def _run(self) -> None:
        # The child is started in this thread: the kernel kills it when the thread that has started it ends
        try:
            with self._supervisor.open(POLL_INTERVAL), keeping(self._directory, RESTART_WINDOW) as environment:
                self._opened.set()
                variables = child_environment() | environment
                self._supervisor.start(self._service, self._command, variables, FINAL[self._service])
                self._supervisor.wait(lambda: None)
        except OSError as error:
            self._error = f"the {self._service} cannot be started: {error}"
        finally:
            self._opened.set()
