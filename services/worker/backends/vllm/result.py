"""From vLLM's `ModelRunnerOutput` to ours: request ids to slots, rows in the plan's order."""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput, StepTimes
from services.worker.backends.pooling import PooledRows
from services.worker.backends.vllm import names
from services.worker.batch.slots import NONE, Rows

I32 = NDArray[np.int32]


@dataclass(frozen=True)
class Asked:
    """What a step is to return beside its tokens, as it was when the step was launched; int32[rows]."""

    logprobs: I32
    """Alternatives at the token that a row samples; NONE: none at all."""
    prompt_logprobs: I32
    """The same at each prompt token, which vLLM returns all together when the prompt is complete."""


@dataclass(frozen=True)
class Result:
    """A step's result, which lies on the host; nothing here is touched by a later step (S3-1)."""

    step: SchedulerOutput
    rows: Rows
    ids: list[str]
    """vLLM's request id of each row."""
    asked: Asked
    theirs: names.ModelRunnerOutput
    times: StepTimes
    pooled: PooledRows | None = None
    acceptable: I32 | None = None
    """int32[rows]: drafts that a grammar leaves; None: all."""
    proposed: I32 | None = None
    """int32[rows, num_speculative_tokens], where a grammar looks at what comes next."""

    def get(self) -> ModelRunnerOutput:
        rows, where = self.rows, self.theirs.req_id_to_index
        samples = rows.samples
        at = np.array([where[self.ids[row]] for row in np.flatnonzero(samples)], np.int64)
        tokens = [self.theirs.sampled_token_ids[i] for i in at]
        counts = np.array([len(row) for row in tokens], np.int32)
        drafted = rows.drafts if self.acceptable is None else self.acceptable
        embedding_slots, embeddings = self.pooled.packed() if self.pooled is not None else (b"", b"")
        parts = [*self._prompts(), *self._sampled(at, counts)]
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            slots=rows.slots[samples].tobytes(),
            generations=rows.generations[samples].tobytes(),
            counts=counts.tobytes(),
            token_ids=np.array(list(chain.from_iterable(tokens)), np.int32).tobytes(),
            times=self.times,
            logprobs=LogprobRows.concatenate(parts).to_message() if parts else None,
            embedding_slots=embedding_slots,
            embeddings=embeddings,
            drafted=drafted[samples].tobytes() if drafted.any() else b"",
            draft_token_ids=self.proposed[samples].tobytes() if self.proposed is not None else b"",
        )

    def _sampled(self, at: NDArray[np.int64], counts: I32) -> list[LogprobRows]:
        """Of the tokens in vLLM's rows `at`, so many of each, where they are asked for."""
        rows, lists = self.rows.select(self.rows.samples), self.theirs.logprobs
        tops = self.asked.logprobs[self.rows.samples]
        wanted = tops != NONE
        if not wanted.any() or lists is None:
            return []
        if lists.cu_num_generated_tokens is not None:  # vLLM's rows are ragged
            at = np.array(lists.cu_num_generated_tokens)[at]
        owners = np.repeat(np.flatnonzero(wanted), counts[wanted])
        offsets = np.arange(len(owners)) - np.repeat(
            np.cumsum(counts[wanted]) - counts[wanted], counts[wanted]
        )
        at, positions = at[owners] + offsets, (rows.ends - rows.drafts)[owners] + offsets
        entries = lists.logprob_token_ids[at], lists.logprobs[at], lists.sampled_token_ranks[at]
        return [_rows(rows.slots[owners], positions, tops[owners], *entries)]

    def _prompts(self) -> list[LogprobRows]:
        """Of whole prompts; the first token has none."""
        parts = []
        for row in np.flatnonzero(self.asked.prompt_logprobs != NONE):
            tensors = self.theirs.prompt_logprobs_dict.get(self.ids[row])
            if tensors is None or not len(tensors.logprobs):
                continue
            positions = np.arange(1, len(tensors.logprobs) + 1, dtype=np.int32)
            slots = np.full(len(positions), self.rows.slots[row], np.int32)
            tops = np.full(len(positions), self.asked.prompt_logprobs[row], np.int32)
            columns = tensors.logprob_token_ids, tensors.logprobs, tensors.selected_token_ranks
            parts.append(_rows(slots, positions, tops, *(column.numpy() for column in columns)))
        return parts


def _rows(
    slots: I32,
    positions: NDArray[np.integer],
    tops: I32,
    ids: NDArray[np.integer],
    values: NDArray[np.float32],
    ranks: NDArray[np.integer],
) -> LogprobRows:
    """`ids` and `values` have as many columns as the greediest row of vLLM's batch asks for: the token's own first,
    then the most likely ones."""
    counts = np.minimum(tops + 1, ids.shape[1]).astype(np.int32)
    wanted = np.arange(ids.shape[1]) < counts[:, None]
    return LogprobRows(
        slots.astype(np.int32),
        positions.astype(np.int32),
        counts,
        ranks.astype(np.int32),
        ids[wanted].astype(np.int32),
        values[wanted].astype(np.float32),
    )
