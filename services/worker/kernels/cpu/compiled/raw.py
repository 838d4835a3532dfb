# ruff: noqa: ARG001, the signatures are numba's
"""Raw memory for numba kernels: arrays at addresses, scratch memory, numbers that threads share, calls of C functions.

Addresses are integers, in bytes.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import carray, njit
from numba.core import types
from numba.extending import intrinsic

I8, I32, I64 = (ir.IntType(bits) for bits in (8, 32, 64))


@intrinsic
def fetch_add(typing_context: Any, address: Any, value: Any) -> Any:
    """Add to the int64 at `address` atomically and return its previous value. All threads see such changes, and all
    earlier writes, in one order."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", builder.inttoptr(args[0], I64.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), code


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


@intrinsic
def load_i64(typing_context: Any, address: Any) -> Any:
    """Load the int64 at `address`, which other threads may change, in the same order."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), code


@intrinsic
def store_i64(typing_context: Any, address: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], builder.inttoptr(args[0], I64.as_pointer()), "seq_cst", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


def _access(name: str, bits: int) -> tuple[Any, Any]:
    """Build a load of a number, as int64, and a store of its lowest bits; other threads do not change it."""
    kind = ir.IntType(bits)

    def load(typing_context: Any, address: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            found = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=1)
            return (builder.sext if name.startswith("i") else builder.zext)(found, I64)

        return types.int64(types.int64), code

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            pointer = builder.inttoptr(args[0], kind.as_pointer())
            builder.store(builder.trunc(args[1], kind), pointer, align=1)
            return context.get_dummy_value()

        return types.void(types.int64, types.int64), code

    load.__name__ = load.__qualname__ = f"load_{name}"
    store.__name__ = store.__qualname__ = f"store_{name}"
    return intrinsic(load), intrinsic(store)


load_u8, store_u8 = _access("u8", 8)
load_u16, store_u16 = _access("u16", 16)
load_u32, store_u32 = _access("u32", 32)
load_i16, _ = _access("i16", 16)


def prefetch_line(builder: Any, address: Any) -> None:
    """Build a prefetch of the 64 bytes around `address`."""
    where = builder.inttoptr(address, I8.as_pointer())
    numbers = [ir.Constant(I32, number) for number in (0, 3, 1)]  # for reading, to all caches, data
    kind = ir.FunctionType(ir.VoidType(), [where.type, I32, I32, I32])
    name = "llvm.prefetch.p0"
    function = builder.module.globals.get(name) or ir.Function(builder.module, kind, name)
    builder.call(function, [where, *numbers])


@intrinsic
def _prefetch_line(typing_context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        prefetch_line(builder, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), code


@njit(inline="always")
def prefetch(address, size):  # type: ignore[no-untyped-def]
    """Begin to read `size` bytes into the caches."""
    for offset in range(0, size, 64):
        _prefetch_line(address + offset)


@intrinsic
def pointer(typing_context: Any, address: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], context.get_value_type(types.voidptr))

    return types.voidptr(types.int64), code


@intrinsic
def call(typing_context: Any, function: Any, argument: Any) -> Any:
    """Call the C function at address `function` with one address."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), code


@intrinsic
def call_shared(typing_context: Any, share: Any, function: Any, argument: Any, among: Any) -> Any:
    """Call it on several threads, as `thread_team.shared` says."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        kind = ir.FunctionType(ir.VoidType(), [I64, I64, I64, I32])
        values = [args[1], args[2], args[3], ir.Constant(I32, 0)]
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), values)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), code


@njit(inline="always")
def i32_at(address, size):  # type: ignore[no-untyped-def]
    """The int32 array of `size` elements at `address`."""
    return carray(pointer(address), (size,), np.int32)


@njit(inline="always")
def u8_at(address, size):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (size,), np.uint8)


@njit(inline="always")
def i64_at(address, size):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (size,), np.int64)


@njit(inline="always")
def f32_at(address, size):  # type: ignore[no-untyped-def]
    return carray(pointer(address), (size,), np.float32)
