"""The listening socket of the HTTP server, and its TLS."""

import contextlib
import errno
import logging
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from typing import Any

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
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(config.uds)


def _tcp(config: HttpConfig) -> socket.socket:
    host, port = config.host, config.port
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listener = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        raise OSError(error.errno, f"cannot listen on {host} port {port}: {error.strerror or error}") from None
    scheme, shown = "http" if config.ssl_certfile is None else "https", f"[{host}]" if ":" in host else host
    log.info("listening on %s://%s:%d", scheme, shown, listener.getsockname()[1])
    return listener


def _unix(path: str) -> socket.socket:
    """A socket that nobody listens on any more is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if _is_abandoned(path):
            os.unlink(path)
        listener.bind(path)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        raise OSError(error.errno, f"cannot listen on {path}: {error.strerror or error}") from None
    log.info("listening on unix:%s", path)
    return listener


def _is_abandoned(path: str) -> bool:
    """Return whether `path` is a socket to which nobody listens. Other files refuse connections, too."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            return False
    except FileNotFoundError:
        return False
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        return probe.connect_ex(path) == errno.ECONNREFUSED


def tls_options(config: HttpConfig) -> dict[str, Any]:
    """Return uvicorn's options; none for plain HTTP."""
    if config.ssl_certfile is None:
        return {}
    required = ssl.CERT_NONE if config.ssl_ca_certs is None else ssl.CERT_REQUIRED
    return {
        "ssl_certfile": config.ssl_certfile,
        "ssl_keyfile": config.ssl_keyfile,
        "ssl_ca_certs": config.ssl_ca_certs,
        "ssl_cert_reqs": required,
    }
