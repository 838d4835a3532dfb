"""Log-probabilities of one step: laid out by the host at launch, filled in by the device."""

import numpy as np

from protocol.rows import LogprobRows
from protocol.sampling import Pooling
from services.worker.backends.sim.device.simulated import SimDevice, SimEvent
from services.worker.backends.sim.model.logits import Logits
from services.worker.backends.sim.model.oracle import Oracle
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.batch.slots import I32, NONE, Rows, SlotTable
from services.worker.sampling.reference import logprobs_of


class StepLogprobs:
    """Log-probabilities of one step, in device memory of this step alone (result memory; docs/invariants.md).

    There is room for every planned draft: entries of tokens that are not sampled keep the position NONE.

    Args:
        slots: int32[entries]
        positions: int32[entries], planned; the true position of a sampled token may be an earlier one.
        counts: int32[entries], tokens of each entry: the token itself and its alternatives.
        sampled_rows: int32[entries], index among the sampled rows; NONE: a prompt token.
        offsets: int32[entries], index of the token in its sampled row.
    """

    def __init__(self, slots: I32, positions: I32, counts: I32, sampled_rows: I32, offsets: I32) -> None:
        self._slots, self._counts = slots, counts
        ends = np.cumsum(counts, dtype=np.int64)
        self._columns = slots, positions, sampled_rows, offsets, ends - counts, ends
        self._positions = np.full(len(slots), NONE, np.int32)
        self._token_ranks = np.ones(len(slots), np.int32)
        self._token_ids, self._values = np.zeros(counts.sum(), np.int32), np.zeros(counts.sum(), np.float32)

    @classmethod
    def from_rows(cls, rows: Rows, table: SlotTable, vocab_size: int) -> "StepLogprobs | None":
        """Lay out the log-probabilities of the plan that was just applied, row after row; None if no row requests any,
        as usual.

        The entries of a row are the prompt tokens that its positions predict, then its sampled tokens.
        """
        slots = rows.slots
        sampled = rows.samples & (table.logprobs[slots] != NONE) & (table.pooling[slots] == Pooling.NONE)
        prompt_alternatives = table.prompt_logprobs[slots]
        if not ((prompt_alternatives != NONE).any() or sampled.any()):
            return None
        places = slots, rows.starts, rows.ends, rows.drafts, np.cumsum(rows.samples) - 1
        alternatives = np.where(sampled, table.logprobs[slots], NONE)
        columns = *places, alternatives, prompt_alternatives, table.num_prompt[slots]
        lines: list[tuple[int, int, int, int, int]] = []
        for slot, start, end, drafts, row, count, prompt_count, num_prompt in zip(
            *(column.tolist() for column in columns), strict=True
        ):
            if prompt_count != NONE:
                width = 1 + min(prompt_count, vocab_size)
                lines += [(slot, at, width, NONE, 0) for at in range(start + 1, min(end + 1, num_prompt))]
            if count != NONE:
                width = 1 + min(count, vocab_size)
                lines += [(slot, end - drafts + j, width, row, j) for j in range(drafts + 1)]
        return cls(*np.array(lines, np.int32).T.copy()) if lines else None

    def compute(self, logits: Logits, oracle: Oracle, acceptance: DraftAcceptance) -> None:
        """Fill the entries of tokens that were sampled. Runs on the device, after the step was sampled."""
        for i, (slot, planned, row, offset, begin, end) in enumerate(
            zip(*(column.tolist() for column in self._columns), strict=True)
        ):
            if row == NONE:
                position, token = planned, oracle.tokens(slot, slice(planned, planned + 1))[0]
            elif offset < acceptance.counts[row]:
                position = int(acceptance.firsts[row]) + offset
                token = acceptance.token_ids[acceptance.begins[row] + offset]
            else:
                continue
            before = oracle.chain[slot, position : position + 1]
            entry = logprobs_of(logits.row(before), int(token), end - begin - 1)
            self._positions[i] = position
            self._token_ranks[i], self._token_ids[begin:end], self._values[begin:end] = entry

    def copy_out(self, device: SimDevice) -> tuple[LogprobRows, SimEvent]:
        """Enqueue the copies to the host. The event is that of the last copy."""
        positions, _ = device.copy_out(self._positions)
        token_ranks, _ = device.copy_out(self._token_ranks)
        token_ids, _ = device.copy_out(self._token_ids)
        values, last = device.copy_out(self._values)
        return LogprobRows(self._slots, positions, self._counts, token_ranks, token_ids, values), last
