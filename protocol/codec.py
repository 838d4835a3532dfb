"""Encoding and decoding of messages: strict, bounded and typed. A frame that is no valid message is a `ProtocolError`.

Strict means that no value is converted: 1.0 is no integer, true is not 1, text is not bytes. One long-lived `Decoder`
serves one direction of one connection; its type is the tagged union of that direction's messages.

Rules for changes of messages (`PROTOCOL_VERSION` in protocol.handshake):

- Structs are arrays whose first element is the tag. A field is identified by its position: never move, remove or retype
  one.
- A minor version appends fields with defaults. Old bytes decode under new types (the defaults fill in), new bytes
  decode under old types (elements beyond the last field are skipped).
- A new tag is a `ProtocolError` for old peers: send it only to a peer whose version, in `Hello` or `Welcome`, has it.
- Any other change needs a new major version. The handshake refuses peers with different major versions.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""Maximum size of a frame, on any socket."""

T = TypeVar("T")
S = TypeVar("S", bound=np.generic)
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """A peer violated the protocol. The service logs the peer, counts the error and continues."""


def encode(message: msgspec.Struct) -> bytes:
    """Raises: ValueError, if the message exceeds `MAX_MESSAGE_BYTES`."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a {type(message).__name__} of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} can be sent")
    return frame


class Decoder(Generic[T]):
    """Decoder for one direction of one connection: `Decoder(Hello | ClientMessage)`."""

    def __init__(self, types: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(types, strict=True)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes) -> T:
        """Raises: ProtocolError, if the frame is not a message of these types."""
        if len(frame) > self._max_bytes:
            raise ProtocolError(f"a message of {len(frame)} bytes; at most {self._max_bytes} are allowed")
        try:
            message: T = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"not a valid message: {error}") from None
        return message


def pack(values: Sequence[int] | NDArray[Any]) -> bytes:
    """Return the bytes of a column: int32 little-endian for a sequence; an array keeps its data type."""
    if isinstance(values, np.ndarray):
        return values.tobytes()
    return np.array(values, "<i4").tobytes() if values else b""  # most of a plan's lists are empty


@overload
def unpack(data: bytes | memoryview) -> NDArray[np.int32]: ...
@overload
def unpack(data: bytes | memoryview, dtype: type[S]) -> NDArray[S]: ...
def unpack(data: bytes | memoryview, dtype: type[Any] = np.int32) -> NDArray[Any]:
    """Return a read-only view of a column. The field's docstring gives the data type if it is not int32.

    Raises: ProtocolError, if the size is not a multiple of the element size.
    """
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        raise ProtocolError(f"a column of {len(data)} bytes does not hold {dtype.__name__} values") from None
