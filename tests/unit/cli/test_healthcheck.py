"""Health checks against an HTTP server, a server of protocol.transport and connections of this machine."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext
from ipaddress import ip_address
from pathlib import Path

import numpy as np
import pytest

from protocol.security import Security
from protocol.transport import Server
from services.cli.healthcheck import Unhealthy, healthcheck, main
from services.cli.transport_keys import make_keys
from tests.http_server import Handler, http_server
from tests.unit.protocol.peers import PATIENCE, echoing

SHORT = 0.2
"""Seconds, for checks without an answer."""


@contextmanager
def answering(status: int) -> Iterator[str]:
    class Probe(Handler):
        def answer(self) -> None:
            found = status if self.path == "/readyz" else 404
            self.reply(found, b'{"phase":\n"loading"}', location="/elsewhere")

    with http_server(Probe) as url:
        yield f"{url}/readyz"


def main_process(directory: Path, state: str) -> Path:
    """Make a /proc with this network namespace and a main process in `state`."""
    (directory / "1").mkdir()
    (directory / "1" / "stat").write_text(f"1 (run) ahead) {state} 0 1 1 0 -1 4194560")
    (directory / "net").symlink_to("/proc/self/net")
    return directory


@pytest.mark.parametrize("path", ["", "/", "/v1"])
def test_the_address_of_a_server_is_enough(path: str) -> None:
    with answering(200) as url:
        server = url.removesuffix("/readyz") + path
        assert main(["--url", server]) == main([f"--url={server}", "--insecure"]) == main([server]) == 0
        assert main([url.removesuffix("/readyz") + "/another/v1"]) == 1


@pytest.mark.parametrize("status", [503, 302, 401])
def test_any_other_status_is_reported_in_one_line(status: int) -> None:
    with answering(status) as url, pytest.raises(Unhealthy) as unhealthy:
        healthcheck(url)
    assert str(unhealthy.value) == f'{url}: status {status}: {{"phase": "loading"}}'


def test_missing_server_is_unhealthy() -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(Unhealthy, match="refused"):
        healthcheck(f"http://127.0.0.1:{port}/readyz")
    with pytest.raises(Unhealthy, match=rf"no answer from tcp://127\.0\.0\.1:{port}"):
        healthcheck(f"tcp://127.0.0.1:{port}", timeout=SHORT)


def test_scheduler_is_healthy_while_its_loop_reads_and_keeps_no_probe() -> None:
    with closing(Server("tcp://127.0.0.1:0", {"worker"})) as server:
        with pytest.raises(Unhealthy, match="no answer"):  # the socket listens, but nothing reads it
            healthcheck(server.endpoint, timeout=SHORT)
        with echoing(server):
            healthcheck(server.endpoint)
        assert not server.peers
        assert not server.errors


def test_command_checks_a_scheduler_with_keys_from_the_environment_or_a_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make_keys(tmp_path)
    keys = str(tmp_path / "scheduler")
    security = Security(tmp_path / "scheduler")
    with closing(Server("tcp://127.0.0.1:0", {"worker"}, security)) as server, echoing(server):
        assert main([server.endpoint]) == 1
        assert capsys.readouterr().err.startswith("unhealthy: ")
        assert main(["--transport-keys", keys, server.endpoint], PATIENCE) == 0
        assert main([server.endpoint, f"--transport-keys={keys}"], PATIENCE) == 0
        monkeypatch.setenv("RUNAHEAD_TRANSPORT_KEYS", keys)
        assert main([server.endpoint], PATIENCE) == 0


def test_worker_is_healthy_while_it_is_connected(tmp_path: Path) -> None:
    proc = main_process(tmp_path, "S")
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        endpoint = f"tcp://localhost:{scheduler.getsockname()[1]}"
        with pytest.raises(Unhealthy, match=f"there is no connection to {endpoint}"):
            healthcheck(endpoint, connected=True, proc=proc)
        with socket.create_connection(scheduler.getsockname()):
            healthcheck(endpoint, connected=True, proc=proc)


def test_worker_is_healthy_with_a_connection_over_ipv6(tmp_path: Path) -> None:
    if not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    proc = main_process(tmp_path, "R")
    with socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as scheduler:
        port = scheduler.getsockname()[1]
        with socket.create_connection(("::1", port)):
            healthcheck(f"tcp://[::1]:{port}", connected=True, proc=proc)
        with pytest.raises(Unhealthy, match="no connection"):
            healthcheck(f"tcp://127.0.0.9:{port}", connected=True, proc=proc)


@pytest.mark.parametrize(("state", "is_healthy"), [("01", True), ("02", False), ("06", False)])
def test_only_an_established_connection_counts(state: str, is_healthy: bool, tmp_path: Path) -> None:
    """As a socket of IPv6 has it to an address of IPv4."""
    (tmp_path / "1").mkdir()
    (tmp_path / "1" / "stat").write_text("1 (run) S 0")
    (tmp_path / "net").mkdir()
    words = np.frombuffer(ip_address("::ffff:127.0.0.1").packed, np.uint32)
    remote = "".join(f"{word:08X}" for word in words.tolist())
    (tmp_path / "net" / "tcp6").write_text(f"header\n 0: {'0' * 32}:0001 {remote}:0050 {state} 0\n")
    with nullcontext() if is_healthy else pytest.raises(Unhealthy, match="there is no connection"):
        healthcheck("tcp://127.0.0.1:80", connected=True, proc=tmp_path)


@pytest.mark.parametrize("state", ["T", "t", "Z"])
def test_main_process_that_does_not_run_is_unhealthy_despite_its_connection(tmp_path: Path, state: str) -> None:
    proc = main_process(tmp_path, state)
    with socket.create_server(("127.0.0.1", 0)) as scheduler:
        address = scheduler.getsockname()
        with socket.create_connection(address), pytest.raises(Unhealthy, match=f"its state in /proc is {state}"):
            healthcheck(f"tcp://127.0.0.1:{address[1]}", connected=True, proc=proc)


@pytest.mark.parametrize(
    "arguments",
    [
        [], ["--connected"], ["ftp://host"], ["--connected", "http://host:1/"], ["--connected", "tcp://host"],
        ["a", "b"], ["--url", "http://a", "http://b"], ["--quiet", "a"],
    ],
)  # fmt: skip
def test_invalid_target_exits_2_with_the_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    done = capsys.readouterr()
    assert done.out == ""
    assert "usage: runahead healthcheck [--url] http[s]://HOST:PORT[/PATH]" in done.err


def test_check_loads_neither_options_nor_torch() -> None:
    code = (
        "import sys; sys.argv[1:] = ['healthcheck', 'http://127.0.0.1:1/']\n"
        "from services.cli import main; status = main()\n"
        "import protocol.transport\n"
        "print(status, sorted({'typer', 'pydantic', 'torch', 'yaml', 'asyncio'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ)
    assert done.stdout == "1 []\n", done.stderr
