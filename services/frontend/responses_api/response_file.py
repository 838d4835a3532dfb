"""The file of one response.

It has a line of JSON with what the response is made from, then a line for each write of its events. The last line has
the response itself; one that is not complete was torn by a crash and does not count.
"""

import logging
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import msgspec
from pydantic import TypeAdapter

from protocol.lora import LoRAAdapter
from services.frontend.errors import APIError
from services.frontend.openai.answers.choice import Delivered
from services.frontend.responses_api.answers import END_OF_EVENT, joined
from services.frontend.responses_api.schemas import Item

log = logging.getLogger("runahead.frontend")

READ_SIZE = 1 << 20
CANCEL = ".cancel"
"""End of the name of a file that says that a response is to be cancelled."""
ITEM_LIST: TypeAdapter[list[Item]] = TypeAdapter(list[Item])


class Origin(msgspec.Struct, frozen=True):
    """The source of a response with `background`, from which another frontend can go on with it."""

    body: str
    """The request body, as the client sent it."""
    model: str
    created: int
    """Seconds since 1970."""
    prompt: bytes
    """Token ids, int32 little-endian."""
    params: bytes
    """`SamplingParams` as MessagePack, with the seed that was drawn."""
    lora: LoRAAdapter | None = None
    """Another frontend may have other files under the name."""


class StoredHead(msgspec.Struct):
    conversation: msgspec.Raw
    """Items before the answer."""
    num_given: int
    """Number of those at the end of the conversation that this turn's request had, at least one."""
    origin: Origin | None = None
    """None: it was created without `background`."""

    @classmethod
    def of(cls, history: Sequence[Item], given: Sequence[Item], origin: Origin | None = None) -> "StoredHead":
        conversation = ITEM_LIST.dump_json([*history, *given], exclude_none=True)
        return cls(msgspec.Raw(conversation), len(given), origin)

    def items(self) -> list[Item]:
        return ITEM_LIST.validate_json(bytes(self.conversation))

    def given(self) -> list[Item]:
        """Return the items of this turn's request."""
        return self.items()[-self.num_given :]

    @property
    def history(self) -> list[Item]:
        """Items of the earlier turns."""
        return self.items()[: -self.num_given]


class StoredLine(msgspec.Struct, omit_defaults=True):
    events: str = ""
    batches: list[list[int]] = []
    """Tokens whose events these are, as they became chunks."""
    identity: str = ""
    """Identity of the engine that made them."""
    response: msgspec.Raw = msgspec.Raw()
    """In the last line."""


_decode_head = msgspec.json.Decoder(StoredHead).decode
_decode_line = msgspec.json.Decoder(StoredLine).decode


def events_in(data: bytes) -> list[bytes]:
    """Return each of the events, which are complete."""
    return [event + END_OF_EVENT for event in data.split(END_OF_EVENT)[:-1]]


class FileContent:
    """A file as it is now. Raises: APIError, if it is damaged"""

    def __init__(self, data: bytes) -> None:
        *lines, torn = data.split(b"\n")
        self.size = len(data) - len(torn)
        """Bytes of the lines that are complete."""
        try:
            self.head = _decode_head(lines[0])
            self.lines = [_decode_line(line) for line in lines[1:]]
        except (msgspec.DecodeError, IndexError) as error:
            log.error("the file of a stored response cannot be read: %s", error)
            raise APIError(500, "the stored response is damaged") from None

    @property
    def events(self) -> list[bytes]:
        return [event for line in self.lines for event in events_in(line.events.encode())]

    @property
    def last(self) -> bytes:
        """The response when it had ended, "" before."""
        return bytes(self.lines[-1].response) if self.lines else b""

    @property
    def response(self) -> bytes:
        return self.last or msgspec.json.encode(joined(self.events))

    @property
    def opening(self) -> bytes:
        """The events before any token."""
        return self.lines[0].events.encode()

    @property
    def delivered(self) -> Delivered:
        batches = [batch for line in self.lines for batch in line.batches]
        identity = next((line.identity for line in reversed(self.lines) if line.identity), "")
        return Delivered(batches, "".join(line.events for line in self.lines[1:]).encode(), identity)


def not_written(path: Path, error: OSError) -> APIError:
    why = error.strerror or str(error)
    log.error("a response cannot be stored in %s: %s", path.parent.parent, why)
    return APIError(500, f"the response cannot be stored: {why}", "store")


async def follow_file(file: BinaryIO, number: int, more: Callable[[], Awaitable[bool]]) -> AsyncIterator[bytes]:
    """Yield the events behind a sequence number as a file has them, until the last one.

    Args:
        more: waits for more lines; returns False if none will follow.
    """
    next_number, rest, is_head = 0, b"", True
    while True:
        data = file.read(READ_SIZE)
        *lines, rest = (rest + data).split(b"\n")
        if is_end := len(data) < READ_SIZE:  # a torn line may be cut off and replaced meanwhile
            file.seek(-len(rest), os.SEEK_CUR)
            rest = b""
        found, is_last = [], False
        for encoded in lines[is_head:]:
            line = _decode_line(encoded)
            events = events_in(line.events.encode())
            found += events[max(number + 1 - next_number, 0) :]
            next_number += len(events)
            is_last = bool(bytes(line.response))
        is_head = is_head and not lines
        if found:
            yield b"".join(found)
        if is_last or (is_end and not lines and not await more()):
            return
