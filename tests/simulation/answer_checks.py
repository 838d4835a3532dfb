"""Checks of what the frontends of a simulated world receive: each token once and equal to the reference, one finish."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from protocol.codec import Decoder, encode, pack, unpack
from protocol.lora import LoRAAdapter
from protocol.media import Media
from protocol.requests import Finish, FinishReason, RequestOutputs
from protocol.rows import LogprobRows, OutputRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.core.request import Request
from tests.simulation.drafts import Speculating
from tests.simulation.grammar import REFUSED, Automaton
from tests.simulation.hashing import distinct_tokens
from tests.simulation.invariants import InvariantError, demand
from tests.simulation.reference import ExpectedAnswer, reference

NO_ANSWER = ExpectedAnswer([], FinishReason.ABORT, None, {})
_OUTPUTS: Decoder[RequestOutputs] = Decoder(RequestOutputs)
_ANSWERS: dict[tuple[object, ...], ExpectedAnswer] = {}
"""Other depths, epochs and faults play the same requests."""
MOST_ANSWERS = 1000


SAME, TIMES, WORK = "same tokens", "times", "exact work"


@dataclass(eq=False)
class SimulatedStream:
    """One request, as its frontend receives it."""

    frontend: int
    number: int
    prompt: list[int]
    params: SamplingParams
    structured: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE
    lora: LoRAAdapter | None = None
    media: Media | None = None
    replayed: int = 0
    """Output tokens that were delivered before this request (a replay)."""
    answer: ExpectedAnswer = NO_ANSWER
    tokens: list[int] = field(default_factory=list)
    """Output tokens, including replayed ones."""
    finish: Finish | None = None
    aborted: bool = False
    scheduled: int = 0
    """Tokens scheduled over the request's life."""
    steps: int = 0
    hit: int = 0
    """Tokens found in the prefix cache by the first step."""
    cached: list[int] = field(default_factory=list)
    """Reports of the cached tokens of its prompt: one, with the first token."""
    request: Request | None = None
    voids: int = 0
    """Epochs that ended while it was running."""
    doomed: bool = False
    """True: it must end with an error, because it does not fit or no workers are left."""
    scored: set[int] = field(default_factory=set)
    """Positions whose log-probabilities have arrived."""
    embedded: bool = False
    planned_drafts: int = 0
    """Drafts planned in all its rows."""
    drafted: int = 0
    """Verified drafts of rows whose tokens were delivered."""
    accepted: int = 0
    """Accepted drafts of these rows."""
    in_vain: int = 0
    """Rows that were left out: each computes the last known token once more."""

    @property
    def key(self) -> tuple[int, int]:
        return self.frontend, self.number

    @property
    def name(self) -> str:
        return f"{self.frontend}/{self.number}"

    @property
    def open(self) -> bool:
        return self.finish is None and not self.aborted

    @property
    def refused(self) -> bool:
        """Return whether its grammar cannot be compiled."""
        return self.structured is not None and self.structured.text == REFUSED

    def fits(self, limits: Limits) -> bool:
        """Return whether a group with these limits can go on with the request."""
        room = len(self.prompt) + len(self.tokens) < limits.max_model_len
        most = limits.positions(len(self.prompt), self.params)
        items = () if self.media is None else self.media.items
        return room and most <= limits.kv_capacity and all(item.length <= limits.encoder_budget for item in items)

    def grammar(self, vocab: int) -> Automaton | None:
        """Return a fresh automaton, or None without a grammar."""
        if self.structured is None or self.refused:
            return None
        return Automaton.from_params(self.structured, vocab, self.params.eos_token_ids)

    def expected(self, max_model_len: int, vocab: int) -> ExpectedAnswer:
        media, p = self.media, self.params
        seen = None if media is None else tuple(distinct_tokens(unpack(pack(self.prompt)), media).tolist())
        key = (tuple(self.prompt), seen, p, self.structured, self.pooling, max_model_len, vocab)
        if key not in _ANSWERS:
            if len(_ANSWERS) == MOST_ANSWERS:
                _ANSWERS.clear()
            grammar = self.grammar(vocab)
            _ANSWERS[key] = reference(self.prompt, p, max_model_len, vocab, grammar, self.pooling, seen)
        return _ANSWERS[key]


class AnswerChecks:
    """The frontends of a world: requests that are open, and checks of each message that they receive."""

    def __init__(
        self, engine: EngineCore, speculating: Speculating | None, coverage: Counter[str], log: Callable[..., None]
    ) -> None:
        self._engine, self._speculating, self._coverage, self._log = engine, speculating, coverage, log
        self.open: dict[tuple[int, int], SimulatedStream] = {}
        """By frontend and number."""

    def receive(self) -> None:
        """Receive what the engine has published."""
        for frontend, message in self._engine.take_outputs():
            outputs = _OUTPUTS.decode(encode(message))
            before: dict[SimulatedStream, int] = {}
            if outputs.logprobs is not None:
                before = {stream: len(stream.tokens) for stream in self.open.values()}
            for number, index, token in zip(*map(np.ndarray.tolist, OutputRows.from_message(outputs)), strict=True):
                self._on_token(self._stream(frontend, number), index, token)
            if outputs.logprobs is not None:
                self._on_logprobs(frontend, LogprobRows.from_message(outputs.logprobs), before)
            for embedding in outputs.embeddings:
                stream = self._stream(frontend, embedding.number)
                is_own = embedding.values == stream.answer.embedding and not stream.embedded
                demand(is_own, SAME, "{} got another embedding than its own, or two", stream.name)
                stream.embedded = True
            for number, count in outputs.cached.items():
                self._stream(frontend, number).cached.append(count)
            for finish in outputs.finished:
                self._on_finish(self._stream(frontend, finish.number), finish)

    def _stream(self, frontend: int, number: int) -> SimulatedStream:
        stream = self.open.get((frontend, number))
        if stream is None:
            raise InvariantError(f"one finish: output for {frontend}/{number}, which has ended")
        return stream

    def _on_token(self, stream: SimulatedStream, index: int, token: int) -> None:
        known, wanted = len(stream.tokens), stream.answer.tokens[index : index + 1]
        demand(index == known, "step order", "{} got index {} after {} tokens", stream.name, index, known)
        demand(wanted == [token], SAME, "{} got token {} at {}, expected {}", stream.name, token, index, wanted)
        stream.tokens.append(token)

    def _on_logprobs(self, frontend: int, rows: LogprobRows, before: dict[SimulatedStream, int]) -> None:
        """Log-probabilities of an output token are in the message with the token, those of the prompt come before the
        first output token. After a preemption, those of the prompt may come again."""
        at = 0
        for number, position, count, rank in zip(
            rows.owners.view("uint32").tolist(), *(column.tolist() for column in rows[1:4]), strict=True
        ):
            stream = self._stream(frontend, number)
            index, again = position - len(stream.prompt), position in stream.scored
            ids, values = rows.token_ids[at : at + count], rows.values[at : at + count]
            at += count
            wanted = stream.answer.scores.get(position)
            is_same = wanted is not None and (rank, ids.tolist()) == (wanted.token_rank, wanted.token_ids.tolist())
            is_same = is_same and values.tobytes() == wanted.values.tobytes()
            got = stream.name, rank, ids, values, position, wanted
            demand(is_same, SAME, "{} got rank {}, {} {} at {}, expected {}", *got)
            refused = stream.answer.reason is FinishReason.ERROR and index == len(stream.answer.tokens)
            if index < 0:
                in_order = before[stream] <= stream.replayed or again
            else:
                in_order = (refused or before[stream] <= index < len(stream.tokens)) and not again
            demand(in_order, "step order", "{} got the log-probabilities of {} out of order", stream.name, position)
            self._coverage["prompt log-probabilities twice"] += again
            stream.scored.add(position)

    def _on_finish(self, stream: SimulatedStream, finish: Finish) -> None:
        self._log("finish", stream.name, finish)
        stream.finish = finish
        del self.open[stream.key]
        self._coverage[f"finishes: {finish.reason.name}"] += 1
        self._check_times(stream, finish)
        failed = finish.reason not in (FinishReason.STOP, FinishReason.LENGTH)
        if failed and stream.doomed:
            return
        ends_well = not stream.doomed and failed == (stream.answer.reason is FinishReason.ERROR)
        demand(ends_well, SAME, "{} finished with {}, doomed: {}", stream.name, finish, stream.doomed)
        got = (stream.tokens, finish.reason, finish.stop_reason)
        wanted = (stream.answer.tokens, stream.answer.reason, stream.answer.stop_reason)
        demand(got == wanted, SAME, "{} finished with {}, expected {}", stream.name, got, wanted)
        self._check_scores(stream)
        demand(stream.embedded or stream.pooling is Pooling.NONE, SAME, "{} got no embedding", stream.name)
        self._count_stop(stream, finish)
        self._check_scheduled(stream, finish)

    def _check_times(self, stream: SimulatedStream, finish: Finish) -> None:
        """Times are in order; those of events that did not happen are 0."""
        times = finish.times
        demand(times is not None and times.ended, TIMES, "{} ended, but its times are {}", stream.name, times)
        known = [t for t in (times.queued, times.scheduled, times.first_token, times.ended) if t]
        known.append(self._engine.store.now)
        in_order = known == sorted(known) and (stream.request is not None or len(known) <= 2)
        gave_tokens = len(stream.tokens) > stream.replayed
        matches = (times.first_token > 0) == gave_tokens and (times.scheduled > 0) == (stream.steps > 0)
        happened = stream.name, times, stream.steps, len(stream.tokens)
        demand(in_order and matches, TIMES, "{} has the times {}, with {} steps and {} tokens", *happened)

    def _check_scores(self, stream: SimulatedStream) -> None:
        """Each requested position arrived once, except those that were delivered before a replay."""
        first = len(stream.prompt)
        wanted = {p for p in stream.answer.scores if not first <= p < first + stream.replayed}
        if stream.answer.reason is FinishReason.ERROR:
            wanted.discard(first + len(stream.tokens))
            stream.scored.discard(first + len(stream.tokens))
        missing = wanted ^ stream.scored
        demand(not missing, SAME, "{} lacks log-probabilities of {}", stream.name, sorted(missing))
        self._coverage["log-probabilities"] += len(wanted)

    def _count_stop(self, stream: SimulatedStream, finish: Finish) -> None:
        if finish.reason is FinishReason.ERROR or stream.pooling is not Pooling.NONE:
            self._coverage["stops: grammar failed" if finish.message else f"embeddings: {stream.pooling.name}"] += 1
            return
        self._coverage["stops: matched by a grammar"] += stream.structured is not None
        if finish.reason is FinishReason.LENGTH:
            full = len(stream.prompt) + len(stream.tokens) == self._engine.epoch.limits.max_model_len
            self._coverage["stops: context" if full else "stops: max_tokens"] += 1
        else:
            self._coverage["stops: EOS" if finish.stop_reason is None else "stops: stop token"] += 1
            self._coverage["stops: on the last token"] += len(stream.tokens) == stream.params.max_tokens
            self._coverage["stops: on the first token"] += len(stream.tokens) == 1
        gate = set(stream.params.eos_token_ids + stream.params.stop_token_ids)
        self._coverage["stops held back by min_tokens"] += not gate.isdisjoint(stream.tokens[:-1])

    def _check_scheduled(self, stream: SimulatedStream, finish: Finish) -> None:
        """Exact work at every depth. An unforeseeable stop costs at most one token per further step."""
        cached, name = finish.num_cached_tokens, stream.name
        found = min(stream.hit, len(stream.prompt))
        demand(cached == found, WORK, "{} reports {} cached tokens, found {}", name, cached, found)
        reported = [cached] * (len(stream.tokens) > stream.replayed)
        demand(stream.cached == reported, WORK, "{} reported {} with its first token", name, stream.cached)
        drafts, counted = (finish.num_draft_tokens, finish.num_accepted_tokens), (stream.drafted, stream.accepted)
        demand(drafts == counted, WORK, "{} reports {} drafts and accepted ones, not {}", name, drafts, counted)
        if finish.num_preemptions or stream.voids or self._engine.store.counters["rollbacks_total"]:
            return
        one_more = stream.pooling is not Pooling.NONE or finish.reason is FinishReason.ERROR
        exact = len(stream.prompt) + len(stream.tokens) - 1 - stream.hit + one_more + stream.in_vain
        ahead = self._engine.queue.depth - 1
        slack = 0 if finish.reason is FinishReason.LENGTH else ahead // self._engine.epoch.limits.stages
        # Rejected drafts, drafts behind the end, steps in flight behind the end
        if self._speculating is not None:
            slack = stream.planned_drafts - stream.accepted + self._speculating.most + ahead
        work = name, stream.scheduled, exact, slack
        demand(exact <= stream.scheduled <= exact + slack, WORK, "{} was scheduled {} tokens, needed {} (+{})", *work)
