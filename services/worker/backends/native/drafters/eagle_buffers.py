"""The buffers of an EAGLE head."""

import torch

from services.worker.backends.native.kernels.interface.buffers import Buffers
from services.worker.backends.native.kernels.interface.drafting import DraftTensors
from services.worker.backends.native.model.config import ModelConfig


class EagleBuffers(Buffers):
    """Kinds of rows: places (a token with the hidden state of the token before it), and rows that get drafts.

    Args:
        where: the device
        layer: the head's decoder layer
        inputs: width of the vectors that queries, keys and values are computed from
        logits: number of ids that the head has logits for
    """

    def __init__(
        self, where: torch.device, layer: ModelConfig, inputs: int, logits: int, places: int
    ) -> None:
        super().__init__(where, places=places, rows=places)
        hidden, heads = layer.hidden_size, layer.num_heads * layer.head_dim
        self.slots, self.positions, self.ids = (self._rows("places", dtype=torch.int32) for _ in range(3))
        self.hidden = self._rows("places", hidden)
        self.embedded, self.left, self.right = (self._rows("places", hidden) for _ in range(3))
        self.fused, self.layer_input = self._rows("places", 2 * hidden), self._rows("places", inputs)
        self.qkv = self._rows("places", heads + 2 * layer.num_kv_heads * layer.head_dim)
        self.attended = self._rows("places", heads)

        self.last, self.room, self.owner, self.chosen = (
            self._rows("rows", dtype=torch.int32) for _ in range(4)
        )
        self.sharpness, self.chance, self.sure = (self._rows("rows") for _ in range(3))
        self.tiles = self._rows("rows", 4, dtype=torch.int32)
        self.yielded = self._rows("rows", hidden)
        self.last_attended = self._rows("rows", heads)
        self.delta, self.normed = self._rows("rows", hidden), self._rows("rows", hidden)
        self.gate_up = self._rows("rows", 2 * layer.intermediate_size)
        self.gated = self._rows("rows", layer.intermediate_size)
        self.logits = self._rows("rows", logits)

    @property
    def draft(self) -> DraftTensors:
        return DraftTensors(
            *(self.slots, self.positions, self.ids, self.hidden),
            *(self.tiles, self.last, self.yielded, self.chosen, self.sure, self.sharpness),
            *(self.room, self.owner, self.chance),
        )
