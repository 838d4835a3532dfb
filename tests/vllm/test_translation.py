"""Translation of plans and results in both directions, field by field; no model is computed."""

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from vllm.v1.kv_cache_interface import KVCacheGroupSpec

from protocol.codec import pack, unpack
from protocol.kv_groups import KVGroup
from protocol.rows import LogprobRows, ResultRows
from protocol.sampling import SamplingParams
from protocol.steps import NO_DRAFT, GrammarOutput, NewRequest, SchedulerOutput, StepTimes
from services.worker.backends.vllm import vllm_api
from services.worker.backends.vllm.kv_groups import kv_groups
from services.worker.backends.vllm.output import ExecutedVllmStep, VllmOutput
from services.worker.backends.vllm.parameters import RequestGenerator, to_vllm_params
from services.worker.backends.vllm.plan import RESERVED_BLOCKS, PlanTranslator, TranslatedPlan
from services.worker.backends.vllm.row_masks import RowMasks
from services.worker.backends.vllm.sampled_steps import SampledStep
from services.worker.batch.slots import NONE, PlanError, Rows, SlotTable
from services.worker.device.device_times import StepClock, past
from services.worker.runner import LoadError

VOCAB = 100
TIMES = StepTimes(prepared=1.0, forward_began=1.0, forward_ended=1.5, sampled=2.0)
CLOCK, SAMPLED_AT = StepClock(1.0, past(1.0), past(1.5)), past(2.0)
BLOCK = 32
GREEDY = SamplingParams(max_tokens=8, temperature=0.0)
SAMPLED = SamplingParams(max_tokens=8, temperature=1.0, seed=7)

# -- parameters --------------------------------------------------------------------------------------------------

CHANGED: dict[str, tuple[Any, dict[str, Any]]] = {
    "max_tokens": (5, {"max_tokens": 5}),
    "temperature": (0.7, {"temperature": 0.7}),
    "top_p": (0.5, {"top_p": 0.5}),
    "top_k": (3, {"top_k": 3}),
    "min_p": (0.25, {"min_p": 0.25}),
    "seed": (2**64 - 1, {"seed": 2**64 - 1}),
    "min_tokens": (9, {"min_tokens": 9}),
    "eos_token_ids": ((2, VOCAB), {"all_stop_token_ids": {2}}),
    "stop_token_ids": ((4,), {"all_stop_token_ids": {4}}),
    "presence_penalty": (0.5, {"presence_penalty": 0.5}),
    "frequency_penalty": (-0.5, {"frequency_penalty": -0.5}),
    "repetition_penalty": (1.5, {"repetition_penalty": 1.5}),
    "logit_bias": (((3, -2.0), (VOCAB, 1.0)), {"logit_bias": {3: -2.0}}),
    "bad_words": (((5, 6), (7,), (VOCAB,)), {"bad_words_token_ids": [[5, 6], [7]]}),
    "allowed_token_ids": (pack([1, 3, VOCAB]), {"allowed_token_ids": [1, 3]}),
    "logprobs": (4, {"logprobs": 4}),
    "prompt_logprobs": (0, {"prompt_logprobs": 0}),
}
"""For each field a value other than its default, and what vLLM's sampler reads then."""
VLLM_FIELDS = sorted({name for _, expected in CHANGED.values() for name in expected})


@pytest.mark.parametrize("field", SamplingParams.__struct_fields__)
def test_each_field_arrives_and_changes_nothing_else(field: str) -> None:
    value, expected = CHANGED[field]
    default, changed = SamplingParams(max_tokens=16), SamplingParams(**{"max_tokens": 16, field: value})
    before, after = to_vllm_params(default, VOCAB), to_vllm_params(changed, VOCAB)
    for name in VLLM_FIELDS:
        wanted = expected.get(name, getattr(before, name))
        assert getattr(after, name) == wanted, name
        assert name not in expected or getattr(before, name) != wanted


def test_values_that_only_vllms_frontend_refuses_reach_its_sampler() -> None:
    params = to_vllm_params(SamplingParams(max_tokens=2, temperature=50.0, min_tokens=9), VOCAB)
    assert (params.temperature, params.min_tokens) == (50.0, 9)


def test_allowed_ids_outside_the_vocabulary_leave_the_lowest_token() -> None:
    params = to_vllm_params(SamplingParams(max_tokens=2, allowed_token_ids=pack([VOCAB])), VOCAB)
    assert params.allowed_token_ids == [0]


def test_number_of_logprobs_is_limited_by_the_vocabulary() -> None:
    params = to_vllm_params(SamplingParams(max_tokens=2, logprobs=20, prompt_logprobs=20), 5)
    assert (params.logprobs, params.prompt_logprobs) == (5, 5)


def draws(generator: torch.Generator, count: int) -> list[int]:
    return [int(torch.randint(0, 2**31, (1,), generator=generator)) for _ in range(count)]


def test_random_numbers_continue_after_the_output_of_a_request() -> None:
    whole = draws(RequestGenerator.after_draws(2**64 - 1, 0), 9)
    assert draws(RequestGenerator.after_draws(2**64 - 1, 4), 5) == whole[4:]


# -- plans -------------------------------------------------------------------------------------------------------


class TranslatorSetup:
    """A slot table, a translator, and the states that vLLM keeps."""

    def __init__(self, max_drafts: int = 0) -> None:
        self.table = SlotTable(4, BLOCK, 20, 256, leaves_rows_out=True)
        self.requests: dict[str, Any] = {}
        self.prompt_logprobs: dict[str, int] = {}
        self.translator = PlanTranslator(self.table, VOCAB, self.requests, self.prompt_logprobs, max_drafts)

    def propose(self, drafts: dict[str, list[int]]) -> None:
        self.translator.drafts.store(list(drafts), list(drafts.values()))

    def step(self, rows: list[tuple[int, int, int, int, bool]], **columns: Any) -> vllm_api.SchedulerOutput:
        return self.plan(rows, **columns).step

    def plan(self, rows: list[tuple[int, int, int, int, bool]], **columns: Any) -> TranslatedPlan:
        """`rows` are (slot, generation, start, count, samples)."""
        slots, generations, starts, counts, samples = zip(*rows, strict=True) if rows else ((),) * 5
        columns = {name: pack(v) if isinstance(v, list) and name != "new" else v for name, v in columns.items()}
        plan = SchedulerOutput(
            1, 1, pack(slots), pack(generations), pack(starts), pack(counts), bytes(samples), **columns
        )
        return self.translator.translate(plan, self.table.apply(plan))


def new(
    slot: int, generation: int, tokens: range, blocks: list[int], num_prompt: int = 0, params: SamplingParams = GREEDY
) -> NewRequest:
    return NewRequest(slot, generation, pack(tokens), num_prompt or len(tokens), pack(blocks), params)


def test_new_request_enters_with_its_prompt_and_blocks() -> None:
    world = TranslatorSetup()
    step = world.step([(2, 5, 0, 40, True)], new=[new(2, 5, range(40), [3, 8])])
    state = world.requests["2.5"]
    assert (state.prompt_token_ids, state.output_token_ids) == (list(range(40)), [])
    assert state.generator is None
    cached = step.scheduled_cached_reqs
    assert (cached.req_ids, cached.resumed_req_ids) == (["2.5"], {"2.5"})
    assert cached.new_block_ids == [([3 + RESERVED_BLOCKS, 8 + RESERVED_BLOCKS],)]
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([0], [0])
    assert (step.num_scheduled_tokens, step.total_num_scheduled_tokens) == ({"2.5": 40}, 40)
    assert (step.finished_req_ids, step.scheduled_new_reqs) == (set(), [])


def test_request_whose_temperature_vllm_raises_has_random_numbers() -> None:
    world = TranslatorSetup()
    params = msgspec.structs.replace(SAMPLED, temperature=1e-6)
    world.step([(0, 1, 0, 2, True)], new=[new(0, 1, range(2), [3], params=params)])
    state = world.requests["0.1"]
    assert state.sampling_params.temperature == 0.01
    assert draws(state.generator, 1) == draws(RequestGenerator.after_draws(7, 0), 1)


def test_steps_ahead_count_promised_tokens_as_output() -> None:
    """vLLM has sampled every promised token when the plan that counts it is translated."""
    world = TranslatorSetup()
    world.step([(0, 1, 0, 31, True)], new=[new(0, 1, range(31), [3])])
    ahead = world.step([(0, 1, 31, 1, True)])
    assert ahead.scheduled_cached_reqs.num_output_tokens == [1]
    assert ahead.scheduled_cached_reqs.new_block_ids == [None]
    further = world.step([(0, 1, 32, 1, True)], block_slots=[0], block_ids=[9])
    assert further.scheduled_cached_reqs.num_output_tokens == [2]
    assert further.scheduled_cached_reqs.new_block_ids == [([9 + RESERVED_BLOCKS],)]
    assert further.scheduled_cached_reqs.resumed_req_ids == set()


def test_blocks_of_a_slot_without_a_row_are_sent_with_its_next_row() -> None:
    world = TranslatorSetup()
    world.step([(0, 1, 0, 20, True), (1, 1, 0, 4, True)], new=[new(0, 1, range(20), [3]), new(1, 1, range(4), [4])])
    skipping = world.step([(1, 1, 4, 1, True)], block_slots=[0], block_ids=[7])
    assert skipping.scheduled_cached_reqs.req_ids == ["1.1"]
    back = world.step([(0, 1, 20, 1, True), (1, 1, 5, 1, True)])
    assert back.scheduled_cached_reqs.new_block_ids == [([7 + RESERVED_BLOCKS],), None]
    assert back.scheduled_cached_reqs.resumed_req_ids == set()


def test_preempted_request_resumes_with_its_output() -> None:
    """In any slot, as another generation: prompt and output stay apart, and its random numbers continue."""
    world = TranslatorSetup()
    world.step([(0, 1, 0, 3, True)], new=[new(0, 1, range(3), [3], params=SAMPLED)])
    step = world.step([(1, 4, 0, 5, True)], released=[0], new=[new(1, 4, range(5), [6], 3, SAMPLED)])
    assert step.finished_req_ids == {"0.1"}
    state = world.requests["1.4"]
    assert (state.prompt_token_ids, state.output_token_ids) == ([0, 1, 2], [3, 4])
    assert draws(state.generator, 1) == draws(RequestGenerator.after_draws(7, 2), 1)
    assert step.scheduled_cached_reqs.num_output_tokens == [2]


def test_request_released_before_its_first_row_never_enters() -> None:
    world = TranslatorSetup()
    world.step([(1, 1, 0, 2, True)], new=[new(0, 1, range(4), [3]), new(1, 1, range(2), [4])])
    assert set(world.requests) == {"1.1"}
    world.step([(1, 1, 2, 1, True)], released=[0])
    assert set(world.requests) == {"1.1"}


def test_release_without_a_step_removes_the_request() -> None:
    world = TranslatorSetup()
    world.step([(3, 1, 0, 2, True)], new=[new(3, 1, range(2), [3])])
    world.table.release(np.array([3], np.int32))
    step = world.translator.translate_release(np.array([3], np.int32))
    assert (step.finished_req_ids, step.total_num_scheduled_tokens) == ({"3.1"}, 0)


def masks_of(rows: Rows, *slots: int, grammar: GrammarOutput | None = None) -> RowMasks:
    """Return the masks of a step whose constrained rows have `slots`."""
    masks = RowMasks(np.array(slots, np.int32), rows, VOCAB)
    if grammar is not None:
        masks.add(grammar)
    return masks


def test_bitmasks_keep_their_bits_in_the_order_of_the_plan() -> None:
    world = TranslatorSetup()
    _, rows, _ = world.plan([(slot, 1, 0, 2, True) for slot in (0, 1, 2)], new=new_ones(0, 1, 2))
    bits = np.arange(8, dtype=np.int32).reshape(2, 4)
    masks = masks_of(rows, 0, 2, grammar=GrammarOutput(1, 1, pack([2, 0]), bits.tobytes()))
    grammar, acceptable, left_out = world.translator.translate_masks(masks, rows)
    assert grammar.structured_output_request_ids == ["0.1", "2.1"]
    assert (grammar.grammar_bitmask == bits[::-1]).all()
    assert (acceptable.tolist(), left_out) == ([0, 0, 0], [])


def test_ranks_exchange_masks_as_numbers() -> None:
    """Their number follows from the plan, whatever masks a rank has."""
    world = drafting(0, 1, 2)
    _, rows, _ = world.plan([(slot, 1, 2, 4, True) for slot in (0, 1, 2)], drafts=[3, 3, 3])
    words = np.arange(8, dtype=np.int32)
    sent = masks_of(rows, 0, 1, grammar=GrammarOutput(1, 1, pack([1]), words.tobytes(), pack([2])))
    received = masks_of(rows, 0, 1)
    received.numbers[:] = sent.numbers
    ours, theirs = (world.translator.translate_masks(masks, rows) for masks in (sent, received))
    assert (ours.acceptable.tolist(), ours.left_out) == ([0, 1, 0], ["0.1"])
    assert (theirs.acceptable.tolist(), theirs.left_out) == ([0, 1, 0], ["0.1"])
    assert theirs.grammar.grammar_bitmask[4:6].reshape(-1).tolist() == words.tolist()
    assert (theirs.grammar.grammar_bitmask == ours.grammar.grammar_bitmask).all()


def test_row_behind_a_left_out_one_begins_with_the_last_known_token() -> None:
    """The plans count a token for each row; vLLM has none of the first row, and then one less."""
    world = TranslatorSetup()
    world.step([(0, 1, 0, 40, True), (1, 1, 0, 2, True)], new=[new(0, 1, range(40), [3, 8]), *new_ones(1)], masked=[0])
    world.requests["1.1"].output_token_ids.append(9)
    step, rows, _ = world.plan([(0, 1, 40, 1, True), (1, 1, 2, 1, True)], masked=[0])
    assert (rows.starts.tolist(), rows.counts.tolist()) == ([39, 2], [1, 1])
    cached = step.scheduled_cached_reqs
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([39, 2], [0, 1])
    world.requests["0.1"].output_token_ids.append(7)
    step, rows, _ = world.plan([(0, 1, 41, 1, True)], masked=[0])
    assert (rows.starts.tolist(), step.scheduled_cached_reqs.num_output_tokens) == ([40], [1])


def test_left_out_rows_may_sample_anything_and_accept_no_draft() -> None:
    """Their samples are discarded."""
    world = drafting(0, 1, 2)
    _, rows, _ = world.plan([(slot, 1, 2, 4, True) for slot in (0, 1, 2)], drafts=[3, 3, 3])
    masks = world.translator.translate_masks(masks_of(rows, 0, 1), rows)
    assert masks.left_out == ["0.1", "1.1"]
    assert masks.acceptable.tolist()[:2] == [0, 0]
    assert (masks.grammar.grammar_bitmask == -1).all()


# -- drafts ------------------------------------------------------------------------------------------------------


def new_ones(*slots: int) -> list[NewRequest]:
    return [new(slot, 1, range(2), [slot]) for slot in slots]


def drafting(*slots: int) -> TranslatorSetup:
    """Requests that have sampled their first token; each but the last has three proposed drafts."""
    world = TranslatorSetup(max_drafts=3)
    world.step([(slot, 1, 0, 2, True) for slot in slots], new=new_ones(*slots))
    for slot in slots:
        world.requests[f"{slot}.1"].output_token_ids.append(50 + slot)
    world.propose({f"{slot}.1": [10, 11, 12] for slot in slots[:-1]})
    return world


def test_drafts_are_those_of_the_step_before_and_missing_ones_shorten_the_row() -> None:
    world = drafting(0, 1, 2)
    plan = [(0, 1, 2, 4, True), (1, 1, 2, 3, True), (2, 1, 2, 4, True)]
    step, rows, ids = world.plan(plan, drafts=[3, 2, 3], num_speculative_tokens=2)
    assert ids == ["0.1", "1.1", "2.1"]
    assert (rows.counts.tolist(), rows.drafts.tolist()) == ([4, 3, 1], [3, 2, 0])
    assert step.scheduled_spec_decode_tokens == {"0.1": [10, 11, 12], "1.1": [10, 11]}
    assert step.num_scheduled_tokens == {"0.1": 4, "1.1": 3, "2.1": 1}
    assert step.total_num_scheduled_tokens == 8
    assert step.num_spec_tokens_to_schedule == 2


def test_row_planned_ahead_is_computed_at_the_true_position() -> None:
    """The true position: the plan counts every draft in flight as accepted."""
    world = drafting(0, 1)
    world.plan([(0, 1, 2, 4, True)], drafts=[3])
    world.requests["0.1"].output_token_ids += [10, 70]  # one of three was accepted
    world.propose({"0.1": [20]})
    step, rows, _ = world.plan([(0, 1, 6, 4, True)], drafts=[3], block_slots=[0], block_ids=[9])
    assert (rows.starts.tolist(), rows.counts.tolist(), rows.drafts.tolist()) == ([4], [2], [1])
    cached = step.scheduled_cached_reqs
    assert (cached.num_computed_tokens, cached.num_output_tokens) == ([4], [3])


def test_drafts_wait_for_the_next_row_of_their_request_and_leave_with_it() -> None:
    """Latest drafts. Pipeline stages compute requests in turns."""
    world = drafting(0, 1, 2)
    world.plan([(2, 1, 2, 1, True)], drafts=[0], released=[1])
    assert world.translator.drafts.column(["0.1", "1.1"], 3).tolist() == [[10, 11, 12], [NO_DRAFT] * 3]
    step, rows, _ = world.plan([(0, 1, 2, 4, True)], drafts=[3])
    assert (step.scheduled_spec_decode_tokens, rows.counts.tolist()) == ({"0.1": [10, 11, 12]}, [4])
    assert world.translator.drafts.column(["0.1"], 3).tolist() == [[NO_DRAFT] * 3]


def test_row_planned_before_the_known_tokens_is_refused() -> None:
    """The position bound."""
    world = drafting(0, 1)
    world.requests["0.1"].output_token_ids += [7, 7]
    with pytest.raises(PlanError, match="the plan samples token 3, but 5 tokens are known already"):
        world.plan([(0, 1, 2, 1, True)], drafts=[0])


def test_request_that_has_filled_the_context_samples_no_logprobs() -> None:
    """It is planned until the scheduler has processed its end; vLLM fails on one token more (position bound)."""
    world = TranslatorSetup(max_drafts=3)
    world.step([(0, 1, 0, 250, True)], new=[new(0, 1, range(250), list(range(8)))])
    output = world.requests["0.1"].output_token_ids
    output += [1]
    world.propose({"0.1": [3, 4, 5]})
    _, rows, _ = world.plan([(0, 1, 250, 4, True)], drafts=[3])
    assert (rows.drafts.tolist(), rows.ends.tolist()) == ([3], [254])
    output += [3, 4, 5, 6]
    world.propose({"0.1": [7]})
    _, rows, _ = world.plan([(0, 1, 254, 2, True)], drafts=[1])
    assert (rows.drafts.tolist(), rows.ends.tolist()) == ([0], [255])
    output += [7]
    _, rows, _ = world.plan([(0, 1, 255, 1, True)], drafts=[0])
    assert (rows.starts.tolist(), rows.ends.tolist()) == ([254], [255])
    assert rows.ends[0] < world.requests["0.1"].num_tokens, "as of a prompt that is not complete"


def test_drafts_without_a_drafter_are_refused() -> None:
    world = TranslatorSetup()
    world.step([(0, 1, 0, 2, True)], new=new_ones(0))
    with pytest.raises(PlanError, match="assignment has no drafter"):
        world.plan([(0, 1, 2, 2, True)], drafts=[1])


def test_missing_masks_are_filled_and_drafts_without_a_mask_are_not_accepted() -> None:
    """Acceptable drafts: one row has masks for one of three drafts, one has more masks than drafts, and one mask is for
    a slot that has no row."""
    world = drafting(0, 1, 2)
    plan = [(1, 1, 2, 3, True), (0, 1, 2, 4, True), (2, 1, 2, 1, True)]
    _, rows, _ = world.plan(plan, drafts=[2, 3, 0])
    mask = np.arange(28, dtype=np.int32).reshape(7, 4)
    message = GrammarOutput(1, 1, pack([0, 1, 3]), mask.tobytes(), pack([2, 4, 1]))
    masks = masks_of(rows, 1, 0, grammar=message)
    grammar, acceptable, _ = world.translator.translate_masks(masks, rows)
    assert grammar.structured_output_request_ids == ["1.1", "0.1"]
    free = np.full((2, 4), -1, np.int32)
    assert (grammar.grammar_bitmask == np.concatenate([mask[2:5], mask[:2], free])).all()
    assert acceptable.tolist() == [2, 1, 0]


def test_proposed_drafts_are_returned_by_row_for_grammars() -> None:
    world = drafting(0, 1)
    assert world.translator.drafts.column(["1.1", "0.1"], 2).tolist() == [[NO_DRAFT, NO_DRAFT], [10, 11]]


# -- results -----------------------------------------------------------------------------------------------------


class Lists:
    """vLLM's log-probabilities of a batch of three rows with two alternatives each."""

    logprob_token_ids = np.array([[10, 11, 12], [20, 21, 22], [30, 31, 32]], np.int32)
    logprobs = -logprob_token_ids / np.float32(10)
    sampled_token_ranks = np.array([1, 2, 3])
    cu_num_generated_tokens: list[int] | None = None


def result(rows: list[tuple[int, int, int, int, bool]], vllm_output: Any, requested: tuple[np.ndarray, ...]) -> Any:
    """`rows` as of `TranslatorSetup.step`; vLLM's row of a slot is the slot's id."""
    world = TranslatorSetup()
    new_ones = [new(slot, 1, range(start + count + (not samples)), [slot]) for slot, _, start, count, samples in rows]
    slots, generations, starts, counts, samples = zip(*rows, strict=True)
    plan = SchedulerOutput(3, 9, pack(slots), pack(generations), pack(starts), pack(counts), bytes(samples), new_ones)
    applied = world.table.apply(plan)
    world.translator.translate(plan, applied)
    executed = ExecutedVllmStep(plan, applied, world.translator.request_ids(applied.slots), *requested, CLOCK)
    return VllmOutput(executed, SampledStep(vllm_output), SAMPLED_AT).get()


def output(order: list[str], tokens: list[list[int]], **more: Any) -> vllm_api.ModelRunnerOutput:
    return vllm_api.ModelRunnerOutput(order, {name: i for i, name in enumerate(order)}, tokens, **more)


def no_logprobs(count: int) -> tuple[np.ndarray, ...]:
    none = np.full(count, NONE, np.int32)
    return none, none


def test_tokens_come_in_the_plans_order_without_rows_that_do_not_sample() -> None:
    vllm_output = output(["3.1", "0.1", "1.1"], [[33], [], [11]])
    message = result([(1, 1, 0, 4, True), (0, 1, 0, 2, False), (3, 1, 2, 1, True)], vllm_output, no_logprobs(3))
    rows = ResultRows.from_message(message)
    assert (rows.slots.tolist(), rows.generations.tolist()) == ([1, 3], [1, 1])
    assert (rows.counts.tolist(), rows.token_ids.tolist()) == ([1, 1], [11, 33])
    assert (message.epoch, message.step_id, message.times, message.logprobs) == (3, 9, TIMES, None)


def test_requested_logprobs_are_at_absolute_positions() -> None:
    vllm_output = output(["0.1", "2.1", "1.1"], [[10], [20], [30]], logprobs=Lists())
    requested = np.array([2, 0, NONE], np.int32), np.full(3, NONE, np.int32)
    message = result([(1, 1, 0, 4, True), (0, 1, 0, 2, True), (2, 1, 0, 3, True)], vllm_output, requested)
    rows = LogprobRows.from_message(message.logprobs)
    assert (rows.owners.tolist(), rows.positions.tolist()) == ([1, 0], [4, 2])
    assert (rows.counts.tolist(), rows.token_ranks.tolist()) == ([3, 1], [3, 1])
    assert rows.token_ids.tolist() == [30, 31, 32, 10]
    assert rows.values == pytest.approx([-3.0, -3.1, -3.2, -1.0])


class Tensors:
    """vLLM's log-probabilities of a prompt of three tokens."""

    logprob_token_ids = torch.tensor([[1, 5], [2, 6]], dtype=torch.int32)
    logprobs = torch.tensor([[-1.0, -0.5], [-2.0, -0.25]])
    selected_token_ranks = torch.tensor([4, 3])


def test_prompt_logprobs_begin_at_the_second_token() -> None:
    vllm_output = output(["0.1", "1.1"], [[10], [20]], prompt_logprobs_dict={"1.1": Tensors()})
    requested = np.full(2, NONE, np.int32), np.array([NONE, 1], np.int32)
    message = result([(0, 1, 0, 4, True), (1, 1, 0, 3, True)], vllm_output, requested)
    rows = LogprobRows.from_message(message.logprobs)
    assert (rows.owners.tolist(), rows.positions.tolist()) == ([1, 1], [1, 2])
    assert (rows.token_ranks.tolist(), rows.token_ids.tolist()) == ([4, 3], [1, 5, 2, 6])
    assert rows.values.tolist() == [-1.0, -0.5, -2.0, -0.25]


def test_result_is_unchanged_by_the_next_step() -> None:
    """The immutable result."""
    world = TranslatorSetup()
    plan = SchedulerOutput(1, 1, pack([0]), pack([1]), pack([0]), pack([2]), b"\1", [new(0, 1, range(2), [3])])
    applied = world.table.apply(plan)
    world.translator.translate(plan, applied)
    executed = ExecutedVllmStep(plan, applied, world.translator.request_ids(applied.slots), *no_logprobs(1), CLOCK)
    kept = VllmOutput(executed, SampledStep(output(["0.1"], [[42]])), SAMPLED_AT)
    world.step([(0, 2, 0, 3, True)], released=[0], new=[new(0, 2, range(3), [4])])
    late = kept.get()
    assert (unpack(late.generations).tolist(), unpack(late.token_ids).tolist()) == ([1], [42])


def test_rows_have_the_accepted_drafts_and_one_token() -> None:
    """Two of three drafts were accepted; in slot 0 the grammar allowed one of two drafts."""
    vllm_output = output(["2.1", "1.1", "0.1"], [[20], [11, 12, 13], [7, 8]], logprobs=RaggedLists())
    world = drafting(0, 1, 2)
    plan = [(0, 1, 2, 3, True), (1, 1, 2, 4, True), (2, 1, 2, 1, True)]
    translated = world.plan(plan, drafts=[2, 3, 0])
    rows, requested = translated.rows, (np.array([NONE, 1, 0], np.int32), np.full(3, NONE, np.int32))
    sent = SchedulerOutput(1, 2, b"", b"", b"", b"", b"")
    message = VllmOutput(
        ExecutedVllmStep(sent, rows, translated.ids, *requested, CLOCK),
        SampledStep(vllm_output),
        SAMPLED_AT,
        acceptable=np.array([1, 3, 0], np.int32),
        proposed=np.array([[5, NO_DRAFT], [6, 7], [NO_DRAFT, NO_DRAFT]], np.int32),
    ).get()
    got = ResultRows.from_message(message)
    assert (got.counts.tolist(), got.token_ids.tolist()) == ([2, 3, 1], [7, 8, 11, 12, 13, 20])
    assert got.drafted.tolist() == [1, 3, 0]
    assert unpack(message.draft_token_ids).tolist() == [5, -1, 6, 7, -1, -1]
    scores = LogprobRows.from_message(message.logprobs)
    assert (scores.owners.tolist(), scores.positions.tolist()) == ([1, 1, 1, 2], [3, 4, 5, 3])
    assert scores.token_ids.tolist() == [11, 1, 12, 1, 13, 1, 20]


class RaggedLists:
    """vLLM's log-probabilities of rows with one, three and two tokens, with one alternative each."""

    logprob_token_ids = np.array([[20, 1], [11, 1], [12, 1], [13, 1], [7, 1], [8, 1]], np.int32)
    logprobs = -logprob_token_ids / np.float32(10)
    sampled_token_ranks = np.array([1, 1, 1, 1, 1, 1])
    cu_num_generated_tokens = (0, 1, 4, 6)


# -- groups of KV cache ------------------------------------------------------------------------------------------

HEADS: dict[str, Any] = {"block_size": BLOCK, "num_kv_heads": 2, "head_size": 32, "dtype": torch.float32}
FULL = vllm_api.FullAttentionSpec(**HEADS)
WINDOW = vllm_api.SlidingWindowSpec(**HEADS, sliding_window=40)
STATE = vllm_api.MambaSpec(block_size=256, shapes=((4, 4),), dtypes=(torch.float32,))
CHUNKS = vllm_api.ChunkedLocalAttentionSpec(**HEADS, attention_chunk_size=64)


def groups_of(*specs: Any) -> list[Any]:
    return [KVCacheGroupSpec([f"layer.{number}"], spec) for number, spec in enumerate(specs)]


def test_kinds_of_vllms_groups() -> None:
    expected = KVGroup(), KVGroup("sliding_window", 40), KVGroup("chunked_local_attention", 64)
    assert kv_groups(groups_of(FULL, WINDOW, CHUNKS), BLOCK, 3) == expected
    assert kv_groups(groups_of(STATE, FULL), BLOCK, 3) == (KVGroup("recurrent_state"), KVGroup())


@pytest.mark.parametrize(
    ("groups", "most", "text"),
    [
        ([], 3, "0 groups of KV cache (none)"),
        ([FULL, WINDOW], 1, "at most 1 groups"),
        ([STATE], 3, "1 groups of KV cache (MambaSpec of 256)"),
        ([FULL, replace(STATE, mamba_cache_mode="align")], 3, "MambaSpec of 256"),
        ([FULL, vllm_api.SlidingWindowSpec(**HEADS | {"block_size": 16}, sliding_window=40)], 3, "of 16"),
    ],
)
def test_other_groups_are_refused_by_name(groups: list[Any], most: int, text: str) -> None:
    with pytest.raises(LoadError) as refused:
        kv_groups(groups_of(*groups), BLOCK, most)
    assert text in str(refused.value)


def test_blocks_of_each_group_are_vllms() -> None:
    """The second group has no block behind its window. One block of each group is appended."""
    groups = KVGroup(), KVGroup("sliding_window", 40)
    table = SlotTable(2, BLOCK, 20, 256, groups=groups)
    translator = PlanTranslator(table, VOCAB, {}, {})
    tokens, start = [5] * 70, 64
    new = NewRequest(0, 1, pack(tokens), 70, pack([3, -1, 4, 5, 6, 7]), GREEDY)
    step = SchedulerOutput(
        1, 1, pack([0]), pack([1]), pack([start]), pack([6]), b"\1", [new], pack([0, 0]), pack([8, 9])
    )
    translated = translator.translate(step, table.apply(step))
    (blocks,) = translated.step.scheduled_cached_reqs.new_block_ids
    assert blocks[0] == [4, 5, 7, 9]
    assert blocks[1][1:] == [6, 8, 10]


def test_blocks_of_recurrent_states_are_vllms() -> None:
    """They come first in a table, and have vLLM's place among its groups. What enters is zeroed."""
    state = KVGroup("recurrent_state")
    table = SlotTable(2, BLOCK, 20, 256, groups=(state, KVGroup(), state))
    translator = PlanTranslator(table, VOCAB, {}, {})
    tokens = [5] * 70
    new = NewRequest(0, 1, pack(tokens), 70, pack([11, 12, 3, 4]), GREEDY)
    columns = pack([0]), pack([1])
    step = SchedulerOutput(1, 1, *columns, pack([0]), pack([64]), b"\0", [new])
    first = translator.translate(step, table.apply(step)).step
    assert first.scheduled_cached_reqs.new_block_ids == [([12], [4, 5], [13])]
    assert first.new_block_ids_to_zero == [12, 4, 5, 13]
    step = SchedulerOutput(1, 2, *columns, pack([64]), pack([6]), b"\1", [], pack([0]), pack([8]))
    second = translator.translate(step, table.apply(step)).step
    assert second.scheduled_cached_reqs.new_block_ids == [([], [9], [])]
    assert second.new_block_ids_to_zero == [9]


@pytest.mark.parametrize("blocks", [[], [11], [-1, 12, 3], [20, 12, 3]])
def test_a_request_without_blocks_for_its_states_is_refused(blocks: list[int]) -> None:
    state = KVGroup("recurrent_state")
    table = SlotTable(2, BLOCK, 20, 256, groups=(state, KVGroup(), state))
    with pytest.raises(PlanError):
        table.assign(NewRequest(0, 1, pack([5]), 1, pack(blocks), GREEDY))
