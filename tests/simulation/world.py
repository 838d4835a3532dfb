"""A simulated world around the production `EngineCore`: frontends, the oracle worker, and time under the test's
control.

Every plan, result and output crosses the codec, so messages in flight are immutable snapshots. The world observes the
core: after every transition the checker recomputes the rules. Every delivered token is compared with the reference.
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import cache
from random import Random

import msgspec

from protocol.block_names import NamedBlocks, names_of, split_names
from protocol.codec import Decoder, encode, pack, unpack
from protocol.kv_groups import name_in_group
from protocol.lora import LoRAAdapter
from protocol.media import Media
from protocol.requests import Finish, FinishReason, GenerateRequest, RequestOutputs
from protocol.rows import LogprobRows, ResultRows
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.steps import GrammarOutput, KeepPins, LoadBlocks, ModelRunnerOutput, ReleaseSlots, SchedulerOutput
from services.scheduler.core.drafting import NO_DRAFTING
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import (
    DispatchStarted,
    Event,
    Observer,
    PreemptionCause,
    RequestPreempted,
    ResultApplied,
    StepDispatched,
)
from services.scheduler.core.pins import PinRefused
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.slots import DELIVER, DROP, LIVE
from services.scheduler.core.store import RequestStore
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.membership.epoch import common_blocks
from services.scheduler.policies import BatchingPolicy, ChunkedPolicy, PhasedPolicy
from services.worker.kv_memory import BlockNames
from tests.simulation.budgets import WatchedPolicy
from tests.simulation.drafts import Speculating
from tests.simulation.grammar import REFUSED, Automaton, Compilation, LateMasks
from tests.simulation.hashing import distinct_tokens
from tests.simulation.invariants import Checker, demand
from tests.simulation.oracle import TORN, OracleWorker, always
from tests.simulation.reference import HIDDEN_SIZE, ExpectedAnswer, reference
from tests.simulation.stage_pipeline import StagePipeline
from tests.simulation.tier import LoadUnderWay, SimulatedTier

EOS = 1
"""The EOS token of every request that does not ignore it."""
NO_ANSWER = ExpectedAnswer([], FinishReason.ABORT, None, {})
_RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)
_PLANS: Decoder[SchedulerOutput] = Decoder(SchedulerOutput)
_OUTPUTS: Decoder[RequestOutputs] = Decoder(RequestOutputs)
_ANSWERS: dict[tuple[object, ...], ExpectedAnswer] = {}
"""Other depths, epochs and faults play the same requests."""
MOST_ANSWERS = 1000


class DeliveryError(AssertionError):
    """A frontend received something else than its answer, each token once, and one finish."""


def params(
    max_tokens: int, *stop: int, eos: bool = True, min_tokens: int = 0, seed: int | None = None
) -> SamplingParams:
    """Sampling parameters of a request; sampled if it has a seed, else greedy."""
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if seed is None else 1.0,
        seed=seed or 0,
        min_tokens=min_tokens,
        eos_token_ids=(EOS,) if eos else (),
        stop_token_ids=stop,
    )


@cache
def _token_of(seed: int, position: int) -> int:
    return Random(f"{seed}/{position}").randrange(64)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return [_token_of(seed, position) for position in range(length)]


@dataclass(eq=False)
class SimulatedStream:
    """One request, as its frontend receives it."""

    frontend: int
    number: int
    prompt: list[int]
    params: SamplingParams
    answer: ExpectedAnswer
    replayed: int
    """Output tokens that were delivered before this request (a replay)."""
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
    structured: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE
    scored: set[int] = field(default_factory=set)
    """Positions whose log-probabilities have arrived."""
    lora: LoRAAdapter | None = None
    media: Media | None = None
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
    def open(self) -> bool:
        return self.finish is None and not self.aborted

    @property
    def refused(self) -> bool:
        """Return whether its grammar cannot be compiled."""
        return self.structured is not None and self.structured.text == REFUSED

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


class World:
    def __init__(
        self,
        limits: Limits,
        depth: int,
        vocab: int = 64,
        use_priority: bool = False,
        policy: BatchingPolicy | None = None,
        trace: Callable[[str], None] | None = None,
        conserves_work: bool = True,
        speculating: Speculating | None = None,
        seed: int = 0,
        observer: Observer | None = None,
        late_masks: bool = False,
        tier: SimulatedTier | None = None,
        loads: Callable[[], bool] = always,
    ) -> None:
        """A world with one epoch of workers.

        Args:
            loads: whether all ranks can load the adapter of a request that enters.
            late_masks: masks are made when `masks_made` is called, not at once.
            conserves_work: the policy leaves no step empty in which a request could be computed (work conservation).
            seed: of the lengths that `speculating` draws.
            observer: receives every event of the core before the world does.
            tier: None: the workers have none.
        """
        limits = limits if speculating is None else speculating.limits(limits, depth)
        self.limits, self.depth, self.vocab, self.speculating = limits, depth, vocab, speculating
        self.conserves_work = conserves_work
        self.tier = tier
        self.policy = WatchedPolicy(policy or ChunkedPolicy())
        self.compilation = Compilation(vocab)
        self.masks = LateMasks()
        self.engine = EngineCore(
            limits,
            self.policy,
            depth,
            vocab,
            drafting=NO_DRAFTING if speculating is None else speculating.drafting(seed),
            use_priority=use_priority,
            compiler=self.compilation,
            mask_maker=self.masks if late_masks else INLINE_MASKS,
            hidden_size=HIDDEN_SIZE,
        )
        if observer is not None:
            self.engine.observers.add(observer)
        self.engine.observers.add(self)
        self._of_worker = speculating, self._future, loads
        self.worker = OracleWorker(limits, vocab, 1, *self._of_worker)
        self.names = BlockNames.empty(limits.num_blocks, limits.block_size, len(limits.groups))
        """The names of blocks that the workers keep."""
        self.dropped: set[bytes] = set()
        """Names of blocks that were dropped, on the workers too, and not computed since."""
        self.pipeline = StagePipeline(limits.stages)
        self.checker = Checker(self.engine)
        self.lost = False
        """True: the epoch has ended and no other has begun."""
        self.admitting = True
        """True: no request was preempted since the last step was dispatched; False: the next step admits nobody."""
        self.even = True
        """True: all stages took the same time for every step so far."""
        self.coverage: Counter[str] = Counter()
        self.streams: list[SimulatedStream] = []
        self.pending: dict[int, bytes] = {}
        """step_id -> result on its way to the scheduler."""
        self.delivered: deque[bytes] = deque(maxlen=8)
        self.plans: list[SchedulerOutput] = []
        self.orphans: deque[bytes] = deque()
        """Results of epochs that have ended."""
        self.expected_stale = 0
        self._rows: dict[int, list[SimulatedStream]] = {}
        """step_id -> streams of its sampling rows, of steps in flight."""
        self._by_key: dict[tuple[int, int], SimulatedStream] = {}
        self._by_request: dict[Request, SimulatedStream] = {}
        self._trace = trace

    def _future(self, slot: int) -> list[int]:
        stream = self._by_request[self.epoch.slots.request(slot)]
        return stream.prompt + stream.answer.tokens

    @property
    def store(self) -> RequestStore:
        return self.engine.store

    @property
    def epoch(self) -> EpochState:
        return self.engine.epoch

    def log(self, *parts: object) -> None:
        if self._trace is not None:
            self._trace(" ".join(map(str, parts)))

    # -- frontends -----------------------------------------------------------------------------------------------

    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        frontend: int = 0,
        number: int | None = None,
        priority: int = 0,
        salt: str = "",
        replayed: int = 0,
        structured: StructuredOutputParams | None = None,
        pooling: Pooling = Pooling.NONE,
        lora: LoRAAdapter | None = None,
        asks_peer: bool = False,
        media: Media | None = None,
    ) -> SimulatedStream:
        """Send a request; `replayed` of its output tokens count as delivered before.

        `asks_peer`: another engine may have blocks of it."""
        number = len(self.streams) if number is None else number
        stream = SimulatedStream(frontend, number, prompt, sampling, NO_ANSWER, replayed)
        stream.structured, stream.pooling, stream.lora = structured, pooling, lora
        stream.media = media
        stream.answer = stream.expected(self.limits.max_model_len, self.vocab)
        stream.tokens += stream.answer.tokens[:replayed]
        message = GenerateRequest(
            number,
            pack(prompt + stream.tokens),
            len(prompt),
            sampling,
            priority,
            salt,
            f"sim-{number}",
            structured,
            pooling,
            lora=lora,
            kv_peers=["peer"] if asks_peer else [],
            media=media,
        )
        self.log(
            "add",
            f"{frontend}/{number}",
            f"p={len(prompt)}",
            sampling,
            f"priority {priority}",
            f"replayed {replayed}",
            structured or "",
            pooling or "",
            lora.name if lora is not None else "",
            media.items if media is not None else "",
        )
        positions = self.limits.positions(len(prompt), sampling)
        stream.doomed = not self._fits(stream) or positions < len(prompt) or stream.refused
        self.coverage["arrivals between epochs"] += self.lost
        self.streams.append(stream)
        self._by_key[frontend, number] = stream
        self._advance()
        self.engine.add(frontend, message)
        stream.request = self.engine.requests.get((frontend, number))
        if stream.request is not None:
            self._by_request[stream.request] = stream
        else:
            self.publish()  # the refusal arrives before the next message of the frontend
        self._transition()
        return stream

    def compiled(self, which: int = 0) -> None:
        """Deliver the `which`-th grammar that is being compiled, or its error."""
        ticket = list(self.compilation.waiting)[which]
        known, grammar = ticket in self.store.compiling.by_ticket, self.compilation.finish(ticket)
        self.coverage[
            "grammars: " + ("of an ended request" if not known else "refused" if isinstance(grammar, str) else "ready")
        ] += 1
        self.coverage["grammars: ready between epochs"] += self.lost
        self.log("grammar", ticket, grammar if isinstance(grammar, str) else "ready")
        self.engine.on_grammar(ticket, grammar)
        self._transition()
        self.publish()  # as the service does before it reads from frontends again

    def masks_made(self, which: int = 0) -> None:
        """Deliver the `which`-th masks that are being made."""
        ticket = list(self.masks.waiting)[which]
        self.coverage["masks: late"] += 1
        self.log("masks", ticket)
        self.engine.on_masks(ticket, self.masks.finish(ticket))
        self._transition()

    def leave_out(self) -> None:
        """The forward pass of the step that waits for masks has ended, and the worker goes on without its rows."""
        self.coverage["left out: steps"] += 1
        self.log("leave out")
        self._take_results(self.worker.leave_out())

    def _take_results(self, results: list[bytes]) -> None:
        """Take results from the worker, and let the plans that it has executed enter the pipeline."""
        for needs in self.worker.entered:
            if self.limits.stages > 1:
                self.pipeline.enter(needs)
        self.worker.entered.clear()
        for result in results:
            if self.limits.stages > 1:
                self.pipeline.sampled(result)
            else:
                self.pending[_RESULTS.decode(result).step_id] = result

    def abort(self, *streams: SimulatedStream) -> None:
        for stream in streams:
            self.coverage[f"aborts: {self.stage(stream)}"] += 1
            self.coverage["aborts between epochs"] += self.lost and stream.open
            self.log("abort", f"{stream.frontend}/{stream.number}", self.stage(stream))
            current = self._by_key.get((stream.frontend, stream.number))
            if current in (None, stream):
                stream.aborted = stream.aborted or stream.finish is None
                self._by_key.pop((stream.frontend, stream.number), None)
                self.engine.abort(stream.frontend, [stream.number])
                self._transition()

    def drop_frontend(self, frontend: int) -> None:
        self.log("drop frontend", frontend)
        for key in [key for key in self._by_key if key[0] == frontend]:
            self._by_key.pop(key).aborted = True
            self.coverage["frontend drops"] += 1
        self.engine.drop_frontend(frontend)
        self._transition()

    def preempt(self, stream: SimulatedStream, stale: int = DELIVER) -> None:
        """Preempt a running request, whatever the scheduler would do."""
        self.engine.lifecycle.preempt(stream.request.slot, PreemptionCause.RESET, stale)
        self._transition()

    def is_open(self, frontend: int, number: int) -> bool:
        return (frontend, number) in self._by_key

    def reset_prefix_cache(self, reset_running: bool) -> None:
        self.log("reset prefix cache", "with running" if reset_running else "")
        if len(self.engine.queue) and len(self.epoch.running):
            self.coverage[f"resets in flight: running={reset_running}"] += 1
        self.checker.on_blocks_forgotten()
        self.engine.prefix_cache.reset(reset_running)
        assert not self.epoch.kv.pool.by_hash
        self._transition()

    def names_of(self, stream: SimulatedStream, num_blocks: int) -> list[bytes]:
        """Return the names of the first blocks of a request's tokens so far."""
        size = self.limits.block_size
        tokens = pack((stream.prompt + stream.tokens)[: num_blocks * size])
        salt, items = ("", ()) if stream.request is None else (stream.request.cache_salt, stream.request.items)
        return names_of(salt, tokens, size, items)

    def pin(self, pin: str, names: list[bytes]) -> None:
        """Pin a prefix, which may be refused."""
        self.log("pin", pin, len(names))
        try:
            self.engine.prefix_cache.pin(pin, "", names)
        except PinRefused:
            self.coverage["pins: refused"] += 1
        self._transition()

    def unpin(self, pin: str) -> None:
        self.log("unpin", pin)
        self.engine.prefix_cache.unpin(pin)
        self._transition()

    def drop_blocks(self, names: list[bytes]) -> None:
        """Drop a prefix, in the cache at once, and on the workers with the next message."""
        self.log("drop", len(names))
        self.checker.on_blocks_forgotten()
        waits = sum(not set(load.names).isdisjoint(names) for load in self.store.loading)
        _, count = self.engine.prefix_cache.drop(names)
        self.coverage["drops: blocks"] += count
        self.coverage["drops: of a load"] += waits
        all_names = {name_in_group(name, g) for name in names for g in range(len(self.limits.groups))}
        assert all_names.isdisjoint(self.epoch.kv.pool.by_hash), "dropped block: one is found"
        assert all(all_names.isdisjoint(load.names) for load in self.store.loading), "dropped block: one will be loaded"
        self._transition()

    def load_ahead(self, names: list[bytes]) -> None:
        """Let the workers load a prefix of a request to come, with the next step."""
        self.log("load ahead", len(names))
        self.engine.prefix_cache.load_ahead(names, ["peer"])
        self._transition()

    def restart(self, policy: BatchingPolicy, seed: int) -> None:
        """Restart the empty core, as the service does for a recording."""
        self.policy = WatchedPolicy(policy)
        drafting = NO_DRAFTING if self.speculating is None else self.speculating.drafting(seed)
        self.engine.restart(self.engine.restart_point(), self.policy, drafting)
        self.coverage["restarts"] += 1
        self._transition()

    def stage(self, stream: SimulatedStream) -> str:
        """Return the state of a request, for coverage."""
        request, slots = stream.request, self.epoch.slots
        if request is None or request.status is RequestStatus.FINISHED:
            return "finished"
        if request in self.store.compiling.by_ticket.values():
            return "compiling"
        if request in self.store.loading.load_of:
            return "loading"
        if request.status is not RequestStatus.RUNNING:
            return "stale rows in flight" if request.stale_rows else request.status.name.lower()
        computed, inflight = int(slots.computed[request.slot]), int(slots.inflight[request.slot])
        if any(request.slot in step.unmasked for step in self.engine.queue.steps):
            return "sampling deferred"
        kind = "prefill" if computed < int(slots.tokens[request.slot]) or computed == inflight else "decode"
        return f"{kind} in flight" if inflight else f"{kind} idle"

    def fail_all(self, error: str) -> None:
        """The workers are lost for good. Results that were on their way may still arrive."""
        for stream in self._by_key.values():
            stream.doomed = stream.request is None or not stream.request.finished
        self.engine.fail_all(error)
        self.checker.on_void()
        self.checker.check()

    # -- epochs --------------------------------------------------------------------------------------------------

    def end_epoch(self, is_fault: bool = False) -> None:
        """The workers are lost. Their results may still arrive."""
        epoch, queue, happened = self.epoch, self.engine.queue, self.coverage
        self.log("end of epoch", epoch.number)
        happened["epochs: ended in flight"] += len(queue) > 0
        happened["epochs: ended with fences"] += bool(epoch.fences)
        happened["epochs: ended with stale rows"] += any(r.stale_rows for r in self.store.waiting)
        happened["epochs: ended with results on the way"] += bool(self.pending)
        happened["epochs: ended with results held back"] += bool(queue.results)
        happened["epochs: ended with a filled cache"] += bool(epoch.kv.pool.by_hash)
        happened["epochs: ended twice"] += self.lost
        happened["epochs: ended with a sampling deferred"] += bool(queue.unmasked)
        happened["epochs: ended with masks being made"] += bool(self.masks.waiting)
        for slot in epoch.running.tolist():
            self._by_request[epoch.slots.request(slot)].voids += 1
        self.orphans.extend(self.pending.values())
        self.orphans.extend(self.pipeline.take_results())
        self.pending.clear()
        self._rows.clear()
        self.worker.tear(self.checker.confirmed)
        self.coverage["epochs: ended with loads"] += len(self.store.loading)
        self.names.end_loads()
        self.lost = True
        self.engine.end_epoch(is_fault)
        self.checker.on_void()
        self._transition()
        assert not queue, "ledger: steps are in flight without workers"

    def start_epoch(
        self,
        limits: Limits,
        policy: BatchingPolicy,
        epoch: int | None = None,
        keeps_memory: Callable[[int], bool] | None = None,
    ) -> None:
        """Start an epoch of other workers. Requests that no longer fit must end with an error, all others with their
        answer.

        Args:
            keeps_memory: whether every rank still holds a block; None: the workers have new memory.
        """
        self.publish()
        for stream in self._by_key.values():
            known = stream.request.token_ids.tolist()
            assert known == stream.prompt + stream.tokens, (
                f"{stream.number}: confirmed tokens: some were lost or doubled"
            )
        if self.speculating is not None:
            limits = self.speculating.limits(limits, self.depth)
        more = limits.num_blocks - self.limits.num_blocks
        self.coverage["epochs: " + ("larger" if more > 0 else "smaller" if more else "of equal size")] += 1
        self.limits, self.lost, epoch = limits, False, epoch or self.epoch.number + 1
        self.log("epoch", epoch, limits)
        for stream in self._by_key.values():
            stream.doomed = not self._fits(stream)
            stream.answer = stream.expected(limits.max_model_len, self.vocab)
        doomed = [stream for stream in self._by_key.values() if stream.doomed]
        self.policy = WatchedPolicy(policy)
        self.engine.start_epoch(limits, self.policy, epoch)
        self._count_drafts()
        self.checker.on_new_epoch()
        kv = self.worker.kv
        self.worker = OracleWorker(limits, self.vocab, epoch, *self._of_worker)
        held = None if keeps_memory is None or len(kv) < limits.num_blocks else self.names.held()
        if held is None:
            self.names = BlockNames.empty(limits.num_blocks, limits.block_size, len(limits.groups))
        else:
            self.names = BlockNames.empty(len(kv), limits.block_size, len(limits.groups))
            self.names.follow(ReleaseSlots(epoch, b"", held))
            self._adopt(kv, [held, self._subset(held, keeps_memory)])
        self.pipeline, self.even = StagePipeline(limits.stages), True
        self._transition()
        self.publish()
        assert all(stream.finish is not None for stream in doomed), "a request that does not fit is still open"
        self.coverage["epochs: a request no longer fits"] += len(doomed)
        for stream in self._by_key.values():
            stream.doomed = stream.refused

    def _adopt(self, kv: list[list[int | None]], held: list[NamedBlocks | None]) -> None:
        """The workers go on with their memory, of which each rank holds some blocks."""
        self.worker.kv = kv
        adopted, canary = common_blocks(held, self.limits.num_blocks)
        self.names.drop([canary])
        kv[canary] = [TORN] * self.limits.block_size
        assert self.dropped.isdisjoint(adopted.values()), "dropped block: one is adopted"
        if adopted:
            self.engine.prefix_cache.adopt(NamedBlocks.from_lists([*adopted], [*adopted.values()]))
        self.coverage["adopted blocks"] += len(adopted)

    @staticmethod
    def _subset(held: NamedBlocks, keeps: Callable[[int], bool] | None) -> NamedBlocks:
        kept = [(block, name) for block, name in held.pairs() if keeps is None or keeps(block)]
        return NamedBlocks.from_lists([block for block, _ in kept], [name for _, name in kept])

    def _fits(self, stream: SimulatedStream) -> bool:
        """Return whether a group with these limits can go on with the request."""
        limits = self.limits
        room = len(stream.prompt) + len(stream.tokens) < limits.max_model_len
        most = limits.positions(len(stream.prompt), stream.params)
        items = () if stream.media is None else stream.media.items
        return room and most <= limits.kv_capacity and all(item.length <= limits.encoder_budget for item in items)

    def late_result(self) -> None:
        """Deliver a result of an epoch that has ended."""
        result = _RESULTS.decode(self.orphans.popleft())
        queued = any(step.step_id == result.step_id for step in self.engine.queue.steps)
        self.coverage["late results: of a step id that is in flight again"] += queued
        self.coverage["late results: epoch ended"] += 1
        self.expected_stale += 1
        self.log("late result", result.epoch, result.step_id)
        self.engine.on_result(result)
        assert self.engine.store.counters["stale_messages_total"] == self.expected_stale, (
            "a late result was not counted"
        )
        self.checker.check()

    def _check_cache(self) -> None:
        """Compare cached blocks with the workers' KV, unless steps that write them still wait for masks. The scheduler
        does not know yet of adapters that could not be loaded in steps in flight."""
        if not self.worker.is_behind:
            self.checker.check_cache(self.worker.kv, self.worker.tainted if self.worker.failed else ())

    def _advance(self) -> None:
        """Advance the clock by a millisecond."""
        self.engine.advance(self.engine.store.now + 1e-3)

    # -- steps ---------------------------------------------------------------------------------------------------

    def dispatch(self) -> int:
        """Fill the queue, send and publish, as the service does after each batch of events. Return the number of steps
        sent."""
        before = len(self.engine.queue)
        self._advance()
        self.worker.confirmed = self.checker.confirmed
        for message in self.engine.dispatch():
            if isinstance(message, KeepPins):  # for the next scheduler
                continue
            frame = encode(message)
            self._on_sent(frame)
            if isinstance(message, LoadBlocks) and message.drops_all:
                self.names.forget_all()
            elif isinstance(message, LoadBlocks):
                self.tier.begin(message, self.names)
                self.dropped.update(split_names(message.dropped))
            elif not isinstance(message, GrammarOutput):
                self.names.follow(message)
                named = (message.whole, getattr(message, "completes", None))
                self.dropped.difference_update(*(split_names(blocks.names) for blocks in named if blocks))
            self._take_results(self.worker.receive(frame))
            if isinstance(message, SchedulerOutput):
                self.plans.append(_PLANS.decode(frame))
                self.coverage["sampling: deferred"] += self.worker.waits_for_grammar
            if isinstance(message, GrammarOutput):
                self.coverage["sampling: with a grammar"] += 1
                states = self.epoch.slots.state[unpack(message.slots)]
                self.coverage["sampling: of a request that ended before"] += int((states == DROP).sum())
        leaves_rows_out, waits = self.limits.leaves_rows_out, bool(self.engine.queue.unmasked)
        if self.engine.has_requests and not self.engine.queue.full and (leaves_rows_out or not waits):
            self._on_nothing_scheduled()
        if not leaves_rows_out:
            assert waits == self.worker.waits_for_grammar, "a sampling is deferred on one side only"
        assert waits or not self.worker.waits_for_grammar, "the worker waits for masks that were sent"
        self.coverage["sampling: waits for tokens in flight"] += waits
        self._check_cache()
        queued = [step.step_id for step in self.engine.queue.steps]
        assert queued == list(range(self.epoch.ledger.oldest, self.epoch.next_step)), (
            "ledger: it differs from the batch queue"
        )
        assert self.engine.queue or self.store.loading.under_way or not self.engine.has_requests, (
            "stall error: requests exist, and nothing is in flight"
        )
        self.publish()
        return len(self.engine.queue) - before

    def executed(self, which: int) -> None:
        """The workers have executed the steps up to the `which`-th one whose result is on its way."""
        self.worker.executed = max(self.worker.executed, [*self.pending][which])
        self.names.executed = self.worker.executed

    def begin_copy(self, name: bytes) -> Callable[[], list[int | None] | None] | None:
        """Begin to copy a block for another engine. Return a function that ends it; None: it is not here. The copy is
        made in two halves, and dropped if the block changes meanwhile, as `BlockTransfers.find` does."""
        names, worker = self.names, self.worker
        if self.lost or (block := names.block_of(name)) is None:
            return None
        assert name not in self.dropped, "dropped block: another engine gets one"
        pool = self.epoch.kv.pool
        confirmed = pool.whole[pool.by_hash[name]] if name in pool.by_hash else True
        self.coverage["fetches: of a block that is not confirmed"] += not confirmed
        owner, first = names.owner(block, name), worker.content(block)

        def end() -> list[int | None] | None:
            rest = worker.content(block)
            half = len(rest) // 2
            same = not self.lost and self.worker is worker and names.owner(block, name) == owner
            return first[:half] + rest[half:] if same else None

        return end

    def report_load(self, load: LoadUnderWay) -> None:
        """The workers report how many blocks of a load they have filled."""
        self.tier.loads.remove(load)
        self.log("load", load.message.ticket, load.filled, "of", len(load.blocks))
        if load.message.epoch != self.epoch.number:
            self.coverage["loads: reported after their epoch"] += 1
        elif self.store.loading.by_ticket.get(load.message.ticket) is None:
            self.coverage["loads: reported too late"] += 1
        known = self.store.loading.by_ticket.get(load.message.ticket)
        if known is not None and known.is_ahead:
            self.coverage["loads: ahead, blocks"] += load.filled
            self.coverage["loads: ahead, in part"] += 0 < load.filled < len(load.blocks)
            self.coverage["loads: ahead, and a request has come"] += bool(known.requests)
        self._advance()
        self.engine.prefix_cache.on_loaded(load.message.epoch, load.message.ticket, load.filled)
        self._transition()
        self._check_cache()

    def tick(self, running: Collection[int] | None = None) -> None:
        """Let pipeline stages run a step each: all of them, or those in `running` while the others are slow."""
        self.even = self.even and running is None
        result = self.pipeline.tick(running)
        if result is not None:
            self.pending[_RESULTS.decode(result).step_id] = result
        self.coverage["uneven stages"] += running is not None
        self.coverage["first stage waited"] += self.pipeline.stalls > 0
        assert not (self.even and self.pipeline.stalls), "stage spacing: the first stage waits for a sampled id"

    def _await_result(self) -> None:
        while self.pipeline.busy and not self.pending:
            self.tick()

    def complete(self, which: int = 0) -> None:
        """Deliver the `which`-th result on its way."""
        step_id = list(self.pending)[which]
        self.executed(which)
        frame = self.pending.pop(step_id)
        self.log("result", step_id)
        self._advance()
        self.coverage["results out of order"] += which > 0
        self.delivered.append(frame)
        self.engine.on_result(_RESULTS.decode(frame))
        self._check_cache()
        assert self.engine.store.counters["stale_messages_total"] == self.expected_stale

    def repeat_result(self, which: int, epoch_before: bool) -> None:
        """Deliver a result again, or one of an earlier epoch. It must be dropped and counted."""
        frame = self.delivered[which % len(self.delivered)] if self.delivered else next(iter(self.pending.values()))
        if epoch_before or not self.delivered:
            message = _RESULTS.decode(frame)
            frame = encode(msgspec.structs.replace(message, epoch=message.epoch - 1))
        self.expected_stale += 1
        self.coverage["late results: old epoch" if epoch_before else "late results: repeated"] += 1
        self.engine.on_result(_RESULTS.decode(frame))
        assert self.engine.store.counters["stale_messages_total"] == self.expected_stale, (
            "a late result was not counted"
        )
        self.checker.check()

    def step(self) -> None:
        """Fill the queue, deliver the oldest result and publish."""
        self.dispatch()
        self._await_result()
        if self.pending:
            self.complete()
            self.publish()

    def drain(self, most: int = 20_000) -> None:
        """Run until nothing is left, then check the empty engine."""
        for _ in range(most):
            while self.compilation.waiting:
                self.compiled()
            while self.masks.waiting:
                self.masks_made()
            self.dispatch()
            if self.masks.waiting:
                continue
            if self.tier is not None and self.tier.loads:
                self.report_load(self.tier.loads[0])
                continue
            self._await_result()
            if not self.pending:
                self.check_drained()
                return
            self.complete()
        raise DeliveryError(f"not drained after {most} steps")

    def check_drained(self) -> None:
        self._count_drafts()
        self.checker.check()
        self.checker.check_drained()
        assert not self.worker.slots, "clean drain: worker rows"
        assert not self.engine.requests, "clean drain: open requests"
        for stream in self.streams:
            if not stream.aborted and stream.finish is None:
                raise DeliveryError(f"{stream.frontend}/{stream.number} never finished")

    def _count_drafts(self) -> None:
        """Add the drafts that this epoch's worker verified to the coverage."""
        self.coverage.update({f"drafts: {name}": count for name, count in self.worker.verified.items()})
        self.worker.verified.clear()

    # -- checks --------------------------------------------------------------------------------------------------

    def _transition(self) -> None:
        self.checker.learn(list(self.engine.requests.values()))
        self.checker.check()
        for request in self.engine.requests.values():
            if request.grammar is not None and not request.finished:
                fresh = self._by_request[request].grammar(self.vocab)
                assert fresh is not None
                self.checker.check_grammar(request, fresh)

    def _on_sent(self, frame: bytes) -> None:
        """Hook of subclasses: a message is sent to the workers."""

    def observe(self, event: Event) -> None:
        """Check a decision of the core when it is made."""
        match event:
            case DispatchStarted():
                self.admitting = True
            case StepDispatched():
                self._on_dispatched(event)
                self.admitting = True
            case RequestPreempted(cause=cause):
                self.admitting = False
                self.coverage["displacements"] += cause is PreemptionCause.PRIORITY
            case ResultApplied():
                self._on_applied(event)

    def _on_dispatched(self, event: StepDispatched) -> None:
        step, plan = event.step, event.plan
        self.checker.on_scheduled(step)
        entering = {new.slot for new in plan.new}
        self.policy.check(step, self.epoch.slots, entering)
        streams = [self._by_request[self.epoch.slots.request(slot)] for slot in step.slots.tolist()]
        self._rows[step.step_id] = [s for s, samples in zip(streams, step.samples, strict=True) if samples]
        columns = (step.slots, step.starts, step.counts, step.samples, step.drafts)
        rows = [column.tolist() for column in columns]
        for stream, slot, start, count, samples, drafts in zip(streams, *rows, strict=True):
            if slot in entering and not stream.request.reads_prefix_cache:
                assert start == 0, f"{stream.number} must read no prefix cache"
            stream.hit = start if not stream.steps else stream.hit
            stream.scheduled += count
            stream.planned_drafts += drafts
            stream.steps += 1
            self.coverage["prefix hits"] += start > 0 and slot in entering
            self.coverage["chunked prefills"] += not samples
            self.coverage["resumed"] += slot in entering and stream.steps > 1
            self.coverage["resumed in another epoch"] += slot in entering and stream.voids > 0
            self.coverage["prefix hits in another epoch"] += start > 0 and slot in entering and plan.epoch > 1
        head, total = self.store.waiting.head(), int(step.counts.sum())
        if self.limits.whole_prompts and head is not None and total < self.limits.max_num_batched_tokens:
            is_long = total + len(head.token_ids) > self.limits.max_num_batched_tokens
            self.coverage["whole prompts that wait for the next step"] += is_long
        if self._trace is not None:
            self.log("step", step.step_id, *zip(*rows, strict=True), "new", sorted(entering))
        self.checker.check()

    def _on_nothing_scheduled(self) -> None:
        """Requests exist and the queue has room, but no step was formed."""
        if self.conserves_work and self.admitting:
            self.checker.on_idle(self.policy.shown)
        elif isinstance(self.policy.policy, PhasedPolicy) and not self.store.suspects.active:
            able = self._decodable(None)
            demand(not able, "work conservation", f"slots {able} could decode, but nothing was scheduled")

    def _decodable(self, step: InflightStep | None) -> list[int]:
        """Return slots that could have been in the step and are not."""
        s, epoch = self.epoch.slots, self.epoch
        named = set() if step is None else set(step.slots.tolist())
        at = epoch.next_step if step is None else step.step_id
        able = []
        for slot in epoch.running.tolist():
            total, promised = int(s.tokens[slot]), int(s.tokens[slot] + s.placeholders[slot])
            under_way = promised > total and self.limits.stages > 1 and at - s.sampled_step[slot] < self.limits.stages
            if total > s.entry[slot] and promised < s.limit[slot] and slot not in named and not under_way:
                able.append(slot)
        return able

    def _on_applied(self, event: ResultApplied) -> None:
        """Count verified and accepted drafts of the rows whose result was used; check the state after the result."""
        self._on_failed({*self.worker.failed.pop(event.step.step_id, {}).values()}, event.ended)
        result = ResultRows.from_message(event.result)
        columns = (event.states, result.counts, result.drafted, event.counts)
        streams = self._rows.pop(event.step.step_id)
        for stream, state, count, drafted, appended in zip(
            streams, *(column.tolist() for column in columns), strict=True
        ):
            if not count and self.limits.leaves_rows_out:
                self._on_left_out(stream, state)
            if state == DROP:
                continue
            stream.drafted += drafted
            stream.accepted += max(count - 1, 0)
            self.coverage["drafts: rows cut by a stop"] += self._ends_within(stream, count, appended)
            if state == DELIVER:
                self.coverage["stale deliveries"] += 1
                self.coverage["drafts: stale rows of several tokens"] += count > 1
                self.coverage["stops while preempted"] += (stream.frontend, stream.number) in event.ended
        self._on_updated(event.step)

    def _on_failed(self, digests: set[str], ended: Collection[tuple[int, int]]) -> None:
        """The requests of adapters that could not be loaded have ended, and no other ones."""
        for request in self.engine.requests.values():
            if request.lora is not None and request.lora.digest in digests:
                assert request.finished, f"{request.number} goes on without its adapter"
                self._by_request[request].doomed |= request.key in ended
                self.coverage["adapters: failed"] += 1
                self.coverage["adapters: failed after a preemption"] += request.num_preemptions > 0

    def _on_left_out(self, stream: SimulatedStream, state: int) -> None:
        self.coverage[f"left out: {('free', 'live', 'delivered', 'dropped')[state]}"] += 1
        self.coverage["left out: with a recurrent state"] += self.limits.takes_back_states
        stream.in_vain += state == LIVE

    def _ends_within(self, stream: SimulatedStream, count: int, appended: int) -> bool:
        """Return whether the answer ends before the last of the row's `count` tokens; `appended` of them were taken."""
        assert stream.request is not None
        s, request = self.epoch.slots, stream.request
        known = int(s.tokens[request.slot]) if request.slot >= 0 else len(request.token_ids)
        return known - appended + count > len(stream.prompt) + len(stream.answer.tokens)

    def _on_updated(self, step: InflightStep) -> None:
        self.checker.on_processed(step)
        self._transition()

    def publish(self) -> None:
        for frontend, message in self.engine.take_outputs():
            outputs = _OUTPUTS.decode(encode(message))
            numbers = memoryview(outputs.numbers).cast("I").tolist()
            before: dict[SimulatedStream, int] = {}
            if outputs.logprobs is not None:
                before = {stream: len(stream.tokens) for stream in self.streams}
            for number, index, token in zip(
                numbers, unpack(outputs.indices).tolist(), unpack(outputs.token_ids).tolist(), strict=True
            ):
                self._on_token(self._open(frontend, number), index, token)
            if outputs.logprobs is not None:
                self._on_logprobs(frontend, LogprobRows.from_message(outputs.logprobs), before)
            for embedding in outputs.embeddings:
                stream = self._open(frontend, embedding.number)
                if embedding.values != stream.answer.embedding or stream.embedded:
                    raise DeliveryError(f"{stream.number} got another embedding than its own, or two")
                stream.embedded = True
            for number, count in outputs.cached.items():
                self._open(frontend, number).cached.append(count)
            for finish in outputs.finished:
                self._on_finish(self._open(frontend, finish.number), finish)

    def _on_logprobs(self, frontend: int, rows: LogprobRows, before: dict[SimulatedStream, int]) -> None:
        """Log-probabilities of an output token are in the message with the token, those of the prompt come before the
        first output token. After a preemption, those of the prompt may come again."""
        at = 0
        for number, position, count, rank in zip(
            rows.owners.view("uint32").tolist(),
            *(column.tolist() for column in (rows.positions, rows.counts, rows.token_ranks)),
            strict=True,
        ):
            stream = self._open(frontend, number)
            name, index = f"{frontend}/{number}", position - len(stream.prompt)
            ids, values = rows.token_ids[at : at + count], rows.values[at : at + count]
            at += count
            expected = stream.answer.scores.get(position)
            if expected is None or expected.token_rank != rank:
                raise DeliveryError(f"{name} got rank {rank} at {position}, expected {expected}")
            if ids.tolist() != expected.token_ids.tolist() or values.tobytes() != expected.values.tobytes():
                raise DeliveryError(f"{name} got {ids} {values} at {position}, expected {expected}")
            refused = stream.answer.reason is FinishReason.ERROR and index == len(stream.answer.tokens)
            if index < 0:
                late = before[stream] > stream.replayed and position not in stream.scored
            else:
                late = not refused and not before[stream] <= index < len(stream.tokens)
                late = late or position in stream.scored
            if late:
                raise DeliveryError(f"{name} got the log-probabilities of {position} out of order")
            self.coverage["prompt log-probabilities twice"] += position in stream.scored
            stream.scored.add(position)

    def _open(self, frontend: int, number: int) -> SimulatedStream:
        stream = self._by_key.get((frontend, number))
        if stream is None or not stream.open:
            raise DeliveryError(f"one finish: output for {frontend}/{number}, which has ended")
        return stream

    def _on_token(self, stream: SimulatedStream, index: int, token: int) -> None:
        name, expected = f"{stream.frontend}/{stream.number}", stream.answer.tokens
        if index != len(stream.tokens):
            raise DeliveryError(f"step order: {name} got index {index} after {len(stream.tokens)} tokens")
        if index >= len(expected) or expected[index] != token:
            raise DeliveryError(
                f"same tokens: {name} got token {token} at {index}, expected {expected[index : index + 1]}"
            )
        stream.tokens.append(token)

    def _on_finish(self, stream: SimulatedStream, finish: Finish) -> None:
        name = f"{stream.frontend}/{stream.number}"
        self.log("finish", name, finish)
        stream.finish = finish
        del self._by_key[stream.frontend, stream.number]
        self.coverage[f"finishes: {finish.reason.name}"] += 1
        self._check_times(name, stream, finish)
        failed = finish.reason not in (FinishReason.STOP, FinishReason.LENGTH)
        if failed and stream.doomed:
            return
        if stream.doomed or failed != (stream.answer.reason is FinishReason.ERROR):
            raise DeliveryError(f"{name} finished with {finish}, doomed: {stream.doomed}")
        got = (stream.tokens, finish.reason, finish.stop_reason)
        wanted = (stream.answer.tokens, stream.answer.reason, stream.answer.stop_reason)
        if got != wanted:
            raise DeliveryError(f"{name} finished with {got}, expected {wanted}")
        self._check_scores(name, stream)
        if stream.pooling is not Pooling.NONE and not stream.embedded:
            raise DeliveryError(f"{name} got no embedding")
        self._count_stop(stream, finish)
        self._check_scheduled(name, stream, finish)

    def _check_times(self, name: str, stream: SimulatedStream, finish: Finish) -> None:
        """Times are in order; those of events that did not happen are 0."""
        times, request = finish.times, stream.request
        if times is None or not times.ended:
            raise DeliveryError(f"{name} ended, but its times are {times}")
        known = [t for t in (times.queued, times.scheduled, times.first_token, times.ended) if t]
        known.append(self.engine.store.now)
        gave_tokens = len(stream.tokens) > stream.replayed
        if (request is None and len(known) > 2) or known != sorted(known):
            raise DeliveryError(f"{name} has the times {times}")
        if (times.first_token > 0) != gave_tokens or (times.scheduled > 0) != (stream.steps > 0):
            raise DeliveryError(f"{name} had {stream.steps} steps, {len(stream.tokens)} tokens, times {times}")

    def _check_scores(self, name: str, stream: SimulatedStream) -> None:
        """Each requested position arrived once, except those that were delivered before a replay."""
        first = len(stream.prompt)
        wanted = {p for p in stream.answer.scores if not first <= p < first + stream.replayed}
        if stream.answer.reason is FinishReason.ERROR:
            wanted.discard(first + len(stream.tokens))
            stream.scored.discard(first + len(stream.tokens))
        if stream.scored != wanted:
            raise DeliveryError(f"{name} lacks log-probabilities of {sorted(wanted ^ stream.scored)}")
        self.coverage["log-probabilities"] += len(wanted)

    def _count_stop(self, stream: SimulatedStream, finish: Finish) -> None:
        if finish.reason is FinishReason.ERROR or stream.pooling is not Pooling.NONE:
            self.coverage["stops: grammar failed" if finish.message else f"embeddings: {stream.pooling.name}"] += 1
            return
        self.coverage["stops: matched by a grammar"] += stream.structured is not None
        if finish.reason is FinishReason.LENGTH:
            full = len(stream.prompt) + len(stream.tokens) == self.limits.max_model_len
            self.coverage["stops: context" if full else "stops: max_tokens"] += 1
        else:
            self.coverage["stops: EOS" if finish.stop_reason is None else "stops: stop token"] += 1
            self.coverage["stops: on the last token"] += len(stream.tokens) == stream.params.max_tokens
            self.coverage["stops: on the first token"] += len(stream.tokens) == 1
        gate = set(stream.params.eos_token_ids + stream.params.stop_token_ids)
        self.coverage["stops held back by min_tokens"] += not gate.isdisjoint(stream.tokens[:-1])

    def _check_scheduled(self, name: str, stream: SimulatedStream, finish: Finish) -> None:
        """Exact work at every depth. An unforeseeable stop costs at most one token per further step."""
        if finish.num_cached_tokens != min(stream.hit, len(stream.prompt)):
            raise DeliveryError(f"{name} reports {finish.num_cached_tokens} cached tokens, found {stream.hit}")
        if stream.cached != [finish.num_cached_tokens] * (len(stream.tokens) > stream.replayed):
            raise DeliveryError(f"{name} reported {stream.cached} cached tokens with its first token")
        if (finish.num_draft_tokens, finish.num_accepted_tokens) != (stream.drafted, stream.accepted):
            raise DeliveryError(
                f"{name} reports {finish.num_accepted_tokens} of {finish.num_draft_tokens} drafts accepted, "
                f"but {stream.accepted} of {stream.drafted} were"
            )
        if finish.num_preemptions or stream.voids:
            return
        one_more = stream.pooling is not Pooling.NONE or finish.reason is FinishReason.ERROR
        exact = len(stream.prompt) + len(stream.tokens) - 1 - stream.hit + one_more + stream.in_vain
        slack = 0 if finish.reason is FinishReason.LENGTH else (self.depth - 1) // self.limits.stages
        # Rejected drafts, drafts behind the end, steps in flight behind the end
        if self.speculating is not None:
            slack = stream.planned_drafts - stream.accepted + self.speculating.most + self.depth - 1
        if not exact <= stream.scheduled <= exact + slack:
            raise DeliveryError(
                f"exact work: {name} was scheduled {stream.scheduled} tokens, needed {exact} (+{slack})"
            )
