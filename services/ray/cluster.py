"""Check of the cluster's resources, and why an application on it does not start."""

import contextlib
import re
import sys
import threading
import time

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.schema import ApplicationStatus

from services.config import RayConfig
from services.ray.resources import missing

ERROR = re.compile(r"(\w+\.)*\w*(Error|Failed): ")
"""Begin of the line of a traceback that has the error."""
WAITS = "to be scheduled"
"""Part of Serve's message about replicas that have no place for 30 seconds."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at an application that starts."""


def check_resources(config: RayConfig) -> None:
    """Raises: RuntimeError, if the cluster's nodes have too few CPUs or GPUs, and no others are awaited"""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not config.wait_for_resources and (text := missing(config, nodes)):
        raise RuntimeError(
            f"{text}; add nodes, use fewer ranks or --threads, or set --wait-for-resources if nodes are added"
        )


def reasons(name: str) -> list[str]:
    """Return why the application does not start, or not yet: errors of its replicas, and what Serve waits for."""
    application = serve.status().applications.get(name)
    messages = [] if application is None else [d.message for d in application.deployments.values()]
    lines = [line.strip() for message in messages for line in message.splitlines()]
    return [
        *(f"a replica of {name} waits: {line}" for line in lines if WAITS in line),
        *(f"a replica of {name} has failed: {line}" for line in lines if ERROR.match(line)),
    ]


def _print_reasons(name: str, printed: set[str]) -> None:
    """Print the reasons that are not among those `printed` already."""
    for text in reasons(name):
        if text not in printed:
            printed.add(text)
            print(f"runahead: {text}", file=sys.stderr, flush=True)


def show_reasons() -> None:
    """Print why the applications that start do not yet run: `serve run` says only that their replicas have failed.

    Returns when they run or Serve has ended.
    """
    with contextlib.suppress(RayError):
        printed, began = set[str](), set[str]()
        while True:
            time.sleep(POLL_INTERVAL)
            applications = serve.status().applications if ray.is_initialized() else {}
            starting = {name for name, a in applications.items() if a.status == ApplicationStatus.DEPLOYING}
            began |= starting
            for name in sorted(began):  # also those that have just given up
                _print_reasons(name, printed)
            if began and not starting:
                return


def await_application(name: str, stop: threading.Event) -> None:
    """Wait until the application runs, or for the event, and print why it does not run yet.

    Raises: RuntimeError, if it does not start
    """
    printed = set[str]()
    while not stop.wait(POLL_INTERVAL):
        application = serve.status().applications.get(name)
        if application is None:
            raise RuntimeError(f"the application {name} was deleted")
        if application.status == ApplicationStatus.DEPLOY_FAILED:
            raise RuntimeError([application.message, *reasons(name)][-1])
        if application.status == ApplicationStatus.RUNNING:
            return
        _print_reasons(name, printed)
