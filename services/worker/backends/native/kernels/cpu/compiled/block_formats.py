# ruff: noqa: ARG001, the signatures are numba's
"""Formats of quantised weights: ggml's blocks of sixteen outputs side by side, and their decoders.

A panel has sixteen outputs. For each block of inputs it has, one after the other: float16[16] scales; float16[16]
minima or their scales; uint8[groups, 16] scales and minima of groups; uint32[words, 16] codes. A word has codes of four
inputs, as ggml's blocks have them, so a block is re-ordered by copying words.

A decoded panel has whole numbers, one form for all formats. A weight is number * scale + minimum, computed in float32
and rounded once:

- int16[steps, 16, 16, 2]: numbers of the 32 inputs of a step. Pair v < 8 has inputs 4 v and 4 v + 2, and pair v + 8
  inputs 4 v + 1 and 4 v + 3. Scales of 4 to 8 bits that belong to groups within a block are factors of the numbers.
- float32[steps, 16]: scales; only the first of each `scale_steps` is there.
- float32[steps, 16]: minima.
"""

from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import types
from numba.extending import intrinsic

from services.worker.backends.native.kernels.cpu.compiled import simd
from services.worker.backends.native.kernels.cpu.compiled.building import load, moved, spread, store
from services.worker.backends.native.kernels.cpu.compiled.simd import I8, I16, I32, I64, LANES, VF, VI

PANEL = 16
"""Outputs of a panel."""
STEP = 32
"""Inputs of a step. A block has one step or eight."""
QUADS = STEP // 4
"""Words of codes of a step, if a code had eight bits."""
NUMBERS_BYTES = 2 * STEP * PANEL
"""Bytes of the numbers of a decoded step."""
DECODED_BYTES = NUMBERS_BYTES + 2 * 4 * PANEL
"""Bytes of a decoded step."""
_PAIRS = ir.VectorType(I16, 2 * LANES)


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
    scales: int | None = None
    """Offset in the file's block of the scales of groups."""
    table: tuple[int, ...] = ()
    """Numbers of 4-bit codes; empty: codes are numbers."""
    largest: int = 128
    """Largest number."""
    scale_steps: int = 1
    """Steps whose products are added as whole numbers, before the scale is applied."""

    @property
    def steps(self) -> int:
        return self.inputs // STEP

    @property
    def has_minima(self) -> bool:
        return len(self.halves) == 2

    @property
    def is_signed(self) -> bool:
        """Codes are int8."""
        return self.zero == 0 and not self.has_minima

    @property
    def has_exponents(self) -> bool:
        """Scales are powers of two."""
        return not self.halves

    @property
    def multiplies(self) -> bool:
        """Scales of groups are factors of the numbers."""
        return self.scales is not None and not self.has_exponents

    @property
    def group_scales(self) -> int:
        return 0 if self.scales is None else self.inputs // self.group

    @property
    def codes_at(self) -> int:
        """Offset of the codes in a panel's block."""
        return PANEL * (2 * len(self.halves) + self.group_scales * (2 if self.has_minima else 1))

    @property
    def bytes(self) -> int:
        """Bytes of a panel's block."""
        return self.codes_at + PANEL * 4 * sum(number for _, number in self.words)

    @property
    def limit(self) -> int:
        """Largest activation of 16 bits with which the sums of `scale_steps` steps fit into int32."""
        return min(2**15 - 1, (2**31 - 1) // (self.scale_steps * STEP * self.largest))


_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of four bits with a fraction."""
FORMATS = {
    "Q4_0": Format(32, 32, 18, (0,), ((2, 4),), zero=8),
    "Q4_1": Format(32, 32, 20, (0, 2), ((4, 4),)),
    "Q5_0": Format(32, 32, 22, (0,), ((6, 4), (2, 1)), zero=16),
    "Q5_1": Format(32, 32, 24, (0, 2), ((8, 4), (4, 1))),
    "Q8_0": Format(32, 32, 34, (0,), ((2, 8),)),
    "MXFP4": Format(32, 32, 17, (), ((1, 4),), scales=0, table=_FP4),
    "Q4_K": Format(256, 32, 144, (0, 2), ((16, 32),), scales=4, largest=15 * 63, scale_steps=8),
    "Q5_K": Format(256, 32, 176, (0, 2), ((48, 32), (16, 8)), scales=4, largest=31 * 63, scale_steps=8),
    "Q6_K": Format(
        256, 16, 210, (208,), ((0, 32), (128, 16)), 32, scales=192, largest=32 * 128, scale_steps=4
    ),
    "IQ4_XS": Format(
        256, 32, 136, (0,), ((8, 32),), scales=2, table=_NONLINEAR, largest=127 * 32, scale_steps=4
    ),
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


def code_pairs(builder: Any, kind: str, block: Any, step: Any, quad: int) -> list[Any]:
    """Return the codes of inputs 0 and 2 of four as int16 pairs, and of inputs 1 and 3."""
    words = code_words(builder, kind, block, step, quad)
    if not FORMATS[kind].is_signed:
        mask = ir.Constant(VI, [0x00FF00FF] * LANES)
        shifted = builder.lshr(words, ir.Constant(VI, [8] * LANES))
        return [builder.bitcast(builder.and_(some, mask), _PAIRS) for some in (words, shifted)]
    eight, pairs = ir.Constant(_PAIRS, [8] * 2 * LANES), builder.bitcast(words, _PAIRS)
    return [builder.ashr(some, eight) for some in (builder.shl(pairs, eight), pairs)]


def block_scale(builder: Any, kind: str, block: Any, number: int = 0) -> Any:
    """Return the float16 scale of a block, or of its minima if `number` is 1, in float32."""
    if FORMATS[kind].has_exponents:
        exponents = builder.zext(load(builder, block, ir.VectorType(I8, LANES)), VI)
        one, bits = ir.Constant(VI, [1] * LANES), ir.Constant(VI, [23] * LANES)
        small = builder.shl(ir.Constant(VI, [0x00200000] * LANES), exponents)  # has no exponent of its own
        is_small = builder.icmp_unsigned("<=", exponents, one)
        scales = builder.select(is_small, small, builder.shl(builder.sub(exponents, one), bits))
        return builder.bitcast(scales, VF)
    halves = load(builder, moved(builder, block, number * 2 * PANEL), ir.VectorType(ir.HalfType(), LANES), 2)
    return builder.fpext(halves, VF)


def _group_bytes(builder: Any, kind: str, block: Any, group: Any, first: int, signed: bool) -> Any:
    start = moved(builder, block, PANEL * (2 * len(FORMATS[kind].halves) + first))
    at = builder.add(start, builder.mul(group, ir.Constant(I64, PANEL)))
    return (builder.sext if signed else builder.zext)(load(builder, at, ir.VectorType(I8, LANES)), VI)


def group_factors(builder: Any, kind: str, block: Any, step: Any) -> list[Any]:
    """Return the scales of the groups of a step as int32."""
    groups = STEP // FORMATS[kind].group
    first = builder.mul(step, ir.Constant(I64, groups))
    signed = not FORMATS[kind].has_minima
    return [
        _group_bytes(builder, kind, block, moved(builder, first, group), 0, signed) for group in range(groups)
    ]


def step_minima(builder: Any, kind: str, block: Any, step: Any) -> Any:
    """Return the minima of a step in float32, of formats that have them."""
    minima = block_scale(builder, kind, block, 1)
    if not FORMATS[kind].multiplies:
        return minima
    factors = _group_bytes(builder, kind, block, step, FORMATS[kind].group_scales, False)
    return builder.fneg(builder.fmul(minima, builder.sitofp(factors, VF)))


@intrinsic(prefer_literal=True)
def _decode_step(
    typing_context: Any, kind: Any, block: Any, step: Any, numbers: Any, scales: Any, minima: Any
) -> Any:
    """Decode a step of a block. `kind` is a constant."""
    name = KINDS[kind.literal_value]
    own = FORMATS[name]

    def code(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        block, step, numbers, scales, minima = args[1:]
        factors = [
            builder.bitcast(
                builder.or_(
                    builder.and_(factor, ir.Constant(VI, [0xFFFF] * LANES)),
                    builder.shl(factor, ir.Constant(VI, [16] * LANES)),
                ),
                _PAIRS,
            )
            for factor in (group_factors(builder, name, block, step) if own.multiplies else ())
        ]
        for quad in range(QUADS):
            for half, pairs in enumerate(code_pairs(builder, name, block, step, quad)):
                if own.zero:
                    pairs = builder.sub(pairs, ir.Constant(_PAIRS, [own.zero] * 2 * LANES))
                if factors:
                    pairs = builder.mul(pairs, factors[quad * len(factors) // QUADS])
                store(builder, pairs, moved(builder, numbers, 64 * (half * QUADS + quad)), 4)
        store(builder, block_scale(builder, name, block), scales, 4)
        none = ir.Constant(VF, None)
        store(builder, step_minima(builder, name, block, step) if own.has_minima else none, minima, 4)
        return context.get_dummy_value()

    return types.void(kind, *[types.int64] * 5), code


@njit(inline="always")
def decode_panel(codes, blocks, decoded, KIND, STEPS, BYTES, SCALE_STEPS):  # type: ignore[no-untyped-def]
    """Decode a panel of `blocks` blocks. The last three are the format's."""
    steps = blocks * STEPS
    scales = decoded + steps * NUMBERS_BYTES
    minima = scales + steps * PANEL * 4
    for step in range(steps):
        block, to = codes + step // STEPS * BYTES, decoded + step * NUMBERS_BYTES
        scale = scales + step // SCALE_STEPS * PANEL * 4
        _decode_step(KIND, block, step % STEPS, to, scale, minima + step * PANEL * 4)
