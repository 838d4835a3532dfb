"""A worker's result, decoded and checked against its plan (identity matching)."""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from protocol.codec import ProtocolError, pack, unpack
from protocol.columns import greatest, has_all, has_any
from protocol.rows import EmbeddingRows, LogprobRows, ProgressRows, ResultRows
from protocol.steps import NO_DRAFT, ModelRunnerOutput
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.slots import Column, Mask

_ONE = pack([1])
NO_EMBEDDINGS: Mapping[int, bytes] = MappingProxyType({})


class UnknownResult(Exception):
    """A worker's result does not match the oldest step in flight: the worker and the scheduler disagree about the
    batch, and the epoch must end."""


class DecodedResult(NamedTuple):
    """Columns of a result; int32[sampling rows] in plan order unless stated."""

    counts: Column
    """Tokens of the row: accepted drafts and one more; 0 if the row was left out, or the runner voided it."""
    token_ids: Column
    """int32[sum(counts)], row after row."""
    drafted: Column
    """Drafts that were verified."""
    draft_ids: Column | None = None
    """int32[sampling rows, proposed]: drafts for the next step, padded with NO_DRAFT; only if a grammar needs them."""
    logprobs: LogprobRows | None = None
    """`owners` are slots of the step."""
    embeddings: Mapping[int, bytes] = NO_EMBEDDINGS
    """slot -> float32[values], of pooling rows that sample."""
    progress: ProgressRows | None = None
    """Positions that prefill rows reached, where the runner reports them."""
    failed: Sequence[int] = ()
    """Slots of rows whose request has an adapter that the workers cannot load."""
    sampled: float = 0.0
    """When the step was sampled, seconds on the worker's clock; 0: unknown."""

    @property
    def one_each(self) -> bool:
        """True: each row has one token, and verified no draft."""
        return self.counts.tobytes() == _ONE * len(self.token_ids) and not has_any(self.drafted)

    def ids_by_row(self, rows: Mask | slice) -> Column:
        """Return the tokens of some rows, int32[rows, widest row]; those of a row are undefined from its count on."""
        widest = greatest(self.counts, 1)
        first = (self.counts.cumsum(dtype=np.int32) - self.counts)[rows]
        return self.token_ids.take(first[:, None] + np.arange(widest, dtype=np.int32), mode="clip")


def decode_result(step: InflightStep, message: ModelRunnerOutput, vocab_size: int, hidden_size: int) -> DecodedResult:
    """Decode the result of `step`.

    Raises: UnknownResult, if its rows are not those of the plan, or a value is impossible.
    """
    try:
        rows = ResultRows.from_message(message)
        reports_progress = message.progress_slots or message.progress_frontiers
        progress = ProgressRows.from_message(message) if reports_progress else None
        logprobs = LogprobRows.from_message(message.logprobs) if message.logprobs is not None else None
        embeddings = EmbeddingRows.from_message(message).by_slot() if message.embeddings else NO_EMBEDDINGS
        failed = unpack(message.failed_slots).tolist() if message.failed_slots else ()
        draft_ids = _decode_drafts(step, message, len(rows.counts), vocab_size) if message.draft_token_ids else None
    except ProtocolError as error:
        raise UnknownResult(f"step {step.step_id}: {error}") from error
    _check_rows(step, message, rows.token_ids, vocab_size)
    if logprobs is not None and not np.isin(logprobs.owners, step.slots).all():
        raise UnknownResult(f"step {step.step_id} has log-probabilities of slots that are not its own")
    if failed and not {*failed} <= {*step.slots.tolist()}:
        raise UnknownResult(f"step {step.step_id} reports adapters of slots that are not its own")
    is_hidden = embeddings and not message.embedding_sizes  # otherwise the model's pooler decides the size
    if is_hidden and any(len(values) != 4 * hidden_size for values in embeddings.values()):
        raise UnknownResult(f"step {step.step_id} has embeddings of another size than the model's")
    columns = rows.counts, rows.token_ids, rows.drafted, draft_ids, logprobs, embeddings, progress, failed
    return DecodedResult(*columns, message.times.sampled)


def _check_rows(step: InflightStep, message: ModelRunnerOutput, token_ids: Column, vocab_size: int) -> None:
    slots, generations = step.slots, step.generations
    if not has_all(step.samples):
        slots, generations = slots[step.samples], generations[step.samples]
    if message.slots != slots.astype(np.int32).tobytes() or message.generations != generations.tobytes():
        raise UnknownResult(f"the rows of step {step.step_id}'s result are not those of its plan")
    if greatest(token_ids, 0) >= vocab_size:
        raise UnknownResult(f"step {step.step_id} returned a token outside the vocabulary of {vocab_size}")


def _decode_drafts(step: InflightStep, message: ModelRunnerOutput, num_rows: int, vocab_size: int) -> Column:
    """int32[rows, proposed]. Raises: UnknownResult, ProtocolError"""
    ids = unpack(message.draft_token_ids)
    if len(ids) != num_rows * step.proposes or ids.min() < NO_DRAFT or ids.max() >= vocab_size:
        raise UnknownResult(
            f"step {step.step_id} returned {len(ids)} drafts, some outside the vocabulary or not "
            f"{step.proposes} for each of {num_rows} rows"
        )
    return ids.reshape(num_rows, step.proposes)
