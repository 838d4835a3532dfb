"""What an EAGLE head computes on: arrays whose addresses stay, for kernels that stand in a sequence."""

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.drafters.base import I32


class Desk:
    """Room for `size` places and as many rows; attributes but for the first two are addresses.

    Args:
        width: of a hidden state
    """

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._kept: list[NDArray[np.int32] | NDArray[np.float32]] = []
        self.ids, self.slots, self.positions = self._ints(1), self._ints(1), self._ints(1)
        self.hidden = self.floats(width)
        self._places = self._kept[:]
        self.tiles, self.last, self._room, self._owner = (
            self._ints(4),
            self._ints(1),
            self._ints(1),
            self._ints(1),
        )
        self._rows = self._kept[len(self._places) :]
        self.yielded, self.chosen, self.sure = self.floats(width), self._ints(1), self.floats(1)
        self._chance = self.floats(1)
        self._chances = self._kept[-1]
        self.columns = (
            *(self.slots, self.positions, self.ids, self.hidden),
            *(
                self.tiles,
                self.last,
                self.yielded,
                self.chosen,
                self.sure,
                self._room,
                self._owner,
                self._chance,
            ),
        )
        """What the kernel of a draft is told, in its order."""

    def floats(self, width: int) -> int:
        """float32[size, width]"""
        self._kept.append(array := np.zeros((self.size, width), np.float32))
        return array.ctypes.data

    def _ints(self, width: int) -> int:
        self._kept.append(array := np.zeros((self.size, width), np.int32))
        return array.ctypes.data

    def put(
        self, slots: I32, positions: I32, ids: I32, hidden: torch.Tensor, last: I32, room: I32, owner: I32
    ) -> None:
        """Places, then rows; all rows have every chance."""
        size, rows = len(slots), len(last)
        for array, values in zip(self._places, (ids, slots, positions), strict=False):
            array[:size, 0] = values
        self._places[3][:size] = hidden.numpy()
        tiles, *columns = self._rows
        tiles[:rows, 0], tiles[:rows, 1], tiles[:rows, 2], tiles[:rows, 3] = (
            slots[last],
            positions[last],
            last,
            1,
        )
        for array, values in zip(columns, (last, room, owner), strict=True):
            array[:rows, 0] = values
        self._chances[:rows] = 1
