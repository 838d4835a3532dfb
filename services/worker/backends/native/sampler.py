"""From logits to token ids, all rows at once; a row's result depends on its own logits and parameters only.

The order is vLLM's: what may not be sampled, temperature, min-p, top-k, top-p, then the noise of
`services.worker.noise`. Tokens that tie with the last one kept are kept too. Of equal maxima the lowest id wins.
"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import GrammarOutput
from services.worker.backends.native.kernels.sampling import sampling_kernel
from services.worker.batch import SlotTable
from services.worker.noise import Purpose, keys

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""
NEVER = float("-inf")


class Sampler:
    """For one calling thread."""

    def __init__(self) -> None:
        self._kernel = sampling_kernel()

    def sample(
        self, logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int32], positions: NDArray[np.int32]
    ) -> torch.Tensor:
        """int64[rows] sampled ids.

        Args:
            logits: float32[rows, vocab], changed in place
            slots: the slot of each row, where its parameters are
            positions: the absolute position that each sampled token will have
        """
        _ban(logits, table, slots, positions)
        ids = logits.argmax(-1)
        rows = np.flatnonzero(table.temperature[slots] >= GREEDY_BELOW).astype(np.int32)
        if len(rows):
            ids[torch.from_numpy(rows.astype(np.int64))] = self._draw(logits, table, slots, positions, rows)
        return ids

    def _draw(
        self,
        logits: torch.Tensor,
        table: SlotTable,
        slots: NDArray[np.int32],
        positions: NDArray[np.int32],
        rows: NDArray[np.int32],
    ) -> torch.Tensor:
        chosen = slots[rows]
        ids = np.empty(len(rows), np.int32)
        columns: list[NDArray[Any]] = [
            column[chosen] for column in (table.temperature, table.min_p, table.top_k, table.top_p)
        ]
        columns += [*keys(table.seed[chosen], positions[rows], Purpose.SAMPLE), ids]
        addresses = [column.ctypes.data for column in columns]
        self._kernel.run(len(rows), (logits.data_ptr(), rows.ctypes.data, logits.shape[1], *addresses))
        return torch.from_numpy(ids).long()


def apply_grammar(logits: torch.Tensor, slots: NDArray[np.int32], grammar: GrammarOutput) -> None:
    """Leaves the rows of constrained slots only the tokens whose bit is set."""
    words = np.frombuffer(grammar.bitmask, np.int32).reshape(-1, -(-logits.shape[1] // 32))
    row_of = {slot: row for row, slot in enumerate(slots.tolist())}
    for slot, mask in zip(np.frombuffer(grammar.slots, np.int32).tolist(), words, strict=True):
        allowed = np.unpackbits(mask.view(np.uint8), bitorder="little")[: logits.shape[1]]
        if slot in row_of:
            logits[row_of[slot]].masked_fill_(torch.from_numpy(allowed == 0), NEVER)


def _ban(
    logits: torch.Tensor, table: SlotTable, slots: NDArray[np.int32], positions: NDArray[np.int32]
) -> None:
    """min_tokens: a text that is still too short cannot end."""
    for row in np.flatnonzero(positions < table.banned_until[slots]).tolist():
        ids = [token for token in table.banned[slots[row]] if token < logits.shape[1]]
        logits[row, ids] = NEVER
