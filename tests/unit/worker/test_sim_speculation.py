"""Drafts on the simulator: tokens of the reference sampler, and acceptance that depends on the request alone."""

from itertools import pairwise

import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Assignment, Speculation
from protocol.steps import NO_DRAFT
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.model.oracle import Oracle, OracleError
from services.worker.batch.slots import PlanError, Rows
from services.worker.runner import MAX_STEPS_IN_FLIGHT, LoadError
from tests.unit.worker.plans import (
    BLOCK,
    CONTEXT,
    GREEDY,
    SLOTS,
    VOCAB,
    PlanBuilder,
    PlannedRunner,
    SlotRequest,
    bits,
    grammar_output,
    hold,
    prompt,
    ragged,
    result_of,
    sim_runner,
)
from tests.unit.worker.sim_reference import answer
from tests.unit.worker.virtual_clock import VirtualClock

MOST = 5


def drafting(acceptance: str = "periodic", longest: int = 0, **options: object) -> SimRunner:
    """Return a runner whose drafts are accepted as `sim_draft_acceptance` says."""
    speculation = Speculation("ngram", MOST, max_model_len=longest)
    return sim_runner(speculation=speculation, flags={"sim_draft_acceptance": acceptance}, **options)  # type: ignore[arg-type]


def assert_answered(request: SlotRequest) -> None:
    """Same tokens as without drafts."""
    assert request.outputs == answer(request.prompt, request.params, len(request.outputs))


# -- answers -----------------------------------------------------------------------------------------------------


def test_drafts_end_at_the_end_of_the_context() -> None:
    """Position bound: more drafts are requested than positions are left in the context."""
    batch = PlannedRunner(drafting("always"))
    request = batch.plans.admit(prompt(1, CONTEXT - 9))
    while len(request.outputs) < 9:
        batch.launch(request, propose=MOST)
    assert [accepted for _, accepted in batch.verified] == [0, 5, 1]
    assert_answered(request)


# -- grammars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [1, 2, 3, 4])
def test_a_draft_without_a_mask_is_not_accepted(masks: int) -> None:
    """Acceptable drafts: although the target would sample the same token. Other rows are not affected."""
    batch = PlannedRunner(drafting("always"))
    free, bound = (batch.plans.admit(prompt(seed, 8)) for seed in (1, 2))
    batch.launch(free, bound, propose=3)
    plan = batch.plans.step(bound, free, masked=[bound], propose=3)
    batch.runner.execute_model(plan)
    batch.runner.add_masks(grammar_output(plan, [bound.slot], bits(*range(VOCAB)) * masks, [masks]))
    result = result_of(batch.runner.sample_tokens(None))
    got = ragged(result)
    assert [len(got[bound.slot]), len(got[free.slot])] == [masks, 4]
    assert unpack(result.drafted).tolist() == [masks - 1, 3]
    proposed = unpack(result.draft_token_ids).reshape(2, 3).tolist()
    for request, drafts in zip((bound, free), proposed, strict=True):
        text = request.prompt + request.outputs + got[request.slot]
        assert drafts == answer(text, GREEDY, 3), "the reported drafts are those that are verified next"


def test_a_step_with_a_grammar_reports_its_drafts() -> None:
    """NO_DRAFT stands for drafts that were not proposed. A step without a grammar does not wait for the drafter."""
    batch = PlannedRunner(drafting("always", longest=10))
    short, long_ = batch.plans.admit(prompt(1, 4)), batch.plans.admit(prompt(2, 12))
    plan = batch.plans.step(short, long_, masked=[short], propose=2)
    batch.runner.execute_model(plan)
    batch.runner.add_masks(grammar_output(plan, [short.slot], bits(*range(VOCAB))))
    result = result_of(batch.runner.sample_tokens(None))
    assert unpack(result.draft_token_ids).tolist() == [*answer(prompt(1, 4), GREEDY, 3)[1:], NO_DRAFT, NO_DRAFT]
    assert result.drafted == b""
    batch.runner.execute_model(batch.plans.step(short, long_, propose=2))
    result = result_of(batch.runner.sample_tokens(None))
    assert result.draft_token_ids == b""
    assert unpack(result.drafted).tolist() == [2, 0], "a row with fewer drafts is shorter"


# -- running ahead -----------------------------------------------------------------------------------------------


def test_a_launch_waits_for_no_accepted_count() -> None:
    """No hidden sync: before the first one is done, as many steps with drafts are launched as can be in flight."""
    device = SimDevice()
    batch = PlannedRunner(drafting(make_device=lambda: device), MAX_STEPS_IN_FLIGHT + 1)
    request = batch.plans.admit(prompt(1, 6))
    hold(device)
    for _ in range(MAX_STEPS_IN_FLIGHT):
        batch.launch(request, propose=3)
    assert not batch.in_flight[0][0].forward.passed
    batch.drain()
    batch.runner.shutdown()
    assert {accepted for drafted, accepted in batch.verified if drafted} == {2}
    assert_answered(request)


def test_a_result_does_not_wait_for_the_drafter() -> None:
    """Only the result of a step with a grammar does; the next step waits on the device. On a VIRTUAL clock."""
    clock, speculation = VirtualClock(), Speculation("ngram", MOST)
    runner = sim_runner(10.0, speculation, {"sim_draft_ms": 2.0}, make_device=lambda: SimDevice(clock))
    plans = PlanBuilder()
    request = plans.admit(prompt(1, 6))
    outputs = []
    for masked in ([], [request], []):
        plan = plans.step((request, request.left), masked=masked, propose=3)
        runner.execute_model(plan)
        if masked:
            runner.add_masks(grammar_output(plan, [request.slot], bits(*range(VOCAB))))
        outputs.append(runner.sample_tokens(None))
    times = [result_of(output).times for output in outputs]
    assert [1e3 * (step.sampled - step.forward_began) for step in times] == pytest.approx([10.0, 16.0, 10.0])
    gaps = [1e3 * (two.forward_began - one.forward_began) for one, two in pairwise(times)]
    assert gaps == pytest.approx([16.0, 16.0])


# -- faults ------------------------------------------------------------------------------------------------------


def started(acceptance: str = "never", propose: int = 3) -> tuple[PlannedRunner, SlotRequest]:
    """Return a request whose next row verifies drafts."""
    batch = PlannedRunner(drafting(acceptance))
    request = batch.plans.admit(prompt(1, 8))
    batch.launch(request, propose=propose)
    return batch, request


def test_a_start_before_what_is_computed_is_noticed() -> None:
    """Position bound: the plan counts a rejected draft that was accepted."""
    batch, request = started("always")
    batch.launch(request, propose=3)
    request.start -= 1
    request.known -= 1
    with pytest.raises(OracleError, match="position bound"):
        batch.launch(request, propose=3)


def run_ahead_of_rejections() -> None:
    batch = PlannedRunner(drafting("never"), 2)
    request = batch.plans.admit(prompt(1, 8))
    for _ in range(4):
        batch.launch(request, propose=3)


@pytest.mark.parametrize("times", [0, 2])
def test_starts_that_are_not_corrected_once_are_noticed(monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """True position, and settle once: at depth two the plan starts behind rejected positions."""
    run_ahead_of_rejections()
    right = Oracle.starts
    monkeypatch.setattr(Oracle, "starts", lambda s, slots, plan: plan + times * (right(s, slots, plan) - plan))
    with pytest.raises(OracleError):
        run_ahead_of_rejections()


def test_stale_kv_of_rejected_drafts_is_never_read() -> None:
    """Rejected positions: a prefix hit of another request on them raises."""
    batch, request = started("never", propose=MOST)
    while request.start % BLOCK:
        batch.launch(request, propose=MOST)
    tokens = request.prompt + request.outputs
    stale = len(tokens) - 1 + BLOCK
    batch.launch(request)
    late = batch.plans.admit((tokens + prompt(5, 9))[: stale + 1], hit=stale, share=request)
    with pytest.raises(OracleError, match="expected"):
        batch.launch(late)


def test_a_placeholder_never_becomes_an_input() -> None:
    """Valid ids."""
    batch, request = started()
    batch.runner.epoch.drafts.tokens[request.slot, 1] = NO_DRAFT
    with pytest.raises(OracleError, match="token -1 is not among"):
        batch.launch(request, propose=3)


def test_drafts_for_another_position_are_noticed() -> None:
    """Latest drafts."""
    batch, request = started()
    batch.runner.epoch.drafts.firsts[request.slot] -= 1
    with pytest.raises(OracleError, match="latest drafts"):
        batch.launch(request, propose=3)


def test_drafts_of_a_slots_last_owner_are_dropped() -> None:
    """Latest drafts: the first rows of the next owner have none."""
    batch, request = started()
    batch.plans.release(request, reuse_slot=True)
    successor = batch.plans.admit(prompt(2, 8))
    assert successor.slot == request.slot
    batch.launch(successor)
    successor.placeholders = 3
    with pytest.raises(OracleError, match="planned with 3 drafts from position 9 on, but step 1 proposed 0"):
        batch.launch(successor)


def test_more_drafts_than_were_agreed_on_are_refused() -> None:
    batch, request = started(propose=0)
    with pytest.raises(PlanError, match="6 drafts per row are planned, but at most 5 were agreed"):
        batch.launch(request, propose=MOST + 1)
    runner, plans = sim_runner(), PlanBuilder()
    plan = plans.step(plans.admit([1]), propose=1)
    with pytest.raises(PlanError, match="1 drafts per row are planned, but at most 0 were agreed"):
        runner.execute_model(plan)


def test_a_rigid_device_has_no_room_for_drafts() -> None:
    config = WorkerConfig(backend="sim", sim_vocab_size=VOCAB, sim_rigid=True)
    assignment = Assignment(1, 0, 1, BLOCK, SLOTS, 512, CONTEXT, speculation=Speculation("ngram", 3))
    with pytest.raises(LoadError, match="without --sim-rigid"):
        SimRunner(config).load(assignment, lambda *_: None)


def test_drafts_cost_what_decoding_them_would() -> None:
    """40 positions of a prompt, a row with three drafts, one without; and the drafter, one draft after the other."""
    flags = {"sim_step_ms": 0.0, "sim_prefill_token_us": 0.0, "sim_decode_us": 1000.0, "sim_draft_ms": 0.5}
    cost = CostModel(WorkerConfig(backend="sim", **flags))  # type: ignore[arg-type]
    slots, ones = np.arange(3, dtype=np.int32), np.ones(3, np.int32)
    starts, counts = np.array([0, 10, 29], np.int32), np.array([40, 4, 1], np.int32)
    drafts = np.array([0, 3, 0], np.int32)
    rows = Rows(slots, ones, starts, counts, np.ones(3, np.bool_), drafts)
    assert cost.step(rows, np.array([40, 10, 3], np.int32)) == pytest.approx(5e-3)
    assert cost.drafts(4) == pytest.approx(2e-3)
