"""The rendezvous of an epoch's ranks: every worker has a listening socket, and the ranks use that of rank 0."""

import ipaddress
import socket


def listen(host: str) -> socket.socket:
    """Return a socket that listens on a free port of `host`.

    Raises: OSError; ValueError, if that means all addresses, in whatever spelling
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, 0), family=family, backlog=1024)
    if ipaddress.ip_address(listener.getsockname()[0]).is_unspecified:
        listener.close()
        raise ValueError("it means all addresses of this machine, and ranks have no authentication")
    return listener


def local_address(peer: str) -> str:
    """Return the address of this machine on the route to `peer`. Nothing is sent.

    Raises: OSError
    """
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def address_facing(endpoint: str) -> str:
    """Return the address at which other ranks reach this worker: the one on the route to the scheduler's `endpoint`,
    or loopback for ipc.

    Raises: OSError
    """
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return local_address(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])  # type: ignore[arg-type]
