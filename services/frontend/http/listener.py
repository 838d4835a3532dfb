"""The listening socket of the HTTP server."""

import contextlib
import errno
import logging
import os
import socket
from collections.abc import Iterator
from pathlib import Path

from services.config import HttpConfig

log = logging.getLogger("runahead.frontend")

BACKLOG = 2048
"""Connections that wait to be accepted."""


@contextlib.contextmanager
def listen(config: HttpConfig) -> Iterator[socket.socket]:
    """Open the listening socket. A Unix socket is removed afterwards. Raises: OSError, naming the address"""
    listener = _tcp(config) if config.uds is None else _unix(config.uds)
    with listener:
        try:
            yield listener
        finally:
            if config.uds is not None:
                Path(config.uds).unlink(missing_ok=True)


def _tcp(config: HttpConfig) -> socket.socket:
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    both = host == "::" and socket.has_dualstack_ipv6()  # without IPv6, the error is that of the socket
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG, dualstack_ipv6=both)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    scheme, shown = "http" if config.ssl_certfile is None else "https", f"[{host}]" if ":" in host else host
    log.info("listening on %s://%s:%d", scheme, shown, listener.getsockname()[1])
    return listener


def _unix(path: str) -> socket.socket:
    """A socket that nobody listens on any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:  # other files refuse connections, too
            if Path(path).is_socket() and probe.connect_ex(path) == errno.ECONNREFUSED:
                os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {path}: {error.strerror or error}") from None
    log.info("listening on unix:%s", path)
    return listener
