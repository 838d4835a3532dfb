"""Where ranks meet: an address that the others can reach, and a socket that waits there."""

import socket

import pytest

from services.worker.distributed.rendezvous import facing, listen, local_address


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("ipc:///tmp/somewhere/workers", "127.0.0.1"),
        ("tcp://127.0.0.1:5555", "127.0.0.1"),
        ("tcp://127.8.9.10:5555", "127.0.0.1"),
    ],
)
def test_worker_is_met_where_it_faces_the_scheduler(endpoint: str, host: str) -> None:
    """A scheduler on this machine is faced from loopback, under whichever of its names; nothing else is open."""
    assert facing(endpoint) == host


def test_scheduler_may_be_given_by_name() -> None:
    assert facing("tcp://localhost:5555") in ("127.0.0.1", "::1")


def test_socket_listens_on_this_address_only() -> None:
    with listen("127.0.0.1") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with socket.create_connection((host, port)), listener.accept()[0] as accepted:
            assert accepted.getsockname() == (host, port)


def test_each_socket_has_a_port_of_its_own() -> None:
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        assert first.getsockname() != second.getsockname()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine speaks no IPv6")
def test_addresses_of_the_newer_protocol() -> None:
    try:
        listener = listen("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        assert listener.family is socket.AF_INET6
        assert local_address("::1") == "::1"
        assert facing("tcp://[::1]:5555") == "::1"
