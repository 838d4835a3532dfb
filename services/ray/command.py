"""`runahead ray MODEL`: deploys the application on a Ray cluster, and removes it at the end."""

import signal
import socket
import threading

import ray
from ray import serve
from ray.exceptions import RayError

from services.cli.settings import ConfigurationError, refusing, refusing_os_errors
from services.config import RayCommandConfig
from services.ray.application import application
from services.ray.cluster import await_application

NAMESPACE = "serve"
CONNECT_SECONDS = 5.0


def run(config: RayCommandConfig) -> int:
    """Serve until a signal. Return the exit status.

    Raises: ConfigurationError, if the cluster cannot be reached, or is too small, or the application does not start
    """
    _check_address(config.address)
    try:
        ray.init(
            config.address, namespace=NAMESPACE, logging_level="warning", log_to_driver=config.log_level == "debug"
        )
    except (ConnectionError, ValueError, RuntimeError, RayError) as error:
        raise ConfigurationError(
            f"--address {config.address}: {str(error).splitlines()[0]} (start a cluster: ray start --head)"
        ) from None
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    with refusing(RuntimeError):
        app = application(config)
    target = serve.RunTarget(app, config.name, config.route_prefix)
    try:
        with refusing(RuntimeError):
            serve.run_many([target], wait_for_applications_running=False)
            await_application(config.name, stop)
        if not stop.is_set():
            print(
                f"Serving behind Ray Serve, and at port {config.port} of each frontend. Ctrl-C removes it.", flush=True
            )
        stop.wait()
    finally:
        serve.delete(config.name)
    return 0


def _check_address(address: str) -> None:
    """Raises: ConfigurationError, if nothing listens there. Ray would try for minutes."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit():
        return
    with refusing_os_errors(f"--address {address}: ", "; start a cluster: ray start --head"):
        socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), CONNECT_SECONDS).close()
