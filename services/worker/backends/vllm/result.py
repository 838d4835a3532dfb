"""From vLLM's `ModelRunnerOutput` to ours: request ids to slots, rows in the plan's order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from protocol.rows import LogprobRows
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.worker.backends.pooling import PooledRows
from services.worker.backends.vllm import names
from services.worker.batch import NONE, Rows

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
    started: float
    ended: float
    pooled: PooledRows | None = None

    def get(self) -> ModelRunnerOutput:
        rows, where = self.rows, self.theirs.req_id_to_index
        samples = rows.samples
        at = np.array([where[self.ids[row]] for row in np.flatnonzero(samples)], np.int64)
        tokens = np.array([self.theirs.sampled_token_ids[i][0] for i in at], np.int32)
        embedding_slots, embeddings = self.pooled.packed() if self.pooled is not None else (b"", b"")
        parts = [*self._prompts(), *self._sampled(at)]
        return ModelRunnerOutput(
            epoch=self.step.epoch,
            step_id=self.step.step_id,
            slots=rows.slots[samples].tobytes(),
            generations=rows.generations[samples].tobytes(),
            counts=np.ones(len(tokens), np.int32).tobytes(),
            token_ids=tokens.tobytes(),
            started=self.started,
            ended=self.ended,
            logprobs=LogprobRows.joined(parts).packed() if parts else None,
            embedding_slots=embedding_slots,
            embeddings=embeddings,
        )

    def _sampled(self, at: NDArray[np.int64]) -> list[LogprobRows]:
        """Of the tokens in vLLM's rows `at`, where they are asked for."""
        rows = self.rows.where(self.rows.samples)
        tops = self.asked.logprobs[self.rows.samples]
        wanted = tops != NONE
        lists = self.theirs.logprobs
        if not wanted.any() or lists is None:
            return []
        at = at[wanted]
        entries = lists.logprob_token_ids[at], lists.logprobs[at], lists.sampled_token_ranks[at]
        return [_rows(rows.slots[wanted], rows.ends[wanted], tops[wanted], *entries)]

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
    positions: I32,
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
