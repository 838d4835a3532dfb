"""What an EAGLE head computes on: arrays whose addresses stay, for kernels that stand in a sequence."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.drafters.base import Advance, Slots
from services.worker.backends.native.kernels.draft import lay


class Laid(NamedTuple):
    """What was put on a desk."""

    places: int
    """Every token that stays. Those of a row stand together."""
    rows: int
    """Those that are drafted for."""
    end: int
    """Position after the last place."""


class Desk:
    """Room for `size` places and as many rows; public attributes but for the first two are addresses.

    Args:
        width: of a hidden state
    """

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._kept: list[NDArray[Any]] = []
        ints, floats = np.int32, np.float32
        places = [self._array(1, ints)[:, 0] for _ in range(3)]
        rows = [self._array(1, kind)[:, 0] for kind in (ints, ints, ints, floats, floats)]
        tiles, self._hidden = self._array(4, ints), self._array(width, floats)
        self._laid = (*places, *rows, tiles)
        self.slots, self.positions, self.ids = (array.ctypes.data for array in places)
        self.last, room, owner, self.sharpness, chance = (array.ctypes.data for array in rows)
        self.hidden, self.tiles = self._hidden.ctypes.data, tiles.ctypes.data
        self.yielded, self.sure = self.floats(width), self.floats(1)
        self.chosen = self._array(1, ints).ctypes.data
        self.columns = (
            *(self.slots, self.positions, self.ids, self.hidden),
            *(self.tiles, self.last, self.yielded, self.chosen, self.sure, self.sharpness),
            *(room, owner, chance),
        )
        """What the kernel of a draft is told of all this, in its order."""

    def floats(self, width: int) -> int:
        """float32[size, width], to be written before it is read."""
        address: int = self._array(width, np.float32).ctypes.data
        return address

    def _array(self, width: int, kind: Any) -> NDArray[Any]:
        self._kept.append(array := np.empty((self.size, width), kind))
        return array

    def put(self, advance: Advance, slots: Slots, k: int, limit: int, error: float) -> Laid:
        """Puts down the places of all that stays below position `limit`, but for their hidden states, and the rows that
        have room for drafts, up to `k` of them, with `error` as `eagle.ERROR` has it. Every row has all chances still.
        """
        table = slots.table
        columns = advance.slots, advance.starts, advance.counts, advance.samples
        held = table.num_blocks, table.temperature, slots.history.array
        return Laid(*lay(*columns, *held, table.block_size, k, limit, error, *self._laid))

    def put_hidden(self, hidden: torch.Tensor) -> None:
        """float32[places, hidden], of each place's own token."""
        self._hidden[: len(hidden)] = hidden.numpy()
