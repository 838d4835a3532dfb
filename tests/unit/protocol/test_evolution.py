"""Peers of different minor versions understand one another, as protocol.codec promises."""

from typing import Any

import msgspec
import pytest

from protocol.codec import Decoder, ProtocolError, encode
from tests.unit.protocol.catalogue import DECODERS, MESSAGES, direction_of
from tests.unit.protocol.examples import EXAMPLES

GOLDEN_1_0 = {
    "Hello": "95a568656c6c6f0100a6776f726b6572a66e6f64652d31",
    "Welcome": "93a777656c636f6d650100",
    "Refused": "92a772656675736564ad6e6f2c207468616e6b20796f75",
    "Register": "95a87265676973746572a66e6174697665a464656d6fa66e6f64652d31cd1267",
    "Assignment": "98aa61737369676e6d656e7401000110cd0200cd0800cd1000",
    "LoadProgress": "93a870726f6772657373af72656164696e672077656967687473cb3fd0000000000000",
    "Loaded": "97a66c6f61646564a6633066666565cd7d00cd1000ce00010000cd03e8c3",
    "InitializeCache": "93aa696e69745f6361636865cd03e8cd1000",
    "Ready": "92a5726561647901",
    "Heartbeat": "93a968656172746265617401cf0000010000000000",
    "LoadFailed": "92ab6c6f61645f6661696c6564b16e6f2073756368206469726563746f7279",
    "Shutdown": "92a873687574646f776ea4646f6e65",
    "GenerateRequest": (
        "98a867656e6572617465ceffffffffc40c010000000200000003000000029940cb3fe6666666666666cb3feccccccccc"
        "cccd28cb3fa999999999999acfffffffffffffffff0292020591cd012cfba674656e616e74a6636d706c2d31"
    ),
    "AbortRequest": "92a561626f72749201ceffffffff",
    "RequestOutputs": (
        "95a76f757470757473c4080700000009000000c4080000000004000000c4080b0000000c00000092960700cd012c1001"
        "a0960903c00000b174686520776f726b6572206661696c6564"
    ),
    "EngineState": (
        "9ba5737461746502a57265616479cb3ff0000000000000cd1000cd7d00cd03e810cd0100c281b46e756d5f7265717565"
        "7374735f72756e6e696e67cb4000000000000000"
    ),
    "SchedulerOutput": (
        "9da4737465700111c4080400000000000000c4080100000009000000c408000000000c000000c4080500000001000000"
        "c402000191960401c41801000000020000000300000004000000050000000600000006c404070000009940cb3fe66666"
        "66666666cb3feccccccccccccd28cb3fa999999999999acfffffffffffffffff0292020591cd012cc408040000000000"
        "0000c4080800000003000000c40402000000c3"
    ),
    "ReleaseSlots": "93a772656c6561736501c4080300000004000000",
    "GrammarOutput": "95a76772616d6d61720111c40400000000c40cffffffff0000000001000000",
    "ModelRunnerOutput": (
        "9aa6726573756c740111c4080400000000000000c4080100000009000000c4080200000000000000c4080b0000000c00"
        "0000cb3ff8000000000000cb4004000000000000cb3fc0000000000000"
    ),
    "StepFault": "94a56661756c740111bb52756e74696d654572726f723a206f7574206f66206d656d6f7279",
}
"""What version 1.0 sends for each of EXAMPLES, in hex. Never edit these."""
GOLDEN_1_1 = {
    "RankLost": "93a972616e6b5f6c6f737403b9636f6e6e656374696f6e20636c6f7365642062792070656572",
    "EndEpoch": "93a9656e645f65706f636803af612072616e6b20776173206c6f7374",
    "Ping": "91a470696e67",
}
"""The messages that version 1.1 added."""
GOLDEN = GOLDEN_1_0 | GOLDEN_1_1


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(MESSAGES)
    assert GOLDEN.keys() == {message.__name__ for message in MESSAGES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_bytes_of_earlier_versions_mean_what_they_meant(example: msgspec.Struct) -> None:
    frame = bytes.fromhex(GOLDEN[type(example).__name__])
    assert DECODERS[direction_of(type(example))].decode(frame) == example


def next_minor(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """The same message after a minor version has appended two fields."""
    fields: list[Any] = [
        (f.name, f.type, msgspec.field(default=f.default, default_factory=f.default_factory))
        for f in msgspec.structs.fields(struct)
    ]
    fields += [("hint", str, "none"), ("extra", list[int], msgspec.field(default_factory=list))]
    return msgspec.defstruct(struct.__name__, fields, array_like=True, tag=struct.__struct_config__.tag)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_old_bytes_decode_under_new_types(example: msgspec.Struct) -> None:
    new = Decoder[Any](next_minor(type(example))).decode(encode(example))
    for name in example.__struct_fields__:
        assert getattr(new, name) == getattr(example, name)
    assert (new.hint, new.extra) == ("none", [])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_new_bytes_decode_under_old_types(example: msgspec.Struct) -> None:
    values = {name: getattr(example, name) for name in example.__struct_fields__}
    newer = next_minor(type(example))(**values, hint="something", extra=[1, 2, 3])
    assert DECODERS[direction_of(type(example))].decode(encode(newer)) == example


def test_fields_appended_to_a_part_do_not_shift_what_follows() -> None:
    """SamplingParams stands in the middle of GenerateRequest."""
    example = next(example for example in EXAMPLES if type(example).__name__ == "GenerateRequest")
    frame = msgspec.msgpack.decode(encode(example))
    frame[4] += ["from a newer frontend", 0.5]
    newer = DECODERS["frontend to scheduler"].decode(msgspec.msgpack.encode(frame))
    assert newer == example


def test_a_missing_field_without_default_is_an_error() -> None:
    """The other direction of the rule: a field without default cannot be appended."""
    newer = msgspec.defstruct(
        "Ready", [("epoch", int), ("rank", int)], array_like=True, tag="ready", frozen=True
    )
    with pytest.raises(ProtocolError, match="at least length 3, got 2"):
        Decoder[Any](newer).decode(bytes.fromhex(GOLDEN_1_0["Ready"]))


def test_a_message_newer_than_its_receiver_is_refused_not_misread() -> None:
    newer = msgspec.defstruct("Nack", [("step_id", int)], array_like=True, tag="nack")
    with pytest.raises(ProtocolError, match="nack"):
        DECODERS["worker to scheduler"].decode(encode(newer(3)))
