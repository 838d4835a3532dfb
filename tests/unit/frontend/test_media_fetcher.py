"""Files by address: only allowed domains, only public addresses, bounded, and one server delays nobody else."""

import asyncio
import ssl
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import pytest

from protocol.media import MediaFile
from services.frontend import media_fetcher
from services.frontend.errors import APIError
from services.frontend.media import MediaProcessing
from services.frontend.media_fetcher import MediaFetcher, is_public
from tests.certificates import AUTHORITY, CERTIFICATE, KEY

FILE = b"\x89PNG a file"
ENDLESS = 1 << 20
"""More bytes than are allowed, and than sockets keep."""


class FileServer:
    """Files over HTTP on a loopback address."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str]] = []
        """Path and header Host."""
        self.port = 0
        self.hanging = asyncio.Event()
        self.left = asyncio.Event()
        """The client closed the connection of a request for /hang or /endless."""

    def url(self, path: str, host: str = "a.test", scheme: str = "http") -> str:
        return f"{scheme}://{host}:{self.port}{path}"

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        path, lines = head.split()[1], [line.lower() for line in head.splitlines()]
        self.requests.append((path, next(line[6:] for line in lines if line.startswith("host: "))))
        try:
            await self._answer(path, reader, writer)
        except ConnectionError:
            self.left.set()
        finally:
            writer.close()

    async def _answer(self, path: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if path == "/hang":
            self.hanging.set()
            await reader.read()
            self.left.set()
        elif path == "/redirect":
            writer.write(b"HTTP/1.1 302 Found\r\nLocation: /file\r\nContent-Length: 0\r\n\r\n")
        elif path == "/missing":
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 6\r\n\r\nsecret")
        elif path == "/endless":
            writer.write(b"HTTP/1.1 200 OK\r\n\r\n")
            while True:
                writer.write(bytes(1 << 14))
                await writer.drain()
        elif path == "/broken":
            writer.write(b"no HTTP\r\n\r\n")
        else:
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(FILE), FILE))
        await writer.drain()


@asynccontextmanager
async def file_server(tls: ssl.SSLContext | None = None) -> AsyncIterator[FileServer]:
    server = FileServer()
    async with await asyncio.start_server(server.serve, "127.0.0.1", 0, ssl=tls) as listening:
        server.port = listening.sockets[0].getsockname()[1]
        yield server


class Names:
    """The names a.test and b.test, whose addresses are loopback ones."""

    def __init__(self) -> None:
        self.addresses = {"a.test": ["127.0.0.1"], "b.test": ["127.0.0.1"]}
        self.asked: list[str] = []
        self.slow = ""
        self.asking, self.answered = threading.Event(), threading.Event()

    def getaddrinfo(self, host: str, port: None, **_: Any) -> list[Any]:
        self.asked.append(host)
        if host == self.slow:
            self.asking.set()
            self.answered.wait()
        if host not in self.addresses:
            raise OSError("no such name")
        return [(0, 0, 0, "", (address, 0)) for address in self.addresses[host]]


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[Names]:
    names = Names()
    monkeypatch.setattr(media_fetcher, "getaddrinfo", names.getaddrinfo)
    monkeypatch.setattr(media_fetcher, "is_public", lambda address: address.is_loopback)
    yield names
    names.answered.set()


def fetcher(limit: int = 1000) -> MediaFetcher:
    return MediaFetcher(["a.test", "b.test", "none.test", "localhost"], limit)


async def refusal(fetcher: MediaFetcher, *urls: str) -> APIError:
    with pytest.raises(APIError) as raised:
        await fetcher.fetch({f"image {number}": url for number, url in enumerate(urls)})
    return raised.value


@pytest.mark.parametrize("address", [
    "127.0.0.1", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "192.0.2.1", "::1", "::", "fe80::1", "fe80::1%1", "fc00::1", "ff02::1",
    "::ffff:8.8.8.8", "::ffff:10.0.0.1", "64:ff9b::a00:1", "2002:a00:1::", "2001:0:a00:1::", "2001:db8::1",
])  # fmt: skip
def test_no_special_address_is_public(address: str) -> None:
    assert not is_public(ip_address(address))


def test_other_addresses_are_public() -> None:
    assert all(map(is_public, map(ip_address, ("8.8.8.8", "100.128.0.1", "2606:4700::1111"))))


async def test_equal_addresses_are_fetched_once_and_by_their_name(names: Names) -> None:
    async with file_server() as server:
        urls = [server.url("/one"), server.url("/two", "B.TEST"), server.url("/one")]
        assert await fetcher().fetch(dict(zip("abc", urls, strict=True))) == dict.fromkeys("abc", FILE)
        assert sorted(server.requests) == [("/one", f"a.test:{server.port}"), ("/two", f"b.test:{server.port}")]


async def test_a_name_at_a_private_address_is_never_connected_to() -> None:
    async with file_server() as server:
        error = await refusal(fetcher(), server.url("/file", "localhost"))
        assert (error.status, error.message) == (400, "image 0 is not at a public address")
        assert server.requests == []


async def test_the_connection_is_made_to_the_address_that_was_checked(
    names: Names, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The name has another address when it is resolved again."""
    given = names.getaddrinfo

    def rebind(host: str, port: None, **options: Any) -> list[Any]:
        found = given(host, port, **options)
        names.addresses[host] = ["10.0.0.1"]
        return found

    monkeypatch.setattr(media_fetcher, "getaddrinfo", rebind)
    async with file_server() as server:
        used = fetcher()
        assert await used.fetch({"a": server.url("/file")}) == {"a": FILE}
        assert "public" in (await refusal(used, server.url("/file"))).message
        assert names.asked == ["a.test", "a.test"]
        assert len(server.requests) == 1


async def test_one_private_address_among_others_refuses_the_name(names: Names) -> None:
    names.addresses["a.test"] = ["127.0.0.1", "10.0.0.1"]
    async with file_server() as server:
        assert "public" in (await refusal(fetcher(), server.url("/file"))).message
        assert server.requests == []


async def test_the_next_address_is_tried_when_nobody_listens_at_the_first(names: Names) -> None:
    names.addresses["a.test"] = ["127.0.0.2", "127.0.0.1"]
    async with file_server() as server:
        assert await fetcher().fetch({"a": server.url("/file")}) == {"a": FILE}


@pytest.mark.parametrize(("path", "host", "why"), [
    ("/redirect", "a.test", "status 302; redirects are not followed"),
    ("/missing", "a.test", "status 404"),
    ("/broken", "a.test", "the connection failed"),
    ("/file", "none.test", "its server was not found"),
])  # fmt: skip
async def test_files_that_cannot_be_fetched(names: Names, path: str, host: str, why: str) -> None:
    async with file_server() as server:
        error = await refusal(fetcher(), server.url(path, host))
        assert error.status == 400
        assert why in error.message
        assert "secret" not in error.message
        assert [path for path, _ in server.requests] == [path] * (host == "a.test")


async def test_the_bytes_of_a_request_are_bounded_together(names: Names) -> None:
    async with file_server() as server:
        used = fetcher(2 * len(FILE))
        assert len(await used.fetch({"a": server.url("/1"), "b": server.url("/2", "b.test")})) == 2
        error = await refusal(used, *(server.url(f"/{number}") for number in range(3)))
        assert f"more than {2 * len(FILE)} bytes" in error.message
        assert "more than" in (await refusal(used, server.url("/endless"))).message
        await server.left.wait()


async def test_a_slow_server_delays_nobody_else(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_fetcher, "MAX_OPEN", 1)
    async with file_server() as server:
        used = fetcher()
        slow = asyncio.create_task(used.fetch({"a": server.url("/hang")}))
        await server.hanging.wait()
        assert await used.fetch({"a": server.url("/file", "b.test")}) == {"a": FILE}
        assert (await refusal(used, server.url("/file"))).status == 429
        assert not slow.done()
        slow.cancel()
        await server.left.wait()
        assert await used.fetch({"a": server.url("/file")}) == {"a": FILE}


async def test_a_slow_name_server_delays_nobody_else(names: Names) -> None:
    names.slow = "a.test"
    async with file_server() as server:
        used = fetcher()
        slow = [asyncio.create_task(used.fetch({"a": server.url("/file")})) for _ in range(8)]
        await asyncio.to_thread(names.asking.wait)
        assert await used.fetch({"a": server.url("/file", "b.test")}) == {"a": FILE}
        slow[0].cancel()
        names.answered.set()
        assert await asyncio.gather(*slow[1:]) == [{"a": FILE}] * 7
        assert names.asked.count("a.test") == 1


async def test_a_server_that_never_answers_is_given_up(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(media_fetcher, "FETCH_SECONDS", 0.1)
    async with file_server() as server:
        error = await refusal(fetcher(), server.url("/file"), server.url("/hang"))
        assert error.message == "image 1 could not be fetched within 0.1 s"
        await server.left.wait()


async def test_certificates_are_checked_against_the_name(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", AUTHORITY)
    names.addresses["localhost"] = ["127.0.0.1"]
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(CERTIFICATE, KEY)
    async with file_server(tls) as server:
        used = fetcher()
        assert await used.fetch({"a": server.url("/file", "localhost", "https")}) == {"a": FILE}
        assert "failed" in (await refusal(used, server.url("/file", "a.test", "https"))).message
        assert len(server.requests) == 1


@pytest.mark.parametrize(("url", "why"), [
    ("http://c.test/", "none of --allowed-media-domains (a.test, b.test, localhost, none.test)"),
    ("http://a.test.c.test/", "none of"),
    ("http://127.0.0.1/", "none of"),
    ("http://a.test@c.test/", "user name"),
    ("http://user:word@a.test/", "user name"),
    ("ftp://a.test/", "neither"),
    ("file:///etc/passwd", "neither"),
    ("//a.test/", "neither"),
    ("", "neither"),
    ("http://a.test:x/", "no valid address"),
    ("http://[::1", "no valid address"),
    ("http://[/", "none of"),
    ("http://\u2488com/", "no valid address"),
])  # fmt: skip
async def test_other_addresses_are_refused(url: str, why: str) -> None:
    processing = MediaProcessing(Path("model"), ["a.test", "b.test", "none.test", "localhost"], 1000)
    with pytest.raises(APIError) as raised:
        processing.check([MediaFile("audio", url)])
    assert why in raised.value.message


def test_without_domains_every_address_is_refused() -> None:
    with pytest.raises(APIError, match="--allowed-media-domains"):
        MediaProcessing(Path("model")).check([MediaFile("image", "https://a.test/image.png")])
