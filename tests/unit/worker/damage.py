"""Damage to the bytes of a file, for tests that read it afterwards."""

from random import Random


def cut(data: bytes, rng: Random) -> bytes:
    return data[: rng.randrange(len(data))]


def flipped(data: bytes, rng: Random) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :]


def extended(data: bytes, rng: Random) -> bytes:
    return data + rng.randbytes(rng.randint(1, 2000))
