"""Images and sounds by address: files of allowed domains, fetched from public addresses only.

A name is resolved once, all its addresses are checked, and the connection is made to one of those that were checked, so
that a name whose addresses change between the check and the connection (DNS rebinding) leads nowhere else. Redirects
are not followed, proxies of the environment are not used.
"""

import asyncio
import ssl
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from socket import SOCK_STREAM, getaddrinfo

import httpx

from services.frontend.errors import APIError, invalid

FETCH_SECONDS = 10.0
"""Time limit for one file, from the name to the last byte."""
CONNECT_SECONDS = 3.0
"""Time limit for one of the addresses that a name has."""
MAX_OPEN = 64
"""Files that are fetched from one domain at a time. One more is refused, so no domain holds back another one."""
MAX_ADDRESSES = 3
"""Addresses of a name that are tried."""
HEADERS = {"accept": "image/*, audio/*", "accept-encoding": "identity", "user-agent": "runahead"}

Address = IPv4Address | IPv6Address
_GLOBAL_UNICAST = IPv6Network("2000::/3")
"""Not in it: unique local, link-local, IPv4-mapped, and translated IPv4 addresses (64:ff9b::/96)."""


def is_public(address: Address) -> bool:
    """Return whether an address is one of the public network, which no private, loopback, link-local, multicast or
    reserved address is, nor an IPv6 address in which an IPv4 address is embedded."""
    if isinstance(address, IPv6Address) and (
        address not in _GLOBAL_UNICAST or address.sixtofour is not None or address.teredo is not None
    ):
        return False
    return address.is_global and not address.is_multicast


Take = Callable[[int], None]
"""Counts bytes of the files of one request. Raises: APIError, if they are too many"""


class MediaFetcher:
    """`domains`: host names, in lower case. `max_bytes`: of all files of a request together."""

    def __init__(self, domains: Sequence[str], max_bytes: int) -> None:
        self._domains, self._max_bytes = frozenset(domains), max_bytes
        self._threads = ThreadPoolExecutor(len(self._domains), "media-names")
        self._resolving: dict[str, asyncio.Task[list[Address]]] = {}
        """By name; each has one thread at most, so a slow name server delays one domain only."""
        self._open = Counter[str]()
        self._client = httpx.AsyncClient(
            headers=HEADERS,
            verify=ssl.create_default_context(),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            timeout=httpx.Timeout(FETCH_SECONDS, connect=CONNECT_SECONDS),
            trust_env=False,
        )

    def checked(self, url: str, name: str) -> httpx.URL:
        """Return the parsed address of a file, which has `name` in errors. Raises: APIError"""
        try:
            parsed = httpx.URL(url)
            host = parsed.raw_host.decode()
        except (httpx.InvalidURL, UnicodeError, ValueError):
            raise invalid(f"{name} is at no valid address", "messages") from None
        if parsed.scheme not in ("http", "https") or parsed.userinfo:
            raise invalid(
                f"{name} is neither a data URL nor at an http or https address without a user name", "messages"
            )
        if host not in self._domains:
            raise invalid(
                f"the domain of {name} is none of --allowed-media-domains ({', '.join(sorted(self._domains))})",
                "messages",
            )
        return parsed

    async def fetch(self, urls: Mapping[str, str]) -> dict[str, bytes]:
        """Return the files of one request by their names. Equal addresses are fetched once. Raises: APIError"""
        left, tasks = self._max_bytes, dict[str, asyncio.Task[bytes]]()

        def take(size: int) -> None:
            nonlocal left
            left -= size
            if left < 0:
                limit = f"more than {self._max_bytes} bytes together; --max-body-bytes is the limit"
                raise invalid(f"the files at addresses have {limit}", "messages")

        for name, url in urls.items():
            if url not in tasks:
                tasks[url] = asyncio.create_task(self._fetch(self.checked(url, name), name, take))
        try:
            await asyncio.gather(*tasks.values())
        finally:
            for task in tasks.values():
                task.cancel()
        return {name: tasks[url].result() for name, url in urls.items()}

    async def _fetch(self, url: httpx.URL, name: str, take: Take) -> bytes:
        """Raises: APIError"""
        host = url.raw_host.decode()
        if self._open[host] >= MAX_OPEN:
            raise APIError(429, f"{MAX_OPEN} files are being fetched from {host}; try again later")
        self._open[host] += 1
        try:
            async with asyncio.timeout(FETCH_SECONDS):
                return await self._read(url, host, name, take)
        except (TimeoutError, httpx.TimeoutException):
            reason = f"{name} could not be fetched within {FETCH_SECONDS:g} s"
        except (httpx.HTTPError, OSError, UnicodeError):
            reason = f"{name} could not be fetched: its server was not found, or the connection failed"
        finally:
            self._open[host] -= 1
        raise invalid(reason, "messages")

    async def _read(self, url: httpx.URL, host: str, name: str, take: Take) -> bytes:
        """Raises: APIError, httpx.HTTPError, OSError"""
        addresses = await self._resolved(host)
        if not all(map(is_public, addresses)):
            raise invalid(f"{name} is not at a public address", "messages")
        failure: Exception = OSError("no address")
        for address in addresses[:MAX_ADDRESSES]:
            try:
                return await self._read_from(address, url, host, name, take)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                failure = error
        raise failure

    async def _read_from(self, address: Address, url: httpx.URL, host: str, name: str, take: Take) -> bytes:
        """Raises: APIError, httpx.HTTPError"""
        at, headers = url.copy_with(host=str(address), fragment=None), {"host": url.netloc.decode()}
        data = bytearray()
        async with self._client.stream("GET", at, headers=headers, extensions={"sni_hostname": host}) as answer:
            if answer.status_code != 200:
                kind = "; redirects are not followed" if answer.is_redirect else ""
                raise invalid(
                    f"{name} could not be fetched: its server answers with status {answer.status_code}{kind}",
                    "messages",
                )
            async for chunk in answer.aiter_raw():
                take(len(chunk))
                data += chunk
        return bytes(data)

    async def _resolved(self, host: str) -> list[Address]:
        """Return the addresses of a name; none, if it has none."""
        task = self._resolving.get(host)
        if task is None:
            task = self._resolving[host] = asyncio.create_task(self._resolve(host))
            task.add_done_callback(lambda _: self._resolving.pop(host))
        return await asyncio.shield(task)

    async def _resolve(self, host: str) -> list[Address]:
        ask = partial(getaddrinfo, host, None, type=SOCK_STREAM)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._threads, ask)
        except (OSError, UnicodeError):
            return []
        return [ip_address(str(place[0])) for *_, place in found]
