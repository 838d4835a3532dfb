"""Endpoints that services may bind and connect to."""

import socket
import stat
from pathlib import Path

import pytest
import zmq

from protocol.security import Security
from protocol.transport import MAX_IPC_PATH, Client, Server, check_endpoint
from protocol.transport.endpoint import bind
from tests.unit.protocol.peers import connect, exchange

ENCRYPTED, INSECURE = Security(Path("keys")), Security(insecure=True)


@pytest.mark.parametrize(
    "endpoint",
    ["ipc:///run/x", "ipc://relative", "tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://[::1]:0", "tcp://lo:1"],
)  # fmt: skip
def test_valid_endpoint_is_returned(endpoint: str) -> None:
    assert check_endpoint(endpoint) == endpoint


@pytest.mark.parametrize("host", ["scheduler", "eth0", "10.0.0.1", "[fe80::1]", "128.0.0.1"])
def test_endpoint_beyond_loopback_needs_keys_or_the_flag_that_says_insecure(host: str) -> None:
    endpoint = f"tcp://{host}:0"
    for make in (check_endpoint, Client, lambda e: Server(e, {"worker"})):
        with pytest.raises(ValueError, match=r"--transport-keys, or set --insecure-transport"):
            make(endpoint)
    assert check_endpoint(endpoint, ENCRYPTED) == check_endpoint(endpoint, INSECURE) == endpoint


@pytest.mark.parametrize(
    "endpoint",
    [
        "",
        "ipc://",
        "ipc://*",
        "ipc://@abstract",
        "inproc://x",
        "udp://127.0.0.1:5",
        "127.0.0.1:5555",
        "tcp://127.0.0.1",
        "tcp://:5555",
        "tcp://127.0.0.1:port",
        "tcp://127.0.0.1:65536",
        "tcp://127.0.0.1:*",
        "tcp://10.0.0.1;127.0.0.1:5555",
        "tcp://127.0.0.1:5555/path",
    ],
)
def test_invalid_endpoint_is_refused_with_the_valid_forms(endpoint: str) -> None:
    with pytest.raises(ValueError, match=r"use ipc://PATH or tcp://HOST:PORT"):
        check_endpoint(endpoint)


@pytest.mark.parametrize("host", ["*", "0.0.0.0", "0", "0x0", "000.0.0.0", "[::]", "[0::0]"])
def test_binding_every_interface_needs_keys(host: str) -> None:
    with pytest.raises(ValueError, match="not encrypted"):
        check_endpoint(f"tcp://{host}:5555")
    with pytest.raises(ValueError, match="not encrypted"):
        Server(f"tcp://{host}:0", {"worker"})
    with pytest.raises(ValueError, match="not encrypted"):
        check_endpoint(f"tcp://{host}:5555", INSECURE)
    assert check_endpoint(f"tcp://{host}:5555", ENCRYPTED)


def test_name_that_resolves_to_every_interface_needs_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    everywhere = [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("0.0.0.0", 0))]
    monkeypatch.setattr("socket.getaddrinfo", lambda *args: everywhere)
    with pytest.raises(ValueError, match="not encrypted"):
        Server("tcp://innocent.example:0", {"worker"}, INSECURE)


def test_ipc_path_above_the_kernels_limit_is_refused() -> None:
    assert check_endpoint("ipc://" + "x" * MAX_IPC_PATH)
    with pytest.raises(ValueError, match=f"at most {MAX_IPC_PATH} bytes"):
        check_endpoint("ipc://" + "ä" * (MAX_IPC_PATH // 2 + 1))


def test_ipc_directory_is_private_and_the_socket_is_removed_with_its_server(directory: Path) -> None:
    path = directory / "new" / "socket"
    server = Server(f"ipc://{path}", {"worker"})
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.is_socket()
    server.close()
    assert not path.exists()


def test_socket_of_a_running_service_is_not_replaced(server: Server) -> None:
    with pytest.raises(OSError, match="another service is using it"):
        Server(server.endpoint, {"worker"})
    client, peer = connect(server)
    exchange(server, client, peer)


def test_socket_of_a_dead_service_is_replaced(directory: Path) -> None:
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(directory / "socket"))
    server = Server(f"ipc://{directory}/socket", {"worker"})
    client, peer = connect(server)
    exchange(server, client, peer)
    server.close()


def test_port_0_becomes_a_free_port() -> None:
    server = Server("tcp://localhost:0", {"worker"})
    assert not server.endpoint.endswith(":0")
    with pytest.raises(OSError, match=f"cannot bind {server.endpoint}"):
        Server(server.endpoint, {"worker"})
    client, peer = connect(server)
    exchange(server, client, peer)
    server.close()


def test_a_file_is_not_replaced_by_a_socket(tmp_path: Path) -> None:
    file = tmp_path / "notes"
    file.write_text("text")
    with (
        zmq.Context() as context,
        context.socket(zmq.ROUTER) as socket,
        pytest.raises(OSError, match="it is no socket"),
    ):
        bind(socket, f"ipc://{file}")
    assert file.read_text() == "text"
