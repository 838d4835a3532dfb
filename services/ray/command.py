"""`runahead ray MODEL`: deploys the application on a Ray cluster, and removes it at the end."""

import re
import signal
import threading

import ray
from ray import serve

from services.cli.settings import ConfigurationError
from services.config import RayCommandConfig
from services.ray.application import application

NAMESPACE = "serve"
ERROR = re.compile(r"(\w+\.)*\w*(Error|Failed): ")
"""Begin of the line of a traceback that has the error."""


def run(config: RayCommandConfig) -> int:
    """Serve until a signal. Return the exit status.

    Raises: ConfigurationError, if the cluster cannot be reached, or is too small, or the application does not start
    """
    try:
        ray.init(
            config.address,
            namespace=NAMESPACE,
            logging_level="warning",
            log_to_driver=config.log_level == "debug",
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        raise ConfigurationError(
            f"--address {config.address}: {str(error).splitlines()[0]} (start a cluster: ray start --head)"
        ) from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    try:
        serve.run(application(config), name=config.name, route_prefix=config.route_prefix)
    except RuntimeError as error:
        reason = _reason(config.name) or str(error)
        serve.delete(config.name)
        raise ConfigurationError(reason) from None
    try:
        print(
            f"Serving behind Ray Serve, and at port {config.port} of each frontend. Ctrl-C removes it.",
            flush=True,
        )
        stop.wait()
    finally:
        serve.delete(config.name)
    return 0


def _reason(name: str) -> str:
    """Return why the application does not start: the last line of the error of one of its deployments, or ""."""
    application = serve.status().applications.get(name)
    messages = [] if application is None else [d.message for d in application.deployments.values()]
    lines = [
        line.strip() for message in messages for line in message.splitlines() if ERROR.match(line.strip())
    ]
    return lines[-1] if lines else ""
