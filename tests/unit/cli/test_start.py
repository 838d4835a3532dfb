"""The start and the end of a service."""

import signal

import pytest

from services.cli.settings import ConfigurationError
from services.cli.start import check_endpoints
from services.config import SchedulerConfig, ServiceConfig, WorkerConfig
from tests.preloaded import ERRORS, OUTPUT, PreloadedProcess

CODE = """
import json, threading, time
from services.cli import logs, start
from services.config import SchedulerConfig

def run():
    for target, text in ((json.loads, "{"), (logs.log_entry, None)):
        thread = threading.Thread(target=target, args=(text,))
        thread.start()
        thread.join()
    time.sleep(60)

start._entry_point = lambda _: run
start.start(SchedulerConfig())
"""


STARTING = """
import time
from services.cli import start
from services.config import SchedulerConfig

def import_service(_):
    print("imports", flush=True)
    time.sleep(60)

start._entry_point = import_service
start.start(SchedulerConfig())
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_a_service_that_starts(number: int) -> None:
    """It has a handler from the beginning: a container's first process ignores a signal that has none."""
    service = PreloadedProcess(STARTING, pipes=(OUTPUT, ERRORS))
    with service.stdout as output, service.stderr as errors:
        assert output.readline()
        service.send_signal(number)
        assert (service.wait(), errors.read()) == (0, "")


def test_an_unexpected_error_on_a_thread_ends_the_service_with_its_traceback() -> None:
    """A worker went on without the thread that sends results: each step took a minute to be given up. The thread of a
    library may end alone."""
    service = PreloadedProcess(CODE, pipes=(ERRORS,))
    with service.stderr as stream:
        output = stream.read()
    assert service.wait() == 70
    assert "JSONDecodeError" in output
    assert "CRITICAL runahead: AttributeError: 'NoneType'" in output
    assert output.count("Traceback") == 2


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (WorkerConfig(scheduler_endpoint="udp://x:1"), "--scheduler-endpoint: 'udp://x:1' is not an endpoint"),
        (SchedulerConfig(worker_endpoint="tcp://10.0.0.1:5602"), "--worker-endpoint: .* loopback address; make keys"),
    ],
)
def test_endpoint_that_cannot_be_used_is_refused_by_its_flag(config: ServiceConfig, reason: str) -> None:
    with pytest.raises(ConfigurationError, match=reason):
        check_endpoints(config)
