"""Messages to bytes and back: strict, bounded, typed. Anything else than a valid message is a `ProtocolError`."""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""No frame may be larger, on any socket."""

T = TypeVar("T")
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """A peer sent what the protocol does not allow. The shell names the peer, counts it and goes on."""


def encode(message: msgspec.Struct) -> bytes:
    return _encoder.encode(message)


class Decoder(Generic[T]):
    """A long-lived decoder for one direction of one connection: `Decoder(Hello | ClientMessage)`."""

    def __init__(self, types: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None: ...

    def decode(self, frame: bytes) -> T: ...


def pack(values: Sequence[int] | NDArray[Any]) -> bytes: ...


def unpack(data: bytes) -> NDArray[np.int32]: ...
