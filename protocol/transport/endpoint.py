"""Endpoints of sockets: `ipc://PATH` (one machine; the directory is private) or `tcp://HOST:PORT`."""

import errno
import ipaddress
import os
import re
import socket
from pathlib import Path

import zmq

from protocol.codec import MAX_MESSAGE_BYTES
from protocol.fields import MAX_IPC_PATH
from protocol.security import LOCAL, Security

HIGH_WATER_MARK = 10_000
"""Maximum number of messages that wait for one peer, on either side."""
HANDSHAKE_MS = 5_000
"""Time limit of ZeroMQ's own handshake; the connection is closed afterwards."""
PING_MS, SILENCE_MS = 5_000, 30_000
"""tcp: interval and time limit of pings between the threads of libzmq. They detect a lost machine; a busy service
answers them too."""
MAX_PORT = 65535
ENVELOPE_BYTES = 1024
"""Bytes that encryption may add to a message of `MAX_MESSAGE_BYTES`."""

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+|\*):(?P<port>\d{1,5})", re.ASCII)


def check_endpoint(endpoint: str, security: Security = LOCAL) -> str:
    """Return the endpoint if a service may bind it or connect to it.

    Raises: ValueError, with the accepted forms, or with what a connection beyond loopback needs.
    """
    host = _checked_host(endpoint)
    if host is None:
        return endpoint
    if not security.encrypted and _is_everywhere(host):
        raise ValueError(
            f"{endpoint}: services are not encrypted; use one internal address or interface instead of {host}, or keys "
            "(runahead keys)"
        )
    if not (security.encrypted or security.insecure or _is_loopback(host)):
        raise ValueError(
            f"{endpoint}: {host} is not the loopback address; make keys (runahead keys DIR) and set --transport-keys, "
            "or set --insecure-transport on a network that you trust"
        )
    return endpoint


def is_private(endpoint: str) -> bool:
    """Return whether the endpoint reaches this machine alone."""
    parts = _TCP.fullmatch(endpoint)
    return ipc_path(endpoint) is not None or (parts is not None and _is_loopback(parts["host"]))


def is_everywhere(endpoint: str) -> bool:
    """Return whether the endpoint means every interface of this machine, so that nobody can connect to it."""
    parts = _TCP.fullmatch(endpoint)
    return parts is not None and _is_everywhere(parts["host"])


def check_publisher(endpoint: str, security: Security = LOCAL) -> str:
    """Return the endpoint if a service may publish at it without encryption.

    Raises: ValueError, with the accepted forms, or with what another machine needs.
    """
    _checked_host(endpoint)
    if not (is_private(endpoint) or security.insecure):
        raise ValueError(
            f"{endpoint} is not on this machine alone, and what is published is not encrypted; set "
            "--insecure-transport on a network that you trust"
        )
    return endpoint


def _checked_host(endpoint: str) -> str | None:
    """Return the host of a tcp endpoint, or None for ipc. Raises: ValueError, with the accepted forms."""
    path = ipc_path(endpoint)
    if path is not None:
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ValueError(f"{endpoint}: an ipc path has at most {MAX_IPC_PATH} bytes")
        return None
    parts = _TCP.fullmatch(endpoint)
    if parts is None or int(parts["port"]) > MAX_PORT:
        raise ValueError(f"{endpoint!r} is not an endpoint: use ipc://PATH or tcp://HOST:PORT")
    return parts["host"]


def ipc_path(endpoint: str) -> Path | None:
    """Return the file of an ipc socket, or None.

    Wildcards and Linux's abstract names, which have no permissions, are no paths.
    """
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or not name or name == "*" or name[0] == "@" else Path(name)


def configure(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """Set the options of both sides: no linger, and bounds of every queue and message."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES + ENVELOPE_BYTES
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if ipc_path(endpoint) is None:
        socket.ipv6 = "[" in endpoint
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)


def bind(socket: zmq.Socket[bytes], endpoint: str, security: Security = LOCAL) -> str:
    """Bind and return the endpoint for clients. Port 0 becomes a free one.

    Raises: OSError, if the endpoint is in use; ValueError, if its address must not be bound.
    """
    path = ipc_path(endpoint)
    if path is not None:
        prepare_path(path)
    else:
        endpoint = check_endpoint(_numeric(endpoint), security)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _is_everywhere(host: str) -> bool:
    """Return whether the host means every interface, including the forms of 0.0.0.0 that C libraries accept."""
    if host == "*":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_unspecified
    except ValueError:
        pass
    try:
        return socket.inet_aton(host) == b"\0\0\0\0"
    except OSError:
        return False


def _is_loopback(host: str) -> bool:
    """Return whether the host reaches this machine alone. A name other than localhost may be any machine."""
    if host in ("localhost", "lo"):
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def prepare_path(path: Path) -> None:
    """Make the directory of an ipc socket.

    Raises: OSError, also if a service listens on the path, or it is a file: libzmq would replace either.
    """
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        why = f"{path.parent} is no directory and cannot be made one ({error.strerror}); give a path elsewhere"
        raise OSError(error.errno, f"cannot bind ipc://{path}: {why}") from None
    if path.exists() and not path.is_socket():
        raise OSError(errno.EEXIST, f"cannot bind ipc://{path}: it is no socket; give a path that is free")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(os.fspath(path)) == 0:
            raise OSError(errno.EADDRINUSE, f"cannot bind ipc://{path}: another service is using it")


def _numeric(endpoint: str) -> str:
    """Replace a host name by its address, because libzmq binds addresses and interfaces only."""
    parts = _TCP.fullmatch(endpoint)
    interfaces = {name for _, name in socket.if_nameindex()}
    if parts is None or parts["host"] == "*" or "[" in parts["host"] or parts["host"] in interfaces:
        return endpoint
    try:
        found = socket.getaddrinfo(parts["host"], None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
    return f"tcp://{found[0][4][0]}:{parts['port']}"
