"""Log-probabilities of one step: laid out by the host at launch, filled in by the device."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.sampling import Pooling
from services.worker.backends.sim.device.simulated import SimDevice, SimEvent
from services.worker.backends.sim.model.logits import F32, Logits
from services.worker.backends.sim.model.oracle import Oracle
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.batch.slots import I32, NONE, Rows, SlotTable
from services.worker.sampling.reference import logprobs_of


@dataclass(frozen=True)
class LogprobLayout:
    """Entries of `protocol.logprobs.Logprobs`, int32[entries] each, with room for every planned draft."""

    slots: I32
    positions: I32
    """Planned positions; the true position of a sampled token may be an earlier one."""
    counts: I32
    """Tokens of each entry: the token itself and its alternatives."""
    sampled_rows: I32
    """Index among the sampled rows; NONE: a prompt token."""
    offsets: I32
    """Index of the token in its sampled row."""

    @classmethod
    def from_rows(cls, rows: Rows, table: SlotTable, vocab_size: int) -> "LogprobLayout":
        """Lay out the plan that was just applied, row after row.

        The entries of a row are the prompt tokens that its positions predict, then its sampled tokens.
        """
        slots = rows.slots
        pooled = table.pooling[slots] != Pooling.NONE
        alternatives, prompt_alternatives = table.logprobs[slots], table.prompt_logprobs[slots]
        alternatives = np.where(pooled, NONE, alternatives)
        sampled = np.where(rows.samples, np.cumsum(rows.samples) - 1, NONE)
        places = slots, rows.starts, rows.ends, rows.drafts, sampled
        columns = *places, alternatives, prompt_alternatives, table.num_prompt[slots]
        lines: list[tuple[int, int, int, int, int]] = []
        for slot, start, end, drafts, row, count, prompt_count, num_prompt in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if prompt_count != NONE:
                width = 1 + min(prompt_count, vocab_size)
                lines += [(slot, at, width, NONE, 0) for at in range(start + 1, min(end + 1, num_prompt))]
            if count != NONE and row != NONE:
                width = 1 + min(count, vocab_size)
                lines += [(slot, end - drafts + j, width, row, j) for j in range(drafts + 1)]
        return cls(*np.array(lines, np.int32).reshape(-1, 5).T.copy())

    @property
    def ends(self) -> NDArray[np.int64]:
        """int64[entries]: where each entry's tokens end."""
        return np.cumsum(self.counts, dtype=np.int64)


@dataclass(frozen=True)
class CopiedLogprobs:
    """Log-probabilities on the host; valid once the event of their copies has passed."""

    layout: LogprobLayout
    positions: I32
    """NONE: no token was sampled there."""
    token_ranks: I32
    token_ids: I32
    values: F32

    def sampled(self) -> LogprobRows | None:
        """Return the entries whose token was sampled, or None without any."""
        layout, exist = self.layout, self.positions != NONE
        every = LogprobRows(layout.slots, self.positions, layout.counts, self.token_ranks, self.token_ids, self.values)
        return every.select(exist) if exist.any() else None


class StepLogprobs:
    """Log-probabilities of one step, in device memory of this step alone (result memory; docs/invariants.md)."""

    def __init__(self, layout: LogprobLayout) -> None:
        self._layout = layout
        entries, tokens = len(layout.slots), int(layout.counts.sum())
        self._positions = np.full(entries, NONE, np.int32)
        self._token_ranks = np.ones(entries, np.int32)
        self._token_ids, self._values = np.zeros(tokens, np.int32), np.zeros(tokens, np.float32)

    @classmethod
    def from_rows(cls, rows: Rows, table: SlotTable, vocab_size: int) -> "StepLogprobs | None":
        """Lay out the log-probabilities of the plan that was just applied; None if no row requests any, as usual."""
        slots = rows.slots
        sampled = rows.samples & (table.logprobs[slots] != NONE) & (table.pooling[slots] == Pooling.NONE)
        if not ((table.prompt_logprobs[slots] != NONE).any() or sampled.any()):
            return None
        layout = LogprobLayout.from_rows(rows, table, vocab_size)
        return cls(layout) if len(layout.slots) else None

    def compute(self, logits: Logits, oracle: Oracle, acceptance: DraftAcceptance) -> None:
        """Fill the entries of tokens that were sampled. Runs on the device, after the step was sampled."""
        layout, ends = self._layout, self._layout.ends
        columns = (layout.slots, layout.positions, layout.sampled_rows, layout.offsets, ends - layout.counts, ends)
        for i, (slot, planned, row, offset, begin, end) in enumerate(
            zip(*(column.tolist() for column in columns), strict=True)
        ):
            if row == NONE:
                position, token = planned, oracle.known(slot, planned, planned + 1)[0]
            elif offset < acceptance.counts[row]:
                position = int(acceptance.firsts[row]) + offset
                token = acceptance.token_ids[acceptance.begins[row] + offset]
            else:
                continue
            before = oracle.chain[slot, position : position + 1]
            entry = logprobs_of(logits.row(before), int(token), end - begin - 1)
            self._positions[i] = position
            self._token_ranks[i], self._token_ids[begin:end], self._values[begin:end] = entry

    def copy_out(self, device: SimDevice) -> tuple[CopiedLogprobs, SimEvent]:
        """Enqueue the copies to the host. The event is that of the last copy."""
        positions, _ = device.copy_out(self._positions)
        token_ranks, _ = device.copy_out(self._token_ranks)
        token_ids, _ = device.copy_out(self._token_ids)
        values, last = device.copy_out(self._values)
        return CopiedLogprobs(self._layout, positions, token_ranks, token_ids, values), last
