"""The run-ahead loop without I/O: events go in, messages come out (spec 0.4).

The shell calls `add`, `abort` and `on_result` as messages arrive, and after each batch of events `dispatch`, which
fills the batch queue: filling it has priority over reading results. Aborts that arrived with a result are applied
before it.
"""

from collections.abc import Iterator

import numpy as np

from protocol.codec import ProtocolError, unpack
from protocol.requests import Finish, FinishReason, GenerateRequest, RequestOutputs, RequestTimes
from protocol.rows import EmbeddingRows, LogprobRows, ProgressRows, ResultRows
from protocol.sampling import Pooling
from protocol.steps import NO_DRAFT, GrammarOutput, ModelRunnerOutput, SchedulerOutput, StepMessage
from services.scheduler.core.batch_queue import BatchQueue
from services.scheduler.core.ledger import InflightStep
from services.scheduler.core.limits import Limits
from services.scheduler.core.observer import (
    AllRequestsFailed,
    DispatchStarted,
    EpochEnded,
    EpochStarted,
    FrontendLeft,
    GrammarReady,
    GrammarSent,
    Observer,
    Observers,
    PrefixCacheReset,
    RequestArrived,
    RequestKey,
    RequestRefused,
    RequestsAborted,
    ResultApplied,
    ResultArrived,
    SlotsReleased,
    StaleResultDropped,
    StepDispatched,
    TimeAdvanced,
)
from services.scheduler.core.request import Request
from services.scheduler.core.results import NO_EMBEDDINGS, Sampled, UnknownResult
from services.scheduler.core.scheduler import Scheduler
from services.scheduler.core.slots import Column
from services.scheduler.grammar import Compiler, Grammar
from services.scheduler.policies import BatchingPolicy

MAX_PRIORITY = 2**20
"""Priorities are integers from -MAX_PRIORITY to MAX_PRIORITY."""


class StallError(Exception):
    """Requests exist, nothing is in flight and nothing can be scheduled (spec 0.4 L7): a bug, said aloud."""


class EngineCore:
    def __init__(
        self,
        scheduler: Scheduler,
        depth: int,
        vocab_size: int,
        max_num_queued_reqs: int = 1024,
        max_num_queued_tokens: int = 1 << 22,
        use_priority: bool = False,
        compiler: Compiler | None = None,
        hidden_size: int = 0,
        observer: Observer | None = None,
    ) -> None:
        """`compiler` None: structured output is refused; `hidden_size` 0: embeddings are. `observer` is attached before
        the first event; others may be added to `observers` at any time."""
        self.scheduler = scheduler
        self.queue = BatchQueue(depth)
        self.requests: dict[tuple[int, int], Request] = {}
        self.vocab_size = vocab_size
        self._max_reqs = max_num_queued_reqs
        self._max_tokens = max_num_queued_tokens
        self._use_priority = use_priority
        self._compiler = compiler
        self._compiling: dict[int, Request] = {}
        """By ticket: requests whose grammar is not ready; they wait here and not in the scheduler, in nobody's way."""
        self._unsampled: InflightStep | None = None
        """The step dispatched last, while its sampling waits for its `GrammarOutput`."""
        self._hidden_size = hidden_size
        self._arrivals = 0
        self.stale_results = 0
        if observer is not None:
            self.observers.add(observer)

    @property
    def observers(self) -> Observers:
        return self.scheduler.observers

    @property
    def now(self) -> float:
        """The time of the last `advance`, in seconds."""
        return self.scheduler.now

    def advance(self, now: float) -> None:
        """Set the time of everything that happens until the next call. `now`: a monotonic clock, in seconds."""
        if self.observers.listening:
            self.observers.emit(TimeAdvanced(now))
        self.scheduler.now = now

    # -- clients -------------------------------------------------------------------------------------------------

    def add(self, client: int, message: GenerateRequest) -> None:
        """Admits a request, or answers with the `Finish` that says why not."""
        if self.observers.listening:
            self.observers.emit(RequestArrived(client, message))
        key = (client, message.number)
        if key in self.requests:
            raise ValueError(f"frontend {client} reused number {message.number}, which is still open")
        refusal = self._refusal(message)
        if refusal is not None:
            times = RequestTimes(ended=self.now)
            finish = Finish(message.number, refusal[0], message=refusal[1], times=times)
            self.scheduler.outputs.finish(client, finish)
            if self.observers.listening:
                self.observers.emit(RequestRefused(client, message.request_id, finish))
            self.scheduler.counters["rejected" if refusal[0] is FinishReason.REJECTED else "invalid"] += 1
            return
        self._arrivals += 1
        request = Request(
            client,
            message.number,
            unpack(message.token_ids),
            message.num_prompt_tokens,
            message.params,
            Request.rank_of(message.priority if self._use_priority else 0, self._arrivals),
            message.cache_salt,
            message.pooling,
            message.request_id,
            self.now,
        )
        self.requests[key] = request
        self.scheduler.counters["prompt_tokens"] += request.num_prompt_tokens
        if message.structured is None or self._compiler is None:
            self.scheduler.add(request)
        else:
            self._compiling[self._arrivals] = request
            self._compiler.submit(self._arrivals, message.structured, message.params.eos_token_ids)

    def on_grammar(self, ticket: int, grammar: Grammar | str) -> None:
        """A request's grammar is ready, or cannot be: then the text says why. The tokens that the request came with
        belong to it."""
        request = self._compiling.pop(ticket, None)
        if self.observers.listening:
            key = None if request is None else (request.client, request.number)
            error = grammar if isinstance(grammar, str) else ""
            self.observers.emit(GrammarReady(ticket, key, error))
        if request is None:
            return  # it was aborted meanwhile
        if not isinstance(grammar, str):
            outputs = request.token_ids[request.num_prompt_tokens :].tolist()
            if all(map(grammar.accept, outputs)):
                request.grammar = grammar
                self.scheduler.add(request)
                return
            grammar = "the tokens delivered before do not match what the output must match"
        self.scheduler.end(request, request.finish_message(FinishReason.INVALID, message=grammar))
        self.scheduler.counters["invalid"] += 1

    def _refusal(self, message: GenerateRequest) -> tuple[FinishReason, str] | None:
        """Guards the shared loop: whatever a frontend lets through, a request that cannot be served ends alone."""
        limits, waiting, params = self.scheduler.limits, self.scheduler.waiting, message.params
        tokens = unpack(message.token_ids)
        prompt, room = message.num_prompt_tokens, limits.max_model_len - message.num_prompt_tokens
        outputs = len(tokens) - prompt
        if prompt < 1 or outputs < 0:
            return FinishReason.INVALID, "the prompt is empty"
        if tokens.min() < 0 or tokens.max() >= self.vocab_size:
            return FinishReason.INVALID, f"token ids must lie between 0 and {self.vocab_size - 1}"
        if room < 1:
            longest = limits.max_model_len - 1
            return (
                FinishReason.INVALID,
                f"the prompt has {prompt} tokens, but the context holds at most {longest}",
            )
        if outputs >= min(params.max_tokens, room):
            return FinishReason.INVALID, "every token this request may have was already delivered"
        positions, pool = limits.positions(prompt, params), limits.num_blocks * limits.block_size
        if positions > pool:
            return (
                FinishReason.INVALID,
                f"the request needs {positions} tokens of KV cache, but it holds {pool}",
            )
        if max(params.stop_token_ids, default=0) >= self.vocab_size:
            return FinishReason.INVALID, f"stop_token_ids must lie between 0 and {self.vocab_size - 1}"
        if params.min_tokens > limits.max_model_len:
            return (
                FinishReason.INVALID,
                f"min_tokens is {params.min_tokens}, but the context holds {limits.max_model_len} tokens",
            )
        refusal = self._lacking(message)
        if refusal is not None:
            return FinishReason.INVALID, refusal
        if abs(message.priority) > MAX_PRIORITY:
            return FinishReason.INVALID, f"priority must lie between -{MAX_PRIORITY} and {MAX_PRIORITY}"
        num_waiting = len(waiting) + len(self._compiling)
        num_tokens = waiting.num_tokens + sum(len(r.token_ids) for r in self._compiling.values())
        if num_waiting >= self._max_reqs or num_tokens + len(tokens) > self._max_tokens:
            return FinishReason.REJECTED, "the server is overloaded; try again later"
        return None

    def _lacking(self, message: GenerateRequest) -> str | None:
        """What the request names or needs that this engine does not have."""
        params = message.params
        named = max(
            (
                *(token for token, _ in params.logit_bias),
                *(token for word in params.bad_words for token in word),
            ),
            default=0,
        )
        allowed = unpack(params.allowed_token_ids)
        if max(named, allowed.max(initial=0)) >= self.vocab_size or allowed.min(initial=0) < 0:
            return f"logit_bias, bad_words and allowed_token_ids must lie between 0 and {self.vocab_size - 1}"
        if message.structured is not None and self._compiler is None:
            return "structured output is not served: the scheduler was started without the model's tokenizer"
        if message.pooling is not Pooling.NONE and not self._hidden_size:
            return "this backend serves no embeddings"
        return None

    def abort(self, client: int, numbers: list[int]) -> None:
        """Unknown and finished numbers are ignored. Outputs were published before: a number may be used again at
        once, and what the old request produced must not reach the new one."""
        if self.observers.listening:
            self.observers.emit(RequestsAborted(client, tuple(numbers)))
        self._abort(client, numbers)

    def _abort(self, client: int, numbers: list[int]) -> None:
        for number in numbers:
            request = self.requests.pop((client, number), None)
            if request is not None and not request.finished:
                self._finish(request, None)
                self.scheduler.counters["aborted"] += 1

    def _finish(self, request: Request, finish: Finish | None) -> None:
        """Wherever the request is."""
        ticket = next((ticket for ticket, waits in self._compiling.items() if waits is request), None)
        if ticket is None or self._compiler is None:
            self.scheduler.finish(request, finish)
        else:
            del self._compiling[ticket]
            self._compiler.cancel(ticket)
            self.scheduler.end(request, finish)

    def drop_client(self, client: int) -> None:
        """A frontend is gone: nobody waits for its requests."""
        if self.observers.listening:
            self.observers.emit(FrontendLeft(client))
        self._abort(client, [number for owner, number in self.requests if owner == client])
        self.scheduler.outputs.drop_client(client)

    def fail_all(self, error: str) -> None:
        """The workers are lost for good: every request ends with the error, nothing in flight is delivered."""
        if self.observers.listening:
            self.observers.emit(AllRequestsFailed(error))
        self._void()
        for request in self.requests.values():
            if not request.finished:
                self._finish(request, request.finish_message(FinishReason.ERROR, message=error))

    def end_epoch(self) -> None:
        """The workers are lost: requests wait with their confirmed tokens, nothing in flight is delivered. Until
        `start_epoch`, requests may come and go, but nothing may be dispatched."""
        if self.observers.listening:
            self.observers.emit(EpochEnded(self.scheduler.epoch))
        self._void()

    def _void(self) -> None:
        self.queue.clear()
        self._unsampled = None
        self.scheduler.void()

    def start_epoch(self, limits: Limits, policy: BatchingPolicy, epoch: int) -> None:
        """Goes on with another group of workers. What does not fit its sizes any more ends with an error."""
        if self.observers.listening:
            self.observers.emit(EpochStarted(epoch, limits))
        self.scheduler = Scheduler(limits, policy, epoch, self.scheduler, self.scheduler.drafting)
        for request in [*self.scheduler.waiting, *self._compiling.values()]:
            most = limits.positions(request.num_prompt_tokens, request.params)
            if len(request.token_ids) >= limits.max_model_len or most > limits.num_blocks * limits.block_size:
                message = "the workers were replaced by others with less memory, in which it does not fit"
                self._finish(request, request.finish_message(FinishReason.ERROR, message=message))

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """See `Scheduler.reset_prefix_cache`."""
        if self.observers.listening:
            self.observers.emit(PrefixCacheReset(reset_running))
        return self.scheduler.reset_prefix_cache(reset_running)

    # -- steps ---------------------------------------------------------------------------------------------------

    def dispatch(self) -> Iterator[StepMessage]:
        """Schedules until the queue is full or nothing more can be scheduled. Each message is to be sent as it comes,
        before the next step is formed.

        A step that waits for its grammar is the last one until it has it: its forward pass runs, no other does
        before it was sampled (spec 0.4 L1).

        Raises: StallError
        """
        observers = self.observers
        if observers.listening:
            observers.emit(DispatchStarted())
        while (grammar := self._grammar_output()) is not None or self._unsampled is None:
            if grammar is not None:
                if observers.listening:
                    observers.emit(GrammarSent(grammar))
                yield grammar
                continue
            planned = None if self.queue.full else self._schedule()
            if planned is None:
                break
            self.queue.push(planned[0])
            self._unsampled = planned[0] if planned[1].has_structured_output_requests else None
            if observers.listening:
                observers.emit(self._dispatched(*planned))
            yield planned[1]
        if not self.queue and (release := self.scheduler.take_releases()) is not None:
            if observers.listening:
                observers.emit(SlotsReleased(release))
            yield release

    def _dispatched(self, step: InflightStep, plan: SchedulerOutput) -> StepDispatched:
        scheduler, slots = self.scheduler, self.scheduler.slots
        return StepDispatched(
            step,
            plan,
            requests=tuple(self._key_of(new.slot) for new in plan.new),
            frontends=slots.client.take(step.slots),
            numbers=slots.number.take(step.slots),
            prefills=step.starts < slots.entry.take(step.slots),
            steps_in_flight=len(self.queue),
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._compiling),
            kv_cache_usage=scheduler.kv.usage,
        )

    def _key_of(self, slot: int) -> RequestKey:
        request = self.scheduler.slots.request(slot)
        return request.client, request.number

    def _grammar_output(self) -> GrammarOutput | None:
        """That of the step which waits for it, as soon as the tokens before it are known."""
        if self._unsampled is None:
            return None
        grammar = self.scheduler.grammar_output(self._unsampled, self.vocab_size)
        if grammar is not None:
            self._unsampled = None
        return grammar

    def _schedule(self) -> tuple[InflightStep, SchedulerOutput] | None:
        scheduler = self.scheduler
        if not self.has_requests:
            return None
        planned = scheduler.schedule()
        if planned is None and not self.queue:
            planned = scheduler.schedule()  # a preemption just now may have made room for what waits
            if planned is None:
                waits = ", ".join(
                    f"{r.client}/{r.number} {r.status.name}" for r in list(scheduler.waiting)[:8]
                )
                raise StallError(
                    f"nothing can be scheduled: {len(scheduler.running)} running, {len(scheduler.waiting)} waiting "
                    f"({waits}), {scheduler.kv.pool.num_free} of {scheduler.kv.pool.num_blocks} blocks free"
                )
        return planned

    def on_result(self, result: ModelRunnerOutput) -> None:
        """Takes a result in any order, applies results in the order of their steps; late or doubled ones are counted
        and dropped.

        Raises: UnknownResult, if the result's rows are not those of its plan.
        """
        if self.observers.listening:
            self.observers.emit(ResultArrived(result))
        if result.epoch != self.scheduler.epoch or not self.queue.deliver(result):
            self.stale_results += 1
            if self.observers.listening:
                self.observers.emit(StaleResultDropped(result))
            return
        while (ready := self.queue.pop()) is not None:
            step, output = ready
            try:
                rows, progress = ResultRows.from_message(output), ProgressRows.from_message(output)
                logprobs = LogprobRows.from_message(output.logprobs) if output.logprobs is not None else None
                embeddings = (
                    EmbeddingRows.from_message(output).by_slot() if output.embeddings else NO_EMBEDDINGS
                )
            except ProtocolError as error:
                raise UnknownResult(f"step {step.step_id}: {error}") from error
            self._check(step, rows)
            if logprobs is not None and not np.isin(logprobs.owners, step.slots).all():
                raise UnknownResult(f"step {step.step_id} has log-probabilities of slots not its own")
            if any(len(values) != 4 * self._hidden_size for values in embeddings.values()):
                raise UnknownResult(f"step {step.step_id} has embeddings of another size than the model's")
            if len(progress.slots):
                self.scheduler.report_progress(step, *progress)
            drafts = None
            if output.draft_token_ids:
                drafts = self._drafts_of(step, output, len(rows.counts))
            seconds = output.times.sampled - output.times.forward_began
            sampled = Sampled(
                rows.counts, rows.token_ids, rows.drafted, drafts, logprobs, embeddings, seconds
            )
            applied = self.scheduler.update_from_output(step, sampled)
            if applied is not None:
                self.observers.emit(ResultApplied(step, output, *applied))
            self.scheduler.counters["steps"] += 1

    def _check(self, step: InflightStep, rows: ResultRows) -> None:
        """The rows must be the plan's (identity, not counting), and tokens of the vocabulary."""
        if not np.array_equal(rows.slots, step.slots[step.samples]) or not np.array_equal(
            rows.generations, step.generations[step.samples]
        ):
            raise UnknownResult(f"the rows of step {step.step_id}'s result are not those of its plan")
        if rows.token_ids.max(initial=0) >= self.vocab_size:
            raise UnknownResult(
                f"step {step.step_id} returned a token outside the vocabulary of {self.vocab_size}"
            )

    def _drafts_of(self, step: InflightStep, output: ModelRunnerOutput, num_rows: int) -> Column:
        """int32[rows, proposed]"""
        ids = unpack(output.draft_token_ids)
        if len(ids) != num_rows * step.proposes or ids.min() < NO_DRAFT or ids.max() >= self.vocab_size:
            raise UnknownResult(
                f"step {step.step_id} returned {len(ids)} drafts, some outside the vocabulary or not "
                f"{step.proposes} for each of {num_rows} rows"
            )
        return ids.reshape(num_rows, step.proposes)

    def take_outputs(self) -> list[tuple[int, RequestOutputs]]:
        """What to publish, a message per frontend; finished requests are forgotten here."""
        taken = self.scheduler.outputs.take()
        for client, outputs in taken:
            for finish in outputs.finished:
                key = (client, finish.number)
                if key in self.requests and self.requests[key].finished:
                    del self.requests[key]
        return taken

    @property
    def has_requests(self) -> bool:
        return bool(len(self.scheduler.running) or len(self.scheduler.waiting))

    def stats(self) -> dict[str, float]:
        """Gauges and totals under vLLM's metric names, without a prefix."""
        scheduler, counters = self.scheduler, self.scheduler.counters
        return {
            "num_requests_running": len(scheduler.running),
            "num_requests_waiting": len(scheduler.waiting) + len(self._compiling),
            "kv_cache_usage_perc": scheduler.kv.usage,
            "num_preemptions": counters["preemptions"],
            "prefix_cache_queries": scheduler.kv.queries,
            "prefix_cache_hits": scheduler.kv.hits,
            "prompt_tokens": counters["prompt_tokens"],
            "generation_tokens": counters["generation_tokens"],
            "admission_rejections": counters["rejected"],
            "steps_total": counters["steps"],
            **{name: count for name, count in counters.items() if name.startswith("spec_decode_")},
            "inflight_steps": len(self.queue),
            "stale_messages_total": self.stale_results,
        }
