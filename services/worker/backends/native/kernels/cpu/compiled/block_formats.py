# ruff: noqa: ARG001, the signatures are numba's
"""Formats of quantised weights: ggml's blocks of sixteen outputs side by side, and their decoders.

A panel has sixteen outputs. For each block of inputs it has, one after the other: float16[16] scales; float16[16]
minima or their scales; uint8[groups, 16] scales and minima of groups; uint32[words, 16] codes. A word has codes of four
inputs, as ggml's blocks have them, so a block is re-ordered by copying words.

A weight is code * scale + minimum, computed in float32 and rounded once. Products differ only in these decoders.
"""

from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.extending import intrinsic

from services.worker.backends.native.kernels.cpu.compiled import simd
from services.worker.backends.native.kernels.cpu.compiled.building import load, moved, spread, store
from services.worker.backends.native.kernels.cpu.compiled.simd import I8, I16, I32, I64, LANES, VF, VI

PANEL = 16
"""Outputs of a panel."""
STEP = 32
"""Inputs that share a scale of activations. A block has one step or eight."""
QUADS = STEP // 4
"""Words of codes of a step, if a code had eight bits."""


class Format(NamedTuple):
    """A type of ggml, and how its panels are laid out. Source of the blocks: ggml's `ggml-common.h`."""

    inputs: int
    """Inputs of a block."""
    group: int
    """Inputs that share a scale."""
    source_bytes: int
    """Bytes of a block in the file."""
    halves: tuple[int, ...]
    """Offsets in the file's block of the float16 scale, and of the minimum or its scale."""
    words: tuple[tuple[int, int], ...]
    """Offset in the file's block and number of words; the lowest four bits of the codes come first."""
    zero: int = 0
    """Code of a weight of zero, of formats without minima."""
    scales: int = 0
    """Offset in the file's block of the scales of groups; 0: there are none."""
    table: tuple[int, ...] = ()
    """Numbers of 4-bit codes; empty: codes are numbers."""

    @property
    def has_minima(self) -> bool:
        return len(self.halves) == 2

    @property
    def is_signed(self) -> bool:
        """Codes are int8."""
        return self.zero == 0 and not self.has_minima

    @property
    def group_scales(self) -> int:
        return self.inputs // self.group if self.scales else 0

    @property
    def codes_at(self) -> int:
        """Offset of the codes in a panel's block."""
        return PANEL * (2 * len(self.halves) + self.group_scales * (2 if self.has_minima else 1))

    @property
    def bytes(self) -> int:
        """Bytes of a panel's block."""
        return self.codes_at + PANEL * 4 * sum(number for _, number in self.words)


_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
FORMATS = {
    "Q4_0": Format(32, 32, 18, (0,), ((2, 4),), zero=8),
    "Q4_1": Format(32, 32, 20, (0, 2), ((4, 4),)),
    "Q5_0": Format(32, 32, 22, (0,), ((6, 4), (2, 1)), zero=16),
    "Q5_1": Format(32, 32, 24, (0, 2), ((8, 4), (4, 1))),
    "Q8_0": Format(32, 32, 34, (0,), ((2, 8),)),
    "Q4_K": Format(256, 32, 144, (0, 2), ((16, 32),), scales=4),
    "Q5_K": Format(256, 32, 176, (0, 2), ((48, 32), (16, 8)), scales=4),
    "Q6_K": Format(256, 16, 210, (208,), ((0, 32), (128, 16)), zero=32, scales=192),
    "IQ4_XS": Format(256, 32, 136, (0,), ((8, 32),), scales=2, table=_NONLINEAR),
}
KINDS = tuple(FORMATS)
"""Numbers of the formats in kernels."""


def code_words(builder: Any, kind: str, block: Any, step: Any, quad: int) -> Any:
    """Return sixteen words of four codes: inputs 4 `quad` to 4 `quad` + 3 of a step, which may be a variable."""
    own, number = FORMATS[kind], ir.Constant(I64, quad)

    def word(index: Any) -> Any:
        at = builder.add(block, builder.mul(index, ir.Constant(I64, 4 * PANEL)))
        return load(builder, moved(builder, at, own.codes_at), VI, 2)

    def bits(words: Any, shift: Any, mask: int) -> Any:
        shifts = spread(builder, builder.trunc(shift, I32), VI)
        return builder.and_(builder.lshr(words, shifts), ir.Constant(VI, [mask * 0x01010101] * LANES))

    def with_high(low: Any, high: Any) -> Any:
        return builder.or_(low, builder.shl(high, ir.Constant(VI, [4] * LANES)))

    def times(value: Any, factor: int, more: int = 0) -> Any:
        return builder.add(builder.mul(value, ir.Constant(I64, factor)), ir.Constant(I64, more))

    if kind == "Q8_0":
        return word(number)
    if kind in ("Q4_K", "Q5_K"):
        odd = builder.and_(step, ir.Constant(I64, 1))
        low = bits(word(times(builder.lshr(step, ir.Constant(I64, 1)), QUADS, quad)), times(odd, 4), 15)
        return low if kind == "Q4_K" else with_high(low, bits(word(ir.Constant(I64, 32 + quad)), step, 1))
    if kind == "Q6_K":
        half, part = builder.lshr(step, ir.Constant(I64, 2)), builder.and_(step, ir.Constant(I64, 3))
        odd, upper = builder.and_(part, ir.Constant(I64, 1)), builder.lshr(part, ir.Constant(I64, 1))
        place = builder.add(times(half, 2 * QUADS), times(odd, QUADS, quad))
        high = bits(word(times(half, QUADS, 32 + quad)), times(part, 2), 3)
        return with_high(bits(word(place), times(upper, 4), 15), high)
    low = bits(word(times(step, 4, quad % 4)), ir.Constant(I64, quad // 4 * 4), 15)
    if own.table:
        return _looked_up(builder, low, own.table)
    if kind.startswith("Q5"):
        # Four bits that lie together go to four bytes: bit i moves by 7 i
        high = builder.and_(
            builder.lshr(word(ir.Constant(I64, 4)), ir.Constant(VI, [4 * quad] * LANES)),
            ir.Constant(VI, [15] * LANES),
        )
        apart = builder.mul(high, ir.Constant(VI, [0x00204081] * LANES))
        return with_high(low, builder.and_(apart, ir.Constant(VI, [0x01010101] * LANES)))
    return low


def _looked_up(builder: Any, codes: Any, table: tuple[int, ...]) -> Any:
    """Return the numbers of sixteen words of four 4-bit codes."""
    kind = ir.VectorType(I8, 4 * LANES)
    indices = builder.bitcast(codes, kind)
    if simd.compiles_for("avx512bw"):
        numbers = ir.Constant(kind, [number & 255 for number in table] * 4)
        return builder.bitcast(
            simd.call_llvm(builder, "llvm.x86.avx512.pshuf.b.512", kind, [numbers, indices]), VI
        )
    if simd.compiles_for("avx2"):
        half, parts = ir.VectorType(I8, 2 * LANES), []
        numbers = ir.Constant(half, [number & 255 for number in table] * 2)
        for first in (0, 2 * LANES):
            order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(first, first + 2 * LANES)))
            some = builder.shuffle_vector(indices, indices, order)
            parts.append(simd.call_llvm(builder, "llvm.x86.avx2.pshuf.b", half, [numbers, some]))
        whole = ir.Constant(ir.VectorType(I32, 4 * LANES), list(range(4 * LANES)))
        return builder.bitcast(builder.shuffle_vector(*parts, whole), VI)
    found = ir.Constant(kind, None)
    for code, number in enumerate(table):
        here = builder.icmp_unsigned("==", indices, ir.Constant(kind, [code] * 4 * LANES))
        found = builder.select(here, ir.Constant(kind, [number & 255] * 4 * LANES), found)
    return builder.bitcast(found, VI)


def group_scales(builder: Any, kind: str, block: Any, group: Any) -> tuple[Any, Any]:
    """Return the scales and the minima of a group; minima are None for formats without them."""
    own = FORMATS[kind]

    def half(number: int) -> Any:
        kind = ir.VectorType(ir.HalfType(), LANES)
        return builder.fpext(load(builder, moved(builder, block, number * 2 * PANEL), kind, 2), VF)

    def byte(first: int, signed: bool) -> Any:
        start = moved(builder, block, PANEL * (2 * len(own.halves) + first))
        at = builder.add(start, builder.mul(group, ir.Constant(I64, PANEL)))
        found = load(builder, at, ir.VectorType(I8, LANES))
        return builder.sitofp((builder.sext if signed else builder.zext)(found, VI), VF)

    scale, minimum = half(0), half(1) if own.has_minima else None
    if own.scales:
        scale = builder.fmul(scale, byte(0, not own.has_minima))
        if minimum is not None:
            minimum = builder.fneg(builder.fmul(minimum, byte(own.group_scales, False)))
    return scale, minimum


def code_pairs(builder: Any, kind: str, words: Any) -> list[Any]:
    """Return inputs 0 and 2 of words of four codes as int16 pairs, and inputs 1 and 3."""
    halves = ir.VectorType(I16, 2 * LANES)
    if not FORMATS[kind].is_signed:
        mask = ir.Constant(VI, [0x00FF00FF] * LANES)
        shifted = builder.lshr(words, ir.Constant(VI, [8] * LANES))
        return [builder.bitcast(builder.and_(some, mask), halves) for some in (words, shifted)]
    eight, pairs = ir.Constant(halves, [8] * 2 * LANES), builder.bitcast(words, halves)
    return [builder.ashr(some, eight) for some in (builder.shl(pairs, eight), pairs)]


def step_weights(builder: Any, kind: str, block: Any, step: Any) -> list[Any]:
    """Return the weights of the 32 inputs of a step in float32."""
    own, weights, scales = FORMATS[kind], [], []
    groups = STEP // own.group
    for number in range(groups):
        group = moved(builder, builder.mul(step, ir.Constant(I64, groups)), number)
        scale, minimum = group_scales(builder, kind, block, group)
        if minimum is None:
            minimum = builder.fmul(scale, ir.Constant(VF, [-float(own.zero)] * LANES))
        scales.append((scale, minimum))
    for quad in range(QUADS):
        scale, minimum = scales[quad * groups // QUADS]
        words = code_words(builder, kind, block, step, quad)
        for number in range(4):
            up = builder.shl(words, ir.Constant(VI, [24 - 8 * number] * LANES))
            shift = builder.ashr if own.is_signed else builder.lshr
            codes = builder.sitofp(shift(up, ir.Constant(VI, [24] * LANES)), VF)
            weights.append(simd.call_llvm(builder, "llvm.fma.v16f32", VF, [codes, scale, minimum]))
    return weights


@intrinsic(prefer_literal=True)
def decode_step(typing_context: Any, kind: Any, target: Any, block: Any, step: Any) -> Any:
    """Write the 32 inputs of a step: float32[32, 16]. `kind` is a constant."""

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        weights = step_weights(builder, KINDS[kind.literal_value], args[2], args[3])
        for number, weight in enumerate(weights):
            store(builder, weight, moved(builder, args[1], number * 4 * PANEL), 4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 3), code
