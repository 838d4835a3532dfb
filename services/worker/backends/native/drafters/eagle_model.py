"""The network of an EAGLE head: one decoder layer that predicts the model's next hidden state, and from it the token.

Place i reads token i + 1 and the model's hidden state of token i, and has position i. Its result approximates the
hidden state of token i + 1, so it is the input of the next place in the next round. For earlier places only keys and
values are needed, so the operations from attention on are computed for the last place of each row.

The layer has two recordings: one over places, up to keys and values, and one over rows, from attention on. A draft runs
both once per round. Everything except the cache is float32.
"""

from abc import ABC, abstractmethod
from pathlib import Path

import torch

from services.worker.backends.native.drafters.base import States, TargetModel
from services.worker.backends.native.drafters.eagle_config import EagleConfig
from services.worker.backends.native.drafters.eagle_weights import EagleLoader
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.forward import FINAL
from services.worker.backends.native.model.model import attention_shape, cache_shape
from services.worker.kernels.interface.attention import Attention
from services.worker.kernels.interface.buffers import Buffers
from services.worker.kernels.interface.drafting import DraftTensors
from services.worker.kernels.interface.network import NetworkKernels
from services.worker.runner import LoadError
from services.worker.weights import Checkpoint


class EagleBuffers(Buffers):
    """Kinds of rows: places (a token with the hidden state of the token before it), and rows that get drafts.

    Args:
        where: the device
        layer: the head's decoder layer
        inputs: width of the vectors that queries, keys and values are computed from
        logits: number of ids that the head has logits for
    """

    def __init__(self, where: torch.device, layer: ModelConfig, inputs: int, logits: int, places: int) -> None:
        super().__init__(where, places=places, rows=places)
        hidden, heads = layer.hidden_size, layer.num_heads * layer.head_dim
        self.slots, self.positions, self.ids = (self._rows("places", dtype=torch.int32) for _ in range(3))
        self.hidden = self._rows("places", hidden)
        self.embedded, self.left, self.right = (self._rows("places", hidden) for _ in range(3))
        self.fused, self.layer_input = self._rows("places", 2 * hidden), self._rows("places", inputs)
        self.qkv = self._rows("places", heads + 2 * layer.num_kv_heads * layer.head_dim)
        self.attended = self._rows("places", heads)

        self.last, self.room, self.owner, self.chosen = (self._rows("rows", dtype=torch.int32) for _ in range(4))
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
        return DraftTensors(*(getattr(self, name) for name in DraftTensors._fields))


class EagleModel(ABC):
    """Weights and forward pass. For one calling thread."""

    inputs = 1
    """Number of hidden vectors that queries, keys and values are computed from."""

    def __init__(self, config: EagleConfig, checkpoint: Checkpoint, target: TargetModel) -> None:
        """Raises: LoadError, when a tensor is missing or has another shape."""
        self.config, self.dtype = config, target.model.dtype
        self.network: NetworkKernels = target.model.kernels.float32_network()
        self.drafting = target.model.kernels.drafting
        self._where = target.model.kernels.device.where
        self.attention = attention_shape(config.layer, config.layer.max_position)
        self.eps = config.layer.norm_eps
        loader = EagleLoader(config, checkpoint, target, self.network)
        self._qkv, self._out, self._gate_up, self._down = loader.layer(self.inputs * config.layer.hidden_size)
        self._post_norm = loader.vector("layers.0.post_attention_layernorm.weight")
        self._load(loader)
        self._embedding = loader.embedding()
        self.tokens = loader.draft_tokens()
        self._head = loader.head(self.tokens)

    @abstractmethod
    def _load(self, loader: EagleLoader) -> None:
        """Read the weights around the layer."""

    @abstractmethod
    def fuse(self, states: States) -> torch.Tensor:
        """Return the hidden states of a draft's first round, float32[places, hidden], from those of the target."""

    @abstractmethod
    def _enter(self, b: EagleBuffers) -> None:
        """Compute `layer_input` from `ids` and `hidden`."""

    @abstractmethod
    def _residual(self, b: EagleBuffers) -> torch.Tensor:
        """The residual stream after `_enter`, float32[places, hidden]."""

    @abstractmethod
    def _head_input(self, b: EagleBuffers) -> torch.Tensor:
        """Add `delta` to `yielded`. Return the input of the head, float32[rows, hidden]."""

    def bytes_per_block(self, block_size: int) -> int:
        return self.network.bytes_per_block(cache_shape(self.config.layer, block_size, self.dtype))

    def buffers(self, places: int) -> EagleBuffers:
        """Allocate buffers for `places` places and as many rows."""
        layer = self.config.layer
        inputs, logits = self.inputs * layer.hidden_size, self.config.draft_vocab_size
        return EagleBuffers(self._where, layer, inputs, logits, places)

    def compute_places(self, b: EagleBuffers, attention: Attention) -> None:
        """Compute keys and values from tokens and hidden states, and write them to the cache."""
        self._enter(b)
        attention.begin(b.positions, b.slots)
        attention.write(0, self._qkv(b.layer_input, b.qkv))

    def compute_rows(self, b: EagleBuffers, attention: Attention) -> None:
        """Compute attention of the last place of each row and the operations after it, up to the most likely token."""
        network = self.network
        attention.attend(0, b.tiles, b.attended)
        network.gather(b.last, b.attended, b.last_attended)
        network.gather(b.last, self._residual(b), b.yielded)
        delta = self._out(b.last_attended, b.delta)
        network.norm(b.yielded, delta, self._post_norm, self.eps, b.normed)
        network.gate_and_multiply(self._gate_up(b.normed, b.gate_up), b.gated)
        self._down(b.gated, b.delta)
        logits = self._head(self._head_input(b), b.logits)
        network.most_likely(logits, b.sharpness, b.chosen, b.sure)


class Eagle(EagleModel):
    """EAGLE: the token's embedding and the target's last hidden state are fused into the layer's input, which has no
    norm. The result is the hidden state that the target's head reads."""

    def _load(self, loader: EagleLoader) -> None:
        hidden = self.config.layer.hidden_size
        self._fc = loader.linear("fc", hidden, 2 * hidden)

    def fuse(self, states: States) -> torch.Tensor:
        return states[0].float()

    def _enter(self, b: EagleBuffers) -> None:
        width = self.config.layer.hidden_size
        self.network.gather(b.ids, self._embedding, b.fused[:, :width])
        self.network.copy(b.hidden, b.fused[:, width:])
        self._fc(b.fused, b.layer_input)

    def _residual(self, b: EagleBuffers) -> torch.Tensor:
        return b.layer_input

    def _head_input(self, b: EagleBuffers) -> torch.Tensor:
        self.network.add(b.delta, b.yielded)
        return b.yielded


class Eagle3(EagleModel):
    """EAGLE-3: hidden states of several of the target's layers are fused once; embedding and hidden state, each after
    its norm, stand side by side in the layer's input. The head has a norm, and may have a smaller vocabulary."""

    inputs = 2

    def _load(self, loader: EagleLoader) -> None:
        c = self.config
        self._fc = loader.linear("fc", c.layer.hidden_size, loader.target_hidden_size * len(c.reads))
        self._input_norm = loader.vector("layers.0.input_layernorm.weight")
        self._hidden_norm = loader.vector("layers.0.hidden_norm.weight")
        self._final_norm = loader.vector("norm.weight")

    def fuse(self, states: States) -> torch.Tensor:
        x = torch.cat(tuple(states), 1).float()
        return self._fc(x, torch.empty(len(x), self.config.layer.hidden_size))

    def _enter(self, b: EagleBuffers) -> None:
        network, width = self.network, self.config.layer.hidden_size
        network.gather(b.ids, self._embedding, b.embedded)
        network.norm(b.embedded, None, self._input_norm, self.eps, b.left)
        network.norm(b.hidden, None, self._hidden_norm, self.eps, b.right)
        network.copy(b.left, b.layer_input[:, :width])
        network.copy(b.right, b.layer_input[:, width:])

    def _residual(self, b: EagleBuffers) -> torch.Tensor:
        return b.right if self.config.norm_before_residual else b.hidden

    def _head_input(self, b: EagleBuffers) -> torch.Tensor:
        self.network.norm(b.yielded, b.delta, self._final_norm, self.eps, b.normed)
        return b.normed


def load(directory: Path, target: TargetModel) -> EagleModel:
    """The head in `directory`. Raises: LoadError, also when it belongs to another model."""
    method = target.speculation.method
    config = EagleConfig.from_directory(directory, method, target.model.part.whole)
    layers = target.model.part.layers
    if foreign := [read for read in config.reads if read != FINAL and read not in layers]:
        raise LoadError(
            f"it reads hidden states of layers {foreign}, but only layers {layers.start} to {layers.stop - 1} are "
            "computed where it runs, by the last pipeline stage; use fewer stages, or a head that reads no others"
        )
    kind = Eagle if method == "eagle" else Eagle3
    return kind(config, target.drafter_checkpoint(directory), target)
