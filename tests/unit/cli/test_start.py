"""The start and the end of a service."""

import signal
from pathlib import Path

import pytest

from services.cli.preflight import check
from services.cli.settings import ConfigurationError
from services.cli.start import check_endpoints
from services.config import FrontendConfig, SchedulerConfig, ServiceConfig, WorkerConfig
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


@pytest.mark.parametrize(
    ("service", "setting", "reason"),
    [
        ("FrontendConfig", "ssl_certfile='{file}.pem'", "--ssl-certfile: cannot use {file}.pem: no such file"),
        ("FrontendConfig", "chat_template='{file}'", "--chat-template: {file}, line 1: unexpected 'end of template'"),
        ("FrontendConfig", "response_store_dir='{file}'", "--response-store-dir {file}: File exists"),
        ("FrontendConfig", "uds='{file}/socket'", "--uds: {file}/socket is no path of a file"),
        ("SchedulerConfig", "step_trace='{file}/trace'", "--step-trace: {file}/trace is no path of a file"),
        ("SchedulerConfig", "record='{file}'", "--record {file}: File exists"),
        ("WorkerConfig", "kv_offload_dir='{file}'", "--kv-offload-dir {file}: File exists"),
        ("WorkerConfig", "kv_peer_address='here'", "--kv-peer-address: 'here' is not an endpoint"),
    ],
)
def test_a_service_that_is_started_alone_refuses_a_setting_by_its_flag(
    service: str, setting: str, reason: str, tmp_path: Path
) -> None:
    """As `serve` does, before it loads anything or waits for others."""
    file = tmp_path / "file"
    file.write_text("{% for x in")
    code = "from services.cli import start\nfrom services.config import *\nstart._entry_point = print\n"
    code += f"raise SystemExit(start.start({service}({setting.format(file=file)})))"
    process = PreloadedProcess(code, pipes=(ERRORS,))
    with process.stderr as errors:
        assert reason.format(file=file) in errors.read()
    assert process.wait() == 1


def test_a_frontend_started_alone_takes_any_name_for_its_model(tmp_path: Path) -> None:
    """It has no MODEL that may have been taken for a name."""
    check(FrontendConfig(served_model_name=["name", str(tmp_path)]))
