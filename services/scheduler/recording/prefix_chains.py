"""Ids of the full blocks of every open request, computed from its tokens as they become known.

The id of a block is a keyed hash over its tokens and all before it, starting with the salt. Equal ids mean equal
prefixes, as in the prefix cache. The key is random and never stored, so ids cannot be computed from guessed prompts.
"""

import os
from hashlib import blake2b

import numpy as np

from services.scheduler.core.limits import Limits
from services.scheduler.core.request import RequestKey
from services.scheduler.core.slots import Column, SlotIds

_ID_BYTES = 8


class _BlockChain:
    """Hash over the full blocks of one request."""

    def __init__(self, keyed: blake2b, salt: str) -> None:
        """`keyed`: the hash function with its key. A copy costs less than another one with the same key."""
        self._keyed = keyed
        self._parent = self._digest(salt.encode())

    def _digest(self, data: bytes) -> bytes:
        keyed = self._keyed.copy()
        keyed.update(data)
        return keyed.digest()

    def extend(self, block: bytes) -> bytes:
        """Append the tokens of a block. Return its id."""
        self._parent = self._digest(self._parent + block)
        return self._parent[:_ID_BYTES]


class PrefixChains:
    def __init__(self, limits: Limits) -> None:
        self._keyed = blake2b(key=os.urandom(32), digest_size=16)
        self._chains: dict[RequestKey, _BlockChain] = {}
        self.start_epoch(limits)

    def start_epoch(self, limits: Limits) -> None:
        """Start without slots. Blocks have the same size in every epoch."""
        self._size = limits.block_size
        self._of_slot: list[_BlockChain | None] = [None] * limits.num_slots
        self._tail = np.zeros((limits.num_slots, limits.block_size), np.int32)
        """Tokens of the block that is not full yet."""
        self._fill = np.zeros(limits.num_slots, np.int32)
        self._totals = np.zeros(limits.num_slots, np.int32)

    def arrive(self, key: RequestKey, salt: str, tokens: Column) -> bytes:
        """Begin the chain of a request. Return the ids of the full blocks, uint64[blocks]."""
        chain = _BlockChain(self._keyed, salt)
        data, width = tokens.tobytes(), 4 * self._size
        ids = [chain.extend(data[at : at + width]) for at in range(0, len(data) - width + 1, width)]
        # A number that is in use is refused, and its owner keeps its chain
        self._chains.setdefault(key, chain)
        return b"".join(ids)

    def forget(self, key: RequestKey) -> None:
        """The request has ended. Tokens that its slot still gets belong to its chain."""
        self._chains.pop(key, None)

    def enter(self, slot: int, key: RequestKey, tokens: Column) -> None:
        """A request with these tokens enters a slot."""
        rest = len(tokens) % self._size
        self._of_slot[slot] = self._chains.get(key)
        self._tail[slot, :rest] = tokens[len(tokens) - rest :]
        self._fill[slot], self._totals[slot] = rest, len(tokens)

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
            at = self._fill[slots]
            self._tail[slots, at] = token_ids[first[some] + index]
            self._fill[slots] = (at + 1) % self._size
            for row in some[at + 1 == self._size].tolist():
                filled.append(row)
                ids.append(self._extend(int(rows[row])))
        self._totals[rows] = totals + counts
        return totals, filled, b"".join(ids)

    def _extend(self, slot: int) -> bytes:
        chain = self._of_slot[slot]
        return bytes(_ID_BYTES) if chain is None else chain.extend(self._tail[slot].tobytes())
