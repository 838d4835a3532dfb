"""A worker's phases: which messages are allowed in each phase, and the actions that they cause."""

import pytest

from protocol.codec import ProtocolError
from protocol.membership import Assignment, EndEpoch, InitializeCache, Ping, Shutdown
from protocol.steps import GrammarOutput, LoadBlocks, ReleaseSlots, SchedulerOutput, StepFault
from services.worker.session import Phase, Session

ASSIGNMENT = Assignment(3, 0, 1, 16, 8, 64)
INIT = InitializeCache(10, 64)


def plan(step_id: int, epoch: int = 3, grammar: bool = False) -> SchedulerOutput:
    return SchedulerOutput(epoch, step_id, b"", b"", b"", b"", b"", has_structured_output_requests=grammar)


def grammar(step_id: int, epoch: int = 3) -> GrammarOutput:
    return GrammarOutput(epoch, step_id, b"", memoryview(b""))


def serving(init: InitializeCache) -> Session:
    """Return a session that serves epoch 3 and has had no step."""
    session = Session()
    assert session.on(ASSIGNMENT) is ASSIGNMENT
    session.loaded()
    assert session.on(init) is init
    session.ready()
    return session


@pytest.fixture
def session() -> Session:
    return serving(INIT)


def test_a_gap_is_a_fault_that_names_both_steps(session: Session) -> None:
    assert [session.on(plan(step_id)) for step_id in (1, 2)] == [plan(1), plan(2)]
    assert session.on(plan(4)) == StepFault(3, 4, "step 4 arrived, but step 3 is next")
    assert session.on(plan(3)) is None
    assert session.phase is Phase.FAILED


@pytest.mark.parametrize("can_leave_rows_out", [False, True])
def test_a_step_that_arrives_before_the_masks_of_the_last_one_is_a_fault(can_leave_rows_out: bool) -> None:
    session = serving(InitializeCache(10, 64, whole_steps=can_leave_rows_out))
    session.leaves_rows_out = can_leave_rows_out
    for step_id in (1, 2):  # masks of step 1 again are not those of step 2
        session.on(plan(step_id, grammar=True))
        assert session.on(grammar(1)) == grammar(1)
    assert session.on(plan(3)) == StepFault(3, 3, "step 3 arrived before the masks of step 2")


def test_loaded_and_ready_are_refused_in_other_phases(session: Session) -> None:
    with pytest.raises(ProtocolError):
        session.loaded()
    with pytest.raises(ProtocolError):
        session.ready()


ASSIGNMENT_4 = Assignment(4, 1, 2, 16, 8, 64, 0, 2, 1, "127.0.0.1:1")


def in_phase(phase: Phase) -> Session:
    """Return a session of epoch 3 in `phase`."""
    session = Session()
    for reached, advance in (
        (Phase.REGISTERED, lambda: session.on(ASSIGNMENT)),
        (Phase.LOADING, session.loaded),
        (Phase.LOADED, lambda: session.on(INIT)),
        (Phase.INITIALIZING, session.ready),
        (Phase.SERVING, session.ranks_lost),
    ):
        if phase is reached:
            return session
        advance()
    assert session.phase is phase
    return session


@pytest.mark.parametrize("phase", [p for p in Phase if p not in (Phase.LEAVING, Phase.FAILED)])
def test_the_end_of_an_epoch_leads_from_every_phase_to_the_next_epoch(phase: Phase) -> None:
    session = in_phase(phase)
    if phase is Phase.SERVING:
        session.on(LoadBlocks(3, 1, 9, b"", b""))
        session.on(plan(1, grammar=True))  # its masks never come
    end = EndEpoch(3, "a rank was lost")
    assert session.on(end) is end
    assert session.phase is Phase.REGISTERED
    assert session.on(ASSIGNMENT_4) is ASSIGNMENT_4
    session.loaded()
    session.on(INIT)
    session.ready()
    assert session.on(plan(2, epoch=3)) is None, "a step of the epoch before"
    load = LoadBlocks(4, 1, 1, b"", b"")
    assert session.on(load) == load, "loads are counted from 1 again"
    assert session.on(plan(1, epoch=4)) == plan(1, epoch=4), "steps are counted from 1 again"


USED, ANSWERED, IGNORED, REFUSED, FAULT = "used", "answered", "ignored", "refused", "fault"
MESSAGES = {
    "assignment": ASSIGNMENT_4,
    "initialize": INIT,
    "plan": plan(1),
    "grammar": grammar(1),
    "release": ReleaseSlots(3, b""),
    "load": LoadBlocks(4, 1, 1, b"", b""),
    "drop": LoadBlocks(4, 0, 0, b"", b"", drops_all=True),
    "late plan": plan(9, epoch=2),
    "early plan": plan(1, epoch=4),
    "early grammar": grammar(1, epoch=4),
    "late end": EndEpoch(2),
    "ping": Ping(2.5),
    "shutdown": Shutdown(),
}
ALWAYS = {"ping": ANSWERED, "shutdown": USED}
BEFORE_SERVING = {"plan": REFUSED, "grammar": REFUSED, "release": REFUSED, "early plan": REFUSED} | ALWAYS
OF_OTHER_EPOCHS = dict.fromkeys(("late plan", "early plan", "early grammar", "load", "drop", "late end"), IGNORED)
WHEN_SERVING = {"release": USED} | OF_OTHER_EPOCHS | ALWAYS
TABLE = {
    Phase.REGISTERED: {"assignment": USED, "load": IGNORED, "drop": USED, "late end": USED} | BEFORE_SERVING,
    Phase.LOADING: {"late plan": IGNORED, "late end": IGNORED} | BEFORE_SERVING,
    Phase.LOADED: {"initialize": USED, "late plan": IGNORED, "late end": IGNORED} | BEFORE_SERVING,
    Phase.INITIALIZING: {"late plan": IGNORED, "late end": IGNORED} | BEFORE_SERVING,
    Phase.SERVING: {"plan": USED, "grammar": FAULT} | WHEN_SERVING,
    Phase.RANKS_LOST: dict.fromkeys(MESSAGES, IGNORED) | ALWAYS,
    Phase.LEAVING: dict.fromkeys(MESSAGES, IGNORED),
    Phase.FAILED: dict.fromkeys(MESSAGES, IGNORED),
}
"""The effect of each message in each phase; messages that are not listed are refused. A registered worker registers
again at the end of any epoch, because the scheduler has dropped its registration."""


def in_any_phase(phase: Phase) -> Session:
    if phase not in (Phase.LEAVING, Phase.FAILED):
        return in_phase(phase)
    session = in_phase(Phase.SERVING)
    if phase is Phase.LEAVING:
        session.on(Shutdown())
    else:
        session.failed()
    return session


@pytest.mark.parametrize("name", MESSAGES)
@pytest.mark.parametrize("phase", Phase)
def test_effect_of_each_message_in_each_phase(phase: Phase, name: str) -> None:
    session, message = in_any_phase(phase), MESSAGES[name]
    before = dict(vars(session))
    effect = TABLE[phase].get(name, REFUSED)
    if effect is REFUSED:
        with pytest.raises(ProtocolError, match=f"is not allowed while {phase.name}"):
            session.on(message)
        assert vars(session) == before, "a refused message changes nothing"
        return
    action = session.on(message)
    if effect is FAULT:
        assert isinstance(action, StepFault)
        assert session.phase is Phase.FAILED
        return
    assert action == (None if effect is IGNORED else message)
    assert effect is USED or vars(session) == before


def test_a_load_that_is_repeated_or_behind_its_step_is_ignored(session: Session) -> None:
    """Its blocks may have been given away since."""
    session.on(plan(1))
    loads = [LoadBlocks(3, next_step, ticket, b"", b"") for next_step, ticket in ((2, 1), (2, 1), (1, 2), (2, 3))]
    assert [session.on(load) for load in loads] == [loads[0], None, None, loads[3]]


def test_masks_come_at_any_time_behind_their_plan(session: Session) -> None:
    session.leaves_rows_out = True
    assert session.on(plan(1, grammar=True)) == plan(1, grammar=True)
    assert session.on(plan(2)) == plan(2)
    for step_id in (1, 2, 1):
        assert session.on(grammar(step_id)) == grammar(step_id)
    assert session.on(grammar(3)) == StepFault(3, 3, "a grammar for step 3, which has not arrived")
