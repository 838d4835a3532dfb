"""The operations of a forward pass."""

from collections.abc import Callable
from typing import Literal, TypeVar

import torch
from torch.nn import functional

from services.worker.kernels.interface.attention import Attention, AttentionShape, normalised
from services.worker.kernels.interface.buffers import B
from services.worker.kernels.interface.kv_cache import Allocate, CacheShape, KVCache, own_memory
from services.worker.kernels.interface.products import EmbeddingTable, Linear
from services.worker.kernels.interface.recording import Recording
from services.worker.kernels.interface.routing import RoutingKernels
from services.worker.kernels.packed_weight import PLAIN, Packed
from services.worker.kernels.quantized_weight import Weight

T = TypeVar("T")
Activation = Literal["silu", "gelu_tanh", "clamped_silu"]


class NetworkKernels:
    """The forward pass of a model or a drafter. For one calling thread."""

    activations: torch.dtype
    """dtype that products read and write."""
    routing: RoutingKernels | None
    """None: mixtures of experts are not supported."""

    def __init__(self, activations: torch.dtype) -> None:
        self.activations = activations
        self.routing = RoutingKernels()

    @property
    def arithmetic(self) -> str:
        """Kernels with equal texts compute the same bits from the same weights."""
        return f"{type(self).__module__} {self.activations}"

    def pack(self, weight: Weight, is_table: bool = False) -> Packed:
        """Bring a weight into the layout of `linear` and `embedding`, or of `embedding` alone if it `is_table`. Kernels
        without a layout of their own return the weight."""
        return weight

    def linear(self, weight: Packed, bias: torch.Tensor | None = None) -> Linear:
        """Prepare a product. Takes ownership of weight [out, in] and bias [out]."""
        assert not isinstance(weight, tuple), PLAIN
        return Linear(weight, bias, self.activations)

    def embedding(self, weight: Packed) -> EmbeddingTable:
        """Prepare the vectors of tokens, [tokens, width]."""
        assert not isinstance(weight, tuple), PLAIN
        return EmbeddingTable(self.gather, weight)

    def tied(self, embedding: EmbeddingTable) -> Linear:
        """A product with the embedding's vectors as weights, which were packed for `linear`. It reads the same memory,
        unless that has another dtype than products need."""
        assert embedding.weight is not None, "it is one of this network's"
        return self.linear(embedding.weight)

    def bytes_per_block(self, shape: CacheShape) -> int:
        per_head = 2 * shape.block_size * shape.head_dim
        return shape.layers * shape.kv_heads * per_head * shape.dtype.itemsize

    def kv_cache(self, shape: CacheShape, num_blocks: int, allocate: Allocate = own_memory) -> KVCache:
        """keys[layer] and values[layer] have a layout of the implementation, here [blocks, block_size, kv_heads,
        head_dim]. `allocate`: used if the device computes in the host's memory."""
        sizes = shape.layers, num_blocks, shape.block_size, shape.kv_heads, shape.head_dim
        keys, values = allocate(sizes, shape.dtype), allocate(sizes, shape.dtype)
        return KVCache(shape, keys, values)

    def attention(self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int) -> Attention:
        """`table`: int32[slots, num_tables * blocks], the block tables of every slot; the scheduler's plans change them
        in place."""
        return Attention(shape, cache, table)

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        """out[i] = source[index[i]] in float32; int32[rows], [any, width], float32[rows, width]."""
        out.copy_(source[index.long()])

    def copy(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        """out = factor * source; float32 or activations[rows, width], float32[rows, width]. `out` may be columns of a
        wider matrix, or the source."""
        out.copy_(source * factor)

    def add(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        """out += factor * source; activations[rows, width], float32[rows, width]."""
        out.add_(source, alpha=factor)

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
        if residual is None:
            assert delta is not None, "there is something to normalise"
            residual = delta.float()
        elif delta is not None:
            residual.add_(delta, alpha=factor)
        out.copy_(residual if weight is None else normalised(residual, weight, eps))

    def gate_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
        """out = activation(gate) * up; activations[rows, 2 * width] to [rows, width].

        gelu_tanh(x) = x * sigmoid(1.5957691216 * (x + 0.044715 * x^3)). With clamped_silu, gates are at most 7 and
        up is in -7 .. 7: out = gate * sigmoid(1.702 * gate) * (up + 1).
        """
        gate, up = gate_up.float().chunk(2, -1)
        match activation:
            case "silu":
                out.copy_(functional.silu(gate) * up)
            case "gelu_tanh":
                out.copy_(functional.gelu(gate, approximate="tanh") * up)
            case "clamped_silu":
                gate = gate.clamp(max=7.0)
                out.copy_(gate * (1.702 * gate).sigmoid() * (up.clamp(-7.0, 7.0) + 1))

    def most_likely(
        self, logits: torch.Tensor, sharpness: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor
    ) -> None:
        """Find the most likely token of each row, the lowest id among equals, and its probability.

        Args:
            logits: float32[rows, vocab]
            sharpness: float32[rows], factor of the logits
            ids, chances: int32[rows] and float32[rows], written
        """
        ids.copy_(logits.argmax(-1))
        chances.copy_((logits * sharpness[:, None]).softmax(-1).amax(-1))

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        """Call a function of the host that maps [rows, width] to the same shape, such as a sum over ranks.

        Returns: the result, in `out` or in the function's own memory.
        """
        return function(x)

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        """Record the operations that `body` calls on `buffers`. `body` must not depend on values."""
        return Recording(body, buffers)
