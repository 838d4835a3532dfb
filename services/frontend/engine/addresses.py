"""Addresses of engines: where the scheduler of each is reached, and with which key. They may change while it serves."""

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from protocol.security import Security
from protocol.transport import check_endpoint

log = logging.getLogger("runahead.frontend")

FILE_INTERVAL = 0.5
"""Seconds between two looks at the file."""
DNS_INTERVAL = 5.0
"""Seconds between two resolutions of the name."""
DNS = "dns://"
KEY_LENGTH = 40
"""Characters of a public key, z85."""


@dataclass(frozen=True)
class EngineAddress:
    name: str
    """Name in metrics, logs and commands, unique among the engines of a frontend."""
    endpoint: str
    """Endpoint of its scheduler for frontends."""
    public_key: str = ""
    """Public key (z85) of its scheduler; "": that of the directory with this frontend's keys."""


Listener = Callable[[list[EngineAddress]], None]


def numbered(endpoints: list[str]) -> list[EngineAddress]:
    """Return addresses whose names are 0, 1, 2 ..."""
    return [EngineAddress(str(index), endpoint) for index, endpoint in enumerate(endpoints)]


def parse(text: str, security: Security) -> tuple[list[EngineAddress], list[str]]:
    """Return the engines that the lines of a file list, and what is wrong with its other lines.

    A line is `ENDPOINT [PUBLIC_KEY [NAME]]`; the key is - for ipc and loopback. Empty lines, and those that begin with
    #, are skipped. Without a name, the endpoint is the name.
    """
    found: dict[str, EngineAddress] = {}
    problems = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or line.lstrip().startswith("#"):
            continue
        endpoint, key, name, *more = [*words, *("-", "")[len(words) - 1 :]]
        name = name or endpoint
        try:
            check_endpoint(endpoint, security)
            if more:
                raise ValueError("more than three words; a line is ENDPOINT [PUBLIC_KEY [NAME]]")
            if key != "-" and len(key) != KEY_LENGTH:
                raise ValueError(f"the public key has {len(key)} characters, not {KEY_LENGTH}; - means none")
            if name in found:
                raise ValueError(f"there is an engine {name} already")
        except ValueError as error:
            problems.append(f"line {number}: {error}")
        else:
            found[name] = EngineAddress(name, endpoint, "" if key == "-" else key)
    return list(found.values()), problems


async def follow(source: str, security: Security, listener: Listener) -> None:
    """Pass the engines of a file, or those that dns://NAME:PORT resolves to, and again when they change, until
    cancelled. A file that cannot be read, or a name that does not resolve, changes nothing."""
    is_name = source.startswith(DNS)
    engines = EngineName(source, security) if is_name else EngineFile(Path(source), security)
    complaint = ""
    while True:
        addresses, problem = None, ""
        try:
            addresses = await engines.read()
        except (OSError, ValueError) as error:
            problem = str(error)
        if problem not in ("", complaint):
            use = "used" if is_name else "read"
            log.error("the engines are those of before, as %s cannot be %s: %s", source, use, problem)
        complaint = problem
        if addresses is not None:
            listener(addresses)
        await asyncio.sleep(DNS_INTERVAL if is_name else FILE_INTERVAL)


class EngineFile:
    """A file that lists engines. What is wrong with its lines is logged, once for each change."""

    def __init__(self, path: Path, security: Security) -> None:
        self._path, self._security = path, security
        self._seen: tuple[int, ...] = ()

    async def read(self) -> list[EngineAddress] | None:
        """Return its engines if it has changed since the last call, else None. Raises: OSError, ValueError"""
        status = self._path.stat()
        now = (status.st_mtime_ns, status.st_size, status.st_ino)
        if now == self._seen:
            return None
        addresses, problems = parse(self._path.read_text(), self._security)
        self._seen = now
        for problem in problems:
            log.error("%s, %s; the other engines are used", self._path, problem)
        return addresses


class EngineName:
    """A name whose addresses are those of engines."""

    def __init__(self, source: str, security: Security) -> None:
        self._source, self._security = source, security
        self._seen: list[EngineAddress] = []

    async def read(self) -> list[EngineAddress] | None:
        """Return its engines if they have changed since the last call, else None. Raises: OSError, ValueError"""
        parts = urlsplit(self._source)
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
        hosts = sorted({f"[{a[4][0]}]" if ":" in str(a[4][0]) else str(a[4][0]) for a in found})
        places = [f"{host}:{parts.port}" for host in hosts]
        addresses = [EngineAddress(place, f"tcp://{place}") for place in places]
        for address in addresses:
            check_endpoint(address.endpoint, self._security)
        if addresses == self._seen:
            return None
        log.info("%s is now %s", self._source, ", ".join(hosts))
        self._seen = addresses
        return addresses
