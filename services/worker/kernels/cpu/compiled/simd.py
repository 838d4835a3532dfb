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
from numba.extending import models, register_model

from services.worker.kernels.cpu.compiled.intrinsics import emits
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
IS_AMD = compiles_for("sse4a")
"""Only AMD's processors have this feature."""


def _constant(kind: ir.Type, value: float) -> ir.Constant:
    """Return a number, or a vector with it in each lane."""
    return ir.Constant(kind, [value] * LANES if isinstance(kind, ir.VectorType) else value)


def call_llvm(builder: Any, name: str, result: Any, operands: list[Any]) -> Any:
    kind = ir.FunctionType(result, [operand.type for operand in operands])
    return builder.call(builder.module.declare_intrinsic(name, (), kind), operands)


def _widen(builder: Any, half: Any, wide: ir.Type, result: ir.Type) -> Any:
    return builder.bitcast(builder.shl(builder.zext(half, wide), _constant(wide, 16)), result)


def _narrow(builder: Any, value: Any, wide: ir.Type, half: ir.Type) -> Any:
    bits = builder.bitcast(value, wide)
    odd = builder.and_(builder.lshr(bits, _constant(wide, 16)), _constant(wide, 1))
    rounded = builder.add(bits, builder.add(odd, _constant(wide, 0x7FFF)))
    return builder.trunc(builder.lshr(rounded, _constant(wide, 16)), half)


def build_load(builder: Any, address: Any, kind: ir.Type, half: int) -> Any:
    """Build a load: `kind` is F32 or VF in registers, bfloat16 in memory if `half`."""
    wide, narrow = (VI, VH) if kind == VF else (I32, I16)
    in_memory, align = (narrow, 2) if half else (kind, 4)
    value = builder.load(builder.inttoptr(address, in_memory.as_pointer()), align=align)
    return _widen(builder, value, wide, kind) if half else value


def _load(kind: ir.Type, half: bool) -> Any:
    result = vector if kind == VF else types.float32
    return emits(result, types.int64)(lambda builder, address: build_load(builder, address, kind, half))


def _store(kind: ir.Type, half: bool) -> Any:
    """Make a store; see `build_load`."""
    wide, narrow = (VI, VH) if kind == VF else (I32, I16)

    @emits(types.void, types.int64, vector if kind == VF else types.float32)
    def store(builder: Any, address: Any, value: Any) -> None:
        in_memory = _narrow(builder, value, wide, narrow) if half else value
        pointer = builder.inttoptr(address, in_memory.type.as_pointer())
        builder.store(in_memory, pointer, align=2 if half else 4)

    return store


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


load_f32x16, load_bf16x16 = _load(VF, half=False), _load(VF, half=True)
load_f32, load_bf16 = _load(F32, half=False), _load(F32, half=True)
store_f32x16, store_bf16x16 = _store(VF, half=False), _store(VF, half=True)
store_f32, store_bf16 = _store(F32, half=False), _store(F32, half=True)

_binary = emits(vector, vector, vector)
add = _binary(lambda builder, a, b: builder.fadd(a, b))
mul = _binary(lambda builder, a, b: builder.fmul(a, b))
div = _binary(lambda builder, a, b: builder.fdiv(a, b))
minimum = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered("<", a, b), a, b))
maximum = _binary(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


def build_fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Build a * b + c, rounded once."""
    return call_llvm(builder, "llvm.fma.v16f32", VF, [a, b, c])


fma = emits(vector, vector, vector, vector)(build_fma)


def spread(builder: Any, value: Any, kind: ir.VectorType) -> Any:
    """Return a vector with the value in each of its sixteen lanes."""
    one = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(one, one, _constant(VI, 0))


splat = emits(vector, types.float32)(lambda builder, value: spread(builder, value, VF))


def _reduction(emit: Any) -> Any:
    @emits(types.float32, vector)
    def reduce(builder: Any, value: Any) -> Any:
        width = LANES // 2
        while width:  # halves onto halves: one fixed tree
            mask = ir.Constant(ir.VectorType(I32, LANES), [(i + width) % LANES for i in range(LANES)])
            value = emit(builder, value, builder.shuffle_vector(value, value, mask))
            width //= 2
        return builder.extract_element(value, ir.Constant(I32, 0))

    return reduce


reduce_add = _reduction(lambda builder, a, b: builder.fadd(a, b))
reduce_max = _reduction(lambda builder, a, b: builder.select(builder.fcmp_ordered(">", a, b), a, b))


@emits(vector, vector)
def exp(builder: Any, a: Any) -> Any:
    """e**a within 2 units in the last place; 0 below -87, and e**88 above 88."""

    def f(value: float) -> ir.Constant:
        return _constant(VF, value)

    low = builder.fcmp_ordered("<", a, f(-87.0))
    x = builder.select(low, f(-87.0), a)
    x = builder.select(builder.fcmp_ordered(">", x, f(88.0)), f(88.0), x)
    # x = n ln 2 + r with |r| <= ln(2) / 2, then e**r as a polynomial and 2**n through the exponent bits
    turned = build_fma(builder, x, f(float(np.float32(1.4426950408889634))), f(0.5))
    n = call_llvm(builder, "llvm.floor.v16f32", VF, [turned])
    r = build_fma(builder, n, f(-0.693359375), x)
    r = build_fma(builder, n, f(float(np.float32(2.12194440e-4))), r)
    p = f(float(np.float32(1.9875691500e-4)))
    for c in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = build_fma(builder, p, r, f(float(np.float32(c))))
    p = builder.fadd(build_fma(builder, builder.fmul(r, r), p, r), f(1.0))
    exponent = builder.shl(builder.add(builder.fptosi(n, VI), _constant(VI, 127)), _constant(VI, 23))
    value = builder.fmul(p, builder.bitcast(exponent, VF))
    return builder.select(low, f(0.0), value)


@emits(vector, vector)
def log(builder: Any, a: Any) -> Any:
    """ln(a) within 2 units in the last place, for normal numbers above 0."""

    def f(value: float) -> ir.Constant:
        return _constant(VF, float(np.float32(value)))

    # a = 2**e m with m from sqrt(1/2) to sqrt(2), then ln(m) as a polynomial in m - 1
    bits = builder.bitcast(a, VI)
    shifted = builder.sub(bits, _constant(VI, 0x3F3504F3))
    exponent = builder.ashr(shifted, _constant(VI, 23))
    m = builder.bitcast(builder.sub(bits, builder.shl(exponent, _constant(VI, 23))), VF)
    e, x = builder.sitofp(exponent, VF), builder.fsub(m, f(1.0))
    p = f(7.0376836292e-2)
    for c in (-1.1514610310e-1, 1.1676998740e-1, -1.2420140846e-1, 1.4249322787e-1, -1.6668057665e-1,
              2.0000714765e-1, -2.4999993993e-1, 3.3333331174e-1):  # fmt: skip
        p = build_fma(builder, p, x, f(c))
    square = builder.fmul(x, x)
    p = build_fma(builder, e, f(-2.12194440e-4), builder.fmul(builder.fmul(x, square), p))
    p = build_fma(builder, square, f(-0.5), p)
    return build_fma(builder, e, f(0.693359375), builder.fadd(x, p))


@emits(vector, *(types.int64,) * 3)
def uniform(builder: Any, token: Any, key0: Any, key1: Any) -> Any:
    """`services.worker.sampling.noise`'s uniform numbers of the sixteen ids from `token` on."""

    def words(value: Any) -> Any:
        return spread(builder, builder.trunc(value, I32), VI)

    def mix(value: Any, shift: int) -> Any:
        return builder.xor(value, builder.lshr(value, _constant(VI, shift)))

    tokens = builder.add(words(token), ir.Constant(VI, list(range(LANES))))
    x = builder.add(builder.mul(tokens, _constant(VI, PRIME)), words(key0))
    x = builder.mul(mix(x, 16), _constant(VI, MIX_A))
    x = builder.xor(x, words(key1))
    x = builder.mul(mix(x, 15), _constant(VI, MIX_B))
    x = builder.lshr(mix(x, 16), _constant(VI, 9))
    half, scale = _constant(VF, 0.5), _constant(VF, 2.0**-23)
    return builder.fmul(builder.fadd(builder.uitofp(x, VF), half), scale)


@emits(vector, vector, vector, vector, vector)
def select_at_least(builder: Any, x: Any, least: Any, value: Any, other: Any) -> Any:
    """`value` in the lanes where x >= least, `other` in the other lanes."""
    return builder.select(builder.fcmp_ordered(">=", x, least), value, other)


@emits(vector, vector, types.int64, vector)
def keep_bits(builder: Any, x: Any, bits: Any, other: Any) -> Any:
    """`x` in the lanes whose bit is set in the low 16 bits of an integer, `other` in the other lanes."""
    lanes = builder.bitcast(builder.trunc(bits, I16), ir.VectorType(ir.IntType(1), LANES))
    return builder.select(lanes, x, other)


@emits(types.float32, types.int64)
def float_of(builder: Any, bits: Any) -> Any:
    """The float32 with the low 32 bits of an int64."""
    return builder.bitcast(builder.trunc(bits, I32), F32)


@emits(types.int64, types.float32)
def bits_of(builder: Any, value: Any) -> Any:
    """The bits of a float32, sign-extended to int64."""
    return builder.sext(builder.bitcast(value, I32), I64)


@njit(inline="always")
def load16(address, half):  # type: ignore[no-untyped-def]
    """Load sixteen numbers: bfloat16 if `half`."""
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
