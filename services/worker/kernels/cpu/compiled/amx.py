"""AMX instructions for numba kernels: tiles of bfloat16 or int8, with sums of float32 or int32, that multiply as
matrices.

A tile has 16 rows of 64 bytes. Tiles 0 to 3 are sums, 4 and 5 are rows of activations, 6 and 7 are weights.
`multiply` adds the products of 32 inputs to each sum in one fixed order, so a row's sums do not depend on the other
rows of a tile.

Each thread has its own tiles. A kernel configures them first and releases them last.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import types

from services.worker.kernels.cpu.compiled import raw
from services.worker.kernels.cpu.compiled.intrinsics import emits
from services.worker.kernels.cpu.compiled.simd import I64

ROWS = 16
"""Rows and columns of a tile of sums."""
TILE_BYTES = 1024


def emit(builder: Any, text: str, *operands: Any) -> None:
    """Build an instruction with some addresses or strides."""
    kind = ir.FunctionType(ir.VoidType(), [I64] * len(operands))
    builder.asm(kind, text, ",".join(["r"] * len(operands) + ["~{memory}"]), list(operands), True)


def _on_memory(text: str) -> Any:
    """Make an instruction with an address and a stride, in bytes."""
    return emits(types.void, types.int64, types.int64)(lambda builder, at, stride: emit(builder, text, at, stride))


def _on_tiles(text: str) -> Any:
    return emits(types.void)(lambda builder: emit(builder, text))


@emits(types.void, types.int64)
def _load_configuration(builder: Any, address: Any) -> None:
    emit(builder, "ldtilecfg ($0)", address)


release = _on_tiles("tilerelease")
zero_0, zero_1, zero_2, zero_3 = (_on_tiles(f"tilezero %tmm{n}") for n in range(4))
load_0, load_1, load_2, load_3, load_4, load_5, load_6, load_7 = (
    _on_memory(f"tileloadd ($0,$1,1), %tmm{n}") for n in range(8)
)
store_0, store_1, store_2, store_3 = (_on_memory(f"tilestored %tmm{n}, ($0,$1,1)") for n in range(4))
multiply_0, multiply_1, multiply_2, multiply_3 = (
    _on_tiles(f"tdpbf16ps %tmm{6 + n % 2}, %tmm{4 + n // 2}, %tmm{n}") for n in range(4)
)
"""Tile n of sums += activations of tile 4 + n // 2 times weights of tile 6 + n % 2."""
multiply_short_0, multiply_short_1 = (_on_tiles(f"tdpbf16ps %tmm{2 + n}, %tmm5, %tmm{n}") for n in range(2))
"""Tile n of sums += activations of tile 5 times weights of tile 2 + n, where both have sixteen inputs."""


@njit(inline="always")
def configure(memory, rows, bytes_=64, short=False):  # type: ignore[no-untyped-def]
    """Configure sums and activations with `rows` rows, weights with 16, for products of `bytes_` bytes of each row.

    Args:
        memory: 64 bytes to write to
        short: tiles 2, 3 and 5 are for `multiply_short_0` and `multiply_short_1`
    """
    configuration = carray(raw.pointer(memory), (64,), np.uint8)
    configuration[:] = 0
    configuration[0] = 1
    for tile in range(8):
        configuration[16 + 2 * tile] = np.uint8(bytes_ if 4 <= tile < 6 else 64)
        configuration[48 + tile] = np.uint8(rows if tile < 6 else bytes_ // 4)
    if short:
        configuration[16 + 2 * 5] = 32
        configuration[48 + 2] = configuration[48 + 3] = 8
    _load_configuration(memory)
