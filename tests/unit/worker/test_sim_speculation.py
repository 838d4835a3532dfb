"""Drafts on the simulator: tokens of the reference sampler, and acceptance that depends on the request alone."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random

import msgspec
import numpy as np
import pytest

from protocol.codec import unpack
from protocol.membership import Assignment, Speculation
from protocol.sampling import SamplingParams
from protocol.steps import NO_DRAFT, ModelRunnerOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.device.columns import StepColumns
from services.worker.backends.sim.device.simulated import SimDevice
from services.worker.backends.sim.epoch import SimEpoch
from services.worker.backends.sim.model.oracle import Oracle, OracleError
from services.worker.backends.sim.sampling.drafter import SimDrafter
from services.worker.batch.slots import PlanError, Rows
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT, HostRing
from services.worker.runner import LoadError, Output
from services.worker.sampling.reference import TokenLogprobs
from tests.matrix import covering
from tests.unit.worker.fake_device import FakeDevice
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
    planned_drafts,
    prompt,
    ragged,
    result_of,
    sampled,
    sim_runner,
)
from tests.unit.worker.sim_reference import answer, assert_scored, scores
from tests.unit.worker.test_sim_parameters import NAMES, everything
from tests.unit.worker.virtual_clock import VirtualClock

MOST = 5
ACCEPTANCES = ("always", "never", "periodic", "request")


def drafting(acceptance: str = "periodic", longest: int = 0, **options: object) -> SimRunner:
    """Return a runner whose drafts are accepted as `sim_draft_acceptance` says, or one without drafts for "none"."""
    if acceptance == "none":
        return sim_runner(**options)  # type: ignore[arg-type]
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
    scored: dict[int, TokenLogprobs] = field(default_factory=dict)

    @property
    def request(self) -> SlotRequest:
        """The request in its present slot."""
        assert self.slot_request is not None
        return self.slot_request


class RunnerUnderTest:
    """A runner, plans for it, and results that are read when `depth` steps are in flight."""

    def __init__(self, runner: SimRunner, depth: int) -> None:
        self.runner, self.plans, self.depth = runner, PlanBuilder(), depth
        self.in_flight: deque[tuple[SchedulerOutput, Output, dict[int, RequestLife]]] = deque()
        self.before_sampling: Callable[[], None] = lambda: None

    def admit(self, life: RequestLife) -> None:
        tokens, num_prompt = life.text + life.outputs, len(life.text)
        life.slot_request = self.plans.admit(tokens, life.params, num_prompt=num_prompt)

    def launch(self, *lives: RequestLife, propose: int, chunk: Callable[[SlotRequest], int] | None = None) -> None:
        """Launch a step, and read the oldest result if `depth` steps are in flight.

        Args:
            propose: drafts that each sampling row proposes.
            chunk: returns the positions of a request's prompt chunk; None: the whole prompt.
        """
        rows = []
        for request in (life.request for life in lives):
            whole = request.left + min(request.placeholders, CONTEXT - 1 - request.start - request.left)
            rows.append((request, whole if chunk is None or request.left == 1 else chunk(request)))
        plan = self.plans.step(*rows, propose=propose)
        self.runner.execute_model(plan)
        self.before_sampling()
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
        for (slot, position), entry in scores(result).items():
            assert lives[slot].scored.setdefault(position, entry) is entry, "a position is scored twice"
        return result

    def drain(self) -> None:
        while self.in_flight:
            self.apply_oldest()


def assert_answered(life: RequestLife) -> None:
    """Same tokens: tokens and log-probabilities are those without drafts."""
    text, got = life.text, life.outputs
    assert got == answer(text, life.params, len(got))
    if life.params.logprobs is not None:
        assert sorted(life.scored) == [len(text) + i for i in range(len(got))]
        for i, token in enumerate(got):
            assert_scored(life.scored[len(text) + i], text + got[:i], token, life.params.logprobs)


def requests_with_every_parameter() -> list[RequestLife]:
    """Return requests with every parameter, sampled and greedy, and some without."""
    lives = []
    for i, name in enumerate(NAMES):
        text = prompt(i, 5 + i)
        lives.append(RequestLife(text, msgspec.structs.replace(everything(text)[name], logprobs=3)))
    drawn = sampled(8, top_k=5, top_p=0.9, min_p=0.01)
    return [*lives, RequestLife(prompt(40, 9), GREEDY), RequestLife(prompt(41, 7), drawn)]


# -- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "depth"),
    [
        ("none", 1),
        ("none", 2),
        ("none", 3),
        ("always", 3),
        ("never", 2),
        ("periodic", 1),
        ("periodic", 2),
        ("request", 3),
    ],
)
def test_requests_of_a_batch_get_the_reference_tokens(acceptance: str, depth: int) -> None:
    """Chunks, rows that skip steps and are reordered, another number of drafts in each step, and requests that are
    preempted and resumed in other slots; on a device with late copies whose sources are overwritten."""
    device = FakeDevice(Random(depth))
    runner, rng = drafting(acceptance, make_device=lambda: device), np.random.default_rng(depth)
    batch, waiting, running = RunnerUnderTest(runner, depth), requests_with_every_parameter(), []
    everyone, resumed = list(waiting), 0
    for step in range(200):
        if step > 90 and resumed > 3 and all(len(life.outputs) > 6 for life in everyone):
            break
        while waiting and len(running) < 5:
            running.append(waiting.pop(0))
            batch.admit(running[-1])
        chosen = [running[i] for i in rng.permutation(len(running)) if rng.random() < 0.8]
        chosen = [life for life in chosen if life.request.known < CONTEXT]
        if chosen:
            propose = int(rng.choice((0, 1, 2, 3, MOST))) if acceptance != "none" else 0
            batch.launch(*chosen, propose=propose, chunk=lambda r: int(rng.integers(1, r.left + 1)))
        entered = [life for life in running if life.request.start]
        if rng.random() < 0.15 and entered:
            batch.drain()
            life = entered[int(rng.integers(len(entered)))]
            batch.plans.release(life.request)
            running.remove(life)
            resumed += bool(life.outputs)
            if len(life.outputs) < 20:
                waiting.append(life)
    batch.drain()
    runner.shutdown()
    assert not device.violations
    assert resumed > 3
    for life in everyone:
        assert len(life.outputs) > 6
        assert_answered(life)
    drafted, accepted = np.array([pair for life in everyone for pair in life.verified]).sum(0)
    if acceptance == "none":
        assert not drafted
        return
    assert drafted > 50
    share = {"always": (1, 1), "never": (0, 0), "periodic": (0.4, 0.8), "request": (0.2, 0.8)}[acceptance]
    assert share[0] <= accepted / drafted <= share[1]


def expected_accepted(acceptance: str, first: int, drafted: int) -> int:
    """Return how many of `drafted` drafts from position `first` on are accepted."""
    period = {"always": 0, "never": 1, "periodic": 3}[acceptance]
    accepted = 0
    while accepted < drafted and not (period and (first + accepted) % period == 0):
        accepted += 1
    return accepted


@pytest.mark.parametrize(("acceptance", "k"), covering(ACCEPTANCES, [1, 2, 3, MOST], strength=1))
def test_drafted_and_accepted_are_the_same_at_any_depth(acceptance: str, k: int) -> None:
    """Equal acceptance, and as the configured pattern predicts."""

    def run(depth: int) -> list[RequestLife]:
        lives = [RequestLife(prompt(i, 4 + 3 * i), GREEDY if i % 2 else sampled(i)) for i in range(5)]
        batch = RunnerUnderTest(drafting(acceptance), depth)
        for life in lives:
            batch.admit(life)
        while going_on := [life for life in lives if len(life.outputs) < 24]:
            batch.launch(*going_on, propose=k)
        batch.drain()
        for life in lives:
            assert_answered(life)
        return lives

    one, others = run(1), [run(2), run(3)]
    for life, *same in zip(one, *others, strict=True):
        rows = min(len(each.verified) for each in (life, *same))
        assert all(each.verified[:rows] == life.verified[:rows] for each in same)
        assert {drafted for drafted, _ in life.verified[1:]} == {k}
        if acceptance != "request":
            known = len(life.text) + 1
            for drafted, accepted in life.verified[1:]:
                assert accepted == expected_accepted(acceptance, known, drafted)
                known += accepted + 1
    if acceptance == "request":
        rates = {sum(a for _, a in life.verified) / sum(d for d, _ in life.verified) for life in one}
        assert len(rates) > 2, "requests differ"


def test_drafts_end_at_the_end_of_the_context() -> None:
    """Position bound: more drafts are requested than positions are left in the context."""
    life = RequestLife(prompt(1, CONTEXT - 9), GREEDY)
    batch = RunnerUnderTest(drafting("always"), 1)
    batch.admit(life)
    while len(life.outputs) < 9:
        batch.launch(life, propose=MOST)
    assert [accepted for _, accepted in life.verified] == [0, 5, 1]
    assert_answered(life)


def test_a_drafter_with_a_shorter_context_proposes_nothing_beyond_it() -> None:
    """Drafter limit: no drafts, and none of the step before; acceptance below the limit does not change."""
    life = RequestLife(prompt(1, 8), GREEDY)
    batch = RunnerUnderTest(drafting("always", longest=20), 2)
    batch.admit(life)
    while len(life.outputs) < 30:
        batch.launch(life, propose=3)
    assert [drafted for drafted, _ in life.verified[:5]] == [0, 3, 3, 3, 0]
    assert {drafted for drafted, _ in life.verified[4:]} == {0}
    assert_answered(life)


def test_a_row_without_drafts_uses_none() -> None:
    """Latest drafts: those of an earlier step are not used later."""
    life = RequestLife(prompt(1, 8), GREEDY)
    batch = RunnerUnderTest(drafting("always"), 1)
    batch.admit(life)
    for propose in (3, 3, 0, 3):
        batch.launch(life, propose=propose)
        if propose == 0:
            life.request.placeholders = 0
    assert [drafted for drafted, _ in life.verified] == [0, 3, 3, 0]
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
    plan = batch.plans.step(bound.request, free.request, grammar=True, propose=3)
    batch.runner.execute_model(plan)
    grammar = grammar_output(plan, [bound.request.slot], bits(*range(VOCAB)) * masks, [masks])
    result = result_of(batch.runner.sample_tokens(grammar))
    got = ragged(result)
    assert [len(got[bound.request.slot]), len(got[free.request.slot])] == [masks, 4]
    assert unpack(result.drafted).tolist() == [masks - 1, 3]
    proposed = unpack(result.draft_token_ids).reshape(2, 3).tolist()
    for life, drafts in zip((bound, free), proposed, strict=True):
        text = life.text + life.outputs + got[life.request.slot]
        assert drafts == answer(text, GREEDY, 3), "the reported drafts are those that are verified next"


def test_each_position_has_its_own_mask() -> None:
    """A draft that its mask forbids is rejected, and replaced by the most likely allowed token."""
    batch, life = RunnerUnderTest(drafting("always"), 1), RequestLife(prompt(2, 8), GREEDY)
    batch.admit(life)
    batch.launch(life, propose=3)
    free = answer(life.text, GREEDY, 5)
    plan = batch.plans.step(life.request, grammar=True)
    batch.runner.execute_model(plan)
    other = (free[2] + 1) % VOCAB
    masks = bits(*range(VOCAB)) + bits(other) + bits(*range(VOCAB)) * 2
    grammar = grammar_output(plan, [life.request.slot], masks, [4])
    result = result_of(batch.runner.sample_tokens(grammar))
    assert ragged(result)[life.request.slot] == [free[1], other]
    assert unpack(result.drafted).tolist() == [3]
    assert result.draft_token_ids == b"", "no drafts were requested"


def test_a_step_with_a_grammar_reports_its_drafts() -> None:
    """NO_DRAFT stands for drafts that were not proposed. A step without a grammar does not wait for the drafter."""
    batch = RunnerUnderTest(drafting("always", longest=10), 1)
    short, long_ = batch.plans.admit(prompt(1, 4)), batch.plans.admit(prompt(2, 12))
    plan = batch.plans.step(short, long_, grammar=True, propose=2)
    batch.runner.execute_model(plan)
    grammar = grammar_output(plan, [short.slot], bits(*range(VOCAB)))
    result = result_of(batch.runner.sample_tokens(grammar))
    assert unpack(result.draft_token_ids).tolist() == [*answer(prompt(1, 4), GREEDY, 3)[1:], NO_DRAFT, NO_DRAFT]
    assert result.drafted == b""
    batch.runner.execute_model(batch.plans.step(short, long_, propose=2))
    result = result_of(batch.runner.sample_tokens(None))
    assert result.draft_token_ids == b""
    assert unpack(result.drafted).tolist() == [2, 0], "a row with fewer drafts is shorter"


# -- running ahead -----------------------------------------------------------------------------------------------


def test_a_launch_waits_for_no_accepted_count() -> None:
    """No hidden sync: while the device is stopped, as many steps with drafts are launched as can be in flight."""
    device = FakeDevice()
    batch, life = (
        RunnerUnderTest(drafting(make_device=lambda: device), MAX_STEPS_IN_FLIGHT + 1),
        RequestLife(prompt(1, 6), GREEDY),
    )
    batch.admit(life)
    device.compute.gate.clear()
    for _ in range(MAX_STEPS_IN_FLIGHT):
        batch.launch(life, propose=3)
    assert {what for what, _ in device.log} == {"launch"}
    device.compute.gate.set()
    batch.drain()
    batch.runner.shutdown()
    assert {accepted for drafted, accepted in life.verified if drafted} == {2}
    assert_answered(life)


def accepted_in_a_race(staged_columns: bool = False) -> list[list[tuple[int, int]]]:
    """Return the acceptance while copies are late and every host buffer is overwritten as soon as it was copied.

    Args:
        staged_columns: the drafter reads the host's columns of the step instead of the device's.
    """
    device = FakeDevice(Random(5))
    runner = drafting("request", make_device=lambda: device)
    lives = [RequestLife(prompt(i, 5), sampled(i)) for i in range(4)]
    batch = RunnerUnderTest(runner, 3)
    if staged_columns:
        batch.before_sampling = drafter_of_staged_columns(runner.epoch)
    for life in lives:
        batch.admit(life)
    try:
        for _ in range(12):
            batch.launch(*lives, propose=3)
        batch.drain()
    finally:
        runner.shutdown()
    assert not device.violations
    for life in lives:
        assert_answered(life)
    return [life.verified for life in lives]


class RememberingRing(HostRing[StepColumns]):
    """Keeps the columns of the last step."""

    last: StepColumns

    def acquire(self) -> StepColumns:
        self.last = super().acquire()
        return self.last


def drafter_of_staged_columns(epoch: SimEpoch) -> Callable[[], None]:
    """Return a function that gives the drafter the host's columns of the last step, against the host-buffer rule."""
    ring = RememberingRing(lambda: StepColumns(SLOTS, CONTEXT // BLOCK))
    epoch.ring = ring

    def replace_drafter() -> None:
        epoch.drafter = SimDrafter("request", 0, epoch.sampler, epoch.oracle, ring.last, epoch.drafts)

    return replace_drafter


def test_the_drafter_reads_nothing_that_the_host_writes() -> None:
    """Host-buffer rule: acceptance equals that of an undisturbed device."""
    lives = [RequestLife(prompt(i, 5), sampled(i)) for i in range(4)]
    batch = RunnerUnderTest(drafting("request"), 1)
    for life in lives:
        batch.admit(life)
    for _ in range(12):
        batch.launch(*lives, propose=3)
    assert accepted_in_a_race() == [life.verified for life in lives]


def test_a_drafter_that_reads_a_buffer_of_the_host_is_noticed() -> None:
    """The test above fails if the drafter reads the host's columns."""
    with pytest.raises(IndexError):
        accepted_in_a_race(staged_columns=True)


def test_a_result_does_not_wait_for_the_drafter() -> None:
    """Only the result of a step with a grammar does; the next step waits on the device. On a VIRTUAL clock."""
    clock, speculation = VirtualClock(), Speculation("ngram", MOST)
    runner = sim_runner(10.0, speculation, {"sim_draft_ms": 2.0}, make_device=lambda: SimDevice(clock))
    plans = PlanBuilder()
    request = plans.admit(prompt(1, 6))
    outputs = []
    for grammar in (False, True, False):
        plan = plans.step((request, request.left), grammar=grammar, propose=3)
        runner.execute_model(plan)
        outputs.append(runner.sample_tokens(grammar_output(plan, []) if grammar else None))
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


def test_starts_that_are_not_corrected_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """True position: at depth two the plan starts behind rejected positions."""
    run_ahead_of_rejections()
    monkeypatch.setattr(Oracle, "starts", lambda self, slots, planned: planned)
    with pytest.raises(OracleError):
        run_ahead_of_rejections()


def test_starts_that_are_corrected_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settle once."""
    right = Oracle.starts
    monkeypatch.setattr(Oracle, "starts", lambda self, slots, planned: 2 * right(self, slots, planned) - planned)
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
