"""Conversion of the core's events into records, with tokens or without.

Without tokens, a recording contains what the decisions of the core depend on, and nothing that tells a text:

- a prompt: its length and the ids of its full blocks;
- a result: the number of tokens of each row, the stop token that ended a request, and the ids of filled blocks;
- parameters: without values that only workers read (logit bias, bad words, allowed tokens), with ids of stop tokens;
- a grammar: that it exists, whether it was compiled, and how many tokens matched.

Log-probabilities and embeddings are never recorded: no decision depends on them. `Converter` serves the recorder and
the replay, so that both convert a decision in the same way.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from msgspec.structs import replace

from protocol.block_names import NamedBlocks
from protocol.codec import pack, unpack
from protocol.media import Media
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.steps import NO_DRAFT, ModelRunnerOutput
from services.scheduler.core import observer as events
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Record
from services.scheduler.recording.prefix_chains import PrefixChains
from services.scheduler.recording.records import AppliedRecord, ArrivalRecord, MaskRecord, OutcomeRecord, PlanRecord

NOT_RECORDED = (events.BlocksCached, events.BlocksEvicted, events.TierChanged)
"""Events that follow from others; whether they are emitted depends on the listeners."""


class Converter:
    """Converts the events of one core, in order."""

    def __init__(self, keeps_tokens: bool) -> None:
        self._keeps_tokens = keeps_tokens
        self._converters: dict[type, Callable[[Any], Record | None]] = {
            **dict.fromkeys(NOT_RECORDED, lambda _: None),
            events.RequestArrived: self.arrival,
            events.StepDispatched: self.plan,
            events.GrammarSent: _masks,
            events.LoadSent: self.load,
            events.SlotsReleased: self.release,
            events.ResultArrived: self.result,
            events.ResultApplied: _applied,
        }
        """Events that are not recorded as they are."""

    def records(self, event: events.Event) -> list[Record]:
        """Return the records of an event, none if it is not recorded."""
        converter = self._converters.get(type(event))
        record = event if converter is None else converter(event)
        return [] if record is None else [record]  # type: ignore[list-item]  # without a converter it is a `Record`

    def arrival(self, event: events.RequestArrived) -> Record:
        media = event.message.media
        return event if media is None else replace(event, message=replace(event.message, media=_shape(media)))

    def plan(self, event: events.StepDispatched) -> PlanRecord:
        plan = event.plan
        num_tokens = tuple(len(new.token_ids) // 4 for new in plan.new)
        if any(row.media is not None for row in plan.new):
            plan = replace(plan, new=[replace(row, media=None) for row in plan.new])
        if not self._keeps_tokens and (plan.new or plan.whole is not None or plan.completes is not None):
            new = [replace(row, token_ids=b"", params=PLAIN) for row in plan.new]
            plan = replace(plan, new=new, whole=_without_names(plan.whole), completes=None)
        return PlanRecord(plan, num_tokens, event.requests, event.steps_in_flight, event.num_running, event.num_waiting)

    def release(self, event: events.SlotsReleased) -> events.SlotsReleased:
        if self._keeps_tokens or event.message.whole is None:
            return event
        return events.SlotsReleased(replace(event.message, whole=_without_names(event.message.whole)))

    def load(self, event: events.LoadSent) -> events.LoadSent:
        return event if self._keeps_tokens else events.LoadSent(replace(event.message, names=b""))

    def result(self, event: events.ResultArrived) -> events.ResultArrived:
        result = event.result
        if result.logprobs is not None or result.embeddings:
            result = replace(result, logprobs=None, embeddings=b"")
        if not self._keeps_tokens:
            result = without_tokens(result)
        return events.ResultArrived(result)


class TokenRemover(Converter):
    """Converts the events of one core into a recording without tokens."""

    def __init__(self, limits: Limits, vocab_size: int) -> None:
        super().__init__(keeps_tokens=False)
        self._chains = PrefixChains(limits)
        self._vocab_size = vocab_size

    def records(self, event: events.Event) -> list[Record]:
        if isinstance(event, events.RequestArrived):
            return [self._arrival(event)]
        records = super().records(event)
        match event:
            case events.EpochStarted(limits=limits) | events.CoreRestarted(limits=limits):
                self._chains.start_epoch(limits)
            case events.StepDispatched(plan=plan, requests=requests):
                for new, key in zip(plan.new, requests, strict=True):
                    self._chains.enter(new.slot, key, unpack(new.token_ids))
            case events.RequestRefused() | events.RequestFinished():
                self._chains.forget((event.frontend, event.finish.number))
            case events.ResultApplied():
                records.append(self._outcome(event))
        return records

    def _arrival(self, event: events.RequestArrived) -> ArrivalRecord:
        message, plain = event.message, _without_content(event.message, self._vocab_size)
        if len(message.token_ids) % 4:
            return ArrivalRecord(event.frontend, replace(plain, token_ids=b"\0"), 0, b"")
        tokens = unpack(message.token_ids)
        outside = tokens[(tokens < 0) | (tokens >= self._vocab_size)]
        if len(outside):
            plain = replace(plain, token_ids=pack(outside[:1]))
        blocks = self._chains.arrive(event.frontend, message)
        return ArrivalRecord(event.frontend, plain, len(tokens), blocks)

    def _outcome(self, event: events.ResultApplied) -> OutcomeRecord:
        step, token_ids = event.step, unpack(event.result.token_ids)
        rows, widths = step.slots[step.samples], unpack(event.result.counts)
        first = np.cumsum(widths, dtype=np.int32) - widths
        totals, block_rows, blocks = self._chains.append(rows, event.counts, token_ids, first)
        stops = np.flatnonzero(event.stops)
        last = event.counts[stops] - 1
        return OutcomeRecord(
            pack(rows.astype(np.int32)),
            pack(totals),
            pack(stops.astype(np.int32)),
            pack(totals[stops] + last),
            pack(token_ids[first[stops] + last]),
            pack(block_rows),
            blocks,
        )


PLAIN = SamplingParams(1)
"""Parameters in plans without tokens: those of the request are in its arrival."""


def _without_names(whole: NamedBlocks | None) -> NamedBlocks | None:
    """Names of blocks are hashes of tokens."""
    return None if whole is None else replace(whole, names=b"")


def without_tokens(result: ModelRunnerOutput) -> ModelRunnerOutput:
    """Return the result with its counts and times; drafts only tell where there is one."""
    drafts = unpack(result.draft_token_ids[: len(result.draft_token_ids) // 4 * 4])
    shape = pack(np.where(drafts < 0, np.int32(NO_DRAFT), np.int32(0))) if len(drafts) else b""
    return replace(result, token_ids=b"", draft_token_ids=shape)


def _without_content(message: GenerateRequest, vocab_size: int) -> GenerateRequest:
    structured = message.structured
    return replace(
        message,
        token_ids=b"",
        params=_without_values(message.params, vocab_size),
        cache_salt="",
        structured=None if structured is None else StructuredOutputParams(structured.kind),
        media=None if message.media is None else _shape(message.media, is_named=False),
    )


def _shape(media: Media, is_named: bool = True) -> Media:
    """Return the items without the encoder's inputs, and without what names their contents unless `is_named`."""
    return Media([item if is_named else replace(item, digest="") for item in media.items])


def _without_values(params: SamplingParams, vocab_size: int) -> SamplingParams:
    """Remove the values that only workers read. Ids outside the vocabulary stay: the request is refused for them."""
    if not (params.logit_bias or params.bad_words or params.allowed_token_ids):
        return params
    biased = [token for token, _ in params.logit_bias if token >= vocab_size]
    bad = [token for word in params.bad_words for token in word if token >= vocab_size]
    allowed = unpack(params.allowed_token_ids)
    outside = allowed[(allowed < 0) | (allowed >= vocab_size)]
    return replace(
        params,
        logit_bias=tuple((token, 0.0) for token in biased[:1]),
        bad_words=tuple((token,) for token in bad[:1]),
        allowed_token_ids=pack(outside[:1]) if len(outside) else b"",
    )


def _masks(event: events.GrammarSent) -> MaskRecord:
    message = event.message
    return MaskRecord(message.epoch, message.step_id, message.slots, message.counts)


def _applied(event: events.ResultApplied) -> AppliedRecord:
    step, result = event.step, event.result
    return AppliedRecord(result.epoch, step.step_id, pack(event.states), pack(event.counts), event.ended)
