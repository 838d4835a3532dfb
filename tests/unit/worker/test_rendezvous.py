"""The rendezvous of ranks: an address that the others can reach, and a socket that listens there."""

import socket

import pytest

from services.worker.distributed.ranks import check_listeners, sockets
from services.worker.distributed.rendezvous import address_facing, listen, local_address
from services.worker.runner import LoadError


@pytest.mark.parametrize(
    ("endpoint", "host"),
    [
        ("ipc:///tmp/somewhere/workers", "127.0.0.1"),
        ("tcp://127.0.0.1:5555", "127.0.0.1"),
        ("tcp://127.8.9.10:5555", "127.0.0.1"),
    ],
)
def test_a_worker_listens_on_the_route_to_the_scheduler(endpoint: str, host: str) -> None:
    """The route to a scheduler on this machine is loopback, under each of the machine's names."""
    assert address_facing(endpoint) == host


def test_the_scheduler_may_be_given_by_name() -> None:
    assert address_facing("tcp://localhost:5555") in ("127.0.0.1", "::1")


def test_the_socket_listens_on_this_address_only() -> None:
    with listen("127.0.0.1") as listener:
        host, port = listener.getsockname()
        assert host == "127.0.0.1"
        with socket.create_connection((host, port)), listener.accept()[0] as accepted:
            assert accepted.getsockname() == (host, port)


def test_each_socket_has_a_port_of_its_own() -> None:
    with listen("127.0.0.1") as first, listen("127.0.0.1") as second:
        assert first.getsockname() != second.getsockname()


@pytest.mark.skipif(not socket.has_ipv6, reason="this machine has no IPv6")
def test_ipv6_addresses() -> None:
    try:
        listener = listen("::1")
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    with listener:
        assert listener.family is socket.AF_INET6
        assert local_address("::1") == "::1"
        assert address_facing("tcp://[::1]:5555") == "::1"


@pytest.mark.parametrize("host", ["0.0.0.0", "0", "", "::", "0:0::0", "::ffff:0.0.0.0", "::ffff:0:0"])
def test_no_socket_listens_on_all_addresses(host: str) -> None:
    """The system refuses IPv4 addresses in a socket of IPv6."""
    with pytest.raises((ValueError, OSError)):
        listen(host)


@pytest.mark.parametrize(("bound", "fits"), [("127.0.0.1", True), ("127.0.0.2", False), ("0.0.0.0", False)])
def test_listener_on_another_address_is_refused(bound: str, fits: bool) -> None:
    before = sockets()
    with socket.create_server((bound, 0)):
        own = sockets() - before
        if fits:
            check_listeners(own, {"127.0.0.1"})
            return
        with pytest.raises(LoadError, match=f"listens on {bound} instead of 127.0.0.1"):
            check_listeners(own, {"127.0.0.1"})
