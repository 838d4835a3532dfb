# ruff: noqa: ARG001, the signatures are numba's
"""Raw memory for numba kernels: arrays at addresses, scratch memory, numbers that threads share, calls of C functions.

Addresses are integers, in bytes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

from services.worker.kernels.cpu.compiled.building import load, store
from services.worker.kernels.cpu.compiled.intrinsics import emits
from services.worker.kernels.cpu.compiled.simd import I8, I16, I32, I64


@emits(types.int64, types.int64, types.int64)
def fetch_add(builder: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address` atomically and return its previous value. All threads see such changes, and all
    earlier writes, in one order."""
    return builder.atomic_rmw("add", builder.inttoptr(address, I64.as_pointer()), value, "seq_cst")


@intrinsic
def allocate(typing_context: Any, size: Any) -> Any:
    """Address of `size` bytes of scratch memory, aligned to 16, until `release`.

    The address of a NumPy array cannot be used instead: the compiler frees an array after its last use, and does not
    count uses of its address.
    """

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.ptrtoint(context.nrt.allocate(builder, args[0]), I64)

    return types.int64(types.int64), code


@intrinsic
def release(typing_context: Any, address: Any) -> Any:
    """Free scratch memory."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        context.nrt.free(builder, builder.inttoptr(args[0], context.get_value_type(types.voidptr)))
        return context.get_dummy_value()

    return types.void(types.int64), code


@emits(types.int64, types.int64)
def load_i64(builder: Any, address: Any) -> Any:
    """Load the int64 at `address`, which other threads may change, in the same order."""
    return builder.load_atomic(builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


@emits(types.void, types.int64, types.int64)
def store_i64(builder: Any, address: Any, value: Any) -> None:
    builder.store_atomic(value, builder.inttoptr(address, I64.as_pointer()), "seq_cst", 8)


def _load(kind: ir.Type, extend: Callable[[Any, Any, Any], Any]) -> Any:
    """Make a load of a number as int64; other threads do not change it."""
    return emits(types.int64, types.int64)(lambda builder, at: extend(builder, load(builder, at, kind), I64))


def _store(kind: ir.Type) -> Any:
    """Make a store of the lowest bits of an int64; other threads do not read them."""
    return emits(types.void, types.int64, types.int64)(
        lambda builder, at, value: store(builder, builder.trunc(value, kind), at)
    )


load_u8, load_u16, load_u32 = (_load(kind, ir.IRBuilder.zext) for kind in (I8, I16, I32))
load_i16 = _load(I16, ir.IRBuilder.sext)
store_u8, store_u16, store_u32 = map(_store, (I8, I16, I32))


def prefetch_line(builder: Any, address: Any, caches: int = 3) -> None:
    """Build a prefetch of the 64 bytes around `address`. `caches`: 3: to all; 2: to all but the first."""
    where = builder.inttoptr(address, I8.as_pointer())
    numbers = [ir.Constant(I32, number) for number in (0, caches, 1)]  # for reading; data
    kind = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [where, *numbers])


@emits(types.void, types.int64)
def _prefetch_line(builder: Any, address: Any) -> None:
    prefetch_line(builder, address)


@njit(inline="always")
def prefetch(address, size):  # type: ignore[no-untyped-def]
    """Begin to read `size` bytes into the caches."""
    for offset in range(0, size, 64):
        _prefetch_line(address + offset)


@emits(types.voidptr, types.int64)
def pointer(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, I8.as_pointer())


@emits(types.void, types.int64, types.int64)
def call(builder: Any, function: Any, argument: Any) -> None:
    """Call the C function at address `function` with one address."""
    kind = ir.FunctionType(ir.VoidType(), [I64])
    builder.call(builder.inttoptr(function, kind.as_pointer()), [argument])


@njit(inline="always")
def i32_at(address, size):  # type: ignore[no-untyped-def]
    """The int32 array of `size` elements at `address`."""
    return carray(pointer(address), (size,), np.int32)


@njit(inline="always")
def i64_at(address, size):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (size,), np.int64)


@njit(inline="always")
def f32_at(address, size):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (size,), np.float32)
