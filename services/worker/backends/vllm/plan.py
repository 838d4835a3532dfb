"""Translation of plans to vLLM's `SchedulerOutput`: slots to request ids, columns to rows.

A plan is checked and applied by `SlotTable` first; what vLLM receives is read from the table. Every request enters
vLLM's batch as vLLM resumes a preempted request: by its state; a new request is one without output. So tokens that were
sampled before, on any worker, count as output, and the request's random numbers continue after them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.steps import NewRequest, SchedulerOutput
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.adapters import to_vllm
from services.worker.backends.vllm.media_inputs import MediaInputs
from services.worker.backends.vllm.model_pooler import ModelPooler
from services.worker.backends.vllm.parameters import RequestGenerator, to_vllm_params
from services.worker.backends.vllm.proposed_drafts import ProposedDrafts
from services.worker.backends.vllm.row_masks import LEFT_OUT, RowMasks
from services.worker.backends.vllm.sampled_steps import TokenPlaceholders
from services.worker.batch.slots import Rows, SlotTable

RESERVED_BLOCKS = 1
"""vLLM reserves its first block, so its block ids are one higher than the plan's."""


class TranslatedPlan(NamedTuple):
    step: vllm_api.SchedulerOutput
    rows: Rows
    """Rows of the plan at their true positions."""
    ids: list[str]
    """vLLM's request id of each row."""


class TranslatedMasks(NamedTuple):
    grammar: vllm_api.GrammarOutput | None = None
    acceptable: NDArray[np.int32] | None = None
    """int32[rows]: largest number of drafts to accept; None: all."""
    left_out: Sequence[str] = ()
    """Request ids of the constrained rows that are not sampled."""


class PlanTranslator:
    """State of each slot as vLLM has received it, so that a step contains only changes.

    Args:
        requests: vLLM's own states by request id; states of requests that enter are added
        prompt_logprobs: vLLM's own number of log-probabilities per prompt token, by request id
        max_drafts: of a row; 0: no speculation
        generator: makes the random numbers of a request from its seed and the number of its output tokens
        pooler: None: the model generates text
        encoded: vLLM's own outputs of its encoder, by content; None: the model reads text only
        set_positions: sets the positions of the prompt in a new state (M-RoPE); None: they are the tokens' numbers
    """

    def __init__(
        self,
        table: SlotTable,
        vocab_size: int,
        requests: dict[str, Any],
        prompt_logprobs: dict[str, int],
        max_drafts: int = 0,
        generator: Callable[[int, int], torch.Generator] = RequestGenerator.after_draws,
        pooler: ModelPooler | None = None,
        encoded: Mapping[str, Any] | None = None,
        set_positions: Callable[[vllm_api.CachedRequestState], None] | None = None,
    ) -> None:
        self._table, self._vocab_size = table, vocab_size
        self.drafts = ProposedDrafts(max_drafts, table.max_model_len, requests)
        self.placeholders = TokenPlaceholders(requests)
        self._requests, self._prompt_logprobs, self._generator = requests, prompt_logprobs, generator
        self._pooler = pooler
        self._media, self._set_positions = MediaInputs(encoded), set_positions
        self._entering: dict[int, NewRequest] = {}
        """New requests by slot, until their first row."""
        self._ids = [""] * table.num_slots
        """Request id of each slot. It contains the generation, so the slot's next request has another id."""
        self._known_blocks = np.zeros(table.num_slots, np.int32)
        """Number of blocks of each slot that vLLM has received."""

    def request_ids(self, slots: NDArray[np.int32]) -> list[str]:
        return [self._ids[slot] for slot in slots.tolist()]

    def translate(self, step: SchedulerOutput, planned: Rows) -> TranslatedPlan:
        """Translate `step`, whose rows are `planned`, after the table has applied it.

        Raises: PlanError
        """
        finished = self._remove(unpack(step.released))
        for request in step.new:
            self._entering[request.slot] = request
            self._ids[request.slot] = f"{request.slot}.{request.generation}"
        ids, table = self.request_ids(planned.slots), self._table
        rows, drafts = self.drafts.settle_rows(planned, ids, unpack(step.masked))
        entered = set(self.request_ids(self._enter(rows)))
        new_blocks = self._new_blocks(rows.slots)
        known = np.where(rows.samples, rows.ends - rows.drafts, table.num_tokens[rows.slots])
        vllm_step = vllm_api.SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=vllm_api.CachedRequestData(
                req_ids=ids,
                resumed_req_ids=entered,
                new_token_ids=[],
                all_token_ids=self.placeholders.begin_step(ids),
                new_block_ids=new_blocks,
                num_computed_tokens=rows.starts.tolist(),
                num_output_tokens=(known - table.num_prompt[rows.slots]).tolist(),
            ),
            num_scheduled_tokens=dict(zip(ids, rows.counts.tolist(), strict=True)),
            total_num_scheduled_tokens=int(rows.counts.sum()),
            scheduled_spec_decode_tokens=drafts,
            scheduled_encoder_inputs=self._media.reach(rows.slots, ids, rows.starts, rows.ends),
            finished_req_ids=finished,
            free_encoder_mm_hashes=self._media.take_passed(),
            num_spec_tokens_to_schedule=step.num_speculative_tokens,
            # The memory of a state may come back as keys of another type. No prefix is a hit, so all blocks are empty.
            new_block_ids_to_zero=_all_blocks(new_blocks) if table.num_states else None,
        )
        return TranslatedPlan(vllm_step, rows, ids)

    def translate_release(self, slots: NDArray[np.int32]) -> vllm_api.SchedulerOutput:
        """Return a step without rows that removes the requests in `slots`."""
        self.placeholders.begin_step(())
        empty = vllm_api.SchedulerOutput.make_empty()
        empty.finished_req_ids = self._remove(slots)
        return empty

    def translate_masks(self, masks: RowMasks, rows: Rows) -> TranslatedMasks:
        """Translate the masks of a step.

        Args:
            rows: of the step, as `translate` returned them
        """
        acceptable, ids = rows.drafts.copy(), self.request_ids(masks.slots)
        acceptable[masks.rows] = np.maximum(masks.acceptable, 0)
        left_out = [
            request_id for request_id, limit in zip(ids, masks.acceptable.tolist(), strict=True) if limit == LEFT_OUT
        ]
        return TranslatedMasks(vllm_api.GrammarOutput(ids, masks.bitmask), acceptable, left_out)

    def _remove(self, slots: NDArray[np.int32]) -> set[str]:
        for slot in slots.tolist():
            self._entering.pop(slot, None)
        self._media.leave(slots.tolist())
        ids = set(self.request_ids(slots))
        self.drafts.drop(ids)
        return ids

    def _enter(self, rows: Rows) -> NDArray[np.int32]:
        """Add the states of requests that have their first row. Returns their slots."""
        if not self._entering:
            return rows.slots[:0]
        first = np.isin(rows.slots, list(self._entering))
        for slot, start in zip(rows.slots[first].tolist(), rows.starts[first].tolist(), strict=True):
            request = self._entering.pop(slot)
            state = self._state(request, start)
            if self._set_positions is not None:
                self._set_positions(state)
            self._requests[state.req_id] = state
            if (count := request.params.prompt_logprobs) is not None:
                self._prompt_logprobs[state.req_id] = count
            self._known_blocks[slot] = 0
        return rows.slots[first]

    def _state(self, request: NewRequest, start: int) -> vllm_api.CachedRequestState:
        tokens, num_prompt = unpack(request.token_ids).tolist(), request.num_prompt_tokens
        output, lora, pooler = tokens[num_prompt:], request.lora, self._pooler
        params = to_vllm_params(request.params, self._vocab_size) if pooler is None else None
        is_sampled = params is not None and params.sampling_type is not vllm_api.SamplingType.GREEDY
        return vllm_api.CachedRequestState(
            req_id=self._ids[request.slot],
            prompt_token_ids=tokens[:num_prompt],
            mm_features=self._media.enter(request),
            sampling_params=params,
            pooling_params=None if pooler is None else pooler.to_vllm_params(request.pooling_params),
            generator=self._generator(request.params.seed, len(output)) if is_sampled else None,
            block_ids=tuple([] for _ in self._table.groups),
            num_computed_tokens=start,
            output_token_ids=output,
            lora_request=None if lora is None else to_vllm(lora),
        )

    def _new_blocks(self, slots: NDArray[np.int32]) -> list[tuple[list[int], ...] | None]:
        """Return for each slot its blocks that vLLM has not received, by cache group, or None."""
        table, known, blocks = self._table, self._known_blocks[slots], self._table.num_blocks[slots]
        new: list[tuple[list[int], ...] | None] = [None] * len(slots)
        for row in np.flatnonzero(blocks > known).tolist():
            by_group = table.block_table[slots[row]].reshape(table.num_groups, -1)
            keys = iter((by_group[:, known[row] : blocks[row]] + RESERVED_BLOCKS).tolist())
            states = iter((table.states[slots[row], :, None] + RESERVED_BLOCKS).tolist())
            new[row] = tuple(
                next(keys) if not group.is_state else [] if known[row] else next(states) for group in table.groups
            )
        self._known_blocks[slots] = blocks
        return new


def _all_blocks(tables: Sequence[tuple[list[int], ...] | None]) -> list[int]:
    return [block for table in tables if table is not None for blocks in table for block in blocks]
