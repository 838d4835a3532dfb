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

    def __init__(self, types: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(types)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes) -> T:
        """Raises: ProtocolError, for whatever is not a message of these types."""
        if len(frame) > self._max_bytes:
            raise ProtocolError(f"a message of {len(frame)} bytes; at most {self._max_bytes} are allowed")
        try:
            message: T = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
            raise ProtocolError(f"not a valid message: {error}") from None
        return message


def pack(values: Sequence[int] | NDArray[Any]) -> bytes:
    """int32 little-endian, row after row; other integer arrays keep their own width."""
    return (values if isinstance(values, np.ndarray) else np.array(values, "<i4")).tobytes()


def unpack(data: bytes) -> NDArray[np.int32]:
    """A read-only int32 view. Raises: ProtocolError, if the length is no multiple of 4."""
    if len(data) % 4:
        raise ProtocolError(f"a column of {len(data)} bytes does not hold int32 values")
    return np.frombuffer(data, "<i4")
