"""Formats of quantised weights: ggml's blocks of sixteen outputs side by side, and their decoders.

A panel has sixteen outputs, and four panels lie together. A block of a panel has, one after the other: float16[16]
scales; float16[16] minima or their scales; uint8[groups, 16] scales and minima of groups; uint32[words, 16] codes. A
word has codes of four inputs, as ggml's blocks have them, so a block is re-ordered by copying words.

A span of a panel is eight steps of 32 inputs. Decoded, it has one form for all formats. A weight is number * scale +
minimum, computed in float32 and rounded once:

- int16[8, 16, 16, 2]: numbers of the inputs of each step. Pair v < 8 has inputs 4 v and 4 v + 2, and pair v + 8 inputs
  4 v + 1 and 4 v + 3. Scales of 4 to 8 bits that belong to groups within a block are factors of the numbers.
- float32[8, 16]: scales, one for each `scale_steps`
- float32[8, 16]: minima of each step
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit
from numba.core import cgutils, types

from services.worker.kernels.cpu.compiled import simd
from services.worker.kernels.cpu.compiled.building import load, moved, store, times
from services.worker.kernels.cpu.compiled.intrinsics import CONSTANT, emits
from services.worker.kernels.cpu.compiled.raw import prefetch_line
from services.worker.kernels.cpu.compiled.simd import I8, I16, I32, I64, LANES, VF, VI, spread

PANEL = 16
"""Outputs of a panel."""
PANELS = 4
"""Panels that lie together: for each block of inputs, their blocks are side by side."""
STEP = 32
"""Inputs of a step. A block has one step or eight."""
QUADS = STEP // 4
"""Words of four codes of a step."""
SPAN = 8
"""Steps of a span."""
NUMBERS_BYTES = 2 * STEP * PANEL
"""Bytes of the numbers of a decoded step."""
SCALES_AT = SPAN * NUMBERS_BYTES
MINIMA_AT = SCALES_AT + SPAN * 4 * PANEL
SPAN_BYTES = MINIMA_AT + SPAN * 4 * PANEL
"""Bytes of a decoded span."""
PAIRS = ir.VectorType(I16, 2 * LANES)


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

    unit: int = 1
    """Steps whose codes are in the same words."""
    turns: int = 4
    """Words of a unit at the same place of its codes: they are read one after the other."""

    @property
    def steps(self) -> int:
        return self.inputs // STEP

    @property
    def groups(self) -> int:
        return max(1, STEP // self.group)

    @property
    def has_minima(self) -> bool:
        return len(self.halves) == 2

    @property
    def is_signed(self) -> bool:
        """Codes are int8."""
        return self.zero == 0 and not self.has_minima

    @property
    def has_bytes(self) -> bool:
        """Each code is a byte of a word."""
        return 4 * sum(number for _, number in self.words) == self.inputs

    @property
    def zero_byte(self) -> int:
        """Unsigned code of a weight of zero."""
        return 128 if self.is_signed else self.zero

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
    def tile_steps(self) -> int:
        """Steps of a tile of rows."""
        return min(2, self.scale_steps)

    @property
    def tile_parts(self) -> int:
        """Bytes of a number in AMX's tiles."""
        return 2 if self.multiplies else 1

    @property
    def limit(self) -> int:
        """Largest activation of two signed bytes with which the sums of `scale_steps` steps fit into int32."""
        return min(127 * 257, (2**31 - 1) // (self.scale_steps * STEP * self.largest))


_NONLINEAR = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FP4 = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""Twice the numbers of four bits with a fraction."""
FORMATS = {
    "Q4_0": Format(32, 32, 18, (0,), ((2, 4),), zero=8),
    "Q4_1": Format(32, 32, 20, (0, 2), ((4, 4),)),
    "Q5_0": Format(32, 32, 22, (0,), ((6, 4), (2, 1)), zero=16),
    "Q5_1": Format(32, 32, 24, (0, 2), ((8, 4), (4, 1))),
    "Q8_0": Format(32, 32, 34, (0,), ((2, 8),), turns=8),
    "MXFP4": Format(32, 32, 17, (), ((1, 4),), scales=0, table=_FP4),
    "Q4_K": Format(256, 32, 144, (0, 2), ((16, 32),), 0, 4, (), 15 * 63, 8, 2, 8),
    "Q5_K": Format(256, 32, 176, (0, 2), ((48, 32), (16, 8)), 0, 4, (), 31 * 63, 8, 2, 8),
    "Q6_K": Format(256, 16, 210, (208,), ((0, 32), (128, 16)), 32, 192, (), 32 * 128, 4, 4, 8),
    "IQ4_XS": Format(256, 32, 136, (0,), ((8, 32),), 0, 2, _NONLINEAR, 127 * 32, 4),
}
KINDS = tuple(FORMATS)
"""Numbers of the formats in kernels."""


BYTES = simd.compiles_for("avx512vnni")
"""Codes are multiplied as bytes where they are decoded in registers."""


CACHES, SPANS_AHEAD = (2, 2) if simd.IS_AMD else (3, 1)
"""Caches to which codes are read ahead (`prefetch_line`), and how many spans ahead.

AMD's cores read fewer lines at once into their first cache than into the second: of one row of Q4_K, a core of Zen 4
reads 10 GB/s with the first and 18 with the second.
"""


def read_ahead(builder: Any, address: Any) -> None:
    """Begin to read 64 bytes of a block."""
    prefetch_line(builder, address, CACHES)


def next_codes(builder: Any, kind: str, blocks: list[Any], end: Any, jump: Any) -> Any:
    """Return the distance from blocks to what is read `SPANS_AHEAD` later, and begin to read the scales there.

    Args:
        blocks: side by side
        end: address of the item's end
        jump: from there to the next item of this thread
    """
    own = FORMATS[kind]
    ahead = ir.Constant(I64, SPANS_AHEAD * PANELS * own.bytes * SPAN // own.steps)
    is_here = builder.icmp_signed("<", builder.add(blocks[0], ahead), end)
    ahead = builder.select(is_here, ahead, builder.add(ahead, jump))
    for block in blocks:
        for line in range(0, own.codes_at, 64):
            read_ahead(builder, moved(builder, builder.add(block, ahead), line))
    return ahead


def code_words(builder: Any, kind: str, block: Any, unit: Any, index: Any, ahead: Any) -> list[tuple[int, int, Any]]:
    """Return some sixteen words of four codes, each with its step in the unit, and with its quad minus `index`. Begin
    to read what is `ahead`, as `next_codes` returns it, or nothing if it is None.

    A quad is four inputs of a step. `unit` and `index` are variables: the codes of a unit are read in `Format.turns`.
    """
    own = FORMATS[kind]

    def word(number: Any, first: int = 0) -> Any:
        place = builder.add(block, times(builder, number, 4 * PANEL))
        at = moved(builder, place, own.codes_at + 4 * PANEL * first)
        if ahead is not None:
            read_ahead(builder, builder.add(at, ahead))
        return load(builder, at, VI, 2)

    def bits(words: Any, shift: Any, mask: int) -> Any:
        shifts = spread(builder, shift if shift.type == I32 else builder.trunc(shift, I32), VI)
        return builder.and_(builder.lshr(words, shifts), ir.Constant(VI, [mask * 0x01010101] * LANES))

    def with_high(low: Any, high: Any) -> Any:
        return builder.or_(low, builder.shl(high, ir.Constant(VI, [4] * LANES)))

    def number(value: int) -> Any:
        return ir.Constant(I32, value)

    if kind == "Q8_0":
        return [(0, 0, word(index))]
    if kind == "Q6_K":
        place = builder.add(times(builder, unit, 2 * QUADS), index)
        low, high = [word(place), word(place, QUADS)], word(builder.add(times(builder, unit, QUADS), index), 4 * QUADS)
        parts = [(bits(low[part % 2], number(part // 2 * 4), 15), part) for part in range(4)]
        return [(part, 0, with_high(some, bits(high, number(2 * part), 3))) for some, part in parts]
    if own.unit == 2:
        place = builder.add(times(builder, unit, QUADS), index)
        both = word(place)
        found = [(odd, bits(both, number(4 * odd), 15)) for odd in range(2)]
        if kind == "Q5_K":
            high, first = word(index, 4 * QUADS), times(builder, unit, 2)
            found = [(odd, with_high(low, bits(high, moved(builder, first, odd), 1))) for odd, low in found]
        return [(odd, 0, words) for odd, words in found]
    words = word(builder.add(times(builder, unit, QUADS // 2), index))
    lows = [bits(words, number(4 * half), 15) for half in range(2)]
    if own.table:
        lows = [_looked_up(builder, low, own.table) for low in lows]
    elif kind.startswith("Q5"):
        ones = ir.Constant(VI, [0x01010101] * LANES)
        for half, low in enumerate(lows):
            # Four bits that lie together go to four bytes: bit i moves by 7 i
            together = bits(word(ir.Constant(I64, QUADS // 2)), moved(builder, times(builder, index, 4), 16 * half), 15)
            together = builder.and_(together, ir.Constant(VI, [15] * LANES))
            apart = builder.mul(together, ir.Constant(VI, [0x00204081] * LANES))
            lows[half] = with_high(low, builder.and_(apart, ones))
    return [(0, half * QUADS // 2, low) for half, low in enumerate(lows)]


def _of_bytes(builder: Any, wide: str, narrow: str, result: ir.VectorType, operands: list[Any]) -> Any:
    """Call an instruction of AVX-512 with vectors of 64 bytes, or the one of AVX2 twice. Both are named as in LLVM."""
    if simd.compiles_for("avx512bw"):
        return simd.call_llvm(builder, f"llvm.x86.avx512.{wide}.512", result, operands)
    half, parts = ir.VectorType(result.element, result.count // 2), []
    for first in (0, 2 * LANES):
        order = ir.Constant(ir.VectorType(I32, 2 * LANES), list(range(first, first + 2 * LANES)))
        halves = [builder.shuffle_vector(operand, operand, order) for operand in operands]
        parts.append(simd.call_llvm(builder, f"llvm.x86.avx2.{narrow}", half, halves))
    whole = ir.Constant(ir.VectorType(I32, result.count), list(range(result.count)))
    return builder.shuffle_vector(*parts, whole)


def _looked_up(builder: Any, codes: Any, table: tuple[int, ...]) -> Any:
    """Return the numbers of sixteen words of four 4-bit codes."""
    kind = ir.VectorType(I8, 4 * LANES)
    indices = builder.bitcast(codes, kind)
    if simd.compiles_for("avx2"):
        numbers = ir.Constant(kind, [number & 255 for number in table] * 4)
        return builder.bitcast(_of_bytes(builder, "pshuf.b", "pshuf.b", kind, [numbers, indices]), VI)
    found = ir.Constant(kind, None)
    for code, number in enumerate(table):
        here = builder.icmp_unsigned("==", indices, ir.Constant(kind, [code] * 4 * LANES))
        found = builder.select(here, ir.Constant(kind, [number & 255] * 4 * LANES), found)
    return builder.bitcast(found, VI)


def code_bytes(
    builder: Any, kind: str, block: Any, unit: Any, index: Any, ahead: Any
) -> list[tuple[int, int, list[Any]]]:
    """Return what `code_words` returns as unsigned bytes, twice: codes, whose zero is `Format.zero_byte`."""
    signs = ir.Constant(VI, [0x80808080 if FORMATS[kind].is_signed else 0] * LANES)
    found = code_words(builder, kind, block, unit, index, ahead)
    return [(step, quad, [builder.xor(words, signs)] * 2) for step, quad, words in found]


def _pairs(builder: Any, kind: str, words: Any) -> list[Any]:
    if FORMATS[kind].is_signed:
        eight, halves = ir.Constant(PAIRS, [8] * 2 * LANES), builder.bitcast(words, PAIRS)
        return [builder.ashr(builder.shl(halves, eight), eight), builder.ashr(halves, eight)]
    mask, shifted = (ir.Constant(VI, [0x00FF00FF] * LANES), builder.lshr(words, ir.Constant(VI, [8] * LANES)))
    return [builder.bitcast(builder.and_(some, mask), PAIRS) for some in (words, shifted)]


def code_pairs(
    builder: Any, kind: str, block: Any, unit: Any, index: Any, ahead: Any
) -> list[tuple[int, int, list[Any]]]:
    """Return what `code_words` returns as pairs of int16: inputs 0 and 2 of each quad, and inputs 1 and 3."""
    found = code_words(builder, kind, block, unit, index, ahead)
    return [(step, quad, _pairs(builder, kind, words)) for step, quad, words in found]


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
    at = builder.add(start, times(builder, group, PANEL))
    return (builder.sext if signed else builder.zext)(load(builder, at, ir.VectorType(I8, LANES)), VI)


def group_factor(builder: Any, kind: str, block: Any, group: Any) -> Any:
    """Return the scales of a group of a block as int32."""
    return _group_bytes(builder, kind, block, group, 0, not FORMATS[kind].has_minima)


def step_minima(builder: Any, kind: str, block: Any, step: Any) -> Any:
    """Return the minima of a step of a block in float32, of formats that have them."""
    minima = block_scale(builder, kind, block, 1)
    if not FORMATS[kind].multiplies:
        return minima
    factors = _group_bytes(builder, kind, block, step, FORMATS[kind].group_scales, False)
    return builder.fneg(builder.fmul(minima, builder.sitofp(factors, VF)))


@emits(types.void, CONSTANT, *(types.int64,) * 5)
def _decode_unit(builder: Any, kind: int, block: Any, unit: Any, numbers: Any, scales: Any, minima: Any) -> None:
    """Decode a unit of a block."""
    name = KINDS[kind]
    own, steps = FORMATS[name], times(builder, unit, FORMATS[name].unit)

    def write(step: int, quad: Any, both: list[Any]) -> None:
        for half, pairs in enumerate(both):
            place = builder.add(numbers, times(builder, quad, 64))
            store(builder, pairs, moved(builder, place, step * NUMBERS_BYTES + 64 * half * QUADS), 4)

    build_pairs(builder, name, block, unit, None, write)
    store(builder, block_scale(builder, name, block), scales, 4)
    for step in range(own.unit):
        found = ir.Constant(VF, None)
        if own.has_minima:
            found = step_minima(builder, name, block, moved(builder, steps, step))
        store(builder, found, moved(builder, minima, 64 * step), 4)


def _products(builder: Any, codes: Any, factors: Any, zero: int) -> list[Any]:
    """Return the pairs of unsigned codes, less `zero`, times signed factors of 8 bits in both halves of words."""
    kind, mask = ir.VectorType(I8, 4 * LANES), ir.Constant(VI, [0x00FF00FF] * LANES)
    lower = builder.and_(factors, mask)
    less = builder.mul(builder.bitcast(factors, PAIRS), ir.Constant(PAIRS, [-zero] * 2 * LANES))
    found = []
    for some in (lower, builder.shl(lower, ir.Constant(VI, [8] * LANES))):
        operands = [builder.bitcast(codes, kind), builder.bitcast(some, kind)]
        products = _of_bytes(builder, "pmaddubs.w", "pmadd.ub.sw", PAIRS, operands)
        found.append(builder.add(products, less) if zero else products)
    return found


def build_pairs(builder: Any, kind: str, block: Any, unit: Any, ahead: Any, write: Callable[..., None]) -> None:
    """Build the decoding of a unit of a block to numbers. `write` is called with a step of the unit, a variable quad
    and its pairs of int16, as `code_pairs` has them. `ahead`: see `code_words`."""
    own = FORMATS[kind]
    groups, steps = ir.Constant(I64, own.groups), times(builder, unit, own.unit)
    turns = ir.Constant(I64, own.turns // own.groups)
    low, high = ir.Constant(VI, [0xFFFF] * LANES), ir.Constant(VI, [16] * LANES)
    with cgutils.for_range(builder, groups) as outer:
        factors = []
        for step in range(own.unit if own.multiplies else 0):
            group = builder.add(builder.mul(moved(builder, steps, step), groups), outer.index)
            factor = group_factor(builder, kind, block, group)
            factors.append(builder.or_(builder.and_(factor, low), builder.shl(factor, high)))
        with cgutils.for_range(builder, turns) as inner:
            index = builder.add(builder.mul(outer.index, turns), inner.index)
            for step, quad, words in code_words(builder, kind, block, unit, index, ahead):
                if factors and not own.is_signed and simd.compiles_for("avx2"):
                    both = _products(builder, words, factors[step], own.zero)
                else:
                    both = _pairs(builder, kind, words)
                    if own.zero:
                        both = [builder.sub(pairs, ir.Constant(PAIRS, [own.zero] * 2 * LANES)) for pairs in both]
                    if factors:
                        both = [builder.mul(pairs, builder.bitcast(factors[step], PAIRS)) for pairs in both]
                write(step, moved(builder, index, quad), both)


@njit(inline="always")
def decode_span(panel, first, steps, decoded, KIND, BLOCK_STEPS, BYTES, UNIT, SCALE_STEPS):  # type: ignore[no-untyped-def]
    """Decode `steps` steps of a panel, from `first` on. The last four are the format's."""
    for number in range(0, steps, UNIT):
        step = first + number
        block, unit = panel + step // BLOCK_STEPS * (PANELS * BYTES), step % BLOCK_STEPS // UNIT
        scale = decoded + SCALES_AT + number // SCALE_STEPS * PANEL * 4
        minima = decoded + MINIMA_AT + number * PANEL * 4
        _decode_unit(KIND, block, unit, decoded + number * NUMBERS_BYTES, scale, minima)
