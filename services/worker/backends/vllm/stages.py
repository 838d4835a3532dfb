"""Sampled tokens on their way from the last pipeline stage to the earlier ones.

vLLM's scheduler would send them to the earlier stages with each step; plans have none. The last stage sends them, and
the drafts that it proposed, to every earlier one, as on the native backend. There they are written into vLLM's states
of requests, as vLLM's sampling does on the last stage. So all stages have the same states when they translate a plan,
and move its rows to the same true positions (true position, docs/invariants.md).
"""

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.steps import NO_DRAFT, NewRequest, SchedulerOutput
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.plan import PlanTranslator
from services.worker.batch.slots import Rows
from services.worker.distributed.feedback import TokenFeedback
from services.worker.distributed.outcome import Outcome
from services.worker.distributed.pipeline import PipelineGroup


class StageOutcomes:
    """The outcomes of one epoch, on any stage; one of several. All methods raise RanksLost.

    Args:
        runner: vLLM's model runner
    """

    def __init__(self, pipeline: PipelineGroup, num_slots: int, runner: Any, translator: PlanTranslator) -> None:
        self._pipeline, self._runner, self._translator = pipeline, runner, translator
        self.feedback = TokenFeedback(num_slots, pipeline.size)
        """On the stages before the last one."""

    def take(self, new: Sequence[NewRequest], slots: NDArray[np.int32]) -> None:
        """Wait for the outcomes that a step with rows of `slots` needs, and store them. On the last stage: nothing."""
        for request in new:
            self.feedback.assign(request.slot)
        for message in self.feedback.due(slots):
            k = message.step.num_speculative_tokens
            body = Outcome.empty_message(message.rows, k)
            self._pipeline.receive_feedback(body)
            stays = self.feedback.wanted(message)
            outcome = Outcome.from_message(body, k).select(stays)
            ids = self._translator.request_ids(message.rows.slots[stays])
            tokens = iter(outcome.ids.tolist())
            for request_id, count in zip(ids, outcome.counts.tolist(), strict=True):
                self._append(request_id, list(islice(tokens, count)))
            drafts = [row[row != NO_DRAFT].tolist() for row in outcome.drafts]
            self._translator.drafts.store(ids, drafts)

    def _append(self, request_id: str, tokens: list[int]) -> None:
        """Append sampled tokens to a request, which may have left."""
        batch, state = self._runner.input_batch, self._runner.requests.get(request_id)
        if state is None:
            return
        state.output_token_ids.extend(tokens)
        if (row := batch.req_id_to_index.get(request_id)) is not None:
            start = batch.num_tokens_no_spec[row]
            end = batch.num_tokens_no_spec[row] = start + len(tokens)
            batch.token_ids_cpu[row, start:end] = tokens
            batch.is_token_ids[row, start:end] = True

    def send(self, step: SchedulerOutput, rows: Rows, ids: list[str], result: vllm_api.ModelRunnerOutput) -> None:
        """Send the outcome of a sampled step. On the last stage.

        Args:
            ids: request id of each row
        """
        if not rows.samples.any():
            return
        sampling = [ids[row] for row in np.flatnonzero(rows.samples)]
        tokens = [result.sampled_token_ids[result.req_id_to_index[request_id]] for request_id in sampling]
        flat = torch.tensor([token for row in tokens for token in row], dtype=torch.int32)
        counts = np.array([len(row) for row in tokens], np.int32)
        k = step.num_speculative_tokens
        outcome = Outcome(flat, counts, self._translator.drafts.column(sampling, k))
        self._pipeline.send_feedback(outcome.to_message(Outcome.empty_message(rows, k)), self._pipeline.size - 1)
