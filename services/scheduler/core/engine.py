"""The run-ahead loop without I/O: events go in, messages come out.

The shell calls `advance` with the time, then `add`, `abort`, `on_grammar`, `on_masks`, `on_result` and the methods of
`prefix_cache` as messages arrive, and after each batch of events `dispatch` and `take_outputs`. `dispatch` fills the
batch queue: filling it comes before reading results (run-ahead loop, docs/invariants.md). Aborts that arrived with a
result are applied before it.
"""

import math
from bisect import bisect_left
from collections.abc import Generator, Sequence

from protocol.codec import ProtocolError, pack, unpack
from protocol.columns import total
from protocol.requests import ITERATION_TOKENS, FinishReason, GenerateRequest, RequestOutputs
from protocol.steps import KeepPins, ModelRunnerOutput, ReleaseSlots, SchedulerOutput, StepMessage
from services.scheduler.core import observer as events
from services.scheduler.core.admission import Admission
from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.deferred_masks import DeferredMasks
from services.scheduler.core.drafting import NO_DRAFTING, Drafting
from services.scheduler.core.epoch import EpochState
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.lifecycle import Lifecycle
from services.scheduler.core.limits import Limits
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.prefix_cache import PrefixCacheControl
from services.scheduler.core.queue_time import QueueTime
from services.scheduler.core.request import Request, RequestKey, RequestStatus, make_order_key
from services.scheduler.core.results import UnknownResult, decode_result
from services.scheduler.core.store import RequestStore
from services.scheduler.core.suspects import GUILTY
from services.scheduler.grammar import INLINE_MASKS, NOT_NOW, Compiler, Grammar, MaskMaker, Masks
from services.scheduler.policies import BatchingPolicy


class StallError(Exception):
    """Requests exist, nothing is in flight and nothing can be scheduled: a bug in the scheduler or its policy."""


class EngineCore:
    """The scheduler: what survives an epoch (`store`), what does not (`epoch`), and the steps in flight (`queue`)."""

    def __init__(
        self,
        limits: Limits,
        policy: BatchingPolicy,
        depth: int,
        vocab_size: int,
        *,
        epoch: int = 1,
        drafting: Drafting = NO_DRAFTING,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int = 1 << 22,
        max_queue_seconds: float = math.inf,
        use_priority: bool = False,
        compiler: Compiler | None = None,
        mask_maker: MaskMaker = INLINE_MASKS,
        hidden_size: int = 0,
    ) -> None:
        """Start with the group of workers of an epoch.

        Args:
            compiler: None: structured output is refused.
            mask_maker: makes the masks of constrained rows, by default at once.
            hidden_size: length of an embedding; 0: embeddings are refused.
        """
        self.store = RequestStore(compiler, mask_maker)
        self.observers = self.store.observers
        self.requests = self.store.requests
        """Open requests."""
        self.queue = BatchQueue(depth)
        self._mask_words = -(-vocab_size // 32)
        self.drafting = drafting
        self._admission = Admission(
            vocab_size, hidden_size, max_num_queued_reqs, max_num_queued_tokens, max_queue_seconds
        )
        self._queue_time = QueueTime()
        self._use_priority = use_priority
        self._admitted = 0
        """Number of requests admitted so far; also the ticket of the last one."""
        self._build_epoch(epoch, limits, policy)

    def _build_epoch(self, number: int, limits: Limits, policy: BatchingPolicy) -> None:
        self.epoch = EpochState(number, limits, policy, self.store)
        self.lifecycle = Lifecycle(self.store, self.epoch)
        self.planner = StepPlanner(self.store, self.epoch, self.lifecycle, self.drafting)
        self.prefix_cache = PrefixCacheControl(self.store, self.epoch, self.lifecycle)
        self.applier = ResultApplier(self.store, self.epoch, self.lifecycle, self.drafting)
        self.deferred_masks = DeferredMasks(self.store, self.epoch, self.queue, self._mask_words)

    @property
    def has_requests(self) -> bool:
        """Return whether a request is running, in the waiting queue or being loaded."""
        return bool(len(self.epoch.running) or len(self.store.waiting) or len(self.store.loading))

    @property
    def is_empty(self) -> bool:
        """Return whether nothing is left to do: no request, no mask to receive, no output to publish, no message to
        send."""
        epoch, store = self.epoch, self.store
        return not (
            store.requests or store.masks or store.outputs or self.queue or epoch.released or epoch.fences
            or store.loading.under_way
        )  # fmt: skip

    def advance(self, now: float, worked: float = 0.0) -> None:
        """Set the time of everything that happens until the next call.

        Args:
            now: a monotonic clock, in seconds.
            worked: seconds that the caller worked since the last call; 0.0: not measured.
        """
        if self.observers.listening:
            self.observers.emit(events.TimeAdvanced(now, worked))
        self.store.now = now

    # -- frontends -----------------------------------------------------------------------------------------------

    def add(self, frontend: int, message: GenerateRequest) -> None:
        """Admit a request, or answer with the `Finish` that says why not.

        Raises: ProtocolError, if the frontend has an open request of that number.
        """
        self.observers.emit(events.RequestArrived(frontend, message))
        key, store = (frontend, message.number), self.store
        if key in store.requests:
            raise ProtocolError(f"frontend {frontend} reused number {message.number}, which is still open")
        refusal = self._admission.refusal(message, self.epoch.limits, store, self.queue_seconds)
        if refusal is not None:
            finish, limit = refusal
            store.outputs.finish(frontend, finish)
            if limit:
                store.counters[f"admission_rejections:{limit}"] += 1
            self.observers.emit(events.RequestRefused(frontend, message.request_id, finish))
            return
        self._admitted += 1
        request = store.requests[key] = Request(
            frontend,
            message.number,
            unpack(message.token_ids),
            message.num_prompt_tokens,
            message.params,
            make_order_key(message.priority if self._use_priority else 0, self._admitted, message.age),
            message.salt,
            message.pooling,
            message.request_id,
            store.now,
            kv_peers=tuple(message.kv_peers),
            lora=message.lora,
            pooling_params=message.pooling_params,
            media=message.media,
        )
        store.counters["prompt_tokens"] += request.num_prompt_tokens
        if message.structured is None:
            store.waiting.add(request)
        else:
            store.compiling.submit(self._admitted, request, message.structured, message.age > 0)

    def queue_seconds(self, num_tokens: int = 1) -> float:
        """Return the seconds that a new request of so many tokens is expected to wait for its first step."""
        return self._queue_time.seconds(self.store, self.epoch, num_tokens)

    def on_grammar(self, ticket: int, grammar: Grammar | str) -> None:
        """Queue the request whose grammar was compiled, or end it with the error text. Output tokens that the request
        came with must match the grammar."""
        request = self.store.compiling.by_ticket.pop(ticket, None)
        error = grammar if isinstance(grammar, str) else ""
        self.observers.emit(events.GrammarReady(ticket, None if request is None else request.key, error))
        if request is None:
            return
        if not isinstance(grammar, str):
            outputs = request.token_ids[request.num_prompt_tokens + request.num_replayed :].tolist()
            if all(map(grammar.accept, outputs)):
                request.grammar = grammar
                self.store.waiting.add(request)
                return
            grammar = "the tokens delivered before do not match what the output must match"
        reason = FinishReason.REJECTED if grammar in NOT_NOW else FinishReason.INVALID
        self.store.end(request, request.finish_message(reason, message=grammar))

    def loras(self) -> tuple[list[str], list[str]]:
        """Return the names of the LoRA adapters of running requests, and those of requests that wait."""
        if not self.epoch.limits.max_loras:
            return [], []
        found = {(r.lora.name, r.status) for r in self.requests.values() if r.lora is not None and not r.finished}
        running = {name for name, status in found if status is RequestStatus.RUNNING}
        waiting = {name for name, status in found if status is not RequestStatus.RUNNING}
        return sorted(running), sorted(waiting)

    def on_masks(self, ticket: int, masks: Masks) -> None:
        """Take the masks of a request that a `MaskMaker` has made."""
        if self.observers.listening:
            self.observers.emit(events.MasksReady(ticket, len(masks)))
        self.store.masks.take(ticket, masks)

    def abort(self, frontend: int, numbers: list[int]) -> None:
        """End requests without a `Finish`; unknown and finished numbers are ignored. A number may be used again at
        once: outputs of the old request were published before."""
        self.observers.emit(events.RequestsAborted(frontend, tuple(numbers)))
        self._abort(frontend, numbers)

    def _abort(self, frontend: int, numbers: list[int]) -> int:
        """Return how many of the requests were open."""
        aborted = 0
        for number in numbers:
            request = self.store.requests.pop((frontend, number), None)
            if request is not None and not request.finished:
                self.lifecycle.finish(request, None)
                aborted += 1
        return aborted

    def drop_frontend(self, frontend: int) -> int:
        """Abort all requests of a frontend that is gone. Return how many were open."""
        self.observers.emit(events.FrontendLeft(frontend))
        numbers = [number for owner, number in self.store.requests if owner == frontend]
        aborted = self._abort(frontend, numbers)
        self.store.outputs.drop_frontend(frontend)
        return aborted

    def take_outputs(self) -> list[tuple[int, RequestOutputs]]:
        """Return the outputs to publish, one message per frontend."""
        return self.store.take_outputs()

    # -- epochs --------------------------------------------------------------------------------------------------

    def end_epoch(self, is_fault: bool = False) -> bool:
        """The workers are lost: nothing in flight is delivered, requests wait with their confirmed tokens. Until
        `start_epoch`, requests may come and go, but `dispatch` must not be called. Return whether a request was found
        guilty of the loss.

        Args:
            is_fault: the cause may be a request in flight.
        """
        self.observers.emit(events.EpochEnded(self.epoch.number, is_fault))
        guilty = self.store.suspects.blame(self._in_flight()) if is_fault else []
        self._void()
        for key in guilty:
            request = self.store.requests[key]
            self.lifecycle.finish(request, request.finish_message(FinishReason.ERROR, message=GUILTY))
        return bool(guilty)

    def _in_flight(self) -> list[tuple[RequestKey, int]]:
        """Return the running requests with a row in flight, and the number of tokens of each."""
        slots = self.epoch.slots
        named = {slot for step in self.queue.steps for slot in step.slots.tolist()}
        return [
            (slots.request(slot).key, int(slots.tokens[slot])) for slot in self.epoch.running.tolist() if slot in named
        ]

    def start_epoch(self, limits: Limits, policy: BatchingPolicy, number: int) -> None:
        """Go on with another group of workers. Requests that exceed its sizes end with an error."""
        self.observers.emit(events.EpochStarted(number, limits))
        self._build_epoch(number, limits, policy)
        self.store.pins.fit(limits)
        for request in [*self.store.waiting, *self.store.compiling.by_ticket.values()]:
            positions = limits.positions(request.num_prompt_tokens, request.params)
            is_long = len(request.token_ids) >= limits.max_model_len or positions > limits.kv_capacity
            if is_long or any(item.length > limits.encoder_budget for item in request.items):
                message = "the workers were replaced by others with less memory, in which it does not fit"
                self.lifecycle.finish(request, request.finish_message(FinishReason.ERROR, message=message))

    def fail_all(self, error: str) -> None:
        """The workers are lost for good: every request ends with the error."""
        self.observers.emit(events.AllRequestsFailed(error))
        self._void()
        for request in self.store.requests.values():
            if not request.finished:
                self.lifecycle.finish(request, request.finish_message(FinishReason.ERROR, message=error))

    def restart_point(self) -> events.CoreRestarted:
        """Return the values that a restart continues from. The core must be empty."""
        epoch, store = self.epoch, self.store
        generations, tickets = (pack(epoch.slots.generation), (store.masks.last_ticket, store.loading.last_ticket))
        return events.CoreRestarted(epoch.number, epoch.limits, epoch.next_step, self._admitted, generations, *tickets)

    def restart(self, point: events.CoreRestarted, policy: BatchingPolicy, drafting: Drafting) -> None:
        """Drop the prefix cache and all estimates, so that a new core that is restarted from the same point decides the
        same. The core must be empty, without pins. Totals stay."""
        self.observers.emit(point)
        self._admitted = point.tickets
        self.store.masks.last_ticket = point.mask_tickets
        self.store.loading.restart(point.load_tickets)
        self._queue_time = QueueTime(self.store.counters["prefix_cache_hits"])
        self.drafting = drafting
        self._build_epoch(point.epoch, point.limits, policy)
        self.epoch.continue_from(point.next_step, unpack(point.generations))

    def _void(self) -> None:
        self.queue.clear()
        self._queue_time.reset()
        self.lifecycle.void()

    # -- steps ---------------------------------------------------------------------------------------------------

    def dispatch(self) -> Generator[StepMessage, None, None]:
        """Form steps until the queue is full or nothing more can be scheduled. Each message must be sent before the
        next one is requested from the iterator; close the iterator if one cannot be sent.

        Masks are sent as soon as they are made. While some of a step are missing, no further step is dispatched, unless
        the workers leave rows out (deferred sampling).

        Raises: StallError
        """
        observers, queue, slots = self.observers, self.queue, self.epoch.slots
        if observers.listening:
            observers.emit(events.DispatchStarted())
        try:
            self.prefix_cache.begin_loads()
            if (pins := self.store.pins.take_unsent()) is not None:
                yield KeepPins(self.epoch.number, self.epoch.limits.block_size, pins)
            while True:
                for grammar in self.deferred_masks.outputs() if slots.num_special else ():
                    observers.emit(events.GrammarSent(grammar))
                    yield grammar
                planned = None if queue.full or self.deferred_masks.holds_back else self._schedule()
                if self.store.loading.unsent:
                    yield from self.prefix_cache.messages(planned[0].step_id if planned else self.epoch.next_step)
                if planned is None:
                    break
                step, plan = planned
                queue.steps.append(step)
                self._queue_time.on_dispatch(self.store.now)
                if observers.listening:
                    observers.emit(self._dispatched(step, plan))
                yield plan
            if not queue.steps and any(notice := (self.epoch.take_released(), self.epoch.kv.take_whole())):
                released, whole = notice
                release = ReleaseSlots(self.epoch.number, pack(released), whole)
                observers.emit(events.SlotsReleased(release))
                yield release
        except GeneratorExit:
            observers.emit(events.DispatchInterrupted())
            raise

    def _dispatched(self, step: InflightStep, plan: SchedulerOutput) -> events.StepDispatched:
        slots = self.epoch.slots
        return events.StepDispatched(
            step,
            plan,
            requests=tuple([slots.request(new.slot).key for new in plan.new]),
            frontends=slots.frontend[step.slots],
            numbers=slots.number[step.slots],
            entries=slots.entry[step.slots],
            steps_in_flight=len(self.queue),
            num_running=len(self.epoch.running),
            num_waiting=self.store.num_waiting,
            kv_cache_usage=self.epoch.kv.usage,
        )

    def _schedule(self) -> tuple[InflightStep, SchedulerOutput] | None:
        if not self.has_requests:
            return None
        num_loading = len(self.store.loading)
        planned = self.planner.schedule()
        if planned is None and (not self.queue or len(self.store.loading) > num_loading):
            planned = self.planner.schedule()  # what a preemption made room for, or a load leaves a step for
            if planned is None and not self.store.loading.under_way:
                raise StallError(self._describe_stall())
        return planned

    def _describe_stall(self) -> str:
        epoch, waiting, limits = self.epoch, self.store.waiting, self.epoch.limits
        heads = ", ".join(f"{r.frontend}/{r.number} {r.status.name}" for r in list(waiting)[:8])
        return (
            f"nothing can be scheduled: {len(epoch.running)} running, {len(waiting)} waiting ({heads}), "
            f"{epoch.kv.num_free} of {limits.num_blocks} blocks free"
        )

    def on_result(self, message: ModelRunnerOutput) -> None:
        """Take a result, in any order; apply results in the order of their steps. Late and repeated ones are counted
        and dropped.

        Raises: UnknownResult, if the result's rows are not those of its plan.
        """
        if self.observers.listening:
            self.observers.emit(events.ResultArrived(message))
        if message.epoch != self.epoch.number or not self.queue.deliver(message):
            self.store.counters["stale_messages_total"] += 1
            self.observers.emit(events.StaleResultDropped(message.epoch, message.step_id))
            return
        while (ready := self.queue.pop()) is not None:
            try:
                self._apply(*ready)
            except UnknownResult:
                self.observers.emit(events.ResultRefused(ready[1].epoch, ready[1].step_id))
                raise
        if self.epoch.slots.num_special and self.store.masks.maker.late:
            self.deferred_masks.start()  # before the next step is formed: they are more urgent

    def _apply(self, step: InflightStep, result: ModelRunnerOutput) -> None:
        decoded = decode_result(step, result, self._admission.vocab_size, self._admission.hidden_size)
        applied = self.applier.apply(step, decoded)
        tokens = step.num_tokens
        self._measure(step, applied.ended)
        self.store.counters["steps_total"] += 1
        self.store.counters["iteration_tokens_sum"] += tokens
        self.store.counters[f"iteration_tokens:{bisect_left(ITERATION_TOKENS, tokens)}"] += 1
        if self.observers.listening:
            self.observers.emit(events.ResultApplied(step, result, *applied))

    def _measure(self, step: InflightStep, ended: Sequence[RequestKey]) -> None:
        # Positions of a step: one per row, drafts, and those of prompts
        prompt_tokens, now = step.num_tokens - len(step.slots), self.store.now
        if prompt_tokens:
            prompt_tokens -= total(step.drafts)
        room = self.epoch.limits.max_num_batched_tokens - len(step.slots)
        hits = self.store.counters["prefix_cache_hits"]
        if self._queue_time.on_result(now, prompt_tokens, room, hits, not self.queue.steps):
            self.store.loading.seconds_per_token = self._queue_time.seconds_per_computed_token
        if ended:
            self._queue_time.on_ends((self.store.requests[key] for key in ended), now)

    def stats(self) -> dict[str, float]:
        """Gauges and totals under vLLM's metric names, without a prefix."""
        return {
            "num_requests_running": len(self.epoch.running),
            "num_requests_waiting": self.store.num_waiting,
            "num_requests_waiting_by_reason:capacity": len(self.store.waiting),
            "num_requests_waiting_by_reason:deferred": self.store.num_waiting - len(self.store.waiting),
            "kv_cache_usage_perc": self.epoch.kv.usage,
            "inflight_steps": len(self.queue),
            "expected_queue_seconds": self.queue_seconds(),
            "seconds_per_prompt_token": self._queue_time.seconds_per_prompt_token,
            **self.store.counters,
        }
