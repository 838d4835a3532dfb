"""The columns of a message as NumPy arrays, checked against one another once, when they are unpacked.

All arrays are read-only views of the message's bytes. Checks that need the batch (does the slot exist, is the block
free) are made by the service that keeps the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from protocol.codec import ProtocolError, unpack
from protocol.columns import I32, total
from protocol.logprobs import Logprobs
from protocol.requests import RequestOutputs
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput


@dataclass(frozen=True)
class Rows:
    """Rows of a plan; int32[rows] unless stated. No number is negative."""

    slots: I32
    generations: I32
    starts: I32
    counts: I32
    """At least 1, drafts included."""
    samples: NDArray[np.bool_]
    drafts: I32
    """Less than `counts`; 0 in a row that does not sample."""

    @property
    def ends(self) -> I32:
        """First position after each row, which is the position of the token that the row samples."""
        return self.starts + self.counts

    @property
    def firsts(self) -> I32:
        """Position of the first token that each row samples, or of its first draft, if it has any."""
        return self.ends - self.drafts

    def select(self, mask: NDArray[np.bool_]) -> "Rows":
        """Return the rows at which `mask`, bool[rows], is True."""
        return Rows(*(column[mask] for column in vars(self).values()))


class StepRows(NamedTuple):
    """Columns of a plan. No number is negative."""

    rows: Rows
    block_slots: I32
    """int32[blocks]"""
    block_ids: I32
    """int32[blocks]"""
    released: I32
    """int32[released slots]"""
    masked: I32
    """int32[constrained rows that sample]: their slots"""

    @classmethod
    def from_message(cls, plan: SchedulerOutput) -> Self:
        """Raises: ProtocolError"""
        what = "the plan"
        slots, generations = unpack(plan.slots), unpack(plan.generations)
        starts, counts = unpack(plan.starts), unpack(plan.counts)
        samples = plan.samples
        _same_length(what, slots=slots, generations=generations, starts=starts, counts=counts, samples=samples)
        if samples.translate(None, b"\0\1"):
            raise ProtocolError(f"{what} has `samples` other than 0 and 1")
        drafts = unpack(plan.drafts or bytes(len(plan.counts)))
        _same_length(what, counts=counts, drafts=drafts)
        if _negative(slots, generations, starts, counts, drafts, counts - drafts - 1):
            raise ProtocolError(f"{what} has a negative number, or a row without a token")
        if plan.drafts and drafts[unpack(samples, np.bool_) == 0].any():
            raise ProtocolError(f"{what} has drafts in a row that does not sample")
        if plan.speculation_rests and plan.num_speculative_tokens:
            raise ProtocolError(f"{what} requests drafts of a drafter that rests")
        block_slots, block_ids, released = map(unpack, (plan.block_slots, plan.block_ids, plan.released))
        _same_length(what, block_slots=block_slots, block_ids=block_ids)
        if _negative(block_slots, block_ids, released):
            raise ProtocolError(f"{what} has a negative number in its blocks or released slots")
        sampling, masked = unpack(samples, np.bool_), unpack(plan.masked)
        if plan.masked and not {*masked.tolist()}.issubset(slots[sampling].tolist()):
            raise ProtocolError(f"{what} has masks for a slot without a row that samples")
        rows = Rows(slots, generations, starts, counts, sampling, drafts)
        return cls(rows, block_slots, block_ids, released, masked)


class GrammarRows(NamedTuple):
    """Masks of one step. The masks of one row follow one another."""

    slots: I32
    """int32[rows]"""
    counts: I32
    """int32[rows]: number of masks of each row, at least 1"""
    masks: I32
    """int32[sum(counts), ceil(vocab / 32)]"""

    @classmethod
    def from_message(cls, grammar: GrammarOutput, vocab_size: int) -> Self:
        """Raises: ProtocolError"""
        slots, words, width = unpack(grammar.slots), unpack(grammar.bitmask), -(-vocab_size // 32)
        counts = unpack(grammar.counts) if grammar.counts else np.ones(len(slots), np.int32)
        _same_length("the grammar", slots=slots, counts=counts)
        number = int(np.add.reduce(counts, dtype=np.int64))
        if _negative(slots, counts, counts - 1) or len(words) != number * width:
            raise ProtocolError(
                f"the grammar of step {grammar.step_id} has {len(words)} words of bitmask for {len(slots)} rows with "
                f"{number} masks of {width}"
            )
        return cls(slots, counts, words.reshape(number, width))


class ResultRows(NamedTuple):
    """Rows of a result. Every column but `token_ids` is int32[rows]; no number is negative."""

    slots: I32
    generations: I32
    counts: I32
    token_ids: I32
    """int32[sum(counts)], row after row"""
    drafted: I32
    """Number of drafts that were verified."""

    @classmethod
    def from_message(cls, result: ModelRunnerOutput) -> Self:
        """Raises: ProtocolError"""
        what = "the result"
        columns = map(unpack, (result.slots, result.generations, result.counts, result.token_ids))
        slots, generations, counts, token_ids = columns
        drafted = unpack(result.drafted or bytes(len(result.counts)))
        rows = cls(slots, generations, counts, token_ids, drafted)
        _same_length(what, slots=slots, generations=generations, counts=counts, drafted=drafted)
        if _negative(slots, generations, counts, drafted, token_ids):
            raise ProtocolError(f"{what} has a negative number")
        if (tokens := total(counts)) != len(token_ids):
            raise ProtocolError(f"{what} has {len(token_ids)} tokens, but its rows count {tokens}")
        return rows


class ProgressRows(NamedTuple):
    """Reported progress of prefill rows, int32[reports]; no number is negative and no slot occurs twice."""

    slots: I32
    frontiers: I32

    @classmethod
    def from_message(cls, result: ModelRunnerOutput) -> Self:
        """Raises: ProtocolError"""
        what = "the result's progress"
        rows = cls(unpack(result.progress_slots), unpack(result.progress_frontiers))
        _same_length(what, slots=rows.slots, frontiers=rows.frontiers)
        if _negative(*rows):
            raise ProtocolError(f"{what} has a negative number")
        if len(np.unique(rows.slots)) != len(rows.slots):
            raise ProtocolError(f"{what} names a slot twice")
        return rows


class LogprobRows(NamedTuple):
    """Columns of `Logprobs`, whose docstrings give the shapes."""

    owners: I32
    positions: I32
    counts: I32
    token_ranks: I32
    token_ids: I32
    values: NDArray[np.float32]

    @classmethod
    def from_message(cls, logprobs: Logprobs) -> Self:
        """Raises: ProtocolError"""
        what = "the log-probabilities"
        *columns, values = (getattr(logprobs, name) for name in cls._fields)
        rows = cls._make((*map(unpack, columns), unpack(values, np.float32)))
        _same_length(
            what, owners=rows.owners, positions=rows.positions, counts=rows.counts, token_ranks=rows.token_ranks
        )
        _same_length(what, token_ids=rows.token_ids, values=rows.values)
        counts, ranks = rows.counts, rows.token_ranks
        if _negative(rows.positions, counts, counts - 1, ranks, ranks - 1, rows.token_ids):
            raise ProtocolError(f"{what} have a negative number, or a row without an entry")
        if int(np.add.reduce(rows.counts, dtype=np.int64)) != len(rows.token_ids):
            raise ProtocolError(f"{what} differ in number from the sum of their counts")
        return rows

    @classmethod
    def concatenate(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of all parts, in order. There must be at least one part."""
        return parts[0] if len(parts) == 1 else cls(*map(np.concatenate, zip(*parts, strict=True)))

    def to_message(self) -> Logprobs:
        return Logprobs(*(column.tobytes() for column in self))

    def select(self, mask: NDArray[np.bool_]) -> Self:
        """Return the rows where `mask`, bool[rows], is true."""
        if mask.all():
            return self
        entries = np.repeat(mask, self.counts)
        *columns, token_ids, values = self
        return type(self)._make((*(column[mask] for column in columns), token_ids[entries], values[entries]))


class EmbeddingRows(NamedTuple):
    """Embeddings of a result."""

    slots: I32
    """int32[rows]"""
    sizes: I32
    """int32[rows]: numbers of each."""
    values: NDArray[np.float32]
    """float32[sum(sizes)], row after row."""

    @classmethod
    def from_message(cls, result: ModelRunnerOutput) -> Self:
        """Raises: ProtocolError"""
        slots, values = unpack(result.embedding_slots), unpack(result.embeddings, np.float32)
        sizes = unpack(result.embedding_sizes)
        if not result.embedding_sizes and len(slots):
            sizes = np.full(len(slots), len(values) // len(slots), np.int32)
        if not len(slots) or len(sizes) != len(slots) or sizes.sum() != len(values) or _negative(slots, sizes):
            raise ProtocolError(f"{len(values)} numbers are no embeddings of {len(slots)} slots")
        return cls(slots, sizes, values)

    def by_slot(self) -> dict[int, bytes]:
        """Return the bytes of each slot's embedding, float32[its size]."""
        rows = np.split(self.values, np.cumsum(self.sizes)[:-1])
        return {slot: row.tobytes() for slot, row in zip(self.slots.tolist(), rows, strict=True)}


class OutputRows(NamedTuple):
    """Output tokens for a frontend, one per row. No number is negative."""

    numbers: NDArray[np.uint32]
    """uint32[rows]: request numbers"""
    indices: I32
    """int32[rows]: index of the token in the request's output"""
    token_ids: I32
    """int32[rows]"""

    @classmethod
    def from_message(cls, outputs: RequestOutputs) -> Self:
        """Raises: ProtocolError"""
        numbers = unpack(outputs.numbers, np.uint32)
        indices, token_ids = unpack(outputs.indices), unpack(outputs.token_ids)
        _same_length("the outputs", numbers=numbers, indices=indices, token_ids=token_ids)
        if _negative(indices, token_ids):
            raise ProtocolError("the outputs have a negative number")
        return cls(numbers, indices, token_ids)


def _same_length(what: str, **columns: NDArray[np.generic] | bytes) -> None:
    lengths = [*map(len, columns.values())]
    if lengths.count(lengths[0]) != len(lengths):
        raise ProtocolError(f"columns of {what} differ in length: {dict(zip(columns, lengths, strict=True))}")


def _negative(*columns: I32) -> bool:
    """Return whether a number is negative: the last byte of it, which has the sign, is no ASCII. The least number less
    one is not: pass the number, too."""
    return not b"".join(columns)[3::4].isascii()  # type: ignore[arg-type]  # arrays are buffers
