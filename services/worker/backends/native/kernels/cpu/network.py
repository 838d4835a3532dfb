"""The forward pass with compiled kernels over a paged cache."""

from collections.abc import Callable
from typing import TypeVar

import torch

from services.worker.backends.native.kernels.cpu.compiled import copying
from services.worker.backends.native.kernels.cpu.compiled.attention import attention_kernel, write_kernel
from services.worker.backends.native.kernels.cpu.compiled.copying import copy_kernel
from services.worker.backends.native.kernels.cpu.compiled.most_likely import most_likely_kernel
from services.worker.backends.native.kernels.cpu.compiled.norm_and_gate import gate_kernel, norm_kernel
from services.worker.backends.native.kernels.cpu.compiled.rotary import rotary_kernel
from services.worker.backends.native.kernels.cpu.embedding import PanelEmbedding
from services.worker.backends.native.kernels.cpu.launching import Launcher
from services.worker.backends.native.kernels.cpu.panels import Panels
from services.worker.backends.native.kernels.cpu.products import (
    NARROW,
    OWN_BFLOAT16,
    WIDE,
    Float32Product,
    OneDnnProduct,
    float32_panel_product,
)
from services.worker.backends.native.kernels.interface.attention import Attention, AttentionShape
from services.worker.backends.native.kernels.interface.buffers import Buffers
from services.worker.backends.native.kernels.interface.kv_cache import (
    Allocate,
    CacheShape,
    KVCache,
    own_memory,
)
from services.worker.backends.native.kernels.interface.products import EmbeddingTable, Linear
from services.worker.backends.native.kernels.interface.recording import Recording
from services.worker.backends.native.kernels.plain_embedding import PlainEmbedding
from services.worker.backends.native.kernels.quantized_weight import QuantizedWeight, Weight
from services.worker.backends.native.layout import kv_block_bytes, padded

B = TypeVar("B", bound=Buffers)
T = TypeVar("T")


class CpuNetwork:
    """`NetworkKernels`. All kernels are our own except products by oneDNN, which a recording calls between its kernels.

    Args:
        own: the feature of the processor with which our own kernels compute products of bfloat16 activations; None:
            oneDNN computes them
        wide: products of float32 activations use AVX-512
    """

    def __init__(
        self, activations: torch.dtype, cache: torch.dtype, own: str | None = None, wide: bool = False
    ) -> None:
        self.activations, self._cache, self._own = activations, cache, own
        self._float32 = WIDE if wide else NARROW
        half = activations == torch.bfloat16
        self._launcher = Launcher(beside_torch=half and own is None)
        self._norm, self._gate, self._most_likely = norm_kernel(half), gate_kernel(half), most_likely_kernel()
        self._copies = {
            torch.float32: copy_kernel(half=False, beside_torch=half),
            torch.bfloat16: copy_kernel(half=True, beside_torch=half),
        }

    def linear(self, weight: Weight, bias: torch.Tensor | None = None) -> Linear:
        if self._own is not None or isinstance(weight, QuantizedWeight):
            return self._from_panels(Panels.from_weight(weight), bias)
        if self.activations == torch.float32:
            return Float32Product(self._launcher, weight, bias, self._float32)
        return OneDnnProduct(self._launcher, weight.to(self.activations), bias)

    def embedding(self, weight: Weight) -> EmbeddingTable:
        if self._own is not None or isinstance(weight, QuantizedWeight):
            return PanelEmbedding(self._launcher, Panels.from_weight(weight))
        return PlainEmbedding(self, weight)

    def tied(self, embedding: EmbeddingTable) -> Linear:
        if isinstance(embedding, PanelEmbedding):
            return self._from_panels(embedding.panels, None)
        assert embedding.tensor is not None, "it is one of this network's"
        return self.linear(embedding.tensor)

    def _from_panels(self, panels: Panels, bias: torch.Tensor | None) -> Linear:
        make = float32_panel_product if self._own is None else OWN_BFLOAT16[self._own]
        return make(self._launcher, panels, bias)

    def bytes_per_block(self, shape: CacheShape) -> int:
        layers, kv_heads, head_dim, block_size, dtype = shape
        return kv_block_bytes(layers, kv_heads, head_dim, block_size, dtype.itemsize)

    def kv_cache(self, shape: CacheShape, num_blocks: int, allocate: Allocate = own_memory) -> KVCache:
        """keys[layer]: [blocks, kv_heads, padded head_dim, padded block_size], transposed for the attention kernel;
        values[layer]: [blocks, kv_heads, block_size, padded head_dim]."""
        layers, heads, dim, size, dtype = shape
        keys = allocate((layers, num_blocks, heads, padded(dim), padded(size)), dtype)
        values = allocate((layers, num_blocks, heads, size, padded(dim)), dtype)
        return KVCache(shape, num_blocks, keys, values)

    def attention(
        self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int
    ) -> Attention:
        return CpuAttention(self._launcher, self.activations, shape, cache, table, most_tokens)

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        self._copied(index, source, index.data_ptr(), out, adds=False)

    def copy(self, source: torch.Tensor, out: torch.Tensor) -> None:
        self._copied(source, source, 0, out, adds=False)

    def add(self, source: torch.Tensor, out: torch.Tensor) -> None:
        self._copied(source, source, 0, out, adds=True)

    def _copied(
        self, counted: torch.Tensor, source: torch.Tensor, index: int, out: torch.Tensor, adds: bool
    ) -> None:
        sizes, kernel = (source.shape[1], out.stride(0)), self._copies[source.dtype]
        kernel.cost = -(-copying.WORTH // sizes[0])
        values = (source.data_ptr(), index, out.data_ptr(), *sizes, int(adds))
        self._launcher.launch(kernel, counted, values)

    def norm(
        self,
        residual: torch.Tensor,
        delta: torch.Tensor | None,
        weight: torch.Tensor,
        eps: float,
        out: torch.Tensor,
    ) -> None:
        added = 0 if delta is None else delta.data_ptr()
        addresses = residual.data_ptr(), added, weight.data_ptr(), out.data_ptr()
        self._launcher.launch(self._norm, residual, (*addresses, residual.shape[1], eps))

    def silu_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor) -> None:
        self._launcher.launch(self._gate, gate_up, (gate_up.data_ptr(), out.data_ptr(), out.shape[1]))

    def most_likely(
        self, logits: torch.Tensor, sharpness: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor
    ) -> None:
        addresses = ids.data_ptr(), chances.data_ptr(), sharpness.data_ptr()
        self._launcher.launch(self._most_likely, logits, (logits.data_ptr(), logits.shape[1], *addresses))

    def call(
        self, function: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, out: torch.Tensor
    ) -> torch.Tensor:
        return self._launcher.call(function, x, out)

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        return self._launcher.record(body, buffers)


class CpuAttention:
    """`Attention`. `write` stores the rotated queries for `attend`, padded to whole vectors."""

    def __init__(
        self,
        launcher: Launcher,
        activations: torch.dtype,
        shape: AttentionShape,
        cache: KVCache,
        table: torch.Tensor,
        most_tokens: int,
    ) -> None:
        kinds = activations == torch.bfloat16, cache.shape.dtype == torch.bfloat16
        self._rotary, self._write, self._attend = (
            rotary_kernel(),
            write_kernel(*kinds),
            attention_kernel(*kinds),
        )
        self._launcher, self._shape, self._cache, self._table = launcher, shape, cache, table
        dim, block_size = cache.shape.head_dim, cache.shape.block_size
        self._queries = torch.empty(most_tokens, shape.heads, padded(dim))
        self._cos, self._sin = torch.empty(most_tokens, dim // 2), torch.empty(most_tokens, dim // 2)
        self._shared = (
            *(table.data_ptr(), table.shape[1], block_size, padded(block_size)),
            *(shape.heads, cache.shape.kv_heads, dim, padded(dim), self._queries.data_ptr()),
        )

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        turns = self._cos.data_ptr(), self._sin.data_ptr()
        self._where = (slots.data_ptr(), positions.data_ptr(), *turns)
        values = (positions.data_ptr(), self._shape.frequencies.data_ptr(), *turns, self._cos.shape[1])
        self._launcher.launch(self._rotary, positions, values)

    def write(
        self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None
    ) -> None:
        weights = tuple(weight.data_ptr() for weight in norms) if norms else (0, 0)
        numbers = self._shape.norm_eps, self._cache.shape.head_dim**-0.5
        values = (*self._of(layer), qkv.data_ptr(), *self._where, *weights, *numbers)
        self._launcher.launch(self._write, qkv, values)

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor) -> None:
        values = (*self._of(layer), out.data_ptr(), tiles.data_ptr(), self._shape.windows[layer])
        self._launcher.launch(self._attend, tiles, values, self._cache.shape.kv_heads)

    def _of(self, layer: int) -> tuple[int, ...]:
        keys, values = self._cache.keys[layer], self._cache.values[layer]
        return keys.data_ptr(), values.data_ptr(), *self._shared
