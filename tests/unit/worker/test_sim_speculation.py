"""Drafts on the simulator (spec section 2): every answer is that of the plain reference, which knows none, and which
drafts hold is a function of the request alone."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from typing import Any

import msgspec
import numpy as np
import pytest

from protocol.codec import pack, unpack
from protocol.membership import Assignment, Speculation
from protocol.sampling import SamplingParams
from protocol.steps import NO_DRAFT, GrammarOutput, ModelRunnerOutput, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.sim import SimRunner
from services.worker.backends.sim import device as sim_device
from services.worker.backends.sim.cost import CostModel
from services.worker.backends.sim.drafter import Drafter
from services.worker.backends.sim.oracle import Oracle, OracleError
from services.worker.batch.slots import PlanError, Rows
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT
from services.worker.runner import LoadError, Output
from services.worker.sampling.reference import TokenLogprobs
from tests.unit.worker.fake_device import FakeDevice
from tests.unit.worker.plans import (
    BLOCK,
    CONTEXT,
    GREEDY,
    SLOTS,
    VOCAB,
    Plans,
    Request,
    planned_drafts,
    prompt,
    ragged,
    sampled,
    sim_runner,
)
from tests.unit.worker.sim_reference import answer, assert_scored, scores
from tests.unit.worker.test_async_runner import Clock
from tests.unit.worker.test_sim_parameters import NAMES, everything

MOST = 5
ACCEPTANCES = ("always", "never", "periodic", "request")


def drafting(acceptance: str = "periodic", longest: int = 0, **options: object) -> SimRunner:
    how = Speculation("ngram", MOST, max_model_len=longest)
    return sim_runner(speculation=how, flags={"sim_draft_acceptance": acceptance}, **options)  # type: ignore[arg-type]


@dataclass
class Story:
    """A request over its whole life."""

    text: list[int]
    params: SamplingParams
    request: Request | None = None
    outputs: list[int] = field(default_factory=list)
    verified: list[tuple[int, int]] = field(default_factory=list)
    """(drafted, accepted) by each of its rows that sampled."""
    scored: dict[int, TokenLogprobs] = field(default_factory=dict)


class Batch:
    """A runner, plans for it, and results that are read when so many steps are in flight."""

    def __init__(self, runner: SimRunner, depth: int) -> None:
        self.runner, self.plans, self.depth = runner, Plans(), depth
        self.flying: deque[tuple[SchedulerOutput, Output, dict[int, Story]]] = deque()

    def admit(self, story: Story) -> None:
        text = story.text
        story.request = self.plans.admit(text + story.outputs, story.params, num_prompt=len(text))

    def launch(self, *stories: Story, propose: int, chunk: Callable[[Request], int] | None = None) -> None:
        rows = []
        for story in stories:
            request = story.request
            assert request is not None
            whole = request.left + min(request.placeholders, CONTEXT - 1 - request.start - request.left)
            rows.append((request, whole if chunk is None or request.left == 1 else chunk(request)))
        plan = self.plans.step(*rows, propose=propose)
        self.runner.execute_model(plan)
        by_slot = {request.slot: story for (request, _), story in zip(rows, stories, strict=True)}
        self.flying.append((plan, self.runner.sample_tokens(None), by_slot))
        while len(self.flying) >= self.depth:
            self.land()

    def land(self) -> ModelRunnerOutput:
        plan, output, stories = self.flying.popleft()
        result = output.get()
        assert result is not None
        planned = planned_drafts(plan)
        drafted = unpack(result.drafted).tolist() or [0] * len(planned)
        for (slot, tokens), verified in zip(ragged(result).items(), drafted, strict=True):
            story = stories[slot]
            assert 1 <= len(tokens) <= 1 + verified <= 1 + planned[slot], "S2-3"
            story.verified.append((verified, len(tokens) - 1))
            story.outputs += tokens
            assert story.request is not None
            story.request.settle(planned[slot], tokens)
        for (slot, position), entry in scores(result).items():
            assert stories[slot].scored.setdefault(position, entry) is entry, "a position is scored twice"
        return result

    def drain(self) -> None:
        while self.flying:
            self.land()


def assert_answered(story: Story) -> None:
    """S2-1: tokens and log-probabilities are those of no speculation."""
    text, got = story.text, story.outputs
    assert got == answer(text, story.params, len(got))
    if story.params.logprobs is not None:
        assert sorted(story.scored) == [len(text) + i for i in range(len(got))]
        for i, token in enumerate(got):
            assert_scored(story.scored[len(text) + i], text + got[:i], token, story.params.logprobs)


def crowd() -> list[Story]:
    """Every parameter, drawn and greedy, and plain ones."""
    stories = []
    for i, name in enumerate(NAMES):
        text = prompt(i, 5 + i)
        stories.append(Story(text, msgspec.structs.replace(everything(text)[name], logprobs=3)))
    return [*stories, Story(prompt(40, 9), GREEDY), Story(prompt(41, 7), sampled(8, top_p=0.9))]


# -- answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("acceptance", "depth"), [("always", 3), ("never", 2), ("periodic", 1), ("periodic", 2), ("request", 3)]
)
def test_in_a_crowd_every_answer_is_the_references(acceptance: str, depth: int) -> None:
    """S2-1, S2-3, 2(e)9: chunks, rows that skip steps and change places, k that changes in each step, requests that
    leave and come back in other slots; on a device whose copies are late and whose sources are overwritten (2(e)6)."""
    device = FakeDevice(Random(depth))
    runner, rng = drafting(acceptance, make_device=lambda: device), np.random.default_rng(depth)
    batch, waiting, running = Batch(runner, depth), crowd(), []
    everyone, resumed = list(waiting), 0
    for step in range(200):
        if step > 90 and resumed > 3 and all(len(story.outputs) > 6 for story in everyone):
            break
        while waiting and len(running) < 5:
            running.append(waiting.pop(0))
            batch.admit(running[-1])
        chosen = [running[i] for i in rng.permutation(len(running)) if rng.random() < 0.8]
        chosen = [story for story in chosen if story.request and story.request.known < CONTEXT]
        if chosen:
            propose = int(rng.choice((0, 1, 2, 3, MOST)))
            batch.launch(*chosen, propose=propose, chunk=lambda r: int(rng.integers(1, r.left + 1)))
        entered = [story for story in running if story.request and story.request.start]
        if rng.random() < 0.15 and entered:
            batch.drain()
            story = entered[int(rng.integers(len(entered)))]
            assert story.request is not None
            batch.plans.leave(story.request)
            running.remove(story)
            resumed += bool(story.outputs)
            if len(story.outputs) < 20:
                waiting.append(story)
    batch.drain()
    runner.shutdown()
    assert not device.violations
    assert resumed > 3
    for story in everyone:
        assert len(story.outputs) > 6
        assert_answered(story)
    drafted, accepted = np.array([pair for story in everyone for pair in story.verified]).sum(0)
    assert drafted > 50
    share = {"always": (1, 1), "never": (0, 0), "periodic": (0.4, 0.8), "request": (0.2, 0.8)}[acceptance]
    assert share[0] <= accepted / drafted <= share[1]


def expected(acceptance: str, first: int, asked: int) -> int:
    """Drafts that hold of those which stand from `first` on."""
    period = {"always": 0, "never": 1, "periodic": 3}[acceptance]
    held = 0
    while held < asked and not (period and (first + held) % period == 0):
        held += 1
    return held


@pytest.mark.parametrize("k", [1, 2, 3, MOST])
@pytest.mark.parametrize("acceptance", ACCEPTANCES)
def test_drafted_and_accepted_are_the_same_at_any_depth(acceptance: str, k: int) -> None:
    """S2-2, 2(e)1: and they are what the pattern says."""

    def lives(depth: int) -> list[Story]:
        stories = [Story(prompt(i, 4 + 3 * i), GREEDY if i % 2 else sampled(i)) for i in range(5)]
        batch = Batch(drafting(acceptance), depth)
        for story in stories:
            batch.admit(story)
        while going_on := [story for story in stories if len(story.outputs) < 24]:
            batch.launch(*going_on, propose=k)
        batch.drain()
        for story in stories:
            assert_answered(story)
        return stories

    one, others = lives(1), [lives(2), lives(3)]
    for story, *same in zip(one, *others, strict=True):
        rows = min(len(each.verified) for each in (story, *same))
        assert all(each.verified[:rows] == story.verified[:rows] for each in same)
        assert {drafted for drafted, _ in story.verified[1:]} == {k}
        if acceptance != "request":
            known = len(story.text) + 1
            for drafted, accepted in story.verified[1:]:
                assert accepted == expected(acceptance, known, drafted)
                known += accepted + 1
    if acceptance == "request":
        rates = {sum(a for _, a in story.verified) / sum(d for d, _ in story.verified) for story in one}
        assert len(rates) > 2, "requests differ"


def test_drafts_end_where_the_context_does() -> None:
    """2(e)4, S2-5: k is larger than the room that is left; the last token stands at the context's last position."""
    story = Story(prompt(1, CONTEXT - 9), GREEDY)
    batch = Batch(drafting("always"), 1)
    batch.admit(story)
    while len(story.outputs) < 9:
        batch.launch(story, propose=MOST)
    assert [accepted for _, accepted in story.verified] == [0, 5, 1]
    assert_answered(story)


def test_a_drafter_with_a_shorter_context_proposes_nothing_beyond_it() -> None:
    """2(b)10, 2(e)3: nothing, rather than what is left of the step before; acceptance before that is as ever."""
    story = Story(prompt(1, 8), GREEDY)
    batch = Batch(drafting("always", longest=20), 2)
    batch.admit(story)
    while len(story.outputs) < 30:
        batch.launch(story, propose=3)
    assert [drafted for drafted, _ in story.verified[:5]] == [0, 3, 3, 3, 0]
    assert {drafted for drafted, _ in story.verified[4:]} == {0}
    assert_answered(story)


def test_a_row_without_drafts_uses_none() -> None:
    """S2-6: and what was proposed before does not come back."""
    story = Story(prompt(1, 8), GREEDY)
    batch = Batch(drafting("always"), 1)
    batch.admit(story)
    for propose in (3, 3, 0, 3):
        batch.launch(story, propose=propose)
        if propose == 0:
            assert story.request is not None
            story.request.placeholders = 0
    assert [drafted for drafted, _ in story.verified] == [0, 3, 3, 0]
    assert_answered(story)


# -- grammars ----------------------------------------------------------------------------------------------------


def bits(*allowed: int) -> bytes:
    row = np.zeros(-(-VOCAB // 32) * 32, np.uint8)
    row[list(allowed)] = 1
    return np.packbits(row, bitorder="little").tobytes()


@pytest.mark.parametrize("masks", [1, 2, 3, 4])
def test_no_more_drafts_hold_than_there_are_masks_for(masks: int) -> None:
    """2(b)14: where information is missing, none is accepted, though the target would; other rows are not touched."""
    batch, free, bound = (
        Batch(drafting("always"), 1),
        Story(prompt(1, 8), GREEDY),
        Story(prompt(2, 8), GREEDY),
    )
    for story in (free, bound):
        batch.admit(story)
    batch.launch(free, bound, propose=3)
    assert bound.request is not None
    assert free.request is not None
    plan = batch.plans.step(bound.request, free.request, grammar=True, propose=3)
    batch.runner.execute_model(plan)
    mask = GrammarOutput(1, 2, pack([bound.request.slot]), bits(*range(VOCAB)) * masks, pack([masks]))
    result = batch.runner.sample_tokens(mask).get()
    assert result is not None
    got = ragged(result)
    assert [len(got[bound.request.slot]), len(got[free.request.slot])] == [masks, 4]
    assert unpack(result.drafted).tolist() == [masks - 1, 3]
    proposed = unpack(result.draft_token_ids).reshape(2, 3).tolist()
    for story, drafts in zip((bound, free), proposed, strict=True):
        assert story.request is not None
        text = story.text + story.outputs + got[story.request.slot]
        assert drafts == answer(text, GREEDY, 3), "what the grammar is to look at is what will be verified"


def test_each_position_has_its_own_mask() -> None:
    """A draft that its mask forbids is refused, and the token in its place is the best of the allowed ones."""
    batch, story = Batch(drafting("always"), 1), Story(prompt(2, 8), GREEDY)
    batch.admit(story)
    batch.launch(story, propose=3)
    free = answer(story.text, GREEDY, 5)
    assert story.request is not None
    plan = batch.plans.step(story.request, grammar=True)
    batch.runner.execute_model(plan)
    other = (free[2] + 1) % VOCAB
    masks = bits(*range(VOCAB)) + bits(other) + bits(*range(VOCAB)) * 2
    result = batch.runner.sample_tokens(
        GrammarOutput(1, 2, pack([story.request.slot]), masks, pack([4]))
    ).get()
    assert result is not None
    assert ragged(result)[story.request.slot] == [free[1], other]
    assert unpack(result.drafted).tolist() == [3]
    assert result.draft_token_ids == b"", "none were asked for"


def test_drafts_are_reported_where_a_grammar_looks_at_them() -> None:
    """With NO_DRAFT in place of what was not proposed; else no result waits for the drafter."""
    batch = Batch(drafting("always", longest=10), 1)
    short, long_ = batch.plans.admit(prompt(1, 4)), batch.plans.admit(prompt(2, 12))
    plan = batch.plans.step(short, long_, grammar=True, propose=2)
    batch.runner.execute_model(plan)
    mask = GrammarOutput(1, 1, pack([short.slot]), bits(*range(VOCAB)))
    result = batch.runner.sample_tokens(mask).get()
    assert result is not None
    assert unpack(result.draft_token_ids).tolist() == [
        *answer(prompt(1, 4), GREEDY, 3)[1:],
        NO_DRAFT,
        NO_DRAFT,
    ]
    assert result.drafted == b""
    batch.runner.execute_model(batch.plans.step(short, long_, propose=2))
    result = batch.runner.sample_tokens(None).get()
    assert result is not None
    assert result.draft_token_ids == b""
    assert unpack(result.drafted).tolist() == [2, 0], "a row is as short as there are drafts"


# -- running ahead -----------------------------------------------------------------------------------------------


def test_launching_waits_for_no_accepted_count() -> None:
    """S2-8, S3-3: with the device standing still, as many steps with drafts are launched as can be in flight."""
    device = FakeDevice()
    batch, story = (
        Batch(drafting(make_device=lambda: device), MAX_STEPS_IN_FLIGHT + 1),
        Story(prompt(1, 6), GREEDY),
    )
    batch.admit(story)
    device.compute.gate.clear()
    for _ in range(MAX_STEPS_IN_FLIGHT):
        batch.launch(story, propose=3)
    assert {what for what, _ in device.log} == {"launch"}
    device.compute.gate.set()
    batch.drain()
    batch.runner.shutdown()
    assert {accepted for drafted, accepted in story.verified if drafted} == {2}
    assert_answered(story)


def race(fault: Callable[[SimRunner], None] | None = None) -> list[list[tuple[int, int]]]:
    """Which drafts hold, when every host buffer is overwritten as soon as it was copied, and copies are late."""
    device = FakeDevice(Random(5))
    runner = drafting("request", make_device=lambda: device)
    if fault is not None:
        fault(runner)
    stories = [Story(prompt(i, 5), sampled(i)) for i in range(4)]
    batch = Batch(runner, 3)
    for story in stories:
        batch.admit(story)
    try:
        for _ in range(12):
            batch.launch(*stories, propose=3)
        batch.drain()
    finally:
        runner.shutdown()
    assert not device.violations
    for story in stories:
        assert_answered(story)
    return [story.verified for story in stories]


def drafter_reads_the_staged_columns(runner: SimRunner) -> None:
    """2(d), first row: what the host prepares for the target is in the drafter's hands too."""
    propose, ring = runner._propose, runner._ring

    def broken(*args: Any) -> Any:
        right = runner._drafter
        staged = ring._sets[ring._current - 1]
        runner._drafter = Drafter("request", 0, right._sampler, right._oracle, staged, right._drafts)
        return propose(*args)

    runner._propose = broken  # type: ignore[method-assign]


def test_the_drafter_reads_nothing_that_the_host_writes() -> None:
    """2(d), 3(b)6, 2(e)6: acceptance is that of an undisturbed device."""
    stories = [Story(prompt(i, 5), sampled(i)) for i in range(4)]
    batch = Batch(drafting("request"), 1)
    for story in stories:
        batch.admit(story)
    for _ in range(12):
        batch.launch(*stories, propose=3)
    assert race() == [story.verified for story in stories]


def test_a_drafter_that_reads_a_buffer_of_the_host_is_noticed() -> None:
    """The proof that the test above can fail."""
    with pytest.raises(IndexError):
        race(drafter_reads_the_staged_columns)


def test_a_result_does_not_wait_for_the_drafter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a grammar is to look at the drafts; the next step waits for them on the device. On a VIRTUAL clock."""
    clock = Clock()
    monkeypatch.setattr(sim_device, "time", clock)
    how = Speculation("ngram", MOST)
    runner, plans = sim_runner(10.0, how, {"sim_draft_ms": 2.0}), Plans()
    request = plans.admit(prompt(1, 6))
    results = []
    for grammar in (False, True, False):
        plan = plans.step((request, request.left), grammar=grammar, propose=3)
        runner.execute_model(plan)
        results.append(runner.sample_tokens(GrammarOutput(1, plan.step_id, b"", b"") if grammar else None))
    landed = [output.get() for output in results]
    assert all(isinstance(result, ModelRunnerOutput) for result in landed)
    times = [1e3 * (result.times.sampled - result.times.forward_began) for result in landed if result]
    assert times == pytest.approx([10.0, 16.0, 10.0])
    gaps = [
        1e3 * (two.times.forward_began - one.times.forward_began)
        for one, two in pairwise(landed)
        if one and two
    ]
    assert gaps == pytest.approx([16.0, 16.0])


# -- what must raise ---------------------------------------------------------------------------------------------


def started(acceptance: str = "never", propose: int = 3) -> tuple[Batch, Story]:
    """A request whose next row verifies drafts."""
    batch, story = Batch(drafting(acceptance), 1), Story(prompt(1, 8), GREEDY)
    batch.admit(story)
    batch.launch(story, propose=propose)
    return batch, story


def test_a_start_before_what_is_computed_is_noticed() -> None:
    """S2-5: a rejection that never was."""
    batch, story = started("always")
    batch.launch(story, propose=3)
    assert story.request is not None
    story.request.start -= 1
    story.request.known -= 1
    with pytest.raises(OracleError, match="S2-5"):
        batch.launch(story, propose=3)


def run_ahead_of_rejections() -> None:
    batch, story = Batch(drafting("never"), 2), Story(prompt(1, 8), GREEDY)
    batch.admit(story)
    for _ in range(4):
        batch.launch(story, propose=3)


def test_starts_that_are_not_corrected_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2(b)5: at depth 2 the plan starts behind positions that were rejected."""
    run_ahead_of_rejections()
    monkeypatch.setattr(Oracle, "starts", lambda self, slots, planned: planned)
    with pytest.raises(OracleError):
        run_ahead_of_rejections()


def test_starts_that_are_corrected_twice_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """2(b)7"""
    right = Oracle.starts
    monkeypatch.setattr(
        Oracle, "starts", lambda self, slots, planned: 2 * right(self, slots, planned) - planned
    )
    with pytest.raises(OracleError):
        run_ahead_of_rejections()


def test_stale_kv_of_rejected_drafts_is_never_read() -> None:
    """2(b)6: another request that hits a block with it is noticed."""
    batch, story = started("never", propose=MOST)
    assert story.request is not None
    while story.request.start % BLOCK:
        batch.launch(story, propose=MOST)
    stale = len(story.text + story.outputs) - 1 + BLOCK
    batch.launch(story, propose=0)
    late = batch.plans.admit(
        (story.text + story.outputs + prompt(5, 9))[: stale + 1], hit=stale, share=story.request
    )
    with pytest.raises(OracleError, match="expected"):
        batch.launch(Story(late.prompt, GREEDY, late), propose=0)


def test_an_id_that_is_no_draft_never_becomes_an_input() -> None:
    """S2-4"""
    batch, story = started()
    assert story.request is not None
    batch.runner._drafts._tokens[story.request.slot, 1] = NO_DRAFT
    with pytest.raises(OracleError, match="token -1 is not among"):
        batch.launch(story, propose=3)


def test_drafts_for_another_position_are_noticed() -> None:
    """S2-6"""
    batch, story = started()
    assert story.request is not None
    batch.runner._drafts._firsts[story.request.slot] -= 1
    with pytest.raises(OracleError, match="S2-6"):
        batch.launch(story, propose=3)


def test_drafts_of_the_slots_last_owner_are_nobodys() -> None:
    """S2-6: the next one's first rows have none to count on."""
    batch, story = started()
    assert story.request is not None
    batch.plans.leave(story.request)
    batch.plans._free_slots.insert(0, batch.plans._free_slots.pop())
    heir = Story(prompt(2, 8), GREEDY)
    batch.admit(heir)
    assert heir.request is not None
    assert heir.request.slot == story.request.slot
    batch.launch(heir, propose=0)
    heir.request.placeholders = 3
    with pytest.raises(OracleError, match="3 drafts from position 9 on are planned, but step 1 proposed 0"):
        batch.launch(heir, propose=0)


def test_more_drafts_than_were_agreed_on_are_refused() -> None:
    batch, story = started(propose=0)
    with pytest.raises(PlanError, match="6 drafts are asked for, of 5 at most"):
        batch.launch(story, propose=MOST + 1)
    runner, plans = sim_runner(), Plans()
    plan = plans.step(plans.admit([1]), propose=1)
    with pytest.raises(PlanError, match="1 drafts are asked for, of 0 at most"):
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
