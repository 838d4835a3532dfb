"""The oracle notices faults: each kind of fault is made once, and raises."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from protocol.codec import pack, unpack
from services.worker.backends.sim.model.oracle import Oracle, OracleError
from services.worker.batch.slots import I32, PlanError
from tests.unit.worker.plans import BLOCK, BLOCKS, CONTEXT, GREEDY, SLOTS, PlanBuilder, alone, prompt, run, sim_runner


class DecodingRequests:
    """Two requests that have decoded some tokens."""

    def __init__(self, full_check: bool = True) -> None:
        self.runner, self.plans = sim_runner(full_check=full_check), PlanBuilder()
        self.a = self.plans.admit(prompt(1, 13))
        self.b = self.plans.admit(prompt(2, 10))
        for _ in range(3):
            run(self.runner, self.plans.step(self.a, self.b))

    @property
    def oracle(self) -> Oracle:
        return self.runner.epoch.oracle

    @property
    def block_table(self) -> I32:
        return self.runner.epoch.table.block_table

    def step(self) -> dict[int, int]:
        return run(self.runner, self.plans.step(self.a, self.b))


@pytest.fixture
def running() -> DecodingRequests:
    return DecodingRequests()


# -- correct plans -----------------------------------------------------------------------------------------------


def test_equal_prompts_of_one_step_share_blocks() -> None:
    """Write before read."""
    runner, plans = sim_runner(), PlanBuilder()
    first = plans.admit(prompt(3, 14))
    second = plans.admit(prompt(3, 14), hit=12, share=first)
    got = run(runner, plans.step(second, first))  # the reading row comes before the writing row
    assert got[first.slot] == got[second.slot] == alone(prompt(3, 14), GREEDY, 1)[0]


# -- faults ------------------------------------------------------------------------------------------------------


def test_a_wrong_block_in_the_table(running: DecodingRequests) -> None:
    running.block_table[running.a.slot, 1] = running.b.blocks[1]
    with pytest.raises(OracleError, match=rf"slot {running.a.slot} position 4 block {running.b.blocks[1]}: expected"):
        running.step()


def test_a_wrong_block_is_found_in_turn_without_the_full_check() -> None:
    running = DecodingRequests(full_check=False)
    running.block_table[running.a.slot, 0] = running.b.blocks[0]
    with pytest.raises(OracleError, match=rf"slot {running.a.slot} position 3 block {running.b.blocks[0]}"):
        [running.step() for _ in range(8)]


def test_swapped_feedback(running: DecodingRequests) -> None:
    """The tokens of two slots are swapped between sampling and the next step: the next tokens are others."""
    history, slots = running.oracle.history, [running.a.slot, running.b.slot]
    at = [running.a.start, running.b.start]
    history[slots, at] = history[slots[::-1], at[::-1]]
    undisturbed = DecodingRequests()
    assert running.step() != undisturbed.step()


def test_a_prefix_that_was_never_written(running: DecodingRequests) -> None:
    late = running.plans.admit(prompt(5, 13), hit=4)
    with pytest.raises(OracleError, match=rf"slot {late.slot} position \d+ block {late.blocks[0]}.*never written"):
        run(running.runner, running.plans.step(late))


def test_a_block_that_is_assigned_again_too_early(running: DecodingRequests) -> None:
    thief = running.plans.admit(prompt(6, 4))
    thief.blocks[0] = running.a.blocks[0]
    run(running.runner, running.plans.step(thief))
    with pytest.raises(OracleError, match=rf"slot {running.a.slot} position 0 block {running.a.blocks[0]}"):
        running.step()


def test_two_slots_that_write_one_block_in_one_step() -> None:
    runner, plans = sim_runner(), PlanBuilder()
    first, second = plans.admit(prompt(1, 4)), plans.admit(prompt(1, 4))
    second.blocks = list(first.blocks)
    with pytest.raises(OracleError, match=rf"slots 0 and 1 both write block {first.blocks[0]} in one step"):
        run(runner, plans.step(first, second))


def test_an_error_stays_with_the_device(running: DecodingRequests) -> None:
    """As on a real device, every step after a failed one fails."""
    running.oracle.kv[:] = 0
    with pytest.raises(OracleError):
        running.step()
    with pytest.raises(OracleError):
        running.step()


def _row(column: str, change: int) -> Callable[[DecodingRequests], None]:
    def make(running: DecodingRequests) -> None:
        plan = running.plans.step(running.a, running.b)
        values = unpack(getattr(plan, column)).copy()
        values[0] += change
        run(running.runner, msgspec.structs.replace(plan, **{column: pack(values)}))

    return make


def _columns(**columns: bytes) -> Callable[[DecodingRequests], None]:
    def make(running: DecodingRequests) -> None:
        run(running.runner, msgspec.structs.replace(running.plans.step(running.a, running.b), **columns))

    return make


def _block(slot: int, block: int) -> Callable[[DecodingRequests], None]:
    return _columns(block_slots=pack([slot]), block_ids=pack([block]))


def _two_rows(running: DecodingRequests) -> None:
    run(running.runner, running.plans.step(running.a, running.a))


def _taken(running: DecodingRequests) -> None:
    running.plans.free_slot_first(running.a.slot)
    run(running.runner, running.plans.step(running.plans.admit([1, 2])))


def _double_release(running: DecodingRequests) -> None:
    running.runner.release(np.array([running.a.slot], np.int32))
    running.runner.release(np.array([running.a.slot], np.int32))


def _after_release(running: DecodingRequests) -> None:
    running.plans.release(running.a)
    running.step()


def _short_table(running: DecodingRequests) -> None:
    late = running.plans.admit(prompt(6, 2 * BLOCK + 1))
    plan = running.plans.step(late)
    entering = msgspec.structs.replace(plan.new[0], block_ids=pack(late.blocks[:2]))
    run(running.runner, msgspec.structs.replace(plan, new=[entering]))


def _too_long(running: DecodingRequests) -> None:
    running.plans.admit(prompt(6, CONTEXT + 1))
    run(running.runner, running.plans.step(running.a))


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        (_row("generations", 1), "slot 0: row of generation 2, but the slot has 1"),
        (_row("slots", 5), "slot 5: row of generation 1, but the slot has -1"),
        (_row("slots", SLOTS), f"only slots 0 to {SLOTS - 1} exist"),
        (_row("starts", 1), "slot 0: a row of 1 positions starts at 16, but 15 are computed"),
        (_row("starts", -1), "slot 0: a row of 1 positions starts at 14, but 15 are computed"),
        (_row("counts", 1), "slot 0: a row ends at 17, but only 16 tokens are known"),
        (_columns(samples=b"\0\1"), "slot 0: samples is False for a row that ends at 16 of 16 tokens"),
        (_block(0, BLOCKS), f"block {BLOCKS} does not exist"),
        (_block(5, 9), "block 9 is appended to slot 5, which is empty"),
        (_two_rows, "a slot has two rows in one step"),
        (_taken, "slot 0 is assigned to generation 2, but generation 1 was not released"),
        (_double_release, "slot 0 is released, but it is empty"),
        (_after_release, "slot 0: row of generation 1, but the slot has -1"),
        (_short_table, "slot 2: a row ends at 9, but its blocks hold 8 positions"),
        (_too_long, f"slot 2: {CONTEXT + 1} tokens, but the context holds 1 to {CONTEXT}"),
    ],
)
def test_a_plan_that_contradicts_the_batch(
    running: DecodingRequests, fault: Callable[[DecodingRequests], None], text: str
) -> None:
    with pytest.raises(PlanError, match=text):
        fault(running)
