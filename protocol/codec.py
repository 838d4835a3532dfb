"""Messages to bytes and back: strict, bounded, typed. Anything else than a valid message is a `ProtocolError`.

Strict means that nothing is converted: 1.0 is no integer, true is no 1, text is no bytes. One long-lived `Decoder`
serves one direction of one connection and knows the tagged union of what may come.

How messages evolve (`PROTOCOL_VERSION` in protocol.handshake):

- Structs are arrays, their first element is the tag. A field is its position: never reorder, remove or retype one.
- A minor version appends fields with defaults. Old bytes decode under new types (the defaults fill in), new bytes
  decode under old types (elements beyond the last field are skipped).
- A new tag reaches old peers as a `ProtocolError`: send it only to a peer whose `Hello` or `Welcome` knows it.
- Whatever else changes, the major version changes, and the handshake refuses the pair.
"""

from collections.abc import Sequence
from typing import Any, Generic, TypeVar, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
"""No frame may be larger, on any socket."""

T = TypeVar("T")
S = TypeVar("S", bound=np.generic)
_encoder = msgspec.msgpack.Encoder()


class ProtocolError(Exception):
    """A peer sent what the protocol does not allow. The shell names the peer, counts it and goes on."""


def encode(message: msgspec.Struct) -> bytes:
    """Raises: ValueError, for a message that no peer would accept because of its size."""
    frame = _encoder.encode(message)
    if len(frame) > MAX_MESSAGE_BYTES:
        raise ValueError(
            f"a {type(message).__name__} of {len(frame)} bytes; at most {MAX_MESSAGE_BYTES} can be sent"
        )
    return frame


class Decoder(Generic[T]):
    """A long-lived decoder for one direction of one connection: `Decoder(Hello | ClientMessage)`."""

    def __init__(self, types: Any, max_bytes: int = MAX_MESSAGE_BYTES) -> None:
        self._decoder = msgspec.msgpack.Decoder(types, strict=True)
        self._max_bytes = max_bytes

    def decode(self, frame: bytes) -> T:
        """Raises: ProtocolError, for whatever is not a message of these types."""
        if len(frame) > self._max_bytes:
            raise ProtocolError(f"a message of {len(frame)} bytes; at most {self._max_bytes} are allowed")
        try:
            message: T = self._decoder.decode(frame)
        except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, MemoryError) as error:
            raise ProtocolError(f"not a valid message: {error}") from None
        return message


def pack(values: Sequence[int] | NDArray[Any]) -> bytes:
    """int32 little-endian, row after row; arrays keep their own width."""
    return (values if isinstance(values, np.ndarray) else np.array(values, "<i4")).tobytes()


@overload
def unpack(data: bytes | memoryview) -> NDArray[np.int32]: ...
@overload
def unpack(data: bytes | memoryview, dtype: type[S]) -> NDArray[S]: ...
def unpack(data: bytes | memoryview, dtype: type[Any] = np.int32) -> NDArray[Any]:
    """A read-only view of a column: int32 unless the field's docstring names another `dtype`.

    Raises: ProtocolError, if the bytes are no whole number of elements.
    """
    try:
        return np.frombuffer(data, dtype)
    except ValueError:
        raise ProtocolError(f"a column of {len(data)} bytes does not hold {dtype.__name__} values") from None
