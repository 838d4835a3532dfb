"""An HTTP/1.1 connection of asyncio that stays open."""

import asyncio
import contextlib
import ssl
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import urlsplit

import h11

from services.cli.ask import NoAnswer, ServerAddress
from services.cli.settings import ConfigurationError

READ_BYTES = 1 << 16


class HttpAnswer(NamedTuple):
    status: int
    headers: dict[str, str]
    """By lower-case name."""
    body: bytes


@dataclass(frozen=True)
class Target:
    """Address of the server: a Unix socket, or host and port."""

    host: str
    port: int | None = None
    socket: str = ""
    tls: ssl.SSLContext | None = None
    """None: no TLS."""
    root: str = ""
    headers: dict[str, str] = field(default_factory=dict)

    @classmethod
    def from_socket(cls, path: str) -> "Target":
        return cls("localhost", socket=path)

    @classmethod
    def from_url(cls, server: ServerAddress) -> "Target":
        """Raises: ConfigurationError"""
        url, key = server.url, server.api_key
        parts = urlsplit(url)
        try:
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host:
            raise ConfigurationError(f"--url: {url} names no host; give one such as http://127.0.0.1:8000")
        headers = {"authorization": f"Bearer {key}"} if key else {}
        root = parts.path.rstrip("/").removesuffix("/v1")
        try:
            tls = server.tls() if parts.scheme == "https" else None
        except NoAnswer as error:
            raise ConfigurationError(str(error)) from None
        return cls(host, port, tls=tls, root=root, headers=headers)

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        """Raises: OSError"""
        if self.socket:
            return await asyncio.open_unix_connection(self.socket)
        port = self.port or (80 if self.tls is None else 443)
        return await asyncio.open_connection(self.host, port, ssl=self.tls)


class HttpConnection:
    """Sends one request after another, and connects when that is needed."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._http = h11.Connection(h11.CLIENT)
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def request(self, method: str, path: str, body: bytes = b"") -> HttpAnswer:
        """Return the answer. A failed connection is closed; the next request opens another.

        Raises: OSError
        """
        try:
            return await self._exchange(method, path, body)
        except h11.ProtocolError as error:  # such as a connection that was closed before the answer
            self.close()
            raise ConnectionError(str(error)) from error
        except BaseException:
            self.close()
            raise

    async def _exchange(self, method: str, path: str, body: bytes) -> HttpAnswer:
        """Raises: OSError, h11.ProtocolError"""
        if self._streams is not None and self._http.our_state is h11.DONE is self._http.their_state:
            self._http.start_next_cycle()
        else:
            self.close()
            self._streams, self._http = await self._target.connect(), h11.Connection(h11.CLIENT)
        reader, writer = self._streams
        headers = {
            "host": self._target.host,
            "content-type": "application/json",
            "content-length": str(len(body)),
            **self._target.headers,
        }
        request = h11.Request(method=method, target=self._target.root + path, headers=list(headers.items()))
        for event in (request, h11.Data(body), h11.EndOfMessage()):
            writer.write(self._http.send(event) or b"")
        await writer.drain()
        return await self._answer(reader)

    async def _answer(self, reader: asyncio.StreamReader) -> HttpAnswer:
        """Raises: OSError, h11.ProtocolError"""
        head: h11.Response | None = None
        parts: list[bytes] = []
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(await reader.read(READ_BYTES))
            elif isinstance(event, h11.Response):
                head = event
            elif isinstance(event, h11.Data):
                parts.append(bytes(event.data))
            elif head is not None and isinstance(event, h11.EndOfMessage):
                fields = {name.decode("latin-1"): value.decode("latin-1") for name, value in head.headers}
                return HttpAnswer(head.status_code, fields, b"".join(parts))
            elif not isinstance(event, h11.InformationalResponse):
                raise ConnectionError("the server closed the connection")

    def close(self) -> None:
        if self._streams is not None:
            with contextlib.suppress(RuntimeError):  # the loop may have ended
                self._streams[1].close()
            self._streams = None
