"""The forward pass on a CUDA device."""

from collections.abc import Callable
from typing import TypeVar

import torch
import triton

from services.worker.device.interface import ComputeDevice
from services.worker.kernels.cuda.attention import PagedAttention
from services.worker.kernels.cuda.compiled.gathering import gather_kernel
from services.worker.kernels.cuda.compiled.norm_and_gate import gate_kernel, norm_kernel
from services.worker.kernels.cuda.graph_plan import GraphPlan
from services.worker.kernels.cuda.graphs import CudaGraphs
from services.worker.kernels.cuda.recording import GraphRecording
from services.worker.kernels.interface.attention import Attention, AttentionShape
from services.worker.kernels.interface.buffers import B
from services.worker.kernels.interface.kv_cache import Allocate, CacheShape, KVCache, own_memory
from services.worker.kernels.interface.network import Activation, NetworkKernels
from services.worker.kernels.interface.products import EmbeddingTable, Linear
from services.worker.kernels.interface.recording import Recording
from services.worker.kernels.packed_weight import PLAIN, Packed
from services.worker.kernels.quantized_weight import QuantizedWeight, Weight
from services.worker.runner import LoadError


class CudaLinear(Linear):
    """A product with the weights in the dtype of the activations."""

    def __init__(
        self, weight: Weight, bias: torch.Tensor | None, activations: torch.dtype, device: ComputeDevice
    ) -> None:
        """Raises: LoadError, for quantised weights."""
        plain = device.keep(dense(weight)).to(activations)
        self._transposed, self.num_bytes = plain.t(), plain.nbytes
        self._bias = bias if bias is None else device.keep(bias).to(activations)

    def __call__(self, x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Outputs in float32 are rounded to the dtype of the activations, as cuBLAS returns them."""
        if out.dtype != x.dtype:
            return out.copy_(self(x, torch.empty_like(out, dtype=x.dtype)))
        if self._bias is None:
            return torch.mm(x, self._transposed, out=out)
        return torch.addmm(self._bias, x, self._transposed, out=out)


def dense(weight: Weight) -> torch.Tensor:
    """Raises: LoadError, for quantised weights."""
    if isinstance(weight, QuantizedWeight):
        raise LoadError(
            f"quantised weights ({', '.join(weight.kinds)}) are not supported on CUDA; use --quantization none, "
            "or --device cpu"
        )
    return weight


T = TypeVar("T")
_COLUMNS = 1024
"""Columns of a row in one program."""


class CudaNetwork(NetworkKernels):
    """
    Args:
        graphs: makes what captures the decode steps of a recording; None: recordings are eager
    """

    def __init__(
        self, activations: torch.dtype, device: ComputeDevice, graphs: Callable[[], CudaGraphs] | None = None
    ) -> None:
        self.activations, self._device, self._graphs = activations, device, graphs
        self.routing = None

    def linear(self, weight: Packed, bias: torch.Tensor | None = None) -> Linear:
        assert not isinstance(weight, tuple), PLAIN
        return CudaLinear(weight, bias, self.activations, self._device)

    def embedding(self, weight: Packed) -> EmbeddingTable:
        assert not isinstance(weight, tuple), PLAIN
        return EmbeddingTable(self.gather, self._device.keep(dense(weight)))

    def kv_cache(self, shape: CacheShape, num_blocks: int, allocate: Allocate = own_memory) -> KVCache:
        """keys[layer] and values[layer]: [blocks, kv_heads, block_size, head_dim]."""
        sizes = shape.layers, num_blocks, shape.kv_heads, shape.block_size, shape.head_dim
        keys, values = (torch.empty(sizes, dtype=shape.dtype, device=self._device.where) for _ in range(2))
        return KVCache(shape, keys, values)

    def attention(self, shape: AttentionShape, cache: KVCache, table: torch.Tensor, most_tokens: int) -> Attention:
        return PagedAttention(shape, cache, table, most_tokens, self.activations)

    def gather(self, index: torch.Tensor, source: torch.Tensor, out: torch.Tensor) -> None:
        """Indices outside the source are clamped."""
        rows, width = out.shape
        if rows:
            strides = source.stride(0), out.stride(0)
            grid = rows, triton.cdiv(width, _COLUMNS)
            gather_kernel[grid](index, source, out, len(source), width, *strides, at_once=_COLUMNS)

    def copy(self, source: torch.Tensor, out: torch.Tensor, factor: float = 1.0) -> None:
        if factor == 1.0:
            out.copy_(source)
        else:
            torch.mul(source, factor, out=out)

    def norm(
        self,
        residual: torch.Tensor | None,
        delta: torch.Tensor | None,
        weight: torch.Tensor | None,
        eps: float,
        out: torch.Tensor,
        factor: float = 1.0,
    ) -> None:
        rows, width = out.shape
        if not rows:
            return
        padded = triton.next_power_of_2(width)
        warps = min(max(padded // 512, 1), 16)
        given = (out if x is None else x for x in (residual, delta, weight))
        norm_kernel[(rows,)](
            *(*given, out, eps, factor, width),
            keeps=residual is not None,
            adds=delta is not None,
            normalises=weight is not None,
            padded=padded,
            num_warps=warps,
        )

    def gate_and_multiply(self, gate_up: torch.Tensor, out: torch.Tensor, activation: Activation = "silu") -> None:
        rows, width = out.shape
        if rows:
            grid = rows, triton.cdiv(width, _COLUMNS)
            gate_kernel[grid](gate_up, out, width, activation=activation, at_once=_COLUMNS)

    def record(self, body: Callable[[B], T], buffers: B) -> Recording[T]:
        """Decode steps of a forward pass are captured; buffers of other kinds of rows are computed eagerly."""
        if self._graphs is None or set(buffers.capacity) != {"tokens", "tiles", "sampled"}:
            return Recording(body, buffers)
        plan = GraphPlan.for_rows(min(buffers.capacity.values()))
        return GraphRecording(body, buffers, plan, self._graphs())
