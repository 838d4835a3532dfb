"""Log-probabilities of one step: their columns are copied at launch, and they are computed on the device."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from protocol.rows import LogprobRows
from protocol.sampling import Pooling
from services.worker.backends.sim.model.logits import Logits
from services.worker.backends.sim.model.oracle import Oracle
from services.worker.backends.sim.sampling.acceptance import DraftAcceptance
from services.worker.batch.slots import I32, NONE, Rows, SlotTable
from services.worker.sampling.reference import logprobs_of


@dataclass
class StepLogprobs:
    """The rows of a step, and the log-probabilities that they request; int32[rows] each."""

    rows: Rows
    sampled: I32
    """Alternatives to report with each sampled token; NONE: no log-probability at all."""
    prompt: I32
    """The same with each prompt token."""
    num_prompt: I32
    result: LogprobRows | None = None
    """After `compute`."""

    @classmethod
    def from_rows(cls, rows: Rows, table: SlotTable) -> "StepLogprobs | None":
        """Copy the columns of the plan that was just applied; None if no row requests any, as usual."""
        slots = rows.slots
        generates = rows.samples & (table.pooling[slots] == Pooling.NONE)
        sampled, prompt = np.where(generates, table.logprobs[slots], NONE), table.prompt_logprobs[slots]
        if not ((sampled != NONE) | (prompt != NONE)).any():
            return None
        return cls(rows, sampled, prompt, table.num_prompt[slots])

    def compute(self, logits: Logits, oracle: Oracle, acceptance: DraftAcceptance) -> None:
        """Compute the result, row after row: the prompt tokens that a row's positions predict, then its sampled tokens.
        Runs on the device, after the step was sampled."""
        rows, found = self.rows, list[LogprobRows]()
        tokens = np.split(acceptance.token_ids, np.cumsum(acceptance.counts)[:-1])
        columns = rows.slots, rows.starts, rows.ends, np.cumsum(rows.samples) - 1
        for slot, start, end, row, count, prompt_count, num_prompt in zip(
            *(column.tolist() for column in (*columns, self.sampled, self.prompt, self.num_prompt)), strict=True
        ):
            if prompt_count != NONE:
                of_prompt = slice(start + 1, min(end + 1, num_prompt))
                found += _scored(logits, oracle, slot, of_prompt.start, oracle.tokens(slot, of_prompt), prompt_count)
            if count != NONE:
                found += _scored(logits, oracle, slot, int(acceptance.firsts[row]), tokens[row], count)
        self.result = LogprobRows.concatenate(found) if found else None


def _scored(
    logits: Logits, oracle: Oracle, slot: int, first: int, tokens: I32, alternatives: int
) -> Iterator[LogprobRows]:
    """Yield the log-probabilities of the tokens of a slot from the position `first` on."""
    for position, token in enumerate(tokens.tolist(), first):
        row = logits.rows(oracle.chain[slot, position : position + 1])[0]
        rank, ids, values = logprobs_of(row, token, alternatives)
        slots, positions, counts, ranks = np.array([[slot], [position], [len(ids)], [rank]], np.int32)
        yield LogprobRows(slots, positions, counts, ranks, ids, values)
