"""`runahead healthcheck TARGET`: what a container's health check runs. Cheap, and never a yes that means nothing.

    http://127.0.0.1:8000/readyz              the frontend answers with success
    tcp://scheduler:5601, ipc://PATH          the scheduler shakes hands: its loop reads and answers
    --connected tcp://scheduler:5602          this container's worker runs and holds a connection to the scheduler

A worker listens to nobody; whether its steps progress is for the scheduler to judge, which hears its heartbeats.
"""

import contextlib
import ipaddress
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

PATIENCE = 5.0
"""Seconds for an answer."""
USAGE = "usage: runahead healthcheck http://HOST:PORT/PATH | tcp://HOST:PORT | --connected tcp://HOST:PORT"
_ESTABLISHED = "01"
_PROC = Path("/proc")


class Unhealthy(Exception):
    """What is wrong, in one line."""


def healthcheck(target: str, connected: bool = False, patience: float = PATIENCE, proc: Path = _PROC) -> None:
    """Returns if `target` is well.

    Args:
        connected: look at this container's main process instead of asking the target.
        patience: seconds to wait for an answer.

    Raises:
        Unhealthy: it is not.
        ValueError: `target` cannot be asked.
    """
    if connected:
        _main_process(proc)
        _connection(target, proc)
    elif target.startswith("http://"):
        _ask(target, patience)
    elif target.startswith(("tcp://", "ipc://")):
        _shake_hands(target, patience)
    else:
        raise ValueError(f"cannot check {target!r}; {USAGE}")


def _ask(url: str, patience: float) -> None:
    """No redirects, no proxies: the server itself has to answer."""
    import http.client

    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=patience)
    try:
        connection.request("GET", parts.path or "/")
        response = connection.getresponse()
        body = response.read(1000).decode(errors="replace")
    except (OSError, http.client.HTTPException) as error:
        raise Unhealthy(f"{url}: {str(error) or type(error).__name__}") from None
    finally:
        connection.close()
    if not 200 <= response.status < 300:
        raise Unhealthy(f"{url}: status {response.status}: {' '.join(body.split())}")


def _shake_hands(endpoint: str, patience: float) -> None:
    from protocol.handshake import PROBE
    from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, PeerGone

    client = Client(endpoint)
    try:
        client.handshake(PROBE, socket.gethostname(), patience)
    except (HandshakeRefused, HandshakeTimeout, PeerGone) as error:
        raise Unhealthy(str(error)) from None
    finally:
        client.close()


def _main_process(proc: Path) -> None:
    """Process 1 of the container. A zombie or a stopped process holds its connections."""
    try:
        state = (proc / "1" / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError as error:
        raise Unhealthy(f"the main process cannot be looked at: {error.strerror}") from None
    if state in "TtZXx":
        raise Unhealthy(f"the main process does not run: its state is {state}")


def _connection(endpoint: str, proc: Path) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"cannot look for a connection to {endpoint!r}; {USAGE}")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unhealthy(f"{endpoint}: {error.strerror}") from None
    wanted = {(ipaddress.ip_address(address[4][0]), parts.port) for address in found}
    if wanted.isdisjoint(_connections(proc)):
        raise Unhealthy(f"there is no connection to {endpoint}")


def _connections(
    proc: Path,
) -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Address and port of whoever is at the other end, for each connection that stands in this network namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                remote, state = line.split()[2:4]
                if state == _ESTABLISHED:
                    address, port = remote.split(":")
                    yield _address(address), int(port, 16)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """The kernel prints each 32-bit word in the machine's byte order."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


def main(arguments: list[str], patience: float = PATIENCE) -> int:
    """0 when well, 1 with a line on stderr when not, 2 for a wrong command line."""
    connected = "--connected" in arguments
    targets = [argument for argument in arguments if argument != "--connected"]
    try:
        if len(targets) != 1 or targets[0].startswith("-"):
            raise ValueError(USAGE)
        healthcheck(targets[0], connected, patience)
    except Unhealthy as error:
        print(f"unhealthy: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"runahead: {error}", file=sys.stderr)
        return 2
    return 0
