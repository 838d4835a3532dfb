"""Replay of a recording: its inbound events enter a core, and the decisions of that core are compared with its own."""

from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from itertools import chain, takewhile, tee, zip_longest
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from protocol.codec import ProtocolError, pack, unpack
from protocol.requests import FinishReason
from protocol.steps import ModelRunnerOutput
from services.scheduler.build import CoreFactory, CoreStart
from services.scheduler.core import observer as events
from services.scheduler.core.engine import StallError
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.results import UnknownResult
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.recording import stand_ins
from services.scheduler.recording.conversion import Converter
from services.scheduler.recording.grammar import RecordedCompiler, RecordedGrammar, RecordedMaskMaker
from services.scheduler.recording.records import AppliedRecord, ArrivalRecord, MaskRecord, OutcomeRecord, PlanRecord
from services.scheduler.recording.segments import EventRecording, RecordingError
from services.scheduler.recording.settings import settings_of


@dataclass
class Turn:
    """One inbound event and the decisions that it caused."""

    cause: events.InboundEvent
    decisions: list[events.Decision] = field(default_factory=list)
    outcomes: dict[tuple[int, int], OutcomeRecord] = field(default_factory=dict)
    """(epoch, step id) -> what stands in for the tokens of an applied result."""
    interrupted: bool = False
    """The dispatch ended behind the last decision."""


class Difference(NamedTuple):
    """The first decision that differs."""

    turn: int
    """Number of the inbound event, from 0."""
    now: float
    """The scheduler's clock, seconds."""
    cause: events.InboundEvent
    recorded: events.Decision | None
    """None: the recorded core made no further decision."""
    replayed: events.Decision | str | None
    """A text: the core raised this error."""


def turns_of(records: Iterable[events.Record]) -> Iterator[Turn]:
    """Group records by the inbound event that caused them. A turn that the end of the recording may have cut is left
    out."""
    turn: Turn | None = None
    for record in records:
        match record:
            case events.DispatchInterrupted():
                if turn is not None:
                    turn.interrupted = True
            case OutcomeRecord() if turn is not None:
                applied = turn.decisions[-1]
                assert isinstance(applied, AppliedRecord)
                turn.outcomes[applied.epoch, applied.step_id] = record
            case events.InboundEvent():
                if turn is not None:
                    yield turn
                turn = Turn(record)
            case events.Decision() if turn is not None:
                turn.decisions.append(record)


def _epoch(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Iterate over the next turns, up to the end of the epoch. They stay in `turns`, an iterator of `itertools.tee`."""
    ends = (events.EpochEnded, events.AllRequestsFailed)
    return takewhile(lambda turn: not isinstance(turn.cause, ends), copy(turns))


class Replay:
    """One replay. `core` is the production core with the recorded settings."""

    def __init__(self, recording: EventRecording, factory: CoreFactory | None = None) -> None:
        """
        Args:
            factory: None: that of the recorded settings.

        Raises:
            RecordingError: this release does not have the recorded settings.
            ValueError: the recorded policy cannot be used.
        """
        self._recording, self._header = recording, (h := recording.header)
        self._factory = factory or CoreFactory(settings_of(h))
        self._converter = Converter(h.has_tokens)
        self._decisions: list[events.Decision] = []
        self.num_plans = self.num_events = 0
        compiler = RecordedCompiler() if h.compiles else None
        masks = RecordedMaskMaker() if h.late_masks else INLINE_MASKS
        self.core = self._factory.core(CoreStart(h.limits, h.epoch, h.vocab_size, h.hidden_size, compiler, masks))
        self.core.observers.add(self)

    def observe(self, event: events.Event) -> None:
        if not isinstance(event, events.InboundEvent):
            records = self._converter.records(event)
            self._decisions += [record for record in records if isinstance(record, events.Decision)]

    # -- turns ---------------------------------------------------------------------------------------------------

    def run(self) -> Difference | None:
        """Replay everything from the first start. Return the first difference, or None.

        Raises: RecordingError, also if there is no start.
        """
        (turns,) = tee(turns_of(self._recording.records_from_start()), 1)
        for number, turn in enumerate(turns):
            error = self._replay(turn, turns)
            self.num_events += 1
            self.num_plans += sum(isinstance(record, PlanRecord) for record in turn.decisions)
            pairs = [*zip_longest(turn.decisions, self._decisions)]
            for recorded, replayed in pairs if error is None else [*pairs, (None, error)]:
                if recorded != replayed:
                    return Difference(number, self.core.store.now, turn.cause, recorded, replayed)
        return None

    def _replay(self, turn: Turn, turns: Iterator[Turn]) -> str | None:
        """Let the event of the turn enter the core. Return the error that it raised, if the recorded core cannot have
        raised it."""
        self._decisions = []
        try:
            self._enter(turn, turns)
        except RecordingError:
            raise
        except (ProtocolError, StallError, UnknownResult):  # the shell goes on after these
            return None
        except Exception as error:
            return _text(error)
        return None

    def _enter(self, turn: Turn, turns: Iterator[Turn]) -> None:
        core = self.core
        match turn.cause:
            case events.TimeAdvanced(now=now):
                core.take_outputs()
                core.advance(now)
            case events.RequestArrived(frontend=frontend, message=message):
                core.add(frontend, message)
            case ArrivalRecord():
                self._arrive(turn.cause)
            case events.RequestsAborted(frontend=frontend, numbers=numbers):
                core.abort(frontend, list(numbers))
            case events.FrontendLeft(frontend=frontend):
                core.drop_frontend(frontend)
            case events.GrammarReady():
                self._grammar(turn.cause, turn.decisions)
            case events.MasksReady(ticket=ticket, num_masks=num_masks):
                words = -(-self._header.vocab_size // 32)
                core.on_masks(ticket, np.full((num_masks, words), -1, np.int32))
            case events.ResultArrived(result=result):
                self._set_outcomes(turn)
                core.on_result(self._complete(result, turn, turns))
            case events.DispatchStarted():
                self._dispatch(turn)
            case events.PrefixCacheReset(reset_running=reset_running):
                core.prefix_cache.reset(reset_running)
            case events.EpochEnded(is_fault=is_fault):
                core.end_epoch(is_fault)
            case events.EpochStarted(epoch=epoch, limits=limits):
                core.start_epoch(limits, self._factory.policy(limits), epoch)
            case events.BlocksAdopted(held=held):
                core.prefix_cache.adopt(held)
            case events.BlocksFilled(epoch=epoch, ticket=ticket, count=count):
                core.prefix_cache.on_loaded(epoch, ticket, count)
            case events.AllRequestsFailed(error=error):
                core.fail_all(error)
            case events.CoreRestarted(limits=limits):
                core.take_outputs()
                core.restart(turn.cause, self._factory.policy(limits), self._factory.drafting())

    # -- requests ------------------------------------------------------------------------------------------------

    def _arrive(self, record: ArrivalRecord) -> None:
        message = stand_ins.arrival(record, self._header.vocab_size)
        self.core.add(record.frontend, message)
        if (request := self.core.requests.get((record.frontend, message.number))) is not None:
            request.block_hashes = stand_ins.block_names(record.blocks)

    def _grammar(self, event: events.GrammarReady, decisions: Iterable[events.Decision]) -> None:
        if event.error:
            self.core.on_grammar(event.ticket, event.error)
            return
        ends = [record.finish for record in decisions if isinstance(record, events.RequestFinished)]
        mismatch = any(finish.reason is FinishReason.INVALID for finish in ends)
        grammar = RecordedGrammar(0 if mismatch else self._header.limits.max_model_len)
        self.core.on_grammar(event.ticket, grammar)
        grammar.num_matching = 0

    # -- steps ---------------------------------------------------------------------------------------------------

    def _dispatch(self, turn: Turn) -> None:
        messages = self.core.dispatch()
        for record in turn.decisions:
            if isinstance(record, (PlanRecord, MaskRecord, events.LoadSent, events.SlotsReleased)):
                self._prepare(record)
                if next(messages, None) is None:
                    return
        if turn.interrupted:
            messages.close()
        else:
            for _ in messages:
                pass

    def _prepare(self, record: PlanRecord | MaskRecord | events.LoadSent | events.SlotsReleased) -> None:
        """Set what the message depends on beside the state of the core: subscriptions, and grammars."""
        match record:
            case PlanRecord(plan=plan):
                self.core.observers.rank_times = plan.report_times
            case MaskRecord(slots=slots, counts=counts) if counts:
                for slot, count in zip(unpack(slots).tolist(), unpack(counts).tolist(), strict=True):
                    if (grammar := self._grammar_of(slot)) is not None:
                        grammar.num_masks = count

    def _grammar_of(self, slot: int) -> RecordedGrammar | None:
        owner = self.core.epoch.slots.owner[slot]
        return owner.grammar if owner is not None and isinstance(owner.grammar, RecordedGrammar) else None

    def _step(self, epoch: int, step_id: int) -> InflightStep | None:
        if epoch != self.core.epoch.number:
            return None
        return next((step for step in self.core.queue.steps if step.step_id == step_id), None)

    def _set_outcomes(self, turn: Turn) -> None:
        """Let grammars match as many tokens as were appended, and name the blocks that were filled."""
        slots = self.core.epoch.slots
        for record in turn.decisions:
            if not isinstance(record, AppliedRecord) or (step := self._step(record.epoch, record.step_id)) is None:
                continue
            rows, counts = step.slots[step.samples], unpack(record.counts)
            for row in np.flatnonzero(slots.constrained.take(rows)).tolist():
                if (grammar := self._grammar_of(int(rows[row]))) is not None:
                    grammar.num_matching += int(counts[row])
            if (outcome := turn.outcomes.get((record.epoch, record.step_id))) is not None:
                for slot, name in stand_ins.filled_blocks(outcome):
                    slots.request(slot).block_hashes.append(name)

    def _complete(self, result: ModelRunnerOutput, turn: Turn, turns: Iterator[Turn]) -> ModelRunnerOutput:
        """Return the result with what was not recorded of it."""
        step = self._step(result.epoch, result.step_id)
        if step is None:
            return result
        refused, outcome = _fate(result, chain([turn], _epoch(turns)))
        if refused:
            return replace(result, slots=b"")  # which is refused again
        if slots := result.embedding_slots:
            result = replace(result, embeddings=bytes(len(slots) * self._header.hidden_size))
        if self._header.has_tokens:
            return result
        owners = map(self.core.epoch.slots.request, step.slots[step.samples].tolist())
        fillers = [stand_ins.filler(owner.params, self._header.vocab_size) for owner in owners]
        return replace(result, token_ids=pack(stand_ins.outputs(unpack(result.counts), fillers, outcome)))


def _fate(result: ModelRunnerOutput, turns: Iterable[Turn]) -> tuple[bool, OutcomeRecord | None]:
    """Return whether the result was refused, and what was applied of it. It waits if it came before that of an older
    step."""
    key = (result.epoch, result.step_id)
    for turn in turns:
        for record in turn.decisions:
            if isinstance(record, (AppliedRecord, events.ResultRefused)) and (record.epoch, record.step_id) == key:
                return isinstance(record, events.ResultRefused), turn.outcomes.get(key)
    return False, None


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
