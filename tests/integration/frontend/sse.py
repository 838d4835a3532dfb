"""A client of event streams that returns each chunk as it was written."""

import json
import socket
from collections.abc import Iterable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import h11

from tests.integration.frontend.scripted import PATIENCE, Frontend


class EventParser:
    """Parses an event stream byte by byte according to the HTML standard; only the `data` field."""

    def __init__(self) -> None:
        self._line = bytearray()
        self._data: list[bytes] = []
        self._was_cr = False

    def feed(self, part: bytes) -> list[str]:
        """Return the data of the events that are complete now."""
        events = []
        for byte in part:
            if self._was_cr and byte == 0x0A:
                self._was_cr = False
                continue
            self._was_cr = byte == 0x0D
            if byte not in b"\r\n":
                self._line.append(byte)
                continue
            line, self._line = bytes(self._line), bytearray()
            if line:
                name, _, value = line.partition(b":")
                assert name == b"data", line
                self._data.append(value.removeprefix(b" "))
            elif self._data:
                events.append(b"\n".join(self._data).decode())
                self._data.clear()
        return events

    @property
    def is_between(self) -> bool:
        """True if no event is incomplete."""
        return not self._line and not self._data


def texts(events: Iterable[str]) -> dict[int, str]:
    """Return the text of each choice of a completion. Checks that the stream is complete."""
    *chunks, done = events
    assert done == "[DONE]"
    found: dict[int, str] = {}
    for chunk in map(json.loads, chunks):
        assert "choices" in chunk, chunk
        for choice in chunk["choices"]:
            found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


@dataclass
class Answer:
    """The part of a response that has arrived."""

    status: int
    chunks: list[bytes] = field(default_factory=list)
    is_complete: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.chunks)


class SseClient:
    """One HTTP connection."""

    def __init__(self, frontend: Frontend, buffer: int | None = None, version: str = "1.1") -> None:
        """
        Args:
            buffer: bytes of the kernel's receive buffer.
        """
        self.socket = socket.socket()
        if buffer is not None:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        self.socket.settimeout(PATIENCE)
        address = urlsplit(frontend.url)
        self.socket.connect((address.hostname, address.port))
        self._version = version
        self._http = h11.Connection(h11.CLIENT)
        self.answer: Answer | None = None

    def post(self, path: str = "/v1/completions", **body: object) -> None:
        """Request a stream."""
        if self._http.our_state is h11.DONE:
            self._http.start_next_cycle()
        self.answer = None
        data = json.dumps({"stream": True, **body}).encode()
        head = h11.Request(
            method="POST", target=path, headers=[("Host", "localhost"), ("Content-Length", str(len(data)))]
        )
        raw = self._http.send(head) or b""
        raw = raw.replace(b"HTTP/1.1", f"HTTP/{self._version}".encode())
        for event in (h11.Data(data), h11.EndOfMessage()):
            raw += self._http.send(event) or b""
        self.socket.sendall(raw)

    def read(self) -> bytes:
        """Return the next chunk as it was written; b"" at the end of the response."""
        chunk = b""
        while True:
            event = self._http.next_event()
            if event is h11.NEED_DATA:
                self._http.receive_data(self.socket.recv(1 << 16))
            elif isinstance(event, h11.Response):
                self.answer = Answer(event.status_code)
            elif isinstance(event, h11.Data):
                chunk += event.data
                if event.chunk_end or self._version == "1.0":
                    self.answer.chunks.append(chunk)
                    return chunk
            elif isinstance(event, h11.EndOfMessage):
                self.answer.is_complete = True
                return b""
            else:
                raise AssertionError(f"{event} was not expected")

    def read_all(self) -> Answer:
        while self.read():
            pass
        assert self.answer is not None
        return self.answer

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: BaseException | TracebackType | None) -> None:
        self.socket.close()


def events_of(body: bytes) -> list[Any]:
    parser = EventParser()
    found = parser.feed(body)
    assert parser.is_between
    return found
