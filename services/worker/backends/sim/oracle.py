"""The device's side of the simulator: a KV cache that knows what should be in it.

A KV position holds the hash of its sequence up to and including that position (spec 7). Each slot also keeps, apart
from the cache, the hashes of the tokens it believes in. A step first writes the KV of all its rows and then reads, as a
layered model does, so equal prompts may share blocks within a step (spec 0.7). What is read through the block table
must be what the slot believes; anything else raises.

How far a slot has come is known here and nowhere else (spec 2(b) 5): drafts are input as if they were sampled, and what
was computed from rejected ones is forgotten when they are, its KV stale until the next row overwrites it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.sim.hashing import SEED, U64, PrefixHash
from services.worker.batch.slots import I32, PlanError

UNWRITTEN = np.uint64(0)
FEW = 16
"""Up to so many positions, a row is hashed together with others, position after position."""


class OracleError(PlanError):
    """The KV cache, a position or a token is not what the request needs it to be."""


@dataclass(frozen=True)
class Batch:
    """One step's rows as the device sees them; int32[rows], block_table int32[rows, blocks]."""

    slots: I32
    starts: I32
    counts: I32
    block_table: I32

    @property
    def ends(self) -> I32:
        return self.starts + self.counts


class Activations(NamedTuple):
    """What stands for a step's hidden states between stages: one entry per planned token, rows back to back, of which
    there are fewer where drafts are missing. And what a stage cannot know by itself of rows with drafts."""

    tokens: I32
    """Input ids: of those that were sampled, a middle stage knows no other source."""
    hashes: U64
    """Of everything up to and including each token."""
    starts: I32
    """int32[rows]: where rows really start"""
    drafts: I32
    """int32[rows]: how many drafts they have"""

    @classmethod
    def empty(cls, tokens: int, rows: int) -> "Activations":
        zeros = np.zeros((2, rows), np.int32)
        return cls(np.zeros(tokens, np.int32), np.zeros(tokens, np.uint64), *zeros)


class Oracle:
    """KV cache and token history of one rank.

    `full_check` reads a row's whole context in every step, as attention does; otherwise a step reads the position
    before each row, everything that a prefix hit skipped, and one earlier block per row in turn.
    """

    def __init__(
        self, num_slots: int, num_blocks: int, block_size: int, max_len: int, vocab_size: int,
        full_check: bool = False,
    ) -> None:  # fmt: skip
        self.block_size, self.max_len, self.vocab_size = block_size, max_len, vocab_size
        self.full_check = full_check
        self.kv = np.full(num_blocks * block_size, UNWRITTEN, np.uint64)
        self._history = np.zeros((num_slots, max_len), np.int32)
        """Token id + 1; 0 where no token is known, so that untouched pages stay untouched."""
        self._extent = np.zeros(num_slots, np.int32)
        self.chain = np.zeros((num_slots, max_len + 1), np.uint64)
        self.chain[:, 0] = SEED
        self.chained = np.zeros(num_slots, np.int32)
        """Tokens of each slot that `chain` covers, from its first row on where the next one starts."""
        self._hash = PrefixHash(vocab_size, max_len)
        self._turn = 0

    # -- tokens --------------------------------------------------------------------------------------------------

    def enter(self, slot: int, tokens: I32) -> None:
        """A request takes the slot, with all tokens it has."""
        self._check_tokens(np.full(len(tokens), slot), np.arange(len(tokens)), tokens)
        self._history[slot, : len(tokens)] = tokens + 1
        self._history[slot, len(tokens) : self._extent[slot]] = 0
        self._extent[slot] = len(tokens)
        self.chained[slot] = 0

    def append(self, slots: I32, positions: I32, tokens: I32) -> None:
        """Sampled tokens become input; one beyond the context is nobody's."""
        self._check_tokens(slots, positions, tokens)
        inside = positions < self.max_len
        slots, positions = slots[inside], positions[inside]
        self._history[slots, positions] = tokens[inside] + 1
        self._extent[slots] = positions + 1

    def settle(self, slots: I32, frontiers: I32, tokens: I32) -> None:
        """Positions before `frontiers` hold; `tokens` stand there in place of a rejected draft or behind all drafts."""
        self._forget(slots, frontiers)
        self.append(slots, frontiers, tokens)

    def _forget(self, slots: I32, frontiers: I32) -> None:
        """Everything from `frontiers` on."""
        behind = self._extent[slots] - frontiers
        if behind.any():
            rows, positions = spread(frontiers, behind)
            self._history[slots[rows], positions] = 0
        self._extent[slots] = self.chained[slots] = frontiers

    def confirm(self, slots: I32, firsts: I32, counts: I32, tokens: I32) -> None:
        """Another rank has sampled `tokens`, int32[sum(counts)], from `firsts` on: all but the last of each row are the
        drafts that stand there.

        Raises: OracleError, if they are others, or more than there are.
        """
        frontiers = firsts + counts - 1
        rows, positions = spread(firsts, counts)
        stood = positions < frontiers[rows]
        wrong = (counts < 1) | (frontiers > self.chained[slots])
        others = self.tokens(slots[rows[stood]], positions[stood]) != tokens[stood]
        wrong[rows[stood][others]] = True
        if wrong.any():
            i = int(wrong.argmax())
            raise OracleError(
                f"slot {slots[i]}: {counts[i]} tokens were sampled from position {firsts[i]} on, but "
                f"{self.chained[slots[i]]} positions are computed here, or with other drafts"
            )
        self.settle(slots, frontiers, tokens[~stood])

    def rewind(self, slots: I32, starts: I32) -> None:
        """Rows go on from `starts`, as the stage before says: from there on drafts were computed that were rejected.

        Raises: OracleError, where not even so much is computed.
        """
        chained = self.chained[slots]
        if ((early := starts > chained) & (chained > 0)).any():
            i = int((early & (chained > 0)).argmax())
            raise OracleError(
                f"slot {slots[i]}: a row starts at {starts[i]}, {chained[i]} positions are computed here"
            )
        back = chained > starts
        self._forget(slots[back], starts[back])

    def known(self, slot: int, start: int, end: int) -> I32:
        """int32[end - start] ids of a slot, as the device has them. Raises: OracleError, where one is unknown."""
        return self.tokens(slot, slice(start, end))

    def tokens(self, slots: I32 | int, positions: I32 | slice) -> I32:
        """The ids there. Raises: OracleError, where none is known: an unknown one is never an index (S2-4, S3-7)."""
        stored = self._history[slots, positions]
        if not stored.all():
            missing = np.broadcast_to(slots, stored.shape)[stored == 0][0]
            raise OracleError(f"slot {missing}: a token is computed before it was sampled")
        return stored - 1

    def _check_tokens(self, slots: NDArray[np.integer], positions: NDArray[np.integer], tokens: I32) -> None:
        bad = (tokens < 0) | (tokens >= self.vocab_size)
        if bad.any():
            i = int(bad.argmax())
            raise OracleError(
                f"slot {slots[i]} position {positions[i]}: token {tokens[i]} is not among the {self.vocab_size} "
                "of the vocabulary"
            )

    # -- forward -------------------------------------------------------------------------------------------------

    def starts(self, slots: I32, planned: I32) -> I32:
        """int32[rows]: where rows really start, which may be earlier than planned. Raises: OracleError, where later."""
        chained = self.chained[slots]
        late = chained > planned
        if late.any():
            i = int(late.argmax())
            raise OracleError(
                f"slot {slots[i]}: a row is planned from {planned[i]} on, where {chained[i]} positions are computed "
                "(S2-5)"
            )
        return np.where(chained == 0, planned, chained)

    def extend(self, hashes: U64, tokens: I32) -> U64:
        """uint64[rows]: prefixes with one more token."""
        return self._hash.step(hashes, tokens)

    def forward(self, batch: Batch, arrived: Activations | None = None) -> U64:
        """uint64[rows]: the hash of everything up to each row's last position.

        Args:
            arrived: what the stage before made of the batch; None on the first.

        Raises:
            OracleError: names slot, position, block, the hash expected there and the one found.
        """
        skipped, tokens = self.chained[batch.slots], int(batch.counts.sum())
        if arrived is not None:
            self._learn(batch, arrived.tokens[:tokens])
        self._believe(batch, skipped)
        if arrived is not None:
            self._compare(batch, arrived.hashes[:tokens])
        self._write(batch)
        self._read(batch, skipped)
        self._turn += 1
        return self.chain[batch.slots, batch.ends]

    def activations(self, batch: Batch, leaving: Activations) -> None:
        """What `forward` made of the batch, for the next stage."""
        rows, positions = spread(batch.starts, batch.counts)
        slots = batch.slots[rows]
        leaving.tokens[: len(rows)] = self.tokens(slots, positions)
        leaving.hashes[: len(rows)] = self.chain[slots, positions + 1]

    def _learn(self, batch: Batch, tokens: I32) -> None:
        """Input ids of the batch that only the stage before knows; what is known here must be the same."""
        rows, positions = spread(batch.starts, batch.counts)
        slots = batch.slots[rows]
        known = self._history[slots, positions] - 1
        wrong = (tokens < 0) | (tokens >= self.vocab_size) | ((known >= 0) & (known != tokens))
        if wrong.any():
            i = int(wrong.argmax())
            raise OracleError(
                f"slot {slots[i]} position {positions[i]}: token {tokens[i]} of {self.vocab_size} came from the stage "
                f"before, {known[i]} is known here (-1: none)"
            )
        self._history[slots, positions] = tokens + 1
        self._extent[batch.slots] = np.maximum(self._extent[batch.slots], batch.ends)

    def _compare(self, batch: Batch, hashes: U64) -> None:
        """The activations of the batch are what this stage makes of the same tokens."""
        rows, positions = spread(batch.starts, batch.counts)
        slots = batch.slots[rows]
        expected = self.chain[slots, positions + 1]
        wrong = hashes != expected
        if wrong.any():
            i = int(wrong.argmax())
            raise OracleError(
                f"slot {slots[i]} position {positions[i]}: expected the activation {expected[i]:016x} from the stage "
                f"before, found {hashes[i]:016x}"
            )

    def _believe(self, batch: Batch, have: I32) -> None:
        """Extends each slot's own hashes to the end of its row."""
        few = (batch.counts <= FEW) & (have == batch.starts)
        slots, positions, left = batch.slots[few], batch.starts[few], batch.counts[few]
        while len(slots):
            self.chain[slots, positions + 1] = self._hash.step(
                self.chain[slots, positions], self.tokens(slots, positions)
            )
            goes_on = left > 1
            slots, positions, left = slots[goes_on], positions[goes_on] + 1, left[goes_on] - 1
        for i in np.flatnonzero(~few).tolist():
            slot, start, end = int(batch.slots[i]), int(have[i]), int(batch.starts[i] + batch.counts[i])
            if start > batch.starts[i]:
                raise OracleError(f"slot {slot}: position {batch.starts[i]} again, {start} are computed")
            tokens = self.tokens(slot, slice(start, end))
            self.chain[slot, start + 1 : end + 1] = self._hash.chunk(self.chain[slot, start], tokens)
        self.chained[batch.slots] = batch.ends

    def _write(self, batch: Batch) -> None:
        rows, positions = spread(batch.starts, batch.counts)
        blocks = batch.block_table[rows, positions // self.block_size]
        self._check_owners(batch, rows, blocks)
        at = blocks * self.block_size + positions % self.block_size
        self.kv[at] = self.chain[batch.slots[rows], positions + 1]

    def _check_owners(self, batch: Batch, rows: NDArray[np.int64], blocks: I32) -> None:
        """No block may be written for two slots in one step."""
        order = np.argsort(blocks, kind="stable")
        same = blocks[order[1:]] == blocks[order[:-1]]
        shared = same & (rows[order[1:]] != rows[order[:-1]])
        if shared.any():
            at = int(shared.argmax())
            first, second = batch.slots[rows[order[at]]], batch.slots[rows[order[at + 1]]]
            raise OracleError(f"slots {first} and {second} both write block {blocks[order[at]]} in one step")

    def _read(self, batch: Batch, skipped: I32) -> None:
        everything = np.arange(len(batch.slots))
        before = everything[batch.starts > 0]
        self._verify(batch, before, batch.starts[before] - 1)
        full = batch.starts // self.block_size
        some = everything[full > 0]
        in_turn = (self._turn + batch.slots[some]) % full[some]
        self._verify(batch, some, in_turn * self.block_size + self.block_size - 1)
        unread = np.zeros_like(skipped) if self.full_check else skipped
        lag = everything[batch.starts > unread]
        if len(lag):
            rows, positions = spread(unread[lag], batch.starts[lag] - unread[lag])
            self._verify(batch, lag[rows], positions)

    def _verify(self, batch: Batch, rows: NDArray[np.int64], positions: I32) -> None:
        """int[reads] each: the KV at `positions` of `rows` is what the slot believes."""
        blocks = batch.block_table[rows, positions // self.block_size]
        found = self.kv[blocks * self.block_size + positions % self.block_size]
        expected = self.chain[batch.slots[rows], positions + 1]
        wrong = found != expected
        if wrong.any():
            i = int(wrong.argmax())
            state = "never written" if found[i] == UNWRITTEN else f"{found[i]:016x}"
            raise OracleError(
                f"slot {batch.slots[rows[i]]} position {positions[i]} block {blocks[i]}: "
                f"expected {expected[i]:016x}, found {state}"
            )


def spread(starts: I32, counts: I32) -> tuple[NDArray[np.int64], I32]:
    """Rows and positions, one entry for each position of each row."""
    rows = np.repeat(np.arange(len(starts)), counts)
    if len(rows) == len(starts) and counts.all():
        return rows, starts
    offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, (starts[rows] + offsets).astype(np.int32)
