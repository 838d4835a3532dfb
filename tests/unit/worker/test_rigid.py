"""The rigid device of the simulator: its padded shapes, the plans that it refuses, and the progress that it reports."""

from collections.abc import Iterator

import pytest

from protocol.codec import unpack
from protocol.steps import ModelRunnerOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.rigid import RigidShapes
from services.worker.batch.slots import PlanError, SlotTable
from tests.unit.worker.plans import (
    BLOCK,
    BLOCKS,
    CONTEXT,
    GREEDY,
    SLOTS,
    PlanBuilder,
    alone,
    prompt,
    result_of,
    sim_runner,
    tokens,
)

CHUNK = 8


@pytest.fixture
def device() -> Iterator[SimRunner]:
    """A rigid runner with blocks of 4 tokens and chunks of 8."""
    device = sim_runner(flags={"sim_rigid": True}, max_num_batched_tokens=CHUNK)
    yield device
    device.shutdown()


def step(device: SimRunner, plan: SchedulerOutput) -> ModelRunnerOutput:
    device.execute_model(plan)
    return result_of(device.sample_tokens(None))


def progress(result: ModelRunnerOutput) -> list[tuple[int, int]]:
    slots, frontiers = unpack(result.progress_slots).tolist(), unpack(result.progress_frontiers).tolist()
    return list(zip(slots, frontiers, strict=True))


def test_chunks_and_decodes_give_the_tokens_of_any_device(device: SimRunner) -> None:
    plans = PlanBuilder()
    request = plans.admit(prompt(1, 10))
    assert progress(step(device, plans.step((request, 4)))) == [(request.slot, 4)]
    last = step(device, plans.step((request, 6)))
    assert progress(last) == [(request.slot, 10)]
    answers = [tokens(last)[request.slot]]
    for _ in range(6):
        result = step(device, plans.step(request))
        assert not result.progress_slots
        answers.append(tokens(result)[request.slot])
    assert answers == alone(prompt(1, 10), GREEDY, 7)


def test_a_step_that_mixes_prefill_and_decode_is_refused(device: SimRunner) -> None:
    plans = PlanBuilder()
    first = plans.admit(prompt(1, 3))
    step(device, plans.step(first))
    second = plans.admit(prompt(2, 3))
    with pytest.raises(PlanError, match="mixes prefill and decode"):
        device.execute_model(plans.step(first, second))


def test_two_prefills_in_a_step_are_refused(device: SimRunner) -> None:
    plans = PlanBuilder()
    requests = plans.admit(prompt(1, 3)), plans.admit(prompt(2, 3))
    with pytest.raises(PlanError, match="has 2 prefills"):
        device.execute_model(plans.step(*requests))


@pytest.mark.parametrize(
    ("length", "chunks", "text"),
    [
        (10, [8], "computes 0 to 8, but its chunk ends at 4"),
        (13, [4], "computes 0 to 4, but its chunk ends at 8"),
        (9, [4, 3], "computes 4 to 7, but its chunk ends at 9"),
    ],
)
def test_chunks_that_are_not_windows_of_the_padded_prompt_are_refused(
    device: SimRunner, length: int, chunks: list[int], text: str
) -> None:
    plans = PlanBuilder()
    request = plans.admit(prompt(1, length))
    for count in chunks[:-1]:
        step(device, plans.step((request, count)))
    with pytest.raises(PlanError, match=text):
        device.execute_model(plans.step((request, chunks[-1])))


def test_a_prefix_hit_that_ends_inside_a_window_is_refused(device: SimRunner) -> None:
    plans = PlanBuilder()
    first = plans.admit(prompt(1, 13))
    step(device, plans.step((first, 8)))
    step(device, plans.step(first))
    second = plans.admit(prompt(1, 13), hit=4, share=first)
    with pytest.raises(PlanError, match="begins at 4 inside the chunk of 0 to 8"):
        device.execute_model(plans.step((second, 4)))


def shapes(
    lengths: list[int], max_volume: int = 0, context: int = CONTEXT
) -> tuple[RigidShapes, SchedulerOutput, SlotTable]:
    """Return shapes after prompts of these lengths were prefilled, and the step that decodes all of them."""
    table = SlotTable(SLOTS, BLOCK, BLOCKS, context)
    rigid, plans = RigidShapes(table, 64, max_volume), PlanBuilder()
    requests = []
    for i, length in enumerate(lengths):
        requests.append(plans.admit(prompt(i, length)))
        plan = plans.step(requests[-1])
        rigid.pad(plan, table.apply(plan))
    return rigid, plans.step(*requests), table


def test_rows_of_a_decode_step_end_with_the_longest_one() -> None:
    """4 + 5, 8 + 4 and 12 positions with padding: the tables end at the same column."""
    rigid, plan, table = shapes([4, 3, 11])
    assert rigid.pad(plan, table.apply(plan)).padded.ends.tolist() == [12, 12, 12]


def test_a_rectangle_beyond_the_volume_or_the_context_is_refused() -> None:
    rigid, plan, table = shapes([4, 3, 11], max_volume=36)
    assert len(rigid.pad(plan, table.apply(plan)).padded.slots) == 3
    rigid, plan, table = shapes([4, 3, 11], max_volume=35)
    with pytest.raises(PlanError, match="3 rows of 12 tokens, more than 35"):
        rigid.pad(plan, table.apply(plan))
    # The shorter row ends its block: 12 positions with padding
    rigid, plan, table = shapes([8, 3], context=10)
    with pytest.raises(PlanError, match="12 tokens long, the context is 10"):
        rigid.pad(plan, table.apply(plan))


def test_a_step_takes_the_time_of_its_padded_shape() -> None:
    """A chunk of one token costs a whole window; decodes cost the rectangle."""
    config = WorkerConfig(
        backend="sim", sim_step_ms=0, sim_prefill_token_us=1, sim_decode_us=1000, sim_context_token_ns=1
    )
    cost, table, plans = CostModel(config), SlotTable(SLOTS, BLOCK, BLOCKS, CONTEXT), PlanBuilder()
    rigid = RigidShapes(table, CHUNK, 0)

    def seconds(plan: SchedulerOutput) -> float:
        padded = rigid.pad(plan, table.apply(plan)).padded
        return cost.step(padded, table.num_prompt[padded.slots])

    short, long = plans.admit(prompt(1, 1)), plans.admit(prompt(2, 7))
    chunk = 8e-6 + 8e-9
    assert seconds(plans.step(short)) == pytest.approx(chunk)
    assert seconds(plans.step(long)) == pytest.approx(chunk)
    assert seconds(plans.step(short, long)) == pytest.approx(2e-3 + 2 * 8e-9)
