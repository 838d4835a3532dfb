"""The operations of a forward pass."""

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import torch

from services.worker.kernels.interface.attention import Attention, AttentionShape
from services.worker.kernels.interface.buffers import B
from services.worker.kernels.interface.kv_cache import Allocate, CacheShape, KVCache, own_memory
from services.worker.kernels.interface.products import EmbeddingTable, Linear
from services.worker.kernels.interface.recording import Recording
from services.worker.kernels.interface.routing import RoutingKernels
from services.worker.kernels.packed_weight import Packed
from services.worker.kernels.quantized_weight import Weight

T = TypeVar("T")
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]


class NetworkKernels(Protocol):
    """The forward pass of a model or a drafter. For one calling thread."""

    activations: torch.dtype
    """dtype that products read and write."""
    routing: RoutingKernels | None
    """None: mixtures of experts are not supported."""

    def pack(self, weight: Weight, is_table: bool = False) -> Packed:
        """Bring a weight into the layout of `linear`, or of `embedding` if it `is_table`. Kernels without a layout of
        their own, or whose layout a library hides, return the weight."""
        ...

    def linear(self, weight: Packed, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a product. Takes ownership of weight [out, in] and bias [out]."""
        ...

    def embedding(self, weight: Packed) -> EmbeddingTable:
        """Prepare the vectors of tokens, [tokens, width]."""
        ...

    def tied(self, embedding: EmbeddingTable) -> Linear:
        """A product with the embedding's vectors as weights; it reads the same memory where the layout allows it."""
        ...

    def bytes_per_block(self, shape: CacheShape) -> int: ...

    def kv_cache(self, shape: CacheShape, num_blocks: int, allocate: Allocate = own_memory) -> KVCache:
        """`allocate`: used if the device computes in the host's memory."""
        ...

    def attention(
        self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int
    ) -> Attention:
        """`table`: int32[slots, num_tables * blocks], the block tables of every slot; the scheduler's plans change them
        in place."""
        ...

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = source[index[i]] in float32; int32[rows], [any, width], float32[rows, width]."""
        ...

    def copy(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        """out = factor * source; float32 or activations[rows, width], float32[rows, width]. `out` may be columns of a
        wider matrix, or the source."""
        ...

    def add(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        """out += factor * source; activations[rows, width], float32[rows, width]."""
        ...

    def norm(
        self,
        residual: torch.Tensor | None,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        """residual += factor * delta; out = residual / rms(residual) * weight.

        Args:
            residual: float32[rows, width]; None: out = delta / rms(delta) * weight
            delta: activations[rows, width], or None: nothing is added
            weight: float32[width]; None: out = residual
            out: activations[rows, width], other memory than `delta`
        """
        ...

    def gate_and_multiply(
        self, gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu"
    ) -> None:
        """out = activation(gate) * up; activations[rows, 2 * width] to [rows, width].

        gelu_tanh(x) = x * sigmoid(1.5957691216 * (x + 0.044715 * x^3)). With clamped_silu, gates are at most 7 and
        up is in -7 .. 7: out = gate * sigmoid(1.702 * gate) * (up + 1).
        """
        ...

    def most_likely(
        self, logits: torch.Tensor, sharpness: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor
    ) -> None:
        """Find the most likely token of each row, the lowest id among equals, and its probability.

        Args:
            logits: float32[rows, vocab]
            sharpness: float32[rows], factor of the logits
            ids, chances: int32[rows] and float32[rows], written
        """
        ...

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Call a function of the host that maps [rows, width] to the same shape, such as a sum over ranks.

        Returns: the result, in `out` or in the function's own memory.
        """
        ...

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        """Record the operations that `body` calls on `buffers`. `body` must not depend on values."""
        ...


class PlainEmbedding:
    """`EmbeddingTable`"""

    def __init__(self, network: NetworkKernels, tensor: torch.Tensor) -> None:
        self._network, self._tensor, self.num_bytes = network, tensor, tensor.nbytes
        self.tensor: torch.Tensor | None = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    def look_up(self, index: torch.Tensor, out: torch.Tensor) -> None:
        self._network.gather(index, self._tensor, out)
