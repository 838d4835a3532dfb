"""Messages between a frontend and the process that renders its chat templates, as JSON over a pair of sockets.

JSON, because clients' values may have integers of any size.
"""

import json
import socket
import struct
import time
from typing import Any

import msgspec

from services.frontend.json_text import json_text

_HEAD = struct.Struct("<I")
MAX_MESSAGE_BYTES = 256 * 1024 * 1024
"""Bounds what the frontend reads. The renderer's output is bounded by its own limit, which is far below."""


class TemplateSources(msgspec.Struct, array_like=True):
    """The first message: templates to compile."""

    default: str | None
    tool_use: str | None
    """Used in place of `default` if tools are given."""
    special: dict[str, str]
    """Special tokens, which are variables of the templates."""


class RenderJob(msgspec.Struct, array_like=True):
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    add_generation_prompt: bool
    variables: dict[str, Any]
    """Values for other variables; those that the template does not have are ignored."""
    seconds: float
    """Limit of the time."""


class Rendered(msgspec.Struct, array_like=True, tag=True):
    text: str


class TemplateRefused(msgspec.Struct, array_like=True, tag=True):
    """The template called `raise_exception`."""

    reason: str


class LimitReached(msgspec.Struct, array_like=True, tag=True):
    reason: str


class TemplatesBroken(msgspec.Struct, array_like=True, tag=True):
    """The templates cannot be compiled, or an expression failed."""

    reason: str


Outcome = Rendered | TemplateRefused | LimitReached | TemplatesBroken


class PipeClosed(Exception):
    """The other side has ended."""


def send(connection: socket.socket, message: msgspec.Struct, seconds: float | None = None) -> None:
    """Raises: PipeClosed; TimeoutError, after `seconds`"""
    data = json_text(msgspec.to_builtins(message)).encode()
    connection.settimeout(seconds)
    try:
        connection.sendall(_HEAD.pack(len(data)) + data)
    except (BrokenPipeError, ConnectionResetError):
        raise PipeClosed from None


def decode(data: bytearray, kind: Any) -> Any:
    """Return a message, whose type is `kind`."""
    return msgspec.convert(json.loads(data), kind)


def receive(connection: socket.socket, seconds: float | None = None) -> bytearray:
    """Return the next message. Raises: PipeClosed; TimeoutError, after `seconds`"""
    deadline = None if seconds is None else time.monotonic() + seconds
    (size,) = _HEAD.unpack(_read(connection, _HEAD.size, deadline))
    if size > MAX_MESSAGE_BYTES:
        raise PipeClosed
    return _read(connection, size, deadline)


def _read(connection: socket.socket, size: int, deadline: float | None) -> bytearray:
    data = bytearray(size)
    view, at = memoryview(data), 0
    while at < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            count = connection.recv_into(view[at:])
        except ConnectionResetError:
            raise PipeClosed from None
        if not count:
            raise PipeClosed
        at += count
    return data
