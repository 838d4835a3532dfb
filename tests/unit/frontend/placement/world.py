"""A placement core with some engines, for tests."""

import numpy as np

from protocol import block_names
from protocol.codec import pack
from services.frontend.placement import Condition, EngineReport, Place, Placement, Role

MODEL = "weights, float32"
BLOCK_SIZE = 4
TOKEN_SECONDS = 0.01


def report(
    condition: Condition = Condition.READY,
    queue_seconds: float = 0.0,
    identity: str = MODEL,
    num_streams: int = 0,
    output_seconds: float = 0.0,
    block_size: int = BLOCK_SIZE,
    role: Role = Role.BOTH,
) -> EngineReport:
    return EngineReport(
        condition, identity, queue_seconds, block_size, TOKEN_SECONDS, num_streams, output_seconds, role
    )


def core(*engines: str, policy: str = "prefix_aware", seed: int = 0) -> Placement:
    """Return a core with engines that are ready."""
    placement = Placement(policy, seed=seed)
    for name in engines:
        placement.on_engine(name, report())
    return placement


def prompt(*parts: tuple[int, int]) -> bytes:
    """Return a prompt of parts: a token, and how often it is repeated."""
    return pack(np.concatenate([np.full(count, token, np.int32) for token, count in parts]))


def names_of(tokens: bytes, salt: str = "") -> list[bytes]:
    return block_names.names_of(salt, tokens, BLOCK_SIZE)


def engine_of(decision: object) -> str:
    assert isinstance(decision, Place), decision
    return decision.engine
