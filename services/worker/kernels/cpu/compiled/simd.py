# ruff: noqa: ARG001, the signatures are numba's
"""Vectors of sixteen float32 for numba kernels, in LLVM's instructions, for processors of any vector width.

Kernels define the order of every sum, so a row's result does not depend on other rows, on the number of threads or on
the optimiser (batch invariance, docs/invariants.md).

Addresses are integers, in bytes. bfloat16 is the upper half of a float32; stores round to nearest even.
"""

from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from llvmlite.binding import get_host_cpu_features  # type: ignore[import-untyped]
from numba import config, njit
from numba.core import types
from numba.extending import intrinsic, models, register_model

from services.worker.sampling.noise import MIX_A, MIX_B, PRIME

LANES = 16
F32, I8, I16, I32, I64 = ir.FloatType(), *(ir.IntType(bits) for bits in (8, 16, 32, 64))
VF, VI, VH = (ir.VectorType(element, LANES) for element in (F32, I32, I16))


class Vector(types.Type):  # type: ignore[misc]
    def __init__(self) -> None:
        super().__init__(name="f32x16")


@register_model(Vector)
class _VectorModel(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, VF)


vector = Vector()


def compiles_for(feature: str) -> bool:
    """Return whether numba compiles for processors with a feature."""
    if config.CPU_FEATURES is not None:
        return f"+{feature}" in config.CPU_FEATURES.split(",")
    return config.CPU_NAME is None and bool(get_host_cpu_features().get(feature))


WIDE = compiles_for("avx512f")
"""A vector is one of 32 registers, and not two of 16."""


def _constant(kind: ir.VectorType, value: float) -> ir.Constant:
    return ir.Constant(kind, [value] * LANES)


def call_llvm(builder: Any, name: str, result: Any, operands: list[Any]) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), operands)


def _widen(builder: Any, half: Any, wide: ir.Type, result: ir.Type) -> Any:
    shift = ir.Constant(wide, 16) if wide == I32 else _constant(wide, 16)
    return builder.bitcast(builder.shl(builder.zext(half, wide), shift), result)


def _narrow(builder: Any, value: Any, wide: ir.Type, half: ir.Type) -> Any:
    def number(x: int) -> ir.Constant:
        return ir.Constant(wide, x) if wide == I32 else _constant(wide, x)

    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, number(16)), number(1))
    rounded = builder.add(bits, builder.add(odd, number(0x7FFF)))
    return builder.trunc(builder.lshr(rounded, number(16)), half)


def _access(name: str, kind: ir.Type, is_store: bool, half: bool) -> Any:
    """Build a load or store: `kind` is F32 or VF in registers, bfloat16 in memory if `half`."""
    front = vector if kind == VF else types.float32
    wide, narrow = (VI, VH) if kind == VF else (I32, I16)
    in_memory, align = (narrow, 2) if half else (kind, 4)

    def load_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = builder.load(builder.inttoptr(args[0], in_memory.as_pointer()), align=align)
        return _widen(builder, value, wide, kind) if half else value

    def store_code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = _narrow(builder, args[1], wide, narrow) if half else args[1]
        builder.store(value, builder.inttoptr(args[0], in_memory.as_pointer()), align=align)
        return context.get_dummy_value()

    def load(typing_context: Any, address: Any) -> Any:
        return front(types.int64), load_code

    def store(typing_context: Any, address: Any, value: Any) -> Any:
        return types.void(types.int64, front), store_code

    body = store if is_store else load
    body.__name__ = body.__qualname__ = name
    return intrinsic(body)


def halves(builder: Any, words: Any) -> list[Any]:
    """Return the low and the high bfloat16 of each word, as bits of float32."""
    number = words.type.count
    low = builder.shl(words, ir.Constant(words.type, [16] * number))
    return [low, builder.and_(words, ir.Constant(words.type, [0xFFFF0000] * number))]


def bf16_pairs(builder: Any, address: Any) -> Any:
    """Load sixteen bfloat16 stored in pairs: numbers i and i + 8 are the halves of one word. Converting them takes half
    the work of sixteen consecutive numbers."""
    pointer = builder.inttoptr(address, ir.VectorType(I32, LANES // 2).as_pointer())
    order = ir.Constant(VI, list(range(LANES)))
    return builder.bitcast(builder.shuffle_vector(*halves(builder, builder.load(pointer, align=2)), order), VF)


load_f32x16 = _access("load_f32x16", VF, False, False)
load_bf16x16 = _access("load_bf16x16", VF, False, True)
load_f32 = _access("load_f32", F32, False, False)
load_bf16 = _access("load_bf16", F32, False, True)
store_f32x16 = _access("store_f32x16", VF, True, False)
store_bf16x16 = _access("store_bf16x16", VF, True, True)
store_f32 = _access("store_f32", F32, True, False)
store_bf16 = _access("store_bf16", F32, True, True)


def _binary(name: str, emit: Any) -> Any:
    def operation(typing_context: Any, a: Any, b: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            return emit(builder, *args)

        return vector(vector, vector), code

    operation.__name__ = operation.__qualname__ = name
    return intrinsic(operation)


add = _binary("add", lambda builder, a, b: builder.fadd(a, b))
mul = _binary("mul", lambda builder, a, b: builder.fmul(a, b))
div = _binary("div", lambda builder, a, b: builder.fdiv(a, b))
minimum = _binary("minimum", lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
maximum = _binary("maximum", lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def fma(typing_context: Any, a: Any, b: Any, c: Any) -> Any:
    """a * b + c, rounded once."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return call_llvm(builder, "llvm.fma.v16f32", VF, list(args))

    return vector(vector, vector, vector), code


@intrinsic
def splat(typing_context: Any, value: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        one = builder.insert_element(ir.Constant(VF, ir.Undefined), args[0], ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, LANES), [0] * LANES)
        return builder.shuffle_vector(one, ir.Constant(VF, ir.Undefined), zeros)

    return vector(types.float32), code


def _reduction(name: str, emit: Any) -> Any:
    def operation(typing_context: Any, a: Any) -> Any:
        def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
            value, width = args[0], LANES // 2
            while width:  # halves onto halves: one fixed tree
                mask = ir.Constant(ir.VectorType(I32, LANES), [(i + width) % LANES for i in range(LANES)])
                value = emit(builder, value, builder.shuffle_vector(value, value, mask))
                width //= 2
            return builder.extract_element(value, ir.Constant(I32, 0))

        return types.float32(vector), code

    operation.__name__ = operation.__qualname__ = name
    return intrinsic(operation)


reduce_add = _reduction("reduce_add", lambda builder, a, b: builder.fadd(a, b))
reduce_max = _reduction("reduce_max", lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@intrinsic
def exp(typing_context: Any, a: Any) -> Any:
    """e**a within 2 units in the last place; 0 below -87, and e**88 above 88."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def f(value: float) -> ir.Constant:
            return _constant(VF, value)

        def mad(x: Any, y: Any, z: Any) -> Any:
            return call_llvm(builder, "llvm.fma.v16f32", VF, [x, y, z])

        low = builder.fcmp_ordered("<", args[0], f(-87.0))
        x = builder.select(low, f(-87.0), args[0])
        x = builder.select(builder.fcmp_ordered(">", x, f(88.0)), f(88.0), x)
        # x = n ln 2 + r with |r| <= ln(2) / 2, then e**r as a polynomial and 2**n through the exponent bits
        n = call_llvm(builder, "llvm.floor.v16f32", VF, [mad(x, f(float(np.float32(1.4426950408889634))), f(0.5))])
        r = mad(n, f(-0.693359375), x)
        r = mad(n, f(float(np.float32(2.12194440e-4))), r)
        p = f(float(np.float32(1.9875691500e-4)))
        for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            p = mad(p, r, f(float(np.float32(c))))
        p = builder.fadd(mad(builder.fmul(r, r), p, r), f(1.0))
        exponent = builder.shl(builder.add(builder.fptosi(n, VI), _constant(VI, 127)), _constant(VI, 23))
        value = builder.fmul(p, builder.bitcast(exponent, VF))
        return builder.select(low, f(0.0), value)

    return vector(vector), code


@intrinsic
def log(typing_context: Any, a: Any) -> Any:
    """ln(a) within 2 units in the last place, for normal numbers above 0."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def f(value: float) -> ir.Constant:
            return _constant(VF, float(np.float32(value)))

        def mad(x: Any, y: Any, z: Any) -> Any:
            return call_llvm(builder, "llvm.fma.v16f32", VF, [x, y, z])

        # a = 2**e m with m from sqrt(1/2) to sqrt(2), then ln(m) as a polynomial in m - 1
        bits = builder.bitcast(args[0], VI)
        shifted = builder.sub(bits, _constant(VI, 0x3F3504F3))
        exponent = builder.ashr(shifted, _constant(VI, 23))
        m = builder.bitcast(builder.sub(bits, builder.shl(exponent, _constant(VI, 23))), VF)
        e, x = builder.sitofp(exponent, VF), builder.fsub(m, f(1.0))
        p = f(7.0376836292e-2)
        for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
                  2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
            p = mad(p, x, f(c))
        square = builder.fmul(x, x)
        p = mad(e, f(-2.12194440e-4), builder.fmul(builder.fmul(x, square), p))
        p = mad(square, f(-0.5), p)
        return mad(e, f(0.693359375), builder.fadd(x, p))

    return vector(vector), code


@intrinsic
def uniform(typing_context: Any, token: Any, key0: Any, key1: Any) -> Any:
    """`services.worker.sampling.noise`'s uniform numbers of the sixteen ids from `token` on."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        def spread(value: Any) -> Any:
            word = builder.trunc(value, I32)
            one = builder.insert_element(ir.Constant(VI, ir.Undefined), word, ir.Constant(I32, 0))
            return builder.shuffle_vector(one, ir.Constant(VI, ir.Undefined), _constant(VI, 0))

        def mix(value: Any, shift: int) -> Any:
            return builder.xor(value, builder.lshr(value, _constant(VI, shift)))

        tokens = builder.add(spread(args[0]), ir.Constant(VI, list(range(LANES))))
        x = builder.add(builder.mul(tokens, _constant(VI, PRIME)), spread(args[1]))
        x = builder.mul(mix(x, 16), _constant(VI, MIX_A))
        x = builder.xor(x, spread(args[2]))
        x = builder.mul(mix(x, 15), _constant(VI, MIX_B))
        x = builder.lshr(mix(x, 16), _constant(VI, 9))
        half, scale = _constant(VF, 0.5), _constant(VF, 2.0**-23)
        return builder.fmul(builder.fadd(builder.uitofp(x, VF), half), scale)

    return vector(types.int64, types.int64, types.int64), code


@intrinsic
def select_at_least(typing_context: Any, x: Any, least: Any, value: Any, other: Any) -> Any:
    """`value` in the lanes where x >= least, `other` in the other lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.select(builder.fcmp_ordered(">=", args[0], args[1]), args[2], args[3])

    return vector(vector, vector, vector, vector), code


@intrinsic
def keep_bits(typing_context: Any, x: Any, bits: Any, other: Any) -> Any:
    """`x` in the lanes whose bit is set in the low 16 bits of an integer, `other` in the other lanes."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        lanes = builder.bitcast(builder.trunc(args[1], I16), ir.VectorType(ir.IntType(1), LANES))
        return builder.select(lanes, args[0], args[2])

    return vector(vector, types.int64, vector), code


@intrinsic
def float_of(typing_context: Any, bits: Any) -> Any:
    """The float32 with the low 32 bits of an int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(builder.trunc(args[0], I32), F32)

    return types.float32(types.int64), code


@intrinsic
def bits_of(typing_context: Any, value: Any) -> Any:
    """The bits of a float32, sign-extended to int64."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.sext(builder.bitcast(args[0], I32), I64)

    return types.int64(types.float32), code


@njit(inline="always")
def load16(address, half):  # type: ignore[no-untyped-def]
    """Load sixteen numbers: bfloat16 if `half`, which is a constant of the kernel."""
    return load_bf16x16(address) if half else load_f32x16(address)


@njit(inline="always")
def load1(address, half):  # type: ignore[no-untyped-def]
    return load_bf16(address) if half else load_f32(address)


@njit(inline="always")
def store16(address, value, half):  # type: ignore[no-untyped-def]
    if half:
        store_bf16x16(address, value)
    else:
        store_f32x16(address, value)


@njit(inline="always")
def store1(address, value, half):  # type: ignore[no-untyped-def]
    if half:
        store_bf16(address, value)
    else:
        store_f32(address, value)
