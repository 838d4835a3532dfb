"""LLVM instructions that several intrinsics are built from. Addresses are LLVM's 64-bit integers, in bytes."""

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir  # type: ignore[import-untyped]

from services.worker.kernels.cpu.compiled.simd import I64


def moved(builder: Any, address: Any, distance: int) -> Any:
    return builder.add(address, ir.Constant(I64, distance))


def times(builder: Any, value: Any, factor: int) -> Any:
    return builder.mul(value, ir.Constant(I64, factor))


def load(builder: Any, address: Any, kind: ir.Type, align: int = 1) -> Any:
    return builder.load(builder.inttoptr(address, kind.as_pointer()), align=align)


def store(builder: Any, value: Any, address: Any, align: int = 1) -> None:
    builder.store(value, builder.inttoptr(address, value.type.as_pointer()), align=align)


def for_each_size(builder: Any, size: Any, sizes: Sequence[int], build: Callable[[int], None]) -> None:
    """Build code for each of some sizes; that of the variable `size` runs. Loops over a size are unrolled in it."""
    end = builder.append_basic_block()
    switch = builder.switch(size, end)
    for number in sizes:
        block = builder.append_basic_block()
        switch.add_case(ir.Constant(size.type, number), block)
        builder.position_at_end(block)
        build(number)
        builder.branch(end)
    builder.position_at_end(end)
