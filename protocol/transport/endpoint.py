"""Where services meet: `ipc://PATH` (one machine; the directory is private) or `tcp://HOST:PORT`."""

import errno
import ipaddress
import os
import re
import socket
from pathlib import Path

import zmq

from protocol.codec import MAX_MESSAGE_BYTES

HIGH_WATER_MARK = 10_000
"""Messages that may wait for one peer, on either side."""
MAX_IPC_PATH = 107
"""Bytes, the kernel's limit."""
HANDSHAKE_MS = 5_000
"""A connection that has not said what it is by then is closed."""
PING_MS, SILENCE_MS = 5_000, 30_000
"""tcp: pings between libzmq's own threads, so that a vanished machine is noticed; busy services do not matter."""
ENVELOPE_BYTES = 1024
"""Room for what encryption adds to a message of `MAX_MESSAGE_BYTES`."""

_TCP = re.compile(r"tcp://(?P<host>\[[0-9A-Fa-f:.]+\]|[\w.-]+|\*):(?P<port>\d{1,5})", re.ASCII)


def check_endpoint(endpoint: str, encrypted: bool = False) -> str:
    """The endpoint, if a service may bind or dial it. `encrypted`: it has CURVE keys.

    Raises: ValueError, saying what would be accepted
    """
    path = ipc_path(endpoint)
    if path is not None:
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ValueError(f"{endpoint}: an ipc path has at most {MAX_IPC_PATH} bytes")
        if encrypted:
            raise ValueError(f"{endpoint}: keys are for tcp://; ipc sockets are guarded by their directory")
        return endpoint
    parts = _TCP.fullmatch(endpoint)
    if parts is None or int(parts["port"]) > 65535:
        raise ValueError(f"{endpoint!r} is not an endpoint: use ipc://PATH or tcp://HOST:PORT")
    if not encrypted and _is_everywhere(parts["host"]):
        raise ValueError(
            f"{endpoint}: services speak unencrypted, name one internal address or interface instead of {parts['host']}"
        )
    return endpoint


def ipc_path(endpoint: str) -> Path | None:
    """The socket's file; None for tcp. Wildcards and Linux's abstract names (no permissions) are no paths."""
    name = endpoint.removeprefix("ipc://")
    return None if name == endpoint or not name or name == "*" or name[0] == "@" else Path(name)


def configure(socket: zmq.Socket[bytes], endpoint: str) -> None:
    """What both sides set: nothing lingers, every queue and every message has a bound."""
    socket.linger = 0
    socket.sndhwm = socket.rcvhwm = HIGH_WATER_MARK
    socket.maxmsgsize = MAX_MESSAGE_BYTES + ENVELOPE_BYTES
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    if ipc_path(endpoint) is None:
        socket.ipv6 = "[" in endpoint
        socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, SILENCE_MS)


def bind(socket: zmq.Socket[bytes], endpoint: str, encrypted: bool = False) -> str:
    """Binds; the endpoint that clients dial (port 0 takes a free one).

    Raises: OSError, when it is taken; ValueError, when it means every interface
    """
    path = ipc_path(endpoint)
    if path is not None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _refuse_if_served(path)
    else:
        endpoint = check_endpoint(_numeric(endpoint), encrypted)
    try:
        socket.bind(endpoint)
    except zmq.ZMQError as error:
        raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
    return str(socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")


def _is_everywhere(host: str) -> bool:
    """Also for the ways in which C libraries let one write 0.0.0.0."""
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


def _refuse_if_served(path: Path) -> None:
    """libzmq would take the file over from a service that is alive."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        if probe.connect_ex(os.fspath(path)) == 0:
            raise OSError(errno.EADDRINUSE, f"cannot bind ipc://{path}: another service is using it")


def _numeric(endpoint: str) -> str:
    """libzmq binds addresses and interfaces only; a container knows its own name."""
    parts = _TCP.fullmatch(endpoint)
    interfaces = {name for _, name in socket.if_nameindex()}
    if parts is None or parts["host"] == "*" or "[" in parts["host"] or parts["host"] in interfaces:
        return endpoint
    try:
        found = socket.getaddrinfo(parts["host"], None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(error.errno, f"cannot bind {endpoint}: {error.strerror}") from None
    return f"tcp://{found[0][4][0]}:{parts['port']}"
