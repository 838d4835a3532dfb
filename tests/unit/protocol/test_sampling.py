"""Ranges of sampling parameters, checked when they are made and when they are decoded."""

import math
from typing import Any

import msgspec
import pytest

from protocol.codec import Decoder, ProtocolError
from protocol.sampling import MAX_BIAS, MAX_END_TOKENS, MAX_TEMPERATURE, SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 0),
    ("max_tokens", 2**31),
    ("temperature", -0.1),
    ("temperature", MAX_TEMPERATURE * 1.01),
    ("temperature", math.nan),
    ("temperature", math.inf),
    ("top_p", 0.0),
    ("top_p", 1.01),
    ("top_p", math.nan),
    ("top_k", -1),
    ("top_k", 2**31),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("min_p", math.nan),
    ("seed", -1),
    ("min_tokens", -1),
    ("min_tokens", 2**31),
    ("stop_token_ids", (1,) * (MAX_END_TOKENS + 1)),
    ("eos_token_ids", (1,) * (MAX_END_TOKENS + 1)),
    ("logit_bias", ((5, -1.01 * MAX_BIAS),)),
    ("logit_bias", ((5, 1.0), (5, 2.0))),
    ("bad_words", ((),)),
    ("allowed_token_ids", b"123"),
]
DECODER: Decoder[SamplingParams] = Decoder(SamplingParams)


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_value_out_of_range_is_refused_by_the_constructor_and_the_decoder(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name.replace("eos", "stop").replace("words", "word").replace("_", ".")):
        SamplingParams(**{"max_tokens": 1, name: value})
    fields = list(msgspec.structs.asdict(SamplingParams(max_tokens=1)))
    wire = list(msgspec.structs.astuple(SamplingParams(max_tokens=1)))
    wire[fields.index(name)] = value
    with pytest.raises(ProtocolError):
        DECODER.decode(msgspec.msgpack.encode(wire))


@pytest.mark.parametrize("name", ["eos_token_ids", "stop_token_ids"])
@pytest.mark.parametrize("token", [-1, 2**31])
def test_token_ids_beyond_int32_are_refused_by_the_decoder(name: str, token: int) -> None:
    with pytest.raises(ProtocolError):
        DECODER.decode(msgspec.msgpack.encode(SamplingParams(max_tokens=1, **{name: (token,)})))


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(1, 0.0, 1.0, 0, 0.0, 0, 0),
        SamplingParams(2**31 - 1, MAX_TEMPERATURE, 1e-9, 2**31 - 1, 1.0, 2**64 - 1, 2**31 - 1, (0,), (2**31 - 1,)),
        SamplingParams(1, 1),  # an integer is a valid float
    ],
)  # fmt: skip
def test_bounds_are_allowed(params: SamplingParams) -> None:
    assert DECODER.decode(msgspec.msgpack.encode(params)) == params
