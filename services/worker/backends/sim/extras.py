"""What a step reports beside sampled ids: log-probabilities and embeddings, of the rows that ask for them.

Which rows these are and how much they report is known at launch and laid out then; the device fills it in.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.sampling import Pooling
from services.worker.backends.sim.acceptance import Acceptance
from services.worker.backends.sim.device import Device, Event
from services.worker.backends.sim.hashing import BASE, U64
from services.worker.backends.sim.logits import F32, Logits, scramble
from services.worker.backends.sim.oracle import Oracle, OracleError
from services.worker.batch.slots import I32, NONE, Rows, SlotTable
from services.worker.sampling.reference import logprobs_of

HIDDEN_SIZE = 32
_LANES = np.arange(1, HIDDEN_SIZE + 1, dtype=np.uint64) * np.uint64(BASE)


def hidden_states(hashes: U64) -> F32:
    """float32[positions, HIDDEN_SIZE]: a function of everything up to each position, in multiples of 2**-15 from -1 to
    1, so that a sum over positions is exact in any order."""
    words = scramble(hashes[:, None] ^ _LANES)
    return ((words >> np.uint64(48)).astype(np.float32) - np.float32(2**15)) * np.float32(2**-15)


class HiddenSums:
    """What mean pooling keeps on the device between the chunks of a prompt."""

    def __init__(self, num_slots: int) -> None:
        self._sums = np.zeros((num_slots, HIDDEN_SIZE))
        self._counts = np.zeros(num_slots, np.int32)
        """Positions that each sum covers."""

    def add(self, slot: int, start: int, hashes: U64) -> None:
        """Positions from `start` on, uint64[positions] hashes.

        Raises: OracleError, if those before it were not summed: they came from the prefix cache.
        """
        if not start:
            self._sums[slot] = self._counts[slot] = 0
        if self._counts[slot] != start:
            raise OracleError(
                f"slot {slot}: a mean from {start} on, but {self._counts[slot]} positions are summed"
            )
        self._sums[slot] += hidden_states(hashes).sum(0, np.float64)
        self._counts[slot] += len(hashes)

    def mean(self, slot: int) -> F32:
        return (self._sums[slot] / self._counts[slot]).astype(np.float32)


@dataclass(frozen=True)
class _Layout:
    """Rows of `Logprobs`, int32[rows] each; all of it is known at launch, with room for every draft."""

    owners: I32
    positions: I32
    """As planned; that of a sampled token may turn out to be an earlier one."""
    counts: I32
    sampled: I32
    """Index among the sampled rows; NONE: a prompt token."""
    offsets: I32
    """Which token of its sampled row."""

    @property
    def ends(self) -> NDArray[np.int64]:
        return np.cumsum(self.counts, dtype=np.int64)


@dataclass(frozen=True)
class _Pools:
    """Pooling rows of a step, int32[rows] each."""

    slots: I32
    starts: I32
    ends: I32
    means: NDArray[np.bool_]
    samples: NDArray[np.bool_]


@dataclass(frozen=True)
class Copied:
    """Extras of a step on the host, valid when the last event of their copies has passed."""

    layout: _Layout | None
    positions: I32
    """NONE: no token came to be sampled there."""
    ranks: I32
    token_ids: I32
    values: F32
    embedding_slots: I32
    embeddings: F32

    def logprobs(self) -> LogprobRows | None:
        if self.layout is None:
            return None
        rows, there = self.layout, self.positions != NONE
        every = LogprobRows(rows.owners, self.positions, rows.counts, self.ranks, self.token_ids, self.values)
        return every.select(there) if there.any() else None


class Extras:
    """Those of one step, in device memory of this step alone (S3-8)."""

    def __init__(self, layout: _Layout, pools: _Pools) -> None:
        self._layout, self._pools = layout, pools
        entries = int(layout.counts.sum())
        self._positions = np.full(len(layout.owners), NONE, np.int32)
        self._ranks = np.ones(len(layout.owners), np.int32)
        self._token_ids, self._values = np.zeros(entries, np.int32), np.zeros(entries, np.float32)
        self._embeddings = np.empty((int(pools.samples.sum()), HIDDEN_SIZE), np.float32)

    def compute(self, logits: Logits, oracle: Oracle, sums: HiddenSums, sampled: Acceptance) -> None:
        """On the device, when the step has sampled."""
        self._compute_logprobs(logits, oracle, sampled)
        self._pool(oracle, sums)

    def _compute_logprobs(self, logits: Logits, oracle: Oracle, of: Acceptance) -> None:
        rows, ends = self._layout, self._layout.ends
        columns = (rows.owners, rows.positions, rows.sampled, rows.offsets, ends - rows.counts, ends)
        for i, (slot, planned, row, offset, begin, end) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if row == NONE:
                position, token = planned, oracle.known(slot, planned, planned + 1)[0]
            elif offset < of.counts[row]:
                position, token = int(of.firsts[row]) + offset, of.token_ids[of.begins[row] + offset]
            else:
                continue
            entry = logprobs_of(
                logits.row(oracle.chain[slot, position : position + 1]), int(token), end - begin - 1
            )
            self._positions[i] = position
            self._ranks[i], self._token_ids[begin:end], self._values[begin:end] = entry

    def _pool(self, oracle: Oracle, sums: HiddenSums) -> None:
        pools, embeddings = self._pools, []
        columns = (pools.slots, pools.starts, pools.ends, pools.means, pools.samples)
        for slot, start, end, mean, samples in zip(*(c.tolist() for c in columns), strict=True):
            hashes = oracle.chain[slot, start + 1 : end + 1]
            if mean:
                sums.add(slot, start, hashes)
            if samples:
                embeddings.append(sums.mean(slot) if mean else hidden_states(hashes[-1:])[0])
        self._embeddings[:] = np.array(embeddings, np.float32).reshape(-1, HIDDEN_SIZE)

    def copy_out(self, device: Device) -> tuple[Copied, Event]:
        """The event is that of the last copy."""
        pools, layout = self._pools, self._layout if len(self._layout.owners) else None
        positions, _ = device.copy_out(self._positions)
        ranks, _ = device.copy_out(self._ranks)
        token_ids, _ = device.copy_out(self._token_ids)
        values, _ = device.copy_out(self._values)
        embeddings, last = device.copy_out(self._embeddings)
        slots = pools.slots[pools.samples]
        return Copied(layout, positions, ranks, token_ids, values, slots, embeddings), last


def extras(rows: Rows, table: SlotTable, vocab_size: int) -> Extras | None:
    """A snapshot of what the rows of the plan just applied ask for; None: of nothing, as ever."""
    slots = rows.slots
    pools = table.pooling[slots] != Pooling.NONE
    wanted, of_prompt = table.logprobs[slots], table.prompt_logprobs[slots]
    if not (pools.any() or (of_prompt != NONE).any() or (rows.samples & (wanted != NONE)).any()):
        return None
    pooled = rows.where(pools)
    means = table.pooling[pooled.slots] == Pooling.MEAN
    return Extras(
        _layout(rows, np.where(pools, NONE, wanted), of_prompt, table.num_prompt[slots], vocab_size),
        _Pools(pooled.slots, pooled.starts, pooled.ends, means, pooled.samples),
    )


def _layout(rows: Rows, wanted: I32, of_prompt: I32, num_prompt: I32, vocab_size: int) -> _Layout:
    """First the prompt tokens that the row's positions predict, then the sampled ones; row after row."""
    lines: list[tuple[int, int, int, int, int]] = []
    sampled = np.where(rows.samples, np.cumsum(rows.samples) - 1, NONE)
    columns = (rows.slots, rows.starts, rows.ends, rows.drafts, sampled, wanted, of_prompt, num_prompt)
    for slot, start, end, drafts, index, count, prompt_count, prompt in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if prompt_count != NONE:
            width = 1 + min(prompt_count, vocab_size)
            lines += [(slot, at, width, NONE, 0) for at in range(start + 1, min(end + 1, prompt))]
        if count != NONE and index != NONE:
            width = 1 + min(count, vocab_size)
            lines += [(slot, end - drafts + j, width, index, j) for j in range(drafts + 1)]
    return _Layout(*np.array(lines, np.int32).reshape(-1, 5).T.copy())
