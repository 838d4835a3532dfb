"""Ids of the full blocks of every open request, computed from its tokens as they become known.

The id of a block is a keyed hash of its name (protocol.block_names). Equal ids mean equal prefixes, as in the prefix
cache. The key is random and never stored, so ids cannot be computed from guessed prompts.
"""

import os
from collections.abc import Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np

from protocol.block_names import extend_names
from protocol.media import MediaItem
from protocol.requests import GenerateRequest
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestKey
from services.scheduler.core.slots import Column, SlotIds

ID_BYTES = 8


class _BlockChain(NamedTuple):
    """Names of the full blocks of one request, and what they depend on besides its tokens."""

    names: list[bytes]
    salt: str
    items: Sequence[MediaItem]


class PrefixChains:
    def __init__(self, limits: Limits) -> None:
        self._keyed = blake2b(key=os.urandom(32), digest_size=ID_BYTES)
        """The hash function with its key. A copy costs less than another one with the same key."""
        self._chains: dict[RequestKey, _BlockChain] = {}
        self.start_epoch(limits)

    def start_epoch(self, limits: Limits) -> None:
        """Start without slots. Blocks have the same size in every epoch."""
        self._size = limits.block_size
        self._of_slot: list[_BlockChain | None] = [None] * limits.num_slots
        self._tail = np.zeros((limits.num_slots, limits.block_size), np.int32)
        """Tokens of the block that is not full yet."""
        self._totals = np.zeros(limits.num_slots, np.int32)

    def arrive(self, frontend: int, message: GenerateRequest) -> bytes:
        """Begin the chain of a request. Return the ids of the full blocks, uint64[blocks]."""
        chain = _BlockChain([], message.salt, () if message.media is None else message.media.items)
        ids = self._extend(chain, message.token_ids)
        # A number that is in use is refused, and its owner keeps its chain
        self._chains.setdefault((frontend, message.number), chain)
        return ids

    def forget(self, key: RequestKey) -> None:
        """The request has ended. Tokens that its slot still gets belong to its chain."""
        self._chains.pop(key, None)

    def enter(self, slot: int, key: RequestKey, tokens: Column) -> None:
        """A request with these tokens enters a slot."""
        rest = len(tokens) % self._size
        self._of_slot[slot] = self._chains.get(key)
        self._tail[slot, :rest] = tokens[len(tokens) - rest :]
        self._totals[slot] = len(tokens)

    def append(
        self, rows: SlotIds, counts: Column, token_ids: Column, first: Column
    ) -> tuple[Column, list[int], bytes]:
        """Append tokens to slots.

        Args:
            rows: int64[rows], slots.
            counts: int32[rows], tokens to append.
            first: int32[rows], index of the row's first token in `token_ids`.

        Returns: tokens of each slot before, int32[rows]; rows that filled a block; ids of these blocks, uint64[blocks].
        """
        totals = self._totals[rows]
        filled: list[int] = []
        ids: list[bytes] = []
        for index in range(int(counts.max(initial=0))):
            some = np.flatnonzero(counts > index)
            slots = rows[some]
            at = (totals[some] + index) % self._size
            self._tail[slots, at] = token_ids[first[some] + index]
            for row in some[at + 1 == self._size].tolist():
                filled.append(row)
                slot = int(rows[row])
                ids.append(self._extend(self._of_slot[slot], self._tail[slot].tobytes()))
        self._totals[rows] = totals + counts
        return totals, filled, b"".join(ids)

    def _extend(self, chain: _BlockChain | None, tokens: bytes) -> bytes:
        """Append tokens to a chain. Return the ids of the full blocks in them."""
        if chain is None:
            return bytes(ID_BYTES)
        num_names = len(chain.names)
        extend_names(chain.names, chain.salt, tokens, self._size, chain.items)
        return b"".join(map(self._id, chain.names[num_names:]))

    def _id(self, name: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(name)
        return keyed.digest()
