"""The oracle: a KV cache whose content can be verified, and the token history of every slot.

A KV position holds the hash of its sequence up to and including that position. Each slot also has, apart from the
cache, the hash chain of its own tokens. A step first writes the KV of all its rows and then reads, as a layered model
does (write before read; docs/invariants.md), so equal prompts may share blocks within a step. A value that is read
through the block table and differs from the slot's own chain raises.

The true position of a slot is stored here alone. Drafts are input as if they were sampled. When drafts are rejected,
the tokens and chain behind them are dropped, and their KV is stale until the next row overwrites it (rejected
positions).
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from services.worker.backends.sim.model.hashing import SEED, U64, PrefixHash
from services.worker.batch.slots import I32, PlanError, Rows

UNWRITTEN = np.uint64(0)
FEW = 16
"""Rows of at most this many positions are hashed together, one position after the other."""


class OracleError(PlanError):
    """The KV cache, a position or a token is not what the request needs."""


class Activations(NamedTuple):
    """A stage's output for the next stage, in place of hidden states.

    `tokens` and `hashes` have the rows back to back; received ones have room for every planned token behind them.
    """

    tokens: I32
    """Input ids. A middle stage has no other source for sampled ones."""
    hashes: U64
    """Hash of the sequence up to and including each token."""
    starts: I32
    """int32[rows]: true positions at which the rows start."""
    drafts: I32
    """int32[rows]: drafts that the rows really have."""


class Oracle:
    """KV cache and token history of one rank.

    Args:
        full_check: a step reads every row's whole context, as attention does; otherwise it reads the position before
            each row, everything that a prefix hit skipped, and one position of an earlier block per row, in turn.
        kv: uint64[num_blocks * block_size]: the cache.
    """

    def __init__(
        self, num_slots: int, block_size: int, max_len: int, vocab_size: int, full_check: bool, kv: U64
    ) -> None:  # fmt: skip
        self.block_size, self.max_len, self.vocab_size = block_size, max_len, vocab_size
        self.full_check, self.kv = full_check, kv
        self.history = np.zeros((num_slots, max_len), np.int32)
        """Token id + 1; 0 where no token is known, so that unused pages are never written."""
        self._extent = np.zeros(num_slots, np.int32)
        """Length of each slot's history, drafts included."""
        self.chain = np.zeros((num_slots, max_len + 1), np.uint64)
        self.chain[:, 0] = SEED
        self.chained = np.zeros(num_slots, np.int32)
        """Tokens of each slot that `chain` covers: the true position, once the slot has had a row."""
        self._begun = np.zeros(num_slots, np.bool_)
        """True: the slot has had a row."""
        self._hash = PrefixHash(vocab_size, max_len)
        self._turn = 0

    # -- tokens --------------------------------------------------------------------------------------------------

    def enter(self, slot: int, tokens: I32) -> None:
        """Assign a slot to a request with all its tokens."""
        self._check_tokens(np.full(len(tokens), slot), np.arange(len(tokens)), tokens)
        self.history[slot, : len(tokens)] = tokens + 1
        self.history[slot, len(tokens) : self._extent[slot]] = 0
        self._extent[slot] = len(tokens)
        self.chained[slot], self._begun[slot] = 0, False

    def append(self, slots: I32, positions: I32, tokens: I32) -> None:
        """Store tokens as input of later rows. A token beyond the context is ignored."""
        self._check_tokens(slots, positions, tokens)
        inside = positions < self.max_len
        slots, positions = slots[inside], positions[inside]
        self.history[slots, positions] = tokens[inside] + 1
        self._extent[slots] = positions + 1

    def settle(self, slots: I32, frontiers: I32, tokens: I32) -> None:
        """Keep the positions before `frontiers`, drop those behind, and store `tokens` at `frontiers`.

        Such a token replaces a rejected draft or follows all accepted ones.
        """
        self._drop(slots, frontiers)
        self.append(slots, frontiers, tokens)

    def leave_out(self, slots: I32, firsts: I32) -> None:
        """Rows that would sample from `firsts` on have no token: the next ones begin with the last known token."""
        frontiers = firsts - 1
        self.settle(slots, frontiers, self.tokens(slots, frontiers))

    def _drop(self, slots: I32, frontiers: I32) -> None:
        """Drop tokens and chain from `frontiers` on."""
        behind = self._extent[slots] - frontiers
        if behind.any():
            rows, positions = spread(frontiers, behind)
            self.history[slots[rows], positions] = 0
        self._extent[slots] = self.chained[slots] = frontiers

    def confirm(self, slots: I32, firsts: I32, counts: I32, tokens: I32) -> None:
        """Store tokens that another rank sampled from `firsts` on. All but the last of each row are accepted drafts; a
        row without tokens was left out.

        Args:
            tokens: int32[sum(counts)], rows back to back.

        Raises: OracleError, if they are not the drafts at these positions, or there are more than were computed.
        """
        frontiers = firsts + counts - 1
        rows, positions = spread(firsts, counts)
        accepted = positions < frontiers[rows]
        wrong = (counts < 0) | (frontiers > self.chained[slots])
        differs = self.tokens(slots[rows[accepted]], positions[accepted]) != tokens[accepted]
        wrong[rows[accepted][differs]] = True
        if (i := first_true(wrong)) is not None:
            raise OracleError(
                f"slot {slots[i]}: {counts[i]} tokens were sampled from position {firsts[i]} on, but "
                f"{self.chained[slots[i]]} positions are computed here, or their drafts are others"
            )
        sampled = counts > 0
        self.settle(slots[sampled], frontiers[sampled], tokens[~accepted])
        self.leave_out(slots[~sampled], firsts[~sampled])

    def rewind(self, slots: I32, starts: I32) -> None:
        """Drop everything from `starts` on, which the stage before sent: it was computed from rejected drafts.

        Raises: OracleError, if fewer positions are computed.
        """
        chained = self.chained[slots]
        if (i := first_true((starts > chained) & self._begun[slots])) is not None:
            raise OracleError(
                f"slot {slots[i]}: a row starts at {starts[i]}, but {chained[i]} positions are computed here"
            )
        back = chained > starts
        self._drop(slots[back], starts[back])

    def tokens(self, slots: I32 | int, positions: I32 | slice) -> I32:
        """Return the token ids at `positions`.

        Raises: OracleError, if one is unknown; it must never be an index (valid ids).
        """
        stored = self.history[slots, positions]
        if not stored.all():
            missing = np.broadcast_to(slots, stored.shape)[stored == 0][0]
            raise OracleError(f"slot {missing}: a token is computed before it was sampled")
        return stored - 1

    def _check_tokens(self, slots: NDArray[np.integer], positions: NDArray[np.integer], tokens: I32) -> None:
        if (i := first_true((tokens < 0) | (tokens >= self.vocab_size))) is not None:
            raise OracleError(
                f"slot {slots[i]} position {positions[i]}: token {tokens[i]} is not among the {self.vocab_size} "
                "of the vocabulary"
            )

    # -- forward -------------------------------------------------------------------------------------------------

    def starts(self, slots: I32, planned: I32) -> I32:
        """Return int32[rows]: the true positions at which rows start, which may be earlier than planned.

        Raises: OracleError, if one is later (position bound).
        """
        chained = self.chained[slots]
        if (i := first_true(chained > planned)) is not None:
            raise OracleError(
                f"position bound: slot {slots[i]} is planned from {planned[i]} on, but {chained[i]} positions are "
                "computed"
            )
        return np.where(self._begun[slots], chained, planned)

    def extend(self, hashes: U64, tokens: I32) -> U64:
        """Return uint64[rows]: prefix hashes after one more token."""
        return self._hash.step(hashes, tokens)

    def forward(self, batch: Rows, table: I32, arrived: Activations | None = None) -> U64:
        """Execute a step. Return uint64[rows]: the hash of each row's sequence up to its last position.

        Args:
            batch: rows at their true positions.
            table: int32[rows, blocks]: their block tables.
            arrived: activations of the stage before; None on the first stage.

        Raises:
            OracleError: names slot, position, block, the expected hash and the one found.
        """
        skipped, tokens = self.chained[batch.slots], int(batch.counts.sum())
        if arrived is not None:
            self._store_inputs(batch, arrived.tokens[:tokens])
        self._extend_chains(batch, skipped)
        if arrived is not None:
            self._compare(batch, arrived.hashes[:tokens])
        self._write(batch, table)
        self._read(batch, table, skipped)
        self._turn += 1
        return self.chain[batch.slots, batch.ends]

    def activations(self, batch: Rows, drafts: I32) -> Activations:
        """Return the activations of the step that `forward` executed. `drafts`: int32[rows], those of each row."""
        rows, positions = spread(batch.starts, batch.counts)
        slots = batch.slots[rows]
        return Activations(self.tokens(slots, positions), self.chain[slots, positions + 1], batch.starts, drafts)

    def _store_inputs(self, batch: Rows, tokens: I32) -> None:
        """Store the input ids that the stage before sent. Ids that are known here must be the same."""
        rows, positions = spread(batch.starts, batch.counts)
        slots = batch.slots[rows]
        known = self.history[slots, positions] - 1
        wrong = (tokens < 0) | (tokens >= self.vocab_size) | ((known >= 0) & (known != tokens))
        if (i := first_true(wrong)) is not None:
            raise OracleError(
                f"slot {slots[i]} position {positions[i]}: token {tokens[i]} of {self.vocab_size} came from the stage "
                f"before, but {known[i]} is known here (-1: none)"
            )
        self.history[slots, positions] = tokens + 1
        self._extent[batch.slots] = np.maximum(self._extent[batch.slots], batch.ends)

    def _compare(self, batch: Rows, hashes: U64) -> None:
        """Compare the activations of the stage before with this stage's own hashes of the same tokens."""
        rows, positions = spread(batch.starts, batch.counts)
        slots = batch.slots[rows]
        expected = self.chain[slots, positions + 1]
        if (i := first_true(hashes != expected)) is not None:
            raise OracleError(
                f"slot {slots[i]} position {positions[i]}: expected the activation {expected[i]:016x} from the stage "
                f"before, found {hashes[i]:016x}"
            )

    def _extend_chains(self, batch: Rows, have: I32) -> None:
        """Extend each slot's chain to the end of its row. `have` is int32[rows]: tokens that it covers now."""
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
                raise OracleError(
                    f"slot {slot}: position {batch.starts[i]} is computed again, {start} are computed already"
                )
            tokens = self.tokens(slot, slice(start, end))
            self.chain[slot, start + 1 : end + 1] = self._hash.chunk(self.chain[slot, start], tokens)
        self.chained[batch.slots], self._begun[batch.slots] = batch.ends, True

    def _write(self, batch: Rows, table: I32) -> None:
        rows, positions = spread(batch.starts, batch.counts)
        blocks = table[rows, positions // self.block_size]
        self._check_owners(batch, rows, blocks)
        at = blocks * self.block_size + positions % self.block_size
        self.kv[at] = self.chain[batch.slots[rows], positions + 1]

    def _check_owners(self, batch: Rows, rows: NDArray[np.int64], blocks: I32) -> None:
        """Raises: OracleError, if a block is written for two slots in one step."""
        order = np.argsort(blocks, kind="stable")
        same = blocks[order[1:]] == blocks[order[:-1]]
        if (at := first_true(same & (rows[order[1:]] != rows[order[:-1]]))) is not None:
            first, second = batch.slots[rows[order[at]]], batch.slots[rows[order[at + 1]]]
            raise OracleError(f"slots {first} and {second} both write block {blocks[order[at]]} in one step")

    def _read(self, batch: Rows, table: I32, skipped: I32) -> None:
        everything = np.arange(len(batch.slots))
        before = everything[batch.starts > 0]
        self._verify(batch, table, before, batch.starts[before] - 1)
        full = batch.starts // self.block_size
        some = everything[full > 0]
        in_turn = (self._turn + batch.slots[some]) % full[some]
        self._verify(batch, table, some, in_turn * self.block_size + self.block_size - 1)
        unread = np.zeros_like(skipped) if self.full_check else skipped
        lag = everything[batch.starts > unread]
        if len(lag):
            rows, positions = spread(unread[lag], batch.starts[lag] - unread[lag])
            self._verify(batch, table, lag[rows], positions)

    def _verify(self, batch: Rows, table: I32, rows: NDArray[np.int64], positions: I32) -> None:
        """Compare the KV at `positions` of `rows`, int[reads] each, with the slots' own chains."""
        blocks = table[rows, positions // self.block_size]
        found = self.kv[blocks * self.block_size + positions % self.block_size]
        expected = self.chain[batch.slots[rows], positions + 1]
        if (i := first_true(found != expected)) is not None:
            state = "never written" if found[i] == UNWRITTEN else f"{found[i]:016x}"
            raise OracleError(
                f"slot {batch.slots[rows[i]]} position {positions[i]} block {blocks[i]}: "
                f"expected {expected[i]:016x}, found {state}"
            )


def first_true(wrong: NDArray[np.bool_]) -> int | None:
    """Return the index of the first true element; None: there is none."""
    return int(wrong.argmax()) if wrong.any() else None


def spread(starts: I32, counts: I32) -> tuple[NDArray[np.int64], I32]:
    """Return the row and the position of each position of each row, rows back to back."""
    rows = np.repeat(np.arange(len(starts)), counts)
    if len(rows) == len(starts) and counts.all():
        return rows, starts
    offsets = np.arange(len(rows)) - np.repeat(np.cumsum(counts) - counts, counts)
    return rows, (starts[rows] + offsets).astype(np.int32)
