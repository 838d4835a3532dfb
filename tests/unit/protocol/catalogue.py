"""All messages, found by inspection, and a hypothesis strategy for each."""

import inspect
import math
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec.inspect import (
    BoolType,
    BytesType,
    DictType,
    EnumType,
    FloatType,
    IntType,
    ListType,
    LiteralType,
    MemoryViewType,
    NoneType,
    StrType,
    StructType,
    UnionType,
    VarTupleType,
    type_info,
)

from protocol import handshake, kv_transfer, logprobs, membership, records, requests, sampling, steps
from protocol.codec import Decoder, pack
from protocol.handshake import Hello, Refused, Welcome
from protocol.kv_transfer import FetchBlocks, FetchedBlocks
from protocol.membership import GroupMessage, WorkerMessage
from protocol.requests import ClientMessage, EngineMessage
from protocol.sampling import (
    MAX_BIAS,
    MAX_LOGPROBS,
    MAX_PENALTY,
    MAX_REPETITION_PENALTY,
    MAX_TEMPERATURE,
    SamplingParams,
)
from protocol.steps import StepMessage, StepResult

STRUCTS: list[type[msgspec.Struct]] = [
    value
    for module in (handshake, kv_transfer, logprobs, membership, records, requests, sampling, steps)
    for value in vars(module).values()
    if inspect.isclass(value) and issubclass(value, msgspec.Struct) and value.__module__ == module.__name__
]
MESSAGES = [struct for struct in STRUCTS if struct.__struct_config__.tag is not None]
"""Structs that are messages of their own; the others are parts of these."""

DIRECTIONS: dict[str, Any] = {
    "client hello": Hello,
    "server answer": Welcome | Refused,
    "frontend to scheduler": ClientMessage,
    "scheduler to frontend": EngineMessage,
    "worker to scheduler": WorkerMessage | StepResult,
    "scheduler to worker": GroupMessage | StepMessage,
    "worker to peer": FetchBlocks,
    "peer to worker": FetchedBlocks,
}
"""Types that the decoder of each direction accepts."""
DECODERS: dict[str, Decoder[Any]] = {name: Decoder(types) for name, types in DIRECTIONS.items()}


def direction_of(message: type[msgspec.Struct]) -> str:
    return next(name for name, types in DIRECTIONS.items() if message in getattr(types, "__args__", (types,)))


@cache  # hypothesis prepares a strategy once
def values(struct: type[msgspec.Struct]) -> st.SearchStrategy[Any]:
    """Return a strategy for instances of `struct` with every field within its bounds."""
    return _strategy(type_info(struct))


_SAMPLING = {
    "max_tokens": st.integers(1, 2**31 - 1),
    "temperature": st.floats(0, MAX_TEMPERATURE),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(0, 2**31 - 1),
    "min_p": st.floats(0, 1),
    "seed": st.integers(0, 2**64 - 1),
    "min_tokens": st.integers(0, 2**31 - 1),
    "presence_penalty": st.floats(-MAX_PENALTY, MAX_PENALTY),
    "frequency_penalty": st.floats(-MAX_PENALTY, MAX_PENALTY),
    "repetition_penalty": st.floats(0, MAX_REPETITION_PENALTY, exclude_min=True),
    "logit_bias": st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-MAX_BIAS, MAX_BIAS), max_size=5).map(
        lambda biases: tuple(biases.items())
    ),
    "bad_words": st.lists(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=5).map(tuple), max_size=5).map(
        tuple
    ),
    "allowed_token_ids": st.lists(st.integers(0, 2**31 - 1), max_size=5).map(pack),
    "logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
    "prompt_logprobs": st.none() | st.integers(0, MAX_LOGPROBS),
}
"""Fields of SamplingParams, whose ranges are checked in `__post_init__` and not by their types."""


def _strategy(info: Any) -> st.SearchStrategy[Any]:
    return _BUILDERS[type(info)](info)


def _struct(info: StructType) -> st.SearchStrategy[Any]:
    known = _SAMPLING if info.cls is SamplingParams else {}
    return st.builds(info.cls, **{f.name: known[f.name] if f.name in known else _strategy(f.type) for f in info.fields})


def _int(info: IntType) -> st.SearchStrategy[int]:
    low = info.ge if info.ge is not None else -(2**63)
    high = info.le if info.le is not None else info.lt - 1 if info.lt is not None else 2**64 - 1
    return st.integers(int(low), int(high)) | st.sampled_from([int(low), int(high)])


def _float(info: FloatType) -> st.SearchStrategy[float]:
    return st.floats(
        -math.inf if info.ge is None else info.ge, math.inf if info.le is None else info.le, allow_nan=False
    )


def _length(info: Any, limit: int = 5) -> dict[str, int]:
    return {"min_size": info.min_length or 0, "max_size": min(limit, info.max_length or limit)}


_BUILDERS: dict[type, Callable[[Any], st.SearchStrategy[Any]]] = {
    StructType: _struct,
    IntType: _int,
    FloatType: _float,
    BoolType: lambda info: st.booleans(),
    LiteralType: lambda info: st.sampled_from(info.values),
    StrType: lambda info: st.from_regex(info.pattern) if info.pattern else st.text(**_length(info, 20)),
    BytesType: lambda info: st.binary(**_length(info, 40)),
    MemoryViewType: lambda info: st.binary(**_length(info, 40)).map(memoryview),
    EnumType: lambda info: st.sampled_from(list(info.cls)),
    NoneType: lambda info: st.none(),
    ListType: lambda info: st.lists(_strategy(info.item_type), **_length(info)),
    VarTupleType: lambda info: st.lists(_strategy(info.item_type), **_length(info)).map(tuple),
    DictType: lambda info: st.dictionaries(_strategy(info.key_type), _strategy(info.value_type), **_length(info)),
    UnionType: lambda info: st.one_of(map(_strategy, info.types)),
}
