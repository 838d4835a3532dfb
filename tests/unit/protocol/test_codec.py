"""Encoding and decoding: every message is restored, and any other frame is a ProtocolError."""

import math
import os
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol import codec
from protocol.codec import Decoder, ProtocolError, encode, pack, unpack
from protocol.fields import MAX_ITEMS, MAX_NAME
from protocol.handshake import Hello
from protocol.membership import Heartbeat, LoadProgress, Register
from protocol.requests import AbortRequest, ClientMessage, GenerateRequest
from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput, StepTimes
from tests.unit.protocol.catalogue import DECODERS, DIRECTIONS, MESSAGES, STRUCTS, direction_of, values

PARAMS = SamplingParams(max_tokens=1)
EXAMPLES = 200 if os.environ.get("RUNAHEAD_SOAK") else 25
"""Random instances of each message."""


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda struct: struct.__name__)
@settings(max_examples=EXAMPLES)
@given(data=st.data())
def test_every_message_is_restored(struct: type[msgspec.Struct], data: st.DataObject) -> None:
    message = data.draw(values(struct))
    decoder = DECODERS[direction_of(struct)] if struct in MESSAGES else Decoder[Any](struct)
    decoded = decoder.decode(encode(message))
    assert decoded == message
    assert type(decoded) is struct


def test_every_message_has_one_direction_and_a_unique_tag() -> None:
    listed = [t for types in DIRECTIONS.values() for t in getattr(types, "__args__", (types,))]
    assert sorted(m.__name__ for m in listed) == sorted(m.__name__ for m in MESSAGES)
    assert len({m.__struct_config__.tag for m in MESSAGES}) == len(MESSAGES)


def test_oversized_frame_is_refused_before_it_is_decoded() -> None:
    decoder: Decoder[Hello] = Decoder(Hello, max_bytes=100)
    frame = encode(Hello(1, 0, "worker", "x" * 200))
    with pytest.raises(ProtocolError, match=f"{len(frame)} bytes; at most 100"):
        decoder.decode(frame)
    with pytest.raises(ProtocolError, match="201 bytes"):
        decoder.decode(b"\xc1" * 201)  # no msgpack: the size is checked first
    assert decoder.decode(encode(Hello(1, 0, "worker", "short"))).name == "short"


def test_oversized_message_is_refused_at_the_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_MESSAGE_BYTES", 1000)
    with pytest.raises(ValueError, match=r"GenerateRequest of \d+ bytes; at most 1000"):
        encode(GenerateRequest(1, bytes(1000), 250, PARAMS))


def wire(value: object) -> bytes:
    return msgspec.msgpack.encode(value)


PARAMS_WIRE = msgspec.to_builtins(PARAMS)


def request(**changes: object) -> list[object]:
    fields = {
        "tag": "generate",
        "number": 1,
        "token_ids": b"",
        "prompt": 0,
        "params": PARAMS_WIRE,
        "priority": 0,
        "salt": "",
    }
    return list((fields | changes).values())


INVALID = {
    "no bytes": b"",
    "null": wire(None),
    "a map instead of an array": wire({"type": "abort", "numbers": [1]}),
    "no tag": wire([]),
    "an unknown tag": wire(["pickle", b"\x80\x04"]),
    "a tag that is no text": wire([7, [1]]),
    "a field missing": wire(["abort"]),
    "a byte too many": wire(["abort", [1]]) + b"\0",
    "a byte too few": wire(["abort", [1]])[:-1],
    "a list that claims four billion elements": b"\x92\xa5abort\xdd\xff\xff\xff\xff\x01",
    "bytes that claim four gigabytes": b"\x96\xa8generate\x01\xc6\xff\xff\xff\xff\x01",
    "too many numbers": wire(["abort", [1] * (MAX_ITEMS + 1)]),
    "a number beyond uint32": wire(request(number=2**32)),
    "a number beyond int64": wire(request(number=2**64 - 1)),
    "a negative number": wire(request(number=-1)),
    "true for a number": wire(request(number=True)),
    "1.0 for a number": wire(request(number=1.0)),
    "text for a number": wire(request(number="1")),
    "text for bytes": wire(request(token_ids="0000")),
    "bytes for text": wire(request(salt=b"salt")),
    "text that is not UTF-8": wire(request(salt="~~~~")).replace(b"~~~~", b"\xff\xfe\xfd\xfc"),
    "a priority beyond int32": wire(request(priority=2**31)),
    "sampling parameters as a map": wire(request(params={"max_tokens": 1})),
    "a temperature that is no number": wire(request(params=[1, math.nan])),
    "an infinite temperature": wire(request(params=[1, math.inf])),
    "an extension type": wire(request(salt=msgspec.msgpack.Ext(1, b"x"))),
    "a timestamp": wire(request(salt=msgspec.msgpack.Ext(-1, bytes(8)))),
    "deep nesting where a field belongs": b"\x92\xa5abort" + b"\x91" * 100_000 + b"\xc0",
    "deep nesting behind the last field": b"\x93\xa5abort\x90" + b"\x91" * 100_000 + b"\xc0",
    "deep nesting of maps": b"\x92\xa5abort" + b"\x81\xa1a" * 100_000 + b"\xc0",
}


@pytest.mark.parametrize("frame", INVALID.values(), ids=INVALID.keys())
def test_invalid_frame_is_a_protocol_error(frame: bytes) -> None:
    decoder: Decoder[Any] = Decoder(ClientMessage)
    with pytest.raises(ProtocolError, match="not a valid message"):
        decoder.decode(frame)
    assert decoder.decode(wire(["abort", [1]])) == AbortRequest([1])  # the decoder still works


def result(**times: float) -> ModelRunnerOutput:
    return ModelRunnerOutput(1, 1, b"", b"", b"", b"", StepTimes(**times))


@pytest.mark.parametrize(
    ("message", "allowed"),
    [
        (Hello(1, 0, "worker", "n" * (MAX_NAME + 1)), Hello(1, 0, "worker", "n" * MAX_NAME)),
        (Heartbeat(1, 2**63), Heartbeat(1, 2**63 - 1)),
        (Heartbeat(-1, 0), Heartbeat(0, 0)),
        (Register("sim", "", epoch=2**62), Register("sim", "", epoch=2**62 - 1)),
        (Register("sim", "", tensor_parallel_sizes=()), Register("sim", "", tensor_parallel_sizes=(1,))),
        (Register("sim", "", tensor_parallel_sizes=(0, 1)), Register("sim", "", tensor_parallel_sizes=(1, 2))),
        (LoadProgress("reading", math.nan), LoadProgress("reading", 1.0)),
        (LoadProgress("reading", 1.1), LoadProgress("reading", 0.0)),
        (result(received=math.nan), result(received=1.5)),
        (result(idle=math.inf), result(idle=-1e-9)),
    ],
)
def test_fields_have_bounds(message: msgspec.Struct, allowed: msgspec.Struct) -> None:
    decoder = DECODERS[direction_of(type(message))]
    with pytest.raises(ProtocolError):
        decoder.decode(encode(message))
    assert decoder.decode(encode(allowed)) == allowed


def test_columns_are_little_endian_int32_and_read_only() -> None:
    data = pack([1, -2, 2**31 - 1])
    assert data == bytes.fromhex("01000000feffffffffffff7f")
    column = unpack(data)
    assert column.dtype == np.int32
    assert column.tolist() == [1, -2, 2**31 - 1]
    with pytest.raises(ValueError, match="read-only"):
        column[0] = 5
    assert unpack(b"").tolist() == []


def test_arrays_keep_their_data_type() -> None:
    numbers = np.array([2**32 - 1, 7], np.uint32)
    assert unpack(pack(numbers), np.uint32).tolist() == [2**32 - 1, 7]
    assert unpack(pack(np.array([True, False])), np.bool_).tolist() == [True, False]
