"""`runahead healthcheck TARGET`: the command of containers' health checks.

    http://127.0.0.1:8000                     the frontend answers /readyz, or the path of the URL, with success
    tcp://scheduler:5601, ipc://PATH          the scheduler completes a handshake: its loop reads and answers
    --connected tcp://scheduler:5602          this container's worker runs and has a connection to the scheduler

A worker has no socket of its own to check. The scheduler checks its progress, through heartbeats.
"""

import argparse
import contextlib
import ipaddress
import os
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NoReturn
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import ssl

ANSWER_TIMEOUT = 5.0
"""Seconds."""
USAGE = (
    "usage: runahead healthcheck [--url] http[s]://HOST:PORT[/PATH] [--cacert FILE] | "
    "[--transport-keys DIR] tcp://HOST:PORT | --connected tcp://HOST:PORT"
)
_ESTABLISHED = "01"
_PROC = Path("/proc")


class Unhealthy(Exception):
    """The reason, in one line."""


def healthcheck(
    target: str,
    connected: bool = False,
    timeout: float = ANSWER_TIMEOUT,
    proc: Path = _PROC,
    keys: str = "",
    cacert: str = "",
    certificate: str = "",
    key: str = "",
) -> None:
    """Check that `target` is healthy.

    Args:
        cacert: file with the authorities to trust; "": certificates are not checked, as the target is this machine.
        certificate: file with a certificate for a server that asks for one, which is that of this machine's server: a
            target http is then https.
        key: file with its key; "": it is in the same file.
        keys: directory with the keys of a service, for a scheduler that has keys.
        connected: check this container's main process and its connection to the target.

    Raises:
        Unhealthy: the target is not healthy.
        ValueError: `target` is not a valid target.
    """
    if connected:
        _main_process(proc)
        _connection(target, proc)
    elif target.startswith(("http://", "https://")):
        _check_http(target, timeout, cacert, certificate, key)
    elif target.startswith(("tcp://", "ipc://")):
        _shake_hands(target, timeout, keys)
    else:
        raise ValueError(f"cannot check {target!r}; {USAGE}")


def _check_http(url: str, timeout: float, cacert: str, certificate: str, key: str) -> None:
    """Require a success."""
    import http.client

    parts = urlsplit(url)
    parts = parts._replace(scheme="https") if certificate else parts
    path = parts.path.rstrip("/")
    if not path or path.endswith("/v1"):  # the address of a server, as other commands take it
        path = path.removesuffix("/v1") + "/readyz"
    tls = None if parts.scheme == "http" else client_tls(cacert or None, certificate, key)
    try:
        status, body = get(parts._replace(path=path).geturl(), timeout, tls)
    except (OSError, http.client.HTTPException) as error:
        raise Unhealthy(f"{url}: {str(error) or type(error).__name__}") from None
    if not 200 <= status < 300:
        raise Unhealthy(f"{url}: status {status}: {' '.join(body[:1000].decode(errors='replace').split())}")


def get(
    url: str,
    timeout: float,
    tls: "ssl.SSLContext | None" = None,
    uds: str | None = None,
    headers: Mapping[str, str] = MappingProxyType({}),
) -> tuple[int, bytes]:
    """Return status and body of an answer of the server itself, at a Unix socket if `uds` names one, without redirects
    and proxies. Raises: OSError, http.client.HTTPException"""
    import http.client

    parts = urlsplit(url)
    place = parts.hostname or "", parts.port
    connection = http.client.HTTPConnection(*place, timeout=timeout)
    if parts.scheme == "https":
        connection = http.client.HTTPSConnection(*place, timeout=timeout, context=tls)
    with contextlib.closing(connection):
        if uds is not None:
            connection.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            connection.sock.settimeout(timeout)
            connection.sock.connect(uds)
        connection.request("GET", parts.path, headers=headers)
        with connection.getresponse() as response:
            return response.status, response.read()


def bearer(keys: Sequence[str]) -> dict[str, str]:
    """Return the header with the first of some API keys, if there is one."""
    return {"Authorization": f"Bearer {keys[0]}"} if keys and keys[0] else {}


def client_tls(
    cacert: str | None, certificate: str | None = None, key: str | None = None, refusal: type[Exception] = Unhealthy
) -> "ssl.SSLContext":
    """Return the context of a client.

    Args:
        cacert: file with the authorities to trust; "": those of the system; None: certificates are not checked, as
            that of a server on this machine has another name.
        certificate: file with one for a server that asks for it.
        key: file with its key; without one, it is in the same file.

    Raises: `refusal`
    """
    import ssl

    option, file = "--cacert", cacert
    try:
        context = ssl.create_default_context(cafile=cacert or None)
        if certificate:
            option, file = "--ssl-certfile", f"{certificate} with the key {key}" if key else certificate
            context.load_cert_chain(certificate, key or None, password="")
    except OSError as error:
        raise refusal(f"{option}: cannot use {file}: {error.strerror or 'it is not PEM'}") from None
    if cacert is None:
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _shake_hands(endpoint: str, timeout: float, keys: str) -> None:
    from protocol.handshake import PROBE
    from protocol.transport import Client, HandshakeRefused, HandshakeTimeout, PeerGone, Security

    try:  # a probe contains no secret, so it may do without keys
        client = Client(endpoint, Security(Path(keys) if keys else None, insecure=True))
    except OSError as error:
        raise Unhealthy(str(error)) from None
    try:
        client.handshake(PROBE, socket.gethostname(), timeout)
    except (HandshakeRefused, HandshakeTimeout, PeerGone) as error:
        raise Unhealthy(str(error)) from None
    finally:
        client.close()


def _main_process(proc: Path) -> None:
    """Check process 1 of the container. A stopped process or a zombie keeps its connections."""
    try:
        state = (proc / "1" / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError as error:
        raise Unhealthy(f"the main process cannot be inspected: {error.strerror}") from None
    if state in "TtZXx":
        raise Unhealthy(f"the main process does not run: its state in /proc is {state}")


def _connection(endpoint: str, proc: Path) -> None:
    parts = urlsplit(endpoint)
    if parts.scheme != "tcp" or not parts.hostname or not parts.port:
        raise ValueError(f"cannot check a connection to {endpoint!r}; {USAGE}")
    try:
        found = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    except OSError as error:
        raise Unhealthy(f"{endpoint}: {error.strerror}") from None
    expected = {(ipaddress.ip_address(address[4][0]), parts.port) for address in found}
    if expected.isdisjoint(_connections(proc)):
        raise Unhealthy(f"there is no connection to {endpoint}")


def _connections(proc: Path) -> Iterator[tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]]:
    """Yield the remote address and port of each established connection of this network namespace."""
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(OSError):
            for line in (proc / "net" / table).read_text().splitlines()[1:]:
                remote, state = line.split()[2:4]
                if state == _ESTABLISHED:
                    address, port = remote.split(":")
                    yield _address(address), int(port, 16)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    """Parse an address of /proc/net, whose 32-bit words are in the byte order of the machine."""
    words = [int(text[i : i + 8], 16).to_bytes(4, sys.byteorder) for i in range(0, len(text), 8)]
    address = ipaddress.ip_address(b"".join(words))
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; {USAGE}")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "runahead healthcheck",
        USAGE.removeprefix("usage: "),
        "Check the health of one service, for the health checks of containers. Exits with status 0 if the frontend, "
        "scheduler or worker is healthy, else 1.",
        allow_abbrev=False,
    )
    parser.add_argument("target", nargs="?", default="", help="http://HOST:PORT, tcp://HOST:PORT or ipc://PATH")
    parser.add_argument("--url", help="The same as TARGET.")
    parser.add_argument("--insecure", action="store_true", help="Do not check the certificate, as without --cacert.")
    parser.add_argument("--cacert", default="", help="File with the authorities to trust in place of no check.")
    parser.add_argument(
        "--connected",
        action="store_true",
        help="Check that this container's main process runs and is connected to TARGET.",
    )
    for name, text in (("certfile", "certificate, which it shows to a server: http becomes https"), ("keyfile", "key")):
        default = os.environ.get(f"RUNAHEAD_SSL_{name.upper()}", "")
        parser.add_argument(f"--ssl-{name}", default=default, help=f"File with this container's {text}.")
    parser.add_argument(
        "--transport-keys",
        default=os.environ.get("RUNAHEAD_TRANSPORT_KEYS", ""),
        help="Directory with the keys of this container's service.",
    )
    return parser


def main(arguments: list[str], timeout: float = ANSWER_TIMEOUT) -> int:
    """Return 0 if healthy, 1 with a line on stderr if not, 2 for an invalid command line."""
    try:
        given = _parser().parse_args(arguments)
        if bool(given.url) == bool(given.target):
            raise ValueError(USAGE)
        target, cacert = given.url or given.target, "" if given.insecure else given.cacert
        tls = {"cacert": cacert, "certificate": given.ssl_certfile, "key": given.ssl_keyfile}
        healthcheck(target, given.connected, timeout, keys=given.transport_keys, **tls)
    except Unhealthy as error:
        print(f"unhealthy: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"runahead: {error}", file=sys.stderr)
        return 2
    return 0
