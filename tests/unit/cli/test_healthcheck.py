"""Health checks against what they check: an HTTP server, the transport's server, connections of this machine."""

import http.server
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from protocol.transport import Server
from services.cli.healthcheck import Unhealthy, healthcheck
from tests.unit.protocol.peers import echoing

SHORT = 0.2
"""Seconds, for checks that are to get no answer."""


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/readyz" else 404)
            self.send_header("Location", "/elsewhere")
            self.end_headers()
            self.wfile.write(b'{"phase":\n"loading"}')

        def log_message(self, format: str, *args: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/readyz"
        finally:
            server.shutdown()
            thread.join()


def runahead(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "healthcheck", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def main_process(directory: Path, state: str) -> Path:
    """A /proc with this network namespace and a main process in `state`."""
    (directory / "1").mkdir()
    (directory / "1" / "stat").write_text(f"1 (run) ahead) {state} 0 1 1 0 -1 4194560")
    (directory / "net").symlink_to("/proc/self/net")
    return directory


def test_frontend_is_well_when_it_answers_with_success() -> None:
    with answering(200) as url:
        healthcheck(url)


@pytest.mark.parametrize("status", [503, 302, 401])
def test_any_other_answer_is_told_in_one_line(status: int) -> None:
    with answering(status) as url, pytest.raises(Unhealthy) as unhealthy:
        healthcheck(url)
    assert str(unhealthy.value) == f'{url}: status {status}: {{"phase": "loading"}}'


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unhealthy, match="refused"):
        healthcheck(f"http://127.0.0.1:{port}/readyz")
    with pytest.raises(Unhealthy, match=rf"no answer from tcp://127\.0\.0\.1:{port}"):
        healthcheck(f"tcp://127.0.0.1:{port}", patience=SHORT)


def test_scheduler_is_well_while_its_loop_reads_and_remembers_no_probe() -> None:
    server = Server("tcp://127.0.0.1:0", {"worker"})
    try:
        with pytest.raises(Unhealthy, match="no answer"):  # it listens, but nobody reads
            healthcheck(server.endpoint, patience=SHORT)
        with echoing(server):
            healthcheck(server.endpoint)
        assert not server.peers
        assert not server.errors
    finally:
        server.close()


def test_worker_is_well_while_it_is_connected(tmp_path: Path) -> None:
    proc = main_process(tmp_path, "S")
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        endpoint = f"tcp://localhost:{scheduler.getsockname()[1]}"
        with pytest.raises(Unhealthy, match=f"there is no connection to {endpoint}"):
            healthcheck(endpoint, connected=True, proc=proc)
        with socket.create_connection(scheduler.getsockname()):
            healthcheck(endpoint, connected=True, proc=proc)


def test_connections_over_ipv6_count(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("no IPv6 here")
    proc = main_process(tmp_path, "R")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as scheduler:
        port = scheduler.getsockname()[1]
        with socket.create_connection(("::1", port)):
            healthcheck(f"tcp://[::1]:{port}", connected=True, proc=proc)
        with pytest.raises(Unhealthy, match="no connection"):
            healthcheck(f"tcp://127.0.0.9:{port}", connected=True, proc=proc)


@pytest.mark.parametrize("state", ["T", "t", "Z"])
def test_a_main_process_that_does_not_run_is_unhealthy_whatever_it_holds(tmp_path: Path, state: str) -> None:
    proc = main_process(tmp_path, state)
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        address = scheduler.getsockname()
        with (
            socket.create_connection(address),
            pytest.raises(Unhealthy, match=f"its state is {state}"),
        ):
            healthcheck(f"tcp://127.0.0.1:{address[1]}", connected=True, proc=proc)


def test_command_says_how_it_went_with_its_status() -> None:
    with answering(200) as url:
        assert runahead(url).returncode == 0
    with answering(503) as url:
        done = runahead(url)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("unhealthy: http://127.0.0.1:")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [[], ["--connected"], ["https://host"], ["--connected", "http://host:1/"], ["a", "b"], ["--quiet", "a"]],
)
def test_what_cannot_be_checked_exits_2_with_the_usage(arguments: list[str]) -> None:
    done = runahead(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert "usage: runahead healthcheck http://HOST:PORT/PATH" in done.stderr


def test_help_shows_it_among_the_commands() -> None:
    assert "--connected" in runahead("--help").stdout


def test_the_check_loads_no_options_no_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['healthcheck', 'http://127.0.0.1:1/']\n"
        "from services.cli import main; status = main()\n"
        "import protocol.transport\n"
        "print(status, sorted({'typer', 'pydantic', 'torch', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "1 []\n", done.stderr
