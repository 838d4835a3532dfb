"""A simulated world around the production `EngineCore`: frontends, the oracle worker, and time under the test's
control.

A method of the world is one event; `driver.py` draws random sequences of them. Every plan, result and output crosses
the codec, so messages in flight are immutable snapshots. What is checked, and where:

- `invariants.py`: the core's state, recomputed after every transition
- `step_checks.py`, `budgets.py`: each step when it is formed, and when its result is applied
- `answer_checks.py`: each message to a frontend, compared with `reference.py`
- `oracle.py`: each message to the workers, and every KV position that they read
"""

from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import cache
from random import Random

import msgspec

from protocol.block_names import NamedBlocks, names_of, split_names
from protocol.codec import Decoder, encode, pack, unpack
from protocol.kv_groups import name_in_group
from protocol.lora import LoRAAdapter
from protocol.media import Media
from protocol.requests import GenerateRequest
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.steps import GrammarOutput, KeepPins, LoadBlocks, ModelRunnerOutput, ReleaseSlots, SchedulerOutput
from services.scheduler.core.drafting import NO_DRAFTING
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import Observer
from services.scheduler.core.pins import PinRefused
from services.scheduler.core.request import Request, RequestStatus
from services.scheduler.core.slots import DROP
from services.scheduler.core.store import RequestStore
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.membership.epoch import common_blocks
from services.scheduler.policies import BatchingPolicy, ChunkedPolicy
from services.worker.kv_memory import BlockNames
from tests.simulation.answer_checks import AnswerChecks, SimulatedStream
from tests.simulation.budgets import WatchedPolicy
from tests.simulation.drafts import Speculating
from tests.simulation.grammar import Compilation, LateMasks
from tests.simulation.invariants import Checker
from tests.simulation.oracle import TORN, OracleWorker, always
from tests.simulation.reference import HIDDEN_SIZE
from tests.simulation.stage_pipeline import StagePipeline
from tests.simulation.step_checks import StepChecks
from tests.simulation.tier import LoadUnderWay, SimulatedTier

EOS = 1
"""The EOS token of every request that does not ignore it."""
RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)
_PLANS: Decoder[SchedulerOutput] = Decoder(SchedulerOutput)


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


class World:
    step_checks = StepChecks

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
        self.by_request: dict[Request, SimulatedStream] = {}
        self.trace = trace
        self.frontends = AnswerChecks(self.engine, speculating, self.coverage, self.log)
        self.steps = self.step_checks(self)
        self.engine.observers.add(self.steps)

    def _future(self, slot: int) -> list[int]:
        stream = self.by_request[self.epoch.slots.request(slot)]
        return stream.prompt + stream.answer.tokens

    @property
    def store(self) -> RequestStore:
        return self.engine.store

    @property
    def epoch(self) -> EpochState:
        return self.engine.epoch

    def log(self, *parts: object) -> None:
        if self.trace is not None:
            self.trace(" ".join(map(str, parts)))

    def check(self) -> None:
        """Check the state after a transition."""
        self.checker.learn(list(self.engine.requests.values()))
        self.checker.check()
        for request in self.engine.requests.values():
            if request.grammar is not None and not request.finished:
                fresh = self.by_request[request].grammar(self.vocab)
                assert fresh is not None
                self.checker.check_grammar(request, fresh)

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
        options = structured, pooling, lora, media
        stream = SimulatedStream(frontend, number, prompt, sampling, *options, replayed)
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
        self.log("add", stream.name, f"{len(prompt)} + {replayed}", sampling, f"priority {priority}", *options)
        positions = self.limits.positions(len(prompt), sampling)
        stream.doomed = not stream.fits(self.limits) or positions < len(prompt) or stream.refused
        self.coverage["arrivals between epochs"] += self.lost
        self.streams.append(stream)
        self.frontends.open[frontend, number] = stream
        self._advance()
        self.engine.add(frontend, message)
        stream.request = self.engine.requests.get((frontend, number))
        if stream.request is not None:
            self.by_request[stream.request] = stream
        else:
            self.frontends.receive()  # the refusal arrives before the next message of the frontend
        self.check()
        return stream

    def compiled(self, which: int = 0) -> None:
        """Deliver the `which`-th grammar that is being compiled, or its error."""
        ticket = list(self.compilation.waiting)[which]
        known, grammar = ticket in self.store.compiling.by_ticket, self.compilation.finish(ticket)
        outcome = "of an ended request" if not known else "refused" if isinstance(grammar, str) else "ready"
        self.coverage[f"grammars: {outcome}"] += 1
        self.coverage["grammars: ready between epochs"] += self.lost
        self.log("grammar", ticket, grammar if isinstance(grammar, str) else "ready")
        self.engine.on_grammar(ticket, grammar)
        self.check()
        self.frontends.receive()  # as the service does before it reads from frontends again

    def masks_made(self, which: int = 0) -> None:
        """Deliver the `which`-th masks that are being made."""
        ticket = list(self.masks.waiting)[which]
        self.coverage["masks: late"] += 1
        self.log("masks", ticket)
        self.engine.on_masks(ticket, self.masks.finish(ticket))
        self.check()

    def leave_out(self) -> None:
        """The forward pass of the step that waits for masks has ended, and the worker goes on without its rows."""
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
                self.pending[RESULTS.decode(result).step_id] = result

    def abort(self, *streams: SimulatedStream) -> None:
        for stream in streams:
            self.coverage[f"aborts: {self.stage(stream)}"] += 1
            self.coverage["aborts between epochs"] += self.lost and stream.open
            self.log("abort", stream.name, self.stage(stream))
            if self.frontends.open.get(stream.key) in (None, stream):
                stream.aborted = stream.aborted or stream.finish is None
                self.frontends.open.pop(stream.key, None)
                self.engine.abort(stream.frontend, [stream.number])
                self.check()

    def drop_frontend(self, frontend: int) -> None:
        self.log("drop frontend", frontend)
        for key in [key for key in self.frontends.open if key[0] == frontend]:
            self.frontends.open.pop(key).aborted = True
            self.coverage["frontend drops"] += 1
        self.engine.drop_frontend(frontend)
        self.check()

    def reset_prefix_cache(self, reset_running: bool) -> None:
        self.log("reset prefix cache", "with running" if reset_running else "")
        if len(self.engine.queue) and len(self.epoch.running):
            self.coverage[f"resets in flight: running={reset_running}"] += 1
        self.checker.on_blocks_forgotten()
        self.engine.prefix_cache.reset(reset_running)
        assert not self.epoch.kv.pool.by_hash
        self.check()

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
        self.check()

    def unpin(self, pin: str) -> None:
        self.log("unpin", pin)
        self.engine.prefix_cache.unpin(pin)
        self.check()

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
        self.check()

    def load_ahead(self, names: list[bytes]) -> None:
        """Let the workers load a prefix of a request to come, with the next step."""
        self.log("load ahead", len(names))
        self.engine.prefix_cache.load_ahead(names, ["peer"])
        self.check()

    def restart(self, policy: BatchingPolicy, seed: int) -> None:
        """Restart the empty core, as the service does for a recording."""
        self.policy = WatchedPolicy(policy)
        drafting = NO_DRAFTING if self.speculating is None else self.speculating.drafting(seed)
        self.engine.restart(self.engine.restart_point(), self.policy, drafting)
        self.coverage["restarts"] += 1
        self.check()

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
        for stream in self.frontends.open.values():
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
            self.by_request[epoch.slots.request(slot)].voids += 1
        self.orphans.extend(self.pending.values())
        self.orphans.extend(self.pipeline.take_results())
        self.pending.clear()
        self.steps.rows.clear()
        self.worker.tear(self.checker.confirmed)
        self.coverage["epochs: ended with loads"] += len(self.store.loading)
        self.names.end_loads()
        self.lost = True
        self.engine.end_epoch(is_fault)
        self.checker.on_void()
        self.check()
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
        self.frontends.receive()
        for stream in self.frontends.open.values():
            known = stream.request.token_ids.tolist()
            assert known == stream.prompt + stream.tokens, f"{stream.name}: tokens: some were lost or doubled"
        if self.speculating is not None:
            limits = self.speculating.limits(limits, self.depth)
        more = limits.num_blocks - self.limits.num_blocks
        self.coverage["epochs: " + ("larger" if more > 0 else "smaller" if more else "of equal size")] += 1
        self.limits, self.lost, epoch = limits, False, epoch or self.epoch.number + 1
        self.log("epoch", epoch, limits)
        for stream in self.frontends.open.values():
            stream.doomed = not stream.fits(self.limits)
            stream.answer = stream.expected(limits.max_model_len, self.vocab)
        doomed = [stream for stream in self.frontends.open.values() if stream.doomed]
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
            kept = [(block, name) for block, name in held.pairs() if keeps_memory(block)]
            other = NamedBlocks.from_lists([block for block, _ in kept], [name for _, name in kept])
            self._adopt(kv, [held, other])
        self.pipeline, self.even = StagePipeline(limits.stages), True
        self.check()
        self.frontends.receive()
        assert all(stream.finish is not None for stream in doomed), "a request that does not fit is still open"
        self.coverage["epochs: a request no longer fits"] += len(doomed)
        for stream in self.frontends.open.values():
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

    def late_result(self) -> None:
        """Deliver a result of an epoch that has ended."""
        result = RESULTS.decode(self.orphans.popleft())
        queued = any(step.step_id == result.step_id for step in self.engine.queue.steps)
        self.coverage["late results: of a step id that is in flight again"] += queued
        self.coverage["late results: epoch ended"] += 1
        self.log("late result", result.epoch, result.step_id)
        self._deliver_stale(result)

    def _deliver_stale(self, result: ModelRunnerOutput) -> None:
        """Deliver a result that must be dropped and counted."""
        self.expected_stale += 1
        self.engine.on_result(result)
        assert self.store.counters["stale_messages_total"] == self.expected_stale, "a late result was not counted"
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
            if isinstance(message, GrammarOutput):
                self.coverage["sampling: with a grammar"] += 1
                states = self.epoch.slots.state[unpack(message.slots)]
                self.coverage["sampling: of a request that ended before"] += int((states == DROP).sum())
        leaves_rows_out, waits = self.limits.leaves_rows_out, bool(self.engine.queue.unmasked)
        if self.engine.has_requests and not self.engine.queue.full and (leaves_rows_out or not waits):
            self.steps.on_nothing_scheduled()
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
        self.frontends.receive()
        return len(self.engine.queue) - before

    def _on_sent(self, frame: bytes) -> None:
        """Hook of subclasses: a message is sent to the workers."""

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
        self.check()
        self._check_cache()

    def tick(self, running: Collection[int] | None = None) -> None:
        """Let pipeline stages run a step each: all of them, or those in `running` while the others are slow."""
        self.even = self.even and running is None
        result = self.pipeline.tick(running)
        if result is not None:
            self.pending[RESULTS.decode(result).step_id] = result
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
        self.engine.on_result(RESULTS.decode(frame))
        self._check_cache()
        assert self.store.counters["stale_messages_total"] == self.expected_stale

    def repeat_result(self, which: int, epoch_before: bool) -> None:
        """Deliver a result again, or one of an earlier epoch."""
        frame = self.delivered[which % len(self.delivered)] if self.delivered else next(iter(self.pending.values()))
        result = RESULTS.decode(frame)
        if epoch_before or not self.delivered:
            result = msgspec.structs.replace(result, epoch=result.epoch - 1)
        self.coverage["late results: old epoch" if epoch_before else "late results: repeated"] += 1
        self._deliver_stale(result)

    def step(self) -> None:
        """Fill the queue, deliver the oldest result and publish."""
        self.dispatch()
        self._await_result()
        if self.pending:
            self.complete()
            self.frontends.receive()

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
        raise AssertionError(f"liveness: not drained after {most} steps")

    def check_drained(self) -> None:
        self._count_drafts()
        self.checker.check()
        self.checker.check_drained()
        assert not self.worker.slots, "clean drain: worker rows"
        assert not self.engine.requests, "clean drain: open requests"
        endless = [stream.name for stream in self.streams if stream.open]
        assert not endless, f"one finish: {endless} never finished"

    def _count_drafts(self) -> None:
        """Add the drafts that this epoch's worker verified to the coverage."""
        self.coverage.update({f"drafts: {name}": count for name, count in self.worker.verified.items()})
        self.worker.verified.clear()
