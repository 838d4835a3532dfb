"""Damaged frames: a decoder returns a message or raises `ProtocolError`. `make soak` tries a million of them."""

import os
import random
from collections.abc import Callable
from typing import Any

import pytest

from protocol.codec import ProtocolError, encode
from protocol.requests import RequestOutputs
from protocol.rows import OutputRows, ResultRows, StepRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from tests.unit.protocol.catalogue import DECODERS, direction_of
from tests.unit.protocol.examples import EXAMPLES

PER_DIRECTION = 170_000 if os.environ.get("RUNAHEAD_SOAK") else 25_000
"""Frames for each of the six directions."""

SEEDS = [encode(example) for example in EXAMPLES]
MARKERS = bytes([
    0x00, 0x7F, 0x80, 0x8F, 0x90, 0x9F, 0xA0, 0xBF, 0xC0, 0xC1, 0xC2, 0xC3, 0xC4, 0xC5, 0xC6, 0xC7, 0xC8, 0xC9, 0xCA,
    0xCB, 0xCC, 0xCD, 0xCE, 0xCF, 0xD0, 0xD1, 0xD2, 0xD3, 0xD4, 0xD8, 0xD9, 0xDA, 0xDB, 0xDC, 0xDD, 0xDE, 0xDF, 0xE0,
    0xFF,
])  # fmt: skip
"""First bytes of every MessagePack type."""


def flip_a_bit(frame: bytearray, rng: random.Random) -> None:
    frame[rng.randrange(len(frame))] ^= 1 << rng.getrandbits(3)


def cut_off(frame: bytearray, rng: random.Random) -> None:
    del frame[rng.randrange(len(frame)) :]


def insert(frame: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(frame) + 1)
    frame[at:at] = rng.randbytes(1 + rng.getrandbits(2))


def remove(frame: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(frame))
    del frame[at : at + 1 + rng.getrandbits(2)]


def swap_a_type(frame: bytearray, rng: random.Random) -> None:
    frame[rng.randrange(len(frame))] = rng.choice(MARKERS)


def claim_a_size(frame: bytearray, rng: random.Random) -> None:
    """Write a length, an integer or a float of extreme value."""
    at = rng.randrange(len(frame))
    extreme = rng.choice((b"\xff" * 8, b"\x7f" + b"\xff" * 7, b"\x7f\xf8" + bytes(6), b"\x80" + bytes(7)))
    frame[at : at + 9] = rng.choice((b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xcf", b"\xd3", b"\xcb")) + extreme


def splice(frame: bytearray, rng: random.Random) -> None:
    other = rng.choice(SEEDS)
    frame[rng.randrange(len(frame)) :] = other[rng.randrange(len(other)) :]


def nest(frame: bytearray, rng: random.Random) -> None:
    at = rng.randrange(len(frame))
    frame[at:at] = rng.choice((b"\x91", b"\xdc\x00\x01", b"\x81\xa1k")) * (1 << rng.randrange(12))


MUTATIONS: list[Callable[[bytearray, random.Random], None]] = [
    flip_a_bit,
    cut_off,
    insert,
    remove,
    swap_a_type,
    claim_a_size,
    splice,
    nest,
]
ROWS: dict[type, Callable[[Any], object]] = {
    SchedulerOutput: StepRows.from_message,
    ModelRunnerOutput: ResultRows.from_message,
    RequestOutputs: OutputRows.from_message,
}


@pytest.mark.parametrize("direction", DECODERS)
def test_damaged_frames_raise_only_protocol_errors(direction: str) -> None:
    rng = random.Random(direction)
    decode = DECODERS[direction].decode
    seeds = [encode(example) for example in EXAMPLES if direction_of(type(example)) == direction]
    refused = accepted = 0
    for _ in range(PER_DIRECTION):
        frame = bytearray(rng.choice(seeds))
        for _ in range(1 + (rng.getrandbits(2) == 0)):
            if frame:
                rng.choice(MUTATIONS)(frame, rng)
        data = bytes(frame)
        try:
            message = decode(data)
            if type(message) in ROWS:
                ROWS[type(message)](message)
        except ProtocolError:
            refused += 1
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}; {direction}, frame {data.hex()}")
        else:
            accepted += 1
            encode(message)
    # Both happened often: the damage is neither too small to matter nor so large that only the first bytes are read.
    assert min(refused, accepted) > PER_DIRECTION // 50
