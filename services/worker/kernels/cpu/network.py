"""The forward pass with compiled kernels over a paged cache."""

import torch

from services.worker.kernels.cpu.compiled import copying, routing
from services.worker.kernels.cpu.compiled.attention import attention_kernel, write_kernel
from services.worker.kernels.cpu.compiled.copying import copy_kernel
from services.worker.kernels.cpu.compiled.most_likely import most_likely_kernel
from services.worker.kernels.cpu.compiled.norm_and_gate import gate_kernel, norm_kernel
from services.worker.kernels.cpu.compiled.quantized import float32_rows_kernel, rows_kernel
from services.worker.kernels.cpu.compiled.rotary import rotary_kernel
from services.worker.kernels.cpu.compiled.tile_attention import KEYS, WIDTH, tile_attention_kernel
from services.worker.kernels.cpu.launching import Launcher
from services.worker.kernels.cpu.panels import PAIRED, PanelEmbedding, coded_panels, paired_panels
from services.worker.kernels.cpu.products import FLOAT32, PanelProduct, StackedProduct, float32_panels
from services.worker.kernels.cpu.thread_team import Kernel
from services.worker.kernels.interface.attention import Attention, AttentionShape
from services.worker.kernels.interface.kv_cache import Allocate, CacheShape, KVCache, own_memory
from services.worker.kernels.interface.network import Activation, NetworkKernels
from services.worker.kernels.interface.products import EmbeddingTable, Linear
from services.worker.kernels.interface.routing import Routed, RoutingKernels
from services.worker.kernels.layout import kv_block_bytes, padded
from services.worker.kernels.packed_weight import Packed, PackedRows
from services.worker.kernels.quantized_weight import QuantizedWeight, Weight
from services.worker.kernels.selection import TILES, KernelChoice


class CpuNetwork(Launcher, NetworkKernels):
    def __init__(self, choice: KernelChoice) -> None:
        self._choice, self.activations = choice, choice.activations
        self._norm, self._most_likely = norm_kernel(self.activations == torch.bfloat16), most_likely_kernel()
        self._gates: dict[Activation, Kernel] = {}
        self.routing = CpuRouting()
        self._copies = {torch.float32: copy_kernel(half=False), torch.bfloat16: copy_kernel(half=True)}

    @property
    def arithmetic(self) -> str:
        own = self._choice.own
        pairs = " pairs of keys and values" if own == TILES else ""
        return f"{super().arithmetic} {own}{pairs}{' few rows' if self._choice.few_rows else ''}"

    def pack(self, weight: Weight, is_table: bool = False) -> Packed:
        if isinstance(weight, QuantizedWeight):
            return tuple(coded_panels(kind, parts) for kind, parts in weight.by_type())
        if self._choice.own is not None:
            return (paired_panels(weight),)
        if is_table:
            return weight
        return (float32_panels(weight, self._choice.wide),)

    def linear(self, weight: Packed, bias: torch.Tensor | None = None) -> Linear:
        packed = weight if isinstance(weight, tuple) else self.pack(weight)
        assert isinstance(packed, tuple), "weights of products are packed"
        if len(packed) == 1:
            return self._product(packed[0], bias)
        biases = [None] * len(packed) if bias is None else bias.split([each.outputs for each in packed])
        return StackedProduct([self._product(*each) for each in zip(packed, biases, strict=True)])

    def embedding(self, weight: Packed) -> EmbeddingTable:
        packed = weight if isinstance(weight, tuple) else self.pack(weight, is_table=True)
        if not isinstance(packed, tuple):
            return EmbeddingTable(self.gather, packed)
        [panels] = packed  # one tensor of a file
        if panels.layout == FLOAT32:
            kernel = float32_rows_kernel(self._choice.wide, panels.memory.dtype == torch.bfloat16)
        else:
            kernel = rows_kernel(panels.layout != PAIRED)
        return PanelEmbedding(self, panels, kernel)

    def tied(self, embedding: EmbeddingTable) -> Linear:
        assert isinstance(embedding, PanelEmbedding), "its weight was packed for products"
        return self._product(embedding.panels, None)

    def _product(self, packed: PackedRows, bias: torch.Tensor | None) -> PanelProduct:
        return PanelProduct(self, packed, bias, self._choice)

    def bytes_per_block(self, shape: CacheShape) -> int:
        layers, kv_heads, head_dim, block_size, dtype = shape
        return kv_block_bytes(layers, kv_heads, head_dim, block_size, dtype.itemsize)

    def kv_cache(self, shape: CacheShape, num_blocks: int, allocate: Allocate = own_memory) -> KVCache:
        """keys[layer]: [blocks, kv_heads, padded head_dim, padded block_size], transposed for the attention kernel;
        values[layer]: [blocks, kv_heads, block_size, padded head_dim]. In pairs with AMX, see `tile_attention`."""
        layers, heads, dim, size, dtype = shape
        keys = allocate((layers, num_blocks, heads, padded(dim), padded(size)), dtype)
        values = allocate((layers, num_blocks, heads, size, padded(dim)), dtype)
        return KVCache(shape, keys, values)

    def attention(self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int) -> Attention:
        kinds = self.activations == torch.bfloat16, cache.shape.dtype == torch.bfloat16
        dim, size = padded(cache.shape.head_dim), cache.shape.block_size
        in_tiles = self._choice.own == TILES and all(kinds) and dim % WIDTH == size % KEYS == 0
        attend = tile_attention_kernel() if in_tiles else attention_kernel(*kinds)
        return CpuAttention(self, write_kernel(*kinds, in_tiles), attend, shape, cache, table, most_tokens)

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        self._copied(index, source, index.data_ptr(), out, adds=False, factor=1.0)

    def copy(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        self._copied(source, source, 0, out, adds=False, factor=factor)

    def add(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        self._copied(source, source, 0, out, adds=True, factor=factor)

    def _copied(
        self, counted: torch.Tensor, source: torch.Tensor, index: int, out: torch.Tensor, adds: bool, factor: float
    ) -> None:
        sizes, kernel = (source.shape[1], out.stride(0)), self._copies[source.dtype]
        kernel.cost = -(-copying.WORTH // sizes[0])
        values = (source.data_ptr(), index, out.data_ptr(), *sizes, int(adds), factor)
        self.launch(kernel, counted, values)

    def norm(
        self,
        residual: torch.Tensor | None,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        addresses = (0 if x is None else x.data_ptr() for x in (residual, delta, weight, out))
        self.launch(self._norm, out, (*addresses, out.shape[1], eps, factor))

    def gate_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
        if activation not in self._gates:
            self._gates[activation] = gate_kernel(self.activations == torch.bfloat16, activation)
        values = gate_up.data_ptr(), out.data_ptr(), out.shape[1]
        self.launch(self._gates[activation], gate_up, values)

    def most_likely(
        self, logits: torch.Tensor, sharpness: torch.Tensor, ids: torch.Tensor, chances: torch.Tensor
    ) -> None:
        addresses = ids.data_ptr(), chances.data_ptr(), sharpness.data_ptr()
        self.launch(self._most_likely, logits, (logits.data_ptr(), logits.shape[1], *addresses))


class CpuRouting(RoutingKernels):
    def route(self, logits: torch.Tensor, per_token: int, normalised: bool, sigmoid: bool = False) -> Routed:
        tokens, weights, ends = routing.route(logits.float().numpy(), per_token, normalised, sigmoid)
        return Routed(torch.from_numpy(tokens), torch.from_numpy(weights), ends.tolist())

    def combine(self, results: torch.Tensor, tokens: torch.Tensor, weights: torch.Tensor, rows: int) -> torch.Tensor:
        out = torch.zeros(rows, results.shape[1])
        routing.combine(results.float().numpy(), tokens.numpy(), weights.numpy(), out.numpy())
        return out


class CpuAttention(Attention):
    """`write` stores the rotated queries for `attend`, padded to whole vectors."""

    def __init__(
        self,
        launcher: Launcher,
        write: Kernel,
        attend: Kernel,
        shape: AttentionShape,
        cache: KVCache,
        table: torch.Tensor,
        most_tokens: int,
    ) -> None:
        self._rotary, self._write, self._attend = rotary_kernel(), write, attend
        super().__init__(shape, cache, table)
        self._launcher = launcher
        dim, block_size = cache.shape.head_dim, cache.shape.block_size
        self._queries = torch.empty(shape.heads, most_tokens, padded(dim))
        turns = len(shape.frequencies)
        self._cos, self._sin = (torch.empty(turns, most_tokens, dim // 2) for _ in range(2))
        self._shared = (
            *(block_size, padded(block_size)),
            *(shape.heads, cache.shape.kv_heads, dim, padded(dim), self._queries.data_ptr(), most_tokens),
        )

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._where = slots.data_ptr(), positions.data_ptr()
        for tables in zip(self._shape.frequencies, self._shape.amplitudes, self._cos, self._sin, strict=True):
            addresses = positions.data_ptr(), *(table.data_ptr() for table in tables)
            self._launcher.launch(self._rotary, positions, (*addresses, self._cos.shape[2]))

    def write(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        kind, dim = self._shape.rotations[layer], self._cache.shape.head_dim
        turns = self._cos[kind].data_ptr(), self._sin[kind].data_ptr()
        weights = tuple(weight.data_ptr() for weight in norms) if norms else (0, 0)
        all_heads = norms is not None and len(norms[0]) != dim
        numbers = int(all_heads), self._shape.norm_eps, self._shape.scale
        values = (*self._of(layer), qkv.data_ptr(), *self._where, *turns, *weights, *numbers)
        self._launcher.launch(self._write, qkv, values)

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        values = (*self._of(layer), out.data_ptr(), tiles.data_ptr(), self._shape.windows[layer])
        values = (*values, 0 if sinks is None else sinks.data_ptr())
        self._launcher.launch(self._attend, tiles, values, self._cache.shape.kv_heads)

    def _of(self, layer: int) -> tuple[int, ...]:
        place, table = self._shape.places[layer], self._tables[self._shape.tables[layer]]
        keys, values = self._cache.keys[place], self._cache.values[place]
        return keys.data_ptr(), values.data_ptr(), table.data_ptr(), table.stride(0), *self._shared
