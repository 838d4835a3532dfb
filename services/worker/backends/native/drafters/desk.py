"""What an EAGLE head computes on: arrays whose addresses stay, for kernels that stand in a sequence."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from services.worker.backends.native.drafters.base import I32

F32 = NDArray[np.float32]


class Places(NamedTuple):
    """What is computed first: every token that stays. Places of a row stand together."""

    slots: I32
    positions: I32
    ids: I32
    """Of the token after each."""
    hidden: torch.Tensor
    """float32[places, hidden], of each one's own token"""


class Going(NamedTuple):
    """Rows that are drafted for from there; int32[rows] unless stated."""

    last: I32
    """Place of each."""
    room: I32
    """Drafts that it may have, at least 1."""
    owner: I32
    """Its row in what is proposed."""
    sharpness: F32
    """float32[rows], of its distribution of the next token over the head's."""


class Desk:
    """Room for `size` places and as many rows; public attributes but for the first two are addresses.

    Args:
        width: of a hidden state
    """

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width
        self._kept: list[NDArray[Any]] = []
        ints, floats = np.int32, np.float32
        places = (
            self._array(1, ints),
            self._array(1, ints),
            self._array(1, ints),
            self._array(width, floats),
        )
        rows = (self._array(1, ints), self._array(1, ints), self._array(1, ints), self._array(1, floats))
        self._tiles, self._chance = self._array(4, ints), self._array(1, floats)
        self._places, self._rows = places, rows
        self.slots, self.positions, self.ids, self.hidden = (array.ctypes.data for array in places)
        self.last, room, owner, self.sharpness = (array.ctypes.data for array in rows)
        self.tiles, self.yielded, self.sure = self._tiles.ctypes.data, self.floats(width), self.floats(1)
        self.chosen = self._array(1, ints).ctypes.data
        self.columns = (
            *(self.slots, self.positions, self.ids, self.hidden),
            *(self.tiles, self.last, self.yielded, self.chosen, self.sure, self.sharpness),
            *(room, owner, self._chance.ctypes.data),
        )
        """What the kernel of a draft is told of all this, in its order."""

    def floats(self, width: int) -> int:
        """float32[size, width], to be written before it is read."""
        address: int = self._array(width, np.float32).ctypes.data
        return address

    def _array(self, width: int, kind: Any) -> NDArray[Any]:
        self._kept.append(array := np.empty((self.size, width), kind))
        return array

    def put(self, places: Places, going: Going) -> None:
        """Every row has all chances still."""
        size, rows = len(places.slots), len(going.last)
        for array, values in zip(self._places, places[:3], strict=False):
            array[:size, 0] = values
        self._places[3][:size] = places.hidden.numpy()
        for column, of_rows in zip(self._rows, going, strict=True):
            column[:rows, 0] = of_rows
        tiles = self._tiles[:rows]
        tiles[:, 0], tiles[:, 1] = places.slots[going.last], places.positions[going.last]
        tiles[:, 2], tiles[:, 3], self._chance[:rows] = going.last, 1, 1
