"""Translation of vLLM's `ModelRunnerOutput` to a step's result: request ids to slots, rows in the plan's order."""

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.backends.pooling import PooledRows
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.sampled_steps import SampledStep
from services.worker.batch.slots import I32, NONE, Rows, spread
from services.worker.device.device_times import DeviceTime, StepClock
from services.worker.device.interface import HostCopy


@dataclass(frozen=True)
class ExecutedVllmStep:
    """A step after its forward pass."""

    step: SchedulerOutput
    rows: Rows
    ids: list[str]
    """vLLM's request id of each row."""
    logprobs: I32
    """int32[rows], requested at the launch: alternatives at the sampled token; NONE: no log-probabilities."""
    prompt_logprobs: I32
    """The same at each prompt token. vLLM returns them together, when the prompt is complete."""
    clock: StepClock
    pooled: PooledRows | None = None
    """None if no row needs a hidden state, or if another rank reports the step."""
    result: Any = None
    """The result of a model with a pooler of its own, which samples nothing."""
    failed: bytes = b""
    """`ModelRunnerOutput.failed_slots`"""


@dataclass(frozen=True)
class VllmOutput:
    """An `Output`. Later steps change nothing in it: immutable result (docs/invariants.md)."""

    executed: ExecutedVllmStep
    sampled: SampledStep
    ended: DeviceTime
    embeddings: HostCopy | None = None
    """float32[completed, hidden] of the pooled rows."""
    acceptable: I32 | None = None
    """int32[rows]: number of drafts that the grammar allows; None: all."""
    proposed: I32 | None = None
    """int32[rows, num_speculative_tokens]: drafts for the next step, if a grammar needs them."""

    @property
    def is_done(self) -> bool:
        return not self.sampled.is_deferred

    def get(self) -> ModelRunnerOutput:
        executed, result = self.executed, self.sampled.get()
        index_of = result.req_id_to_index
        rows, samples = executed.rows, executed.rows.samples
        indices = np.array([index_of[executed.ids[row]] for row in np.flatnonzero(samples)], np.int64)
        embedding_slots, embeddings, sizes = b"", b"", b""
        if (vectors := result.pooler_output) is None:
            tokens = [result.sampled_token_ids[i] for i in indices]
        else:  # in place of each token
            tokens, embedding_slots = [[0]] * len(indices), rows.slots[samples].tobytes()
            embeddings, sizes = _vectors([vectors[i] for i in indices])
        counts = np.array([len(row) for row in tokens], np.int32)
        drafted = rows.drafts if self.acceptable is None else self.acceptable
        if executed.pooled is not None and self.embeddings is not None:
            embedding_slots, embeddings = executed.pooled.to_message(*self.embeddings())
        parts = [*self._prompt_logprobs(result), *self._token_logprobs(result, indices, counts)]
        return ModelRunnerOutput(
            epoch=executed.step.epoch,
            step_id=executed.step.step_id,
            slots=rows.slots[samples].tobytes(),
            generations=rows.generations[samples].tobytes(),
            counts=counts.tobytes(),
            token_ids=np.array(list(chain.from_iterable(tokens)), np.int32).tobytes(),
            times=executed.clock.times(self.ended),
            logprobs=LogprobRows.concatenate(parts).to_message() if parts else None,
            embedding_slots=embedding_slots,
            embeddings=embeddings,
            embedding_sizes=sizes,
            drafted=drafted[samples].tobytes() if drafted.any() else b"",
            draft_token_ids=self.proposed[samples].tobytes() if self.proposed is not None else b"",
            failed_slots=executed.failed,
        )

    def _token_logprobs(
        self, result: vllm_api.ModelRunnerOutput, indices: NDArray[np.int64], counts: I32
    ) -> list[LogprobRows]:
        """Return the log-probabilities of sampled tokens.

        Args:
            indices: vLLM's row of each sampling row
            counts: tokens of each sampling row
        """
        samples, lists = self.executed.rows.samples, result.logprobs
        rows, tops = self.executed.rows.select(samples), self.executed.logprobs[samples]
        wanted = tops != NONE
        if not wanted.any() or lists is None:
            return []
        if lists.cu_num_generated_tokens is not None:  # rows of different lengths
            indices = np.array(lists.cu_num_generated_tokens)[indices]
        owners, offsets = spread(np.where(wanted, counts, np.int32(0)))
        at, positions = indices[owners] + offsets, rows.firsts[owners] + offsets
        entries = lists.logprob_token_ids[at], lists.logprobs[at], lists.sampled_token_ranks[at]
        return [_logprob_rows(rows.slots[owners], positions, tops[owners], *entries)]

    def _prompt_logprobs(self, result: vllm_api.ModelRunnerOutput) -> list[LogprobRows]:
        """Return the log-probabilities of prompts that are complete. The first token has none."""
        parts, executed = [], self.executed
        for row in np.flatnonzero(executed.prompt_logprobs != NONE):
            tensors = result.prompt_logprobs_dict.get(executed.ids[row])
            if tensors is None or not len(tensors.logprobs):
                continue
            positions = np.arange(1, len(tensors.logprobs) + 1, dtype=np.int32)
            slots = np.full(len(positions), executed.rows.slots[row], np.int32)
            tops = np.full(len(positions), executed.prompt_logprobs[row], np.int32)
            columns = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
            parts.append(_logprob_rows(slots, positions, tops, *(column.numpy() for column in columns)))
        return parts


def _vectors(vectors: list[torch.Tensor | None]) -> tuple[bytes, bytes]:
    """Return the vectors, float32 one behind the other, and the size of each, int32."""
    values = [np.empty(0, np.float32) if v is None else v.float().numpy().ravel() for v in vectors]
    return b"".join(v.tobytes() for v in values), np.array([len(v) for v in values], np.int32).tobytes()


def _logprob_rows(
    slots: I32,
    positions: NDArray[np.integer],
    tops: I32,
    ids: NDArray[np.integer],
    values: NDArray[np.float32],
    token_ranks: NDArray[np.integer],
) -> LogprobRows:
    """Return the first `tops` + 1 columns of each row of `ids` and `values`.

    vLLM's columns are the token itself, then the likeliest tokens, as many as the batch's largest request needs.
    """
    counts = np.minimum(tops + 1, ids.shape[1]).astype(np.int32)
    wanted = np.arange(ids.shape[1]) < counts[:, None]
    return LogprobRows(
        slots.astype(np.int32),
        positions.astype(np.int32),
        counts,
        token_ranks.astype(np.int32),
        ids[wanted].astype(np.int32),
        values[wanted].astype(np.float32),
    )
