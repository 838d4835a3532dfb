"""A device with rigid shapes: a step is one prefill chunk or a rectangle of decode rows, and everything is padded.

The device derives its shapes from the plan and the batch alone, and refuses plans that do not fit them. A padded prompt
ends at the end of a block and is cut into windows of one size, from its end towards its beginning; the rest of the
first window is padding. In a decode step all block tables end at the same column; shorter ones have dummy blocks on the
left. docs/scheduling.md explains the shapes.
"""

from dataclasses import dataclass, replace

import msgspec.structs
import numpy as np

from protocol.codec import pack
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.batch.slots import PlanError, Rows, SlotTable


@dataclass(frozen=True)
class PaddedStep:
    """A step as the device runs it."""

    padded: Rows
    """Rows that cost time: whole windows, or the rectangle."""
    progress: dict[int, int]
    """Slot -> frontier of its prefill; runner-reported progress (docs/invariants.md)."""

    def complete(self, result: ModelRunnerOutput) -> ModelRunnerOutput:
        """Add the progress."""
        return msgspec.structs.replace(
            result, progress_slots=pack(list(self.progress)), progress_frontiers=pack(list(self.progress.values()))
        )


class RigidShapes:
    """Pads the steps of one epoch.

    Args:
        chunk: tokens of a window.
        max_volume: largest number of tokens in the rectangle of a decode step; 0: no limit.
    """

    def __init__(self, table: SlotTable, chunk: int, max_volume: int) -> None:
        if chunk % table.block_size:
            raise PlanError(f"rigid: a chunk of {chunk} tokens is not a multiple of the block size {table.block_size}")
        self._table, self._chunk, self._max_volume = table, chunk, max_volume
        self._entry = np.zeros(table.num_slots, np.int32)
        """Tokens with which the request entered: the end of its prefill."""

    def pad(self, step: SchedulerOutput, rows: Rows) -> PaddedStep:
        """Pad a step. `rows` are those of the plan that was just applied.

        Raises: PlanError, for a step that the shapes do not allow.
        """
        for request in step.new:
            self._entry[request.slot] = len(request.token_ids) // 4
        prefill = rows.starts < self._entry[rows.slots]
        if not len(rows.slots):
            return PaddedStep(rows, {})
        if not prefill.any():
            return self._decode(step, rows)
        if not prefill.all():
            raise PlanError(f"rigid: step {step.step_id} mixes prefill and decode")
        if len(prefill) > 1:
            raise PlanError(f"rigid: step {step.step_id} has {len(prefill)} prefills, it can have one")
        return self._prefill(rows)

    # -- prefill -------------------------------------------------------------------------------------------------

    def _window(self, entry: int, start: int) -> tuple[int, int, int]:
        """Return the left padding, and the first position and the end of the window that contains `start`."""
        begin = -(-entry // self._table.block_size) * self._table.block_size
        while begin > start:
            begin -= self._chunk
        first = begin
        while first > 0:
            first -= self._chunk
        return -first, begin, min(begin + self._chunk, entry)

    def _prefill(self, rows: Rows) -> PaddedStep:
        slot, start, end = int(rows.slots[0]), int(rows.starts[0]), int(rows.ends[0])
        entry = int(self._entry[slot])
        padding, begin, last = self._window(entry, start)
        if start != max(begin, 0):
            raise PlanError(f"rigid: slot {slot} begins at {start} inside the chunk of {max(begin, 0)} to {last}")
        if end != last:
            raise PlanError(f"rigid: slot {slot} computes {start} to {end}, but its chunk ends at {last}")
        # A whole window, at its place in the padded sequence.
        padded = replace(rows, starts=np.array([begin + padding], np.int32), counts=np.array([self._chunk], np.int32))
        return PaddedStep(padded, {slot: end})

    # -- decode --------------------------------------------------------------------------------------------------

    def _decode(self, step: SchedulerOutput, rows: Rows) -> PaddedStep:
        blocks = -(-rows.ends // self._table.block_size)
        padding = (blocks.max() - blocks) * self._table.block_size
        tkv = int((padding + rows.ends).max())
        if tkv > self._table.max_model_len:
            raise PlanError(
                f"rigid: step {step.step_id} is {tkv} tokens long, the context is {self._table.max_model_len}"
            )
        if self._max_volume and len(rows.slots) * tkv > self._max_volume:
            raise PlanError(
                f"rigid: step {step.step_id} has {len(rows.slots)} rows of {tkv} tokens, more than {self._max_volume}"
            )
        return PaddedStep(replace(rows, starts=np.full_like(rows.starts, tkv - 1)), {})
