"""Drafts on the simulator: tokens of the reference sampler, and acceptance that depends on the request alone."""

from collections import deque
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Assignment, Speculation
from protocol.sampling import SamplingParams
from protocol.steps import NO_DRAFT, ModelRunnerOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.model.oracle import Oracle, OracleError
from services.worker.backends.sim.output.step_output import StepOutput
from services.worker.batch.slots import PlanError, Rows
from services.worker.runner import MAX_STEPS_IN_FLIGHT, LoadError
from tests.unit.worker.plans import (
    BLOCK,
    CONTEXT,
    GREEDY,
    SLOTS,
    VOCAB,
    PlanBuilder,
    SlotRequest,
    bits,
    grammar_output,
    hold,
    planned_drafts,
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


@dataclass
class RequestLife:
    """A request over its whole life, in one slot after the other."""

    text: list[int]
    params: SamplingParams
    slot_request: SlotRequest | None = None
    outputs: list[int] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) of each of its rows that sampled."""

    @property
    def request(self) -> SlotRequest:
        """The request in its present slot."""
        assert self.slot_request is not None
        return self.slot_request


class RunnerUnderTest:
    """A runner, plans for it, and results that are read when `depth` steps are in flight."""

    def __init__(self, runner: SimRunner, depth: int) -> None:
        self.runner, self.plans, self.depth = runner, PlanBuilder(), depth
        self.in_flight: deque[tuple[SchedulerOutput, StepOutput, dict[int, RequestLife]]] = deque()

    def admit(self, life: RequestLife) -> None:
        tokens, num_prompt = life.text + life.outputs, len(life.text)
        life.slot_request = self.plans.admit(tokens, life.params, num_prompt=num_prompt)

    def launch(self, *lives: RequestLife, propose: int) -> None:
        """Launch a step whose sampling rows `propose` that many drafts; read the oldest of `depth` results."""
        rows = []
        for request in (life.request for life in lives):
            room = CONTEXT - 1 - request.start - request.left
            rows.append((request, request.left + min(request.placeholders, room)))
        plan = self.plans.step(*rows, propose=propose)
        self.runner.execute_model(plan)
        by_slot = {request.slot: life for (request, _), life in zip(rows, lives, strict=True)}
        self.in_flight.append((plan, self.runner.sample_tokens(None), by_slot))
        while len(self.in_flight) >= self.depth:
            self.apply_oldest()

    def apply_oldest(self) -> ModelRunnerOutput:
        plan, output, lives = self.in_flight.popleft()
        result = result_of(output)
        planned = planned_drafts(plan)
        drafted = unpack(result.drafted).tolist() or [0] * len(planned)
        for (slot, tokens), verified in zip(ragged(result).items(), drafted, strict=True):
            life = lives[slot]
            assert 1 <= len(tokens) <= 1 + verified <= 1 + planned[slot], "row width"
            life.verified.append((verified, len(tokens) - 1))
            life.outputs += tokens
            life.request.settle(planned[slot], tokens)
        return result

    @property
    def oldest(self) -> StepOutput:
        return self.in_flight[0][1]

    def drain(self) -> None:
        while self.in_flight:
            self.apply_oldest()


def assert_answered(life: RequestLife) -> None:
    """Same tokens as without drafts."""
    assert life.outputs == answer(life.text, life.params, len(life.outputs))


# -- answers -----------------------------------------------------------------------------------------------------


def test_drafts_end_at_the_end_of_the_context() -> None:
    """Position bound: more drafts are requested than positions are left in the context."""
    life = RequestLife(prompt(1, CONTEXT - 9), GREEDY)
    batch = RunnerUnderTest(drafting("always"), 1)
    batch.admit(life)
    while len(life.outputs) < 9:
        batch.launch(life, propose=MOST)
    assert [accepted for _, accepted in life.verified] == [0, 5, 1]
    assert_answered(life)


# -- grammars ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("masks", [1, 2, 3, 4])
def test_a_draft_without_a_mask_is_not_accepted(masks: int) -> None:
    """Acceptable drafts: although the target would sample the same token. Other rows are not affected."""
    batch = RunnerUnderTest(drafting("always"), 1)
    free, bound = RequestLife(prompt(1, 8), GREEDY), RequestLife(prompt(2, 8), GREEDY)
    for life in (free, bound):
        batch.admit(life)
    batch.launch(free, bound, propose=3)
    plan = batch.plans.step(bound.request, free.request, masked=[bound.request], propose=3)
    batch.runner.execute_model(plan)
    batch.runner.add_masks(grammar_output(plan, [bound.request.slot], bits(*range(VOCAB)) * masks, [masks]))
    result = result_of(batch.runner.sample_tokens(None))
    got = ragged(result)
    assert [len(got[bound.request.slot]), len(got[free.request.slot])] == [masks, 4]
    assert unpack(result.drafted).tolist() == [masks - 1, 3]
    proposed = unpack(result.draft_token_ids).reshape(2, 3).tolist()
    for life, drafts in zip((bound, free), proposed, strict=True):
        text = life.text + life.outputs + got[life.request.slot]
        assert drafts == answer(text, GREEDY, 3), "the reported drafts are those that are verified next"


def test_a_step_with_a_grammar_reports_its_drafts() -> None:
    """NO_DRAFT stands for drafts that were not proposed. A step without a grammar does not wait for the drafter."""
    batch = RunnerUnderTest(drafting("always", longest=10), 1)
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
    batch, life = (
        RunnerUnderTest(drafting(make_device=lambda: device), MAX_STEPS_IN_FLIGHT + 1),
        RequestLife(prompt(1, 6), GREEDY),
    )
    batch.admit(life)
    hold(device)
    for _ in range(MAX_STEPS_IN_FLIGHT):
        batch.launch(life, propose=3)
    assert not batch.oldest.forward.passed
    batch.drain()
    batch.runner.shutdown()
    assert {accepted for drafted, accepted in life.verified if drafted} == {2}
    assert_answered(life)


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


def started(acceptance: str = "never", propose: int = 3) -> tuple[RunnerUnderTest, RequestLife]:
    """Return a request whose next row verifies drafts."""
    batch, life = RunnerUnderTest(drafting(acceptance), 1), RequestLife(prompt(1, 8), GREEDY)
    batch.admit(life)
    batch.launch(life, propose=propose)
    return batch, life


def test_a_start_before_what_is_computed_is_noticed() -> None:
    """Position bound: the plan counts a rejected draft that was accepted."""
    batch, life = started("always")
    batch.launch(life, propose=3)
    life.request.start -= 1
    life.request.known -= 1
    with pytest.raises(OracleError, match="position bound"):
        batch.launch(life, propose=3)


def run_ahead_of_rejections() -> None:
    batch, life = RunnerUnderTest(drafting("never"), 2), RequestLife(prompt(1, 8), GREEDY)
    batch.admit(life)
    for _ in range(4):
        batch.launch(life, propose=3)


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
    batch, life = started("never", propose=MOST)
    while life.request.start % BLOCK:
        batch.launch(life, propose=MOST)
    stale = len(life.text + life.outputs) - 1 + BLOCK
    batch.launch(life, propose=0)
    late = batch.plans.admit((life.text + life.outputs + prompt(5, 9))[: stale + 1], hit=stale, share=life.request)
    with pytest.raises(OracleError, match="expected"):
        batch.launch(RequestLife(late.prompt, GREEDY, late), propose=0)


def test_a_placeholder_never_becomes_an_input() -> None:
    """Valid ids."""
    batch, life = started()
    batch.runner.epoch.drafts.tokens[life.request.slot, 1] = NO_DRAFT
    with pytest.raises(OracleError, match="token -1 is not among"):
        batch.launch(life, propose=3)


def test_drafts_for_another_position_are_noticed() -> None:
    """Latest drafts."""
    batch, life = started()
    batch.runner.epoch.drafts.firsts[life.request.slot] -= 1
    with pytest.raises(OracleError, match="latest drafts"):
        batch.launch(life, propose=3)


def test_drafts_of_a_slots_last_owner_are_dropped() -> None:
    """Latest drafts: the first rows of the next owner have none."""
    batch, life = started()
    batch.plans.release(life.request, reuse_slot=True)
    successor = RequestLife(prompt(2, 8), GREEDY)
    batch.admit(successor)
    assert successor.request.slot == life.request.slot
    batch.launch(successor, propose=0)
    successor.request.placeholders = 3
    with pytest.raises(OracleError, match="planned with 3 drafts from position 9 on, but step 1 proposed 0"):
        batch.launch(successor, propose=0)


def test_more_drafts_than_were_agreed_on_are_refused() -> None:
    batch, life = started(propose=0)
    with pytest.raises(PlanError, match="6 drafts per row are planned, but at most 5 were agreed"):
        batch.launch(life, propose=MOST + 1)
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
