"""Attention of a step over the paged cache."""

import torch
import triton

from services.worker.kernels.cuda.attention_buffers import DRAFTED, LEAST_ROWS, AttentionBuffers, padded
from services.worker.kernels.cuda.compiled.attention import attention_kernel, merge_kernel
from services.worker.kernels.cuda.compiled.writing import write_kernel
from services.worker.kernels.cuda.split_plan import num_splits
from services.worker.kernels.interface.attention import Attention, AttentionShape
from services.worker.kernels.interface.kv_cache import KVCache

TILE = 64
"""Maximum number of tokens in a tile."""
_LOG2_E = 1.4426950408889634
_HEADS_AT_ONCE = 8
_MOST_AT_ONCE = {2: 64, 4: 32}
"""Rows of a program, and keys at once with heads of up to 128 dimensions, by the bytes of an item: the compiler keeps
their products in registers. In two bytes a multiprocessor holds two programs, one of which multiplies while the other
computes exponentials. Products of float32 use no matrix unit; larger ones take kilobytes of a thread's stack."""


class PagedAttention(Attention):
    """Queries keep the dtype of the activations, as the products of the kernel need it.

    Args:
        table: int32[slots, blocks] on the device
        processors: multiprocessors to occupy; None: those of the device
    """

    def __init__(
        self,
        shape: AttentionShape,
        cache: KVCache,
        table: torch.Tensor,
        most_tokens: int,
        activations: torch.dtype,
        processors: int | None = None,
    ) -> None:
        super().__init__(shape, cache, table)
        self._heads, self._kv_heads, self._head_dim = shape.heads, cache.shape.kv_heads, shape.head_dim
        self._group = shape.heads // self._kv_heads
        self._most = _MOST_AT_ONCE[activations.itemsize]
        where = table.device
        self._processors = processors or num_processors(where)
        self._frequencies = shape.frequencies.to(where)
        self._amplitudes = shape.amplitudes.to(where) if bool((shape.amplitudes != 1).any()) else None
        self._buffers = AttentionBuffers(shape, self._kv_heads, most_tokens, activations, self._processors, where)
        self._positions = self._slots = torch.empty(0, dtype=torch.int32, device=where)

    def begin(self, positions: torch.Tensor, slots: torch.Tensor) -> None:
        self._positions, self._slots = positions, slots
        tables = self._buffers.angles, self._buffers.cosines, self._buffers.sines
        angles, cosines, sines = (table[:, : len(positions)] for table in tables)
        torch.mul(positions[:, None], self._frequencies[:, None], out=angles)
        torch.cos(angles, out=cosines)
        torch.sin(angles, out=sines)
        if self._amplitudes is not None:
            cosines.mul_(self._amplitudes[:, None])
            sines.mul_(self._amplitudes[:, None])

    def write(self, layer: int, qkv: torch.Tensor, norms: tuple[torch.Tensor, torch.Tensor] | None = None) -> None:
        if not len(qkv):
            return
        b, keys, values, table = self._buffers, *self._of(layer)
        query_norm, key_norm = norms if norms is not None else (self._frequencies, self._frequencies)
        kind = self._shape.rotations[layer]
        grid = len(qkv), triton.cdiv(self._heads + 2 * self._kv_heads, _HEADS_AT_ONCE)
        write_kernel[grid](
            *(qkv, b.cosines[kind], b.sines[kind], self._positions, self._slots, table),
            *(query_norm, key_norm, b.queries, keys, values, self._shape.norm_eps, table.stride(0)),
            heads=self._heads,
            kv_heads=self._kv_heads,
            half=self._head_dim // 2,
            width=triton.next_power_of_2(self._head_dim // 2),
            block_size=self._cache.shape.block_size,
            normed=norms is not None,
            all_heads=len(query_norm) > self._head_dim,
            at_once=_HEADS_AT_ONCE,
        )

    def attend(self, layer: int, tiles: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None = None) -> None:
        if not len(tiles):
            return
        group, most = self._group, self._most
        decodes = len(tiles) == len(out)  # every tile has one token
        few = padded(group if decodes else max(group, min(DRAFTED * group, most)))
        small = 1 if decodes else max(1, few // group)
        splits = num_splits(len(tiles), self._kv_heads, self._processors)
        self._launch(layer, tiles, out, sinks, least=1, most=small, rows=few, programs=1, splits=splits)
        if not decodes:
            many = min(most, padded(TILE * group))
            programs = triton.cdiv(TILE * group, many)
            self._launch(layer, tiles, out, sinks, least=small + 1, most=TILE, rows=many, programs=programs, splits=1)

    def _of(self, layer: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the keys, the values and the block table of a layer."""
        place = self._shape.places[layer]
        return self._cache.keys[place], self._cache.values[place], self._tables[self._shape.tables[layer]]

    def _launch(
        self, layer: int, tiles: torch.Tensor, out: torch.Tensor, sinks: torch.Tensor | None,
        *, least: int, most: int, rows: int, programs: int, splits: int
    ) -> None:  # fmt: skip
        """Launch `attention_kernel` with these numbers."""
        b, head_dim = self._buffers, self._head_dim
        width = max(LEAST_ROWS, triton.next_power_of_2(head_dim))
        parts = b.parts, b.maxima, b.sums
        keys, values, table = self._of(layer)
        shared = {"group": self._group, "head_dim": head_dim, "width": width, "rows": rows, "splits": splits}
        attention_kernel[len(tiles) * programs, self._kv_heads, splits](
            *(b.queries, keys, values, table, tiles, out, *parts, b.sums if sinks is None else sinks),
            *(self._shape.scale * _LOG2_E, table.stride(0), self._kv_heads, least, most),
            block_size=self._cache.shape.block_size,
            window=self._shape.windows[layer],
            has_sinks=sinks is not None,
            programs=programs,
            keys_at_once=self._most if width <= 128 else self._most // 2,
            num_warps=8 if rows >= 64 and width > 128 else 4,
            num_stages=2 if rows >= 64 else 3,
            **shared,
        )
        if splits > 1:
            grid = len(tiles), self._kv_heads, min(rows, most * self._group)
            merge_kernel[grid](*parts, tiles, out, self._kv_heads, most, **shared)


def num_processors(where: torch.device) -> int:
    """Return the number of multiprocessors; under Triton's interpreter there is one."""
    return torch.cuda.get_device_properties(where).multi_processor_count if where.type == "cuda" else 1
