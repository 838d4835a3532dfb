"""Check of the cluster's resources, and why an application on it does not start."""

import re
import sys
import time

import ray
from ray import serve
from ray.serve.schema import ApplicationStatus

from services.config import RayConfig
from services.ray.resources import missing

ERROR = re.compile(r"(\w+\.)*\w*(Error|Failed): ")
"""Begin of the line of a traceback that has the error."""
POLL_INTERVAL = 0.5
"""Seconds between two looks at an application that starts."""


def check_resources(config: RayConfig) -> None:
    """Raises: RuntimeError, if the cluster's nodes have too few CPUs or GPUs, and no others are awaited"""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if not config.wait_for_resources and (text := missing(config, nodes)):
        raise RuntimeError(
            f"{text}; add nodes, use fewer ranks or --threads, or set --wait-for-resources if nodes are added"
        )


def reason(name: str) -> str:
    """Return why the application does not start: the last line of the error of one of its deployments, or ""."""
    application = serve.status().applications.get(name)
    messages = [] if application is None else [d.message for d in application.deployments.values()]
    lines = [
        line.strip() for message in messages for line in message.splitlines() if ERROR.match(line.strip())
    ]
    return lines[-1] if lines else ""


def show_reasons() -> None:
    """Print why the replicas of the applications that start have failed: `serve run` says only that they have."""
    shown, began = set[str](), set[str]()
    while True:
        time.sleep(POLL_INTERVAL)
        applications = serve.status().applications if ray.is_initialized() else {}
        starting = {name for name, a in applications.items() if a.status == ApplicationStatus.DEPLOYING}
        began |= starting
        for name in sorted(began):  # also those that have just given up
            if (text := reason(name)) and text not in shown:
                shown.add(text)
                print(f"runahead: a replica of {name} has failed: {text}", file=sys.stderr, flush=True)
        if began and not starting:
            return
