"""Compatibility of minor versions, by the rules in protocol.codec."""

from typing import Any

import msgspec
import pytest

from protocol.codec import encode
from tests.unit.protocol.catalogue import DECODERS, MESSAGES, direction_of
from tests.unit.protocol.examples import EXAMPLES

GOLDEN = {
    "Hello": "95a568656c6c6f0100a6776f726b6572a66e6f64652d31",
    "Welcome": "93a777656c636f6d650100",
    "Refused": "92a772656675736564ad6e6f2c207468616e6b20796f75",
    "Register": "9ca87265676973746572a66e6174697665a464656d6fa66e6f64652d31cd1267a0a0910101a000c0",
    "Assignment": "9caa61737369676e6d656e7401000110cd0200cd0800cd10000101a0c0",
    "LoadProgress": "93a870726f6772657373af72656164696e672077656967687473cb3fd0000000000000",
    "Loaded": "99a66c6f61646564a6633066666565cd7d00cd1000ce00010000cd03e8c30000",
    "InitializeCache": "93aa696e69745f6361636865cd03e8cd1000",
    "Ready": "92a5726561647901",
    "Heartbeat": "94a968656172746265617401cf000001000000000000",
    "LoadFailed": "92ab6c6f61645f6661696c6564b16e6f2073756368206469726563746f7279",
    "RankLost": "93a972616e6b5f6c6f737403b9636f6e6e656374696f6e20636c6f7365642062792070656572",
    "EndEpoch": "93a9656e645f65706f636803af612072616e6b20776173206c6f7374",
    "Ping": "92a470696e67cb4029000000000000",
    "Pong": "94a4706f6e67cb4029000000000000cb4059100000000000cb4059200000000000",
    "Shutdown": "92a873687574646f776ea4646f6e65",
    "GenerateRequest": (
        "9aa867656e6572617465ceffffffffc40c01000000020000000300000002dc001140cb3fe6666666666666cb3feccccc"
        "cccccccd28cb3fa999999999999acfffffffffffffffff0292020591cd012ccb0000000000000000cb00000000000000"
        "00cb3ff00000000000009090c400c0c0fba674656e616e74a6636d706c2d31c000"
    ),
    "AbortRequest": "92a561626f72749201ceffffffff",
    "Subscribe": "92a9737562736372696265c2",
    "StepRecords": (
        "95a77265636f72647391dc00110111cb3ff0000000000000cb3ff4000000000000cb4000000000000000cb4002000000"
        "00000091920097cb3ff0000000000000cb3ff2000000000000cb3ff4000000000000cb3ff8000000000000cb3ffc0000"
        "00000000cb4000000000000000cb3fe0000000000000c4080000000000000000c4080700000009000000c40805000000"
        "01000000c4020100c4080000000000000000c4080000000001000000020201cb3fe0000000000000919400cb3fe00000"
        "0000000001a974776f2072616e6b7303cb4004000000000000"
    ),
    "RequestOutputs": (
        "97a76f757470757473c4080700000009000000c4080000000004000000c4080b0000000c00000092980700cd012c1001"
        "a00000980903c00000b174686520776f726b6572206661696c65640000c090"
    ),
    "EngineState": (
        "9da5737461746502a57265616479cb3ff0000000000000cd1000cd7d00cd03e810cd0100c281b46e756d5f7265717565"
        "7374735f72756e6e696e67cb40000000000000008000"
    ),
    "SchedulerOutput": (
        "dc0011a4737465700111c4080400000000000000c4080100000009000000c408000000000c000000c408050000000100"
        "0000c402000191980401c41801000000020000000300000004000000050000000600000006c40407000000dc001140cb"
        "3fe6666666666666cb3feccccccccccccd28cb3fa999999999999acfffffffffffffffff0292020591cd012ccb000000"
        "0000000000cb0000000000000000cb3ff00000000000009090c400c0c000a0c4080400000000000000c4080800000003"
        "000000c40402000000c3c40000cb0000000000000000c2"
    ),
    "ReleaseSlots": "93a772656c6561736501c4080300000004000000",
    "GrammarOutput": "96a76772616d6d61720111c40400000000c40cffffffff0000000001000000c400",
    "ModelRunnerOutput": (
        "9fa6726573756c740111c4080400000000000000c4080100000009000000c4080200000000000000c4080b0000000c00"
        "000097cb3ff0000000000000cb3ff2000000000000cb3ff4000000000000cb3ff8000000000000cb3ffc000000000000"
        "cb4000000000000000cb3fe0000000000000c400c400c0c400c400c400c400"
    ),
    "StepReport": (
        "95a67265706f727401110397cb3ff0000000000000cb3ff2000000000000cb3ff4000000000000cb3ff8000000000000"
        "cb3ffc000000000000cb4000000000000000cb3fe0000000000000"
    ),
    "StepFault": "94a56661756c740111bb52756e74696d654572726f723a206f7574206f66206d656d6f7279",
    "FrontendAlive": "91ae66726f6e74656e645f616c697665",
    "CachedBlocks": (
        "94ad6361636865645f626c6f636b7303c4206e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e6e"
        "6e6ec4206f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f6f"
    ),
    "LoadBlocks": (
        "97a46c6f6164011205c4080700000003000000c440000000000000000000000000000000000000000000000000000000"
        "0000000000000000000000000000000000000000000000000000000000000000000000000091b77463703a2f2f31302e"
        "302e302e313a35373030206b6579"
    ),
    "BlocksLoaded": "94ad6c6f616465645f626c6f636b73010502",
    "FetchBlocks": ("93a56665746368c40400000000c4200000000000000000000000000000000000000000000000000000000000000000"),
    "FetchedBlocks": "93a76665746368656402c406000000000000",
    "ControlCache": (
        "96ad636f6e74726f6c5f6361636865ceffffffff01a673797374656db030313233343536373839616263646566c44000"
        "000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000000"
        "000000000000000000000000000000"
    ),
    "CacheControlled": (
        "95b063616368655f636f6e74726f6c6c6564ceffffffffa26e6f9195a673797374656db0303132333435363738396162"
        "636465662010cd100030"
    ),
    "KeepPins": (
        "94a470696e7301109193a673797374656da430313233c42000000000000000000000000000000000000000000000000000"
        "00000000000000"
    ),
}
"""Bytes of each of EXAMPLES, as hex, some without fields that have their defaults. A minor version adds messages; never
edit an existing entry."""


def test_every_message_has_an_example() -> None:
    assert {type(example) for example in EXAMPLES} == set(MESSAGES)
    assert GOLDEN.keys() == {message.__name__ for message in MESSAGES}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_bytes_of_earlier_versions_decode_to_the_same_message(example: msgspec.Struct) -> None:
    frame = bytes.fromhex(GOLDEN[type(example).__name__])
    assert DECODERS[direction_of(type(example))].decode(frame) == example


def next_minor(struct: type[msgspec.Struct]) -> type[msgspec.Struct]:
    """Return the type of the message after a minor version appended two fields."""
    fields: list[Any] = [(f.name, f.type) for f in msgspec.structs.fields(struct)]
    fields += [("hint", str), ("extra", list[int])]
    return msgspec.defstruct(struct.__name__, fields, array_like=True, tag=struct.__struct_config__.tag)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: type(example).__name__)
def test_new_bytes_decode_under_old_types(example: msgspec.Struct) -> None:
    values = {name: getattr(example, name) for name in example.__struct_fields__}
    newer = next_minor(type(example))(**values, hint="something", extra=[1, 2, 3])
    assert DECODERS[direction_of(type(example))].decode(encode(newer)) == example


def test_fields_appended_to_a_part_do_not_shift_later_fields() -> None:
    """SamplingParams is in the middle of GenerateRequest."""
    example = next(example for example in EXAMPLES if type(example).__name__ == "GenerateRequest")
    frame = msgspec.msgpack.decode(encode(example))
    frame[4] += ["from a newer frontend", 0.5]
    newer = DECODERS["frontend to scheduler"].decode(msgspec.msgpack.encode(frame))
    assert newer == example
