"""From a plan to vLLM's `SchedulerOutput`: slots to request ids, columns to rows.

The plan goes through `SlotTable` first, which checks it; what is said to vLLM is read from there. A request enters
vLLM's batch by its state: that is how vLLM itself takes back one that was preempted, and a new one is the same without
output. So tokens that were sampled before, by whichever worker, stay output, and its noise goes on where it was.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.rows import GrammarRows
from protocol.steps import GrammarOutput, NewRequest, SchedulerOutput
from services.worker.backends.vllm import names
from services.worker.backends.vllm.drafts import Drafts
from services.worker.backends.vllm.parameters import Generator, translated
from services.worker.batch.slots import Rows, SlotTable
from services.worker.sampling.reference import GREEDY_BELOW

RESERVED_BLOCKS = 1
"""vLLM keeps its first block for itself, so each of ours is one further."""
ANYTHING = -1
"""A word of a mask that forbids nothing."""


class Translated(NamedTuple):
    step: names.SchedulerOutput
    rows: Rows
    """The plan's, where they really stand."""
    ids: list[str]
    """vLLM's request id of each row."""


class Plans:
    """What vLLM was told of each slot, so that a step says only what changed.

    Args:
        requests: vLLM's own states by request id, where those that enter are put
        prompt_logprobs: vLLM's own: by request id, how many are asked for at each prompt token
        most_drafts: of a row; 0: no speculation
    """

    def __init__(
        self,
        table: SlotTable,
        vocab_size: int,
        requests: dict[str, Any],
        prompt_logprobs: dict[str, int],
        most_drafts: int = 0,
    ) -> None:
        self._table, self._vocab_size = table, vocab_size
        self.drafts = Drafts(most_drafts, table.max_model_len, requests)
        self._requests, self._prompt_logprobs = requests, prompt_logprobs
        self._entering: dict[int, NewRequest] = {}
        """By slot, until its first row."""
        self._ids = [""] * table.num_slots
        """Of the request in each slot. It carries the generation: the slot's next request must be another one."""
        self._told = np.zeros(table.num_slots, np.int32)
        """Blocks of each slot that vLLM knows."""

    def ids(self, slots: NDArray[np.int32]) -> list[str]:
        """vLLM's request ids of what is in `slots`."""
        return [self._ids[slot] for slot in slots.tolist()]

    def translated(self, step: SchedulerOutput, planned: Rows) -> Translated:
        """`planned` are the rows of `step`, which the table has applied. Raises: PlanError"""
        finished = self._left(unpack(step.released))
        for request in step.new:
            self._entering[request.slot] = request
            self._ids[request.slot] = f"{request.slot}.{request.generation}"
        ids, table = self.ids(planned.slots), self._table
        rows, drafts = self.drafts.settle(planned, ids)
        entered = set(self.ids(self._enter(rows)))
        known = np.where(rows.samples, rows.ends - rows.drafts, table.num_tokens[rows.slots])
        theirs = names.SchedulerOutput(
            scheduled_new_reqs=[],
            scheduled_cached_reqs=names.CachedRequestData(
                req_ids=ids,
                resumed_req_ids=entered,
                new_token_ids=[],
                all_token_ids={},
                new_block_ids=self._new_blocks(rows.slots),
                num_computed_tokens=rows.starts.tolist(),
                num_output_tokens=(known - table.num_prompt[rows.slots]).tolist(),
            ),
            num_scheduled_tokens=dict(zip(ids, rows.counts.tolist(), strict=True)),
            total_num_scheduled_tokens=int(rows.counts.sum()),
            scheduled_spec_decode_tokens=drafts,
            scheduled_encoder_inputs={},
            finished_req_ids=finished,
            free_encoder_mm_hashes=[],
            num_spec_tokens_to_schedule=step.num_speculative_tokens,
        )
        return Translated(theirs, rows, ids)

    def released(self, slots: NDArray[np.int32]) -> names.SchedulerOutput:
        """A step of no rows; the table has released the slots."""
        empty = names.SchedulerOutput.make_empty()
        empty.finished_req_ids = self._left(slots)
        return empty

    def grammar(self, grammar: GrammarOutput, rows: Rows) -> tuple[names.GrammarOutput, NDArray[np.int32]]:
        """vLLM wants a mask for every draft of a row and one more. Where there are fewer, the drafts behind them may
        not be accepted (spec 2(b) 14).

        Args:
            rows: of the step, as `translated` returned them

        Returns: what vLLM is told; int32[rows], how many drafts of each may be accepted.

        Raises: ProtocolError
        """
        said = GrammarRows.from_message(grammar, self._vocab_size)
        row_of = {slot: row for row, slot in enumerate(rows.slots.tolist())}
        here, masks, acceptable = [], [], rows.drafts.copy()
        for slot, count, end in zip(said.slots.tolist(), said.counts, np.cumsum(said.counts), strict=True):
            if (row := row_of.get(slot)) is None:
                continue
            own = said.masks[end - count : end]
            most = int(rows.drafts[row]) + 1
            acceptable[row] = min(most, count) - 1
            here.append(slot)
            masks += [own[:most], np.full((max(0, most - count), own.shape[1]), ANYTHING, np.int32)]
        # A copy: torch wants what it reads to be writable.
        every = np.concatenate(masks) if masks else said.masks[:0].copy()
        return names.GrammarOutput([self._ids[slot] for slot in here], every), acceptable

    def _left(self, slots: NDArray[np.int32]) -> set[str]:
        for slot in slots.tolist():
            self._entering.pop(slot, None)
        return set(self.ids(slots))

    def _enter(self, rows: Rows) -> NDArray[np.int32]:
        """The slots among `rows` that have their first row; vLLM is given their states."""
        if not self._entering:
            return rows.slots[:0]
        first = np.isin(rows.slots, list(self._entering))
        for slot, start in zip(rows.slots[first].tolist(), rows.starts[first].tolist(), strict=True):
            request = self._entering.pop(slot)
            state = self._state(request, start)
            self._requests[state.req_id] = state
            if (wanted := state.sampling_params.prompt_logprobs) is not None:
                self._prompt_logprobs[state.req_id] = wanted
            self._told[slot] = 0
        return rows.slots[first]

    def _state(self, request: NewRequest, start: int) -> names.CachedRequestState:
        tokens, num_prompt = unpack(request.token_ids).tolist(), request.num_prompt_tokens
        params, output = request.params, tokens[num_prompt:]
        draws = params.temperature >= GREEDY_BELOW
        return names.CachedRequestState(
            req_id=self._ids[request.slot],
            prompt_token_ids=tokens[:num_prompt],
            mm_features=[],
            sampling_params=translated(params, self._vocab_size),
            generator=Generator.after(params.seed, len(output)) if draws else None,
            block_ids=([],),
            num_computed_tokens=start,
            output_token_ids=output,
        )

    def _new_blocks(self, slots: NDArray[np.int32]) -> list[tuple[list[int]] | None]:
        """Of each slot in turn, in the one group there is; None where nothing is new."""
        table, told, blocks = self._table, self._told[slots], self._table.num_blocks[slots]
        new: list[tuple[list[int]] | None] = [None] * len(slots)
        for row in np.flatnonzero(blocks > told).tolist():
            ids = table.block_table[slots[row], told[row] : blocks[row]] + RESERVED_BLOCKS
            new[row] = (ids.tolist(),)
        self._told[slots] = blocks
        return new
