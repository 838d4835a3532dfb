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


async def follow(source: str, security: Security, listener: Callable[[list[EngineAddress]], None]) -> None:
    """Pass the engines of a file, or those that dns://NAME:PORT resolves to, and again when they change, until
    cancelled. A file that cannot be read, or a name that does not resolve, changes nothing. What is wrong with lines of
    a file is logged, once for each change."""
    is_name, seen, complaint = source.startswith(DNS), None, ""
    while True:
        problem = ""
        try:
            found = (await _resolved(source, security), []) if is_name else _listed(source, security)
        except (OSError, ValueError) as error:
            problem = str(error)
            if problem != complaint:
                use = "used" if is_name else "read"
                log.error("the engines are those of before, as %s cannot be %s: %s", source, use, problem)
        else:
            if found != seen:
                seen = found
                if is_name:
                    log.info("%s is now %s", source, ", ".join(address.name for address in found[0]))
                for wrong in found[1]:
                    log.error("%s, %s; the other engines are used", source, wrong)
                listener(found[0])
        complaint = problem
        await asyncio.sleep(DNS_INTERVAL if is_name else FILE_INTERVAL)


def _listed(file: str, security: Security) -> tuple[list[EngineAddress], list[str]]:
    """`parse` for a file. Raises: OSError, ValueError"""
    return parse(Path(file).read_text(), security)


async def _resolved(source: str, security: Security) -> list[EngineAddress]:
    """Return the engines at the addresses of a name. Raises: OSError, ValueError"""
    parts = urlsplit(source)
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_STREAM)
    hosts = sorted({f"[{a[4][0]}]" if ":" in str(a[4][0]) else str(a[4][0]) for a in found})
    places = [f"{host}:{parts.port}" for host in hosts]
    return [EngineAddress(place, check_endpoint(f"tcp://{place}", security)) for place in places]
