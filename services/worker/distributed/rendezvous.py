"""Where the ranks of an epoch meet: each worker holds a listening socket, that of rank 0 is used."""

import socket


def listen(host: str) -> socket.socket:
    """A socket where ranks can meet, on a free port of `host`. Raises: OSError"""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=1024)


def local_address(peer: str) -> str:
    """The address of this machine that faces `peer`, without sending anything. Raises: OSError"""
    family = socket.AF_INET6 if ":" in peer else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((peer, 9))
        return str(probe.getsockname()[0])


def facing(endpoint: str) -> str:
    """The address at which ranks reach this worker, if it can reach the scheduler's `endpoint`; loopback for ipc.

    Raises: OSError
    """
    if not endpoint.startswith("tcp://"):
        return "127.0.0.1"
    host = endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
    return local_address(socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM)[0][4][0])  # type: ignore[arg-type]
