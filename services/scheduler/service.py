"""The scheduler process: sockets, signals and the clock around `EngineCore` and `WorkerGroup`. It holds no rules.

One thread, one poll: client messages first (an abort that arrived with a result is applied before it), then worker
messages, then the actions of the group, then everything there is to send.
"""

import logging
import math
import os
import socket
import sys
import time

import zmq
from msgspec.structs import replace

from protocol.codec import ProtocolError
from protocol.epochs import number_of
from protocol.handshake import Hello
from protocol.kv_groups import num_states
from protocol.membership import Pong, WorkerMessage
from protocol.records import Subscribe
from protocol.requests import (
    AbortRequest,
    ClientMessage,
    ControlCache,
    EnginePhase,
    Finish,
    FinishReason,
    GenerateRequest,
    RequestOutputs,
)
from protocol.silence import SIGN_INTERVAL
from protocol.steps import BlocksLoaded, ModelRunnerOutput, SchedulerOutput, StepFault, StepReport
from protocol.suspects import SUSPECT_AFTER
from services.checkpoint.gguf import forget_headers
from services.config import SchedulerConfig
from services.process import HANG_FACTOR, NO_ALARM, STARTED, HangAlarm, end_start_up, start_log, stop_signals
from services.scheduler.build import CoreFactory, CoreListener, CoreStart
from services.scheduler.cache_control import CacheControl
from services.scheduler.cached_blocks import CachedBlockReports
from services.scheduler.capabilities import Combination
from services.scheduler.core.engine import EngineCore, StallError
from services.scheduler.core.results import UnknownResult
from services.scheduler.engine_state import GAUGE_INTERVAL, StateReports
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.io.frontends import FrontendConnections
from services.scheduler.io.workers import WorkerConnections
from services.scheduler.leadership import Leadership
from services.scheduler.listeners import make_listeners
from services.scheduler.membership import (
    Ended,
    FailRequests,
    GroupStatus,
    News,
    Refuse,
    Send,
    Started,
    StepSize,
    WorkerGroup,
)
from services.scheduler.policies import BatchingPolicy
from services.scheduler.structured_output import StructuredOutput
from services.scheduler.subscriptions import Subscriptions
from services.scheduler.tier_reports import TierReports

log = logging.getLogger("runahead.scheduler")

EXIT_WORKER_LOST = 5
EXIT_REPLACED = 8
LINGER_MS = 1000
"""Milliseconds that the last messages to frontends and workers have to leave."""
PROBE_MS = 50
"""Longest wait for messages, in milliseconds, while steps are in flight, step records wait to be sent, or a connection
is known to be broken."""
CHECK_INTERVAL = 0.02
"""Seconds between two looks at timeouts, lost peers and what is due to frontends, while nothing but results arrives."""
SWITCH_INTERVAL = 1e-4
"""Seconds after which the loop lends the interpreter's lock to a thread that makes masks or compiles a grammar."""


class Service:
    def __init__(
        self, config: SchedulerConfig, incarnation: int, structured: StructuredOutput, alarm: HangAlarm = NO_ALARM
    ) -> None:
        """
        Args:
            structured: the service closes it.
            alarm: set with each sign of life, and cancelled after the loop.
        """
        self.config = config
        self.incarnation = incarnation
        self._alarm = alarm
        self._leadership = Leadership(config.scheduler_timeout_seconds, time.monotonic())
        self._structured = structured
        self.frontends = FrontendConnections(config.client_endpoint, config.security)
        self.workers = WorkerConnections(config.worker_endpoint, config.security)
        # A tokenizer of its own is not that of the model.
        self.group = WorkerGroup(config, incarnation, "" if config.tokenizer else structured.tokenizer)
        self._factory = CoreFactory(config)
        self.engine: EngineCore | None = None
        self._ranks: list[bytes] = []
        """The workers of the epoch in effect; empty: no step may be dispatched."""
        self._tiers = TierReports(config.block_size)
        self._cache_control = CacheControl(config, self._tiers, self.group.on_drop)
        self._started: Started | None = None
        """The epoch in effect, or the last one; None: there was none."""
        self._draining = False
        self._stop_now = False
        self._reports = StateReports(config, incarnation, self.group, structured, self._tiers)
        self._next_sign = self._next_check = 0.0
        self._subscriptions = Subscriptions(config.step_trace)
        self.cached_blocks = CachedBlockReports()
        self._listeners: tuple[CoreListener, ...] = (*make_listeners(config, incarnation), self._subscriptions)

    # -- the loop ------------------------------------------------------------------------------------------------

    def run(self, wakeup: socket.socket) -> int:
        """Serve until a signal arrives. Return the exit status.

        Args:
            wakeup: a byte can be read from it for each signal to stop.
        """
        try:
            poller = zmq.Poller()
            clients, workers = self.frontends.server.sockets, self.workers.server.sockets
            signals = wakeup.fileno()
            for source in (*clients, *workers, wakeup, *self._structured.fds):
                poller.register(source, zmq.POLLIN)
            worked = 0.0
            while not self._finished():
                ready = dict(poller.poll(self._poll_ms()))
                began = time.monotonic()
                self._check_leadership(began)
                if self.engine is not None:
                    self.engine.advance(began, worked)
                if signals in ready:
                    self._on_signal(wakeup)
                if not ready.keys().isdisjoint(clients):
                    self._read_clients()
                if not ready.keys().isdisjoint(workers):
                    self._read_workers()
                if checks := self._checks_are_due(began):
                    self._watch_workers()
                if self.engine is not None:
                    self._structured.read(self.engine)
                self._send()
                if checks or self._checks_are_due(began):
                    self._report()
                worked = time.monotonic() - began
            if self.group.failed:
                log.error("%s", self.group.status.detail)
                return EXIT_WORKER_LOST
            self.group.shut_down("the scheduler is stopping")
            self._act()
            return 0
        finally:
            self._alarm.cancel()
            self._structured.close()
            self.frontends.close(LINGER_MS)
            self.workers.close(LINGER_MS)
            for listener in self._listeners:
                listener.close()

    def _check_leadership(self, now: float) -> None:
        """Exit at once if another scheduler has taken this one's place: closing the sockets would remove the other's
        files, and a message would disturb it."""
        due = now >= self._next_sign
        if (why := self._leadership.lost(now, due and self.frontends.server.replaced)) is not None:
            log.error("%s; it exits", why)
            logging.shutdown()
            os._exit(EXIT_REPLACED)

    def _poll_ms(self) -> int:
        """Return the milliseconds to wait for messages. When idle, the loop wakes only for its signs of life."""
        if self._structured.grammars:
            return 0
        in_flight = self.engine is not None and self.engine.queue.steps
        if in_flight or self.workers.server.sweeps or self._subscriptions.pending:
            return PROBE_MS
        if self.engine is not None and self.engine.has_requests:
            return int(1000 * GAUGE_INTERVAL)
        until_sign = math.ceil(1000 * max(0.0, self._next_sign - time.monotonic()))
        return min(200 if self.group.settling else 1000, until_sign)

    def _checks_are_due(self, now: float) -> bool:
        """Return whether to look at more than results: no step is in flight, as after the loss of an epoch, something
        else has arrived, a peer was found to be gone, or `CHECK_INTERVAL` is over."""
        if now >= self._next_check or self.engine is None or not self.engine.queue.steps:
            return True
        return bool(self.workers.server.lost or self.frontends.server.lost)

    @property
    def _is_idle(self) -> bool:
        return self.engine is None or not (self.engine.requests or self.engine.queue)

    def _finished(self) -> bool:
        return self._stop_now or self.group.failed or (self._draining and (self._is_idle or self.group.is_stopped))

    def _on_signal(self, wakeup: socket.socket) -> None:
        wakeup.recv(64)
        self._next_check = 0.0
        self._stop_now, self._draining = self._draining, True
        log.info("stopping now" if self._stop_now else "draining: open requests finish, new ones are refused")

    # -- in ------------------------------------------------------------------------------------------------------

    def _read_clients(self) -> None:
        self._next_check = 0.0
        for client, message in self.frontends.receive():
            try:
                self._on_client_message(client, message)
            except ProtocolError as error:
                self.frontends.count_error(client, error)

    def _on_client_message(self, client: int, message: Hello | ClientMessage) -> None:
        match message:
            case Hello():
                self.frontends.send_state(client, self._reports.state(self._status(), self._started, self.engine))
            case Subscribe(steps=steps, cached_blocks=cached_blocks):
                self._subscriptions.set(client, steps)
                self.cached_blocks.set(client, cached_blocks)
            case ControlCache():
                started = self._started if self._ranks else None
                answer = self._cache_control.handle(client, message, self.engine, started)
                if answer is not None:
                    self.frontends.send_if_connected(client, answer)
            case GenerateRequest(incarnation=other) | AbortRequest(incarnation=other) if other not in (
                0,
                self.incarnation,
            ):
                log.warning("a message for another scheduler was dropped")
            case GenerateRequest() if self.engine is None or (self._draining and not message.age):
                why = "the engine is shutting down" if self._draining else "the engine is not ready"
                finish = Finish(message.number, FinishReason.REJECTED, message=f"{why}; try again later")
                self.frontends.send(client, RequestOutputs(b"", b"", b"", [finish]))
            case GenerateRequest() if self.engine is not None:
                if message.attempts >= SUSPECT_AFTER:  # the last line about it, if this scheduler dies too
                    log.warning(
                        "request_id=%s: %d schedulers have died while they had it", message.request_id, message.attempts
                    )
                self.engine.add(client, message)
            case AbortRequest() if self.engine is not None:
                self.engine.abort(client, message.numbers)

    def _read_workers(self) -> None:
        now = time.monotonic()
        for worker, message in self.workers.receive():
            try:
                if isinstance(message, ModelRunnerOutput):
                    self._on_result(worker, message, now)
                else:
                    self._on_worker_message(worker, message, now)
            except ProtocolError as error:
                self.workers.server.count_error(worker, error)
            self._act()
            if isinstance(message, ModelRunnerOutput) and message.embeddings:
                self._publish()  # those of two steps may be too large for one message

    def _on_worker_message(
        self, worker: bytes, message: WorkerMessage | StepReport | StepFault | BlocksLoaded, now: float
    ) -> None:
        """Raises: ProtocolError"""
        self._next_check = 0.0
        match message:
            case BlocksLoaded():
                if self.engine is not None and worker in self._ranks and message.epoch == self.group.epoch:
                    done = self._cache_control.on_loaded(worker, message, len(self._ranks), self.engine)
                    if done is not None:
                        self.frontends.send_if_connected(*done)
            case StepReport():
                self._subscriptions.add_times(worker, message, self.workers.clock_offset)
            case Pong():
                self.group.on_pong(worker, message.number)
                if message.tiers and self.engine is not None and worker in self._ranks:
                    self._tiers.on_report(worker, message.tiers, self.engine.observers)
            case _:
                self.group.on_message(worker, message, now)

    def _on_result(self, worker: bytes, result: ModelRunnerOutput, now: float) -> None:
        if self.engine is None:
            return
        if not self.group.may_return(worker, result.epoch):
            self.group.on_impossible_result(worker, "another rank sends the results", now)
            return
        if self.group.on_result(result.epoch, result.step_id, now):
            self._subscriptions.add_times(worker, result, self.workers.clock_offset)
            self._reports.worker_seconds.add(result.times)
        try:
            self.engine.on_result(result)
        except UnknownResult as error:  # worker and scheduler disagree about the batch
            self.group.on_impossible_result(worker, str(error), now)

    def _watch_workers(self) -> None:
        """Pass broken connections and the time to the group."""
        now = time.monotonic()
        for worker in self.workers.take_gone():
            self.group.on_gone(worker, "is gone: its connection broke", now)
            self._next_check = now
        self._act()
        if now >= self._next_check or not self._ranks:
            self._next_check = now + CHECK_INTERVAL
            self.group.check(now)
            self._act()
            if not self._draining:
                self.group.release_stopped(now, self._is_idle)
                self._act()

    def _act(self) -> None:
        """Carry out the group's actions."""
        for action in self.group.take_actions():
            match action:
                case Send(peer, message, everywhere):
                    self.workers.send(peer, message, everywhere)
                case Refuse(peer, reason):
                    self.workers.refuse(peer, reason)
                case Started():
                    self._start(action)
                case Ended(epoch, reason, is_fault):
                    level = logging.WARNING if is_fault else logging.INFO
                    log.log(level, "epoch %d has ended: %s", number_of(epoch), reason)
                    self._ranks = []
                    self._tiers.end_epoch()
                    for frontend, answer in self._cache_control.end_epoch():
                        self.frontends.send_if_connected(frontend, answer)
                    self._subscriptions.end_epoch()
                    self._report_state()  # before the end of a suspect: the next one waits for other workers
                    if self.engine is not None and self.engine.end_epoch(is_fault):
                        self.group.losses.on_explained()  # the request that caused it is refused
                case FailRequests(error):
                    if self.group.failed:  # frontends send the requests to other engines, if there are any
                        self._report_state()
                    if self.engine is not None:
                        self.engine.fail_all(error)
                        self._publish()
                case News(text):
                    log.info("%s", text)

    def _start(self, started: Started) -> None:
        self._ranks, self._started = started.peers, started
        self._subscriptions.start_epoch(started.peers)
        c, limits = self.config, started.limits
        try:
            policy = self._factory.policy(limits)
        except ValueError as error:
            self.group.fail(str(error), time.monotonic())
            return
        log.info(
            "ready: epoch %d, %d x %d ranks, %d blocks of %d tokens, context %d, %d sequences, batch queue depth %d",
            number_of(started.epoch), len(started.peers) // limits.stages, limits.stages, limits.num_blocks,
            limits.block_size, limits.max_model_len, limits.max_num_seqs, c.depth,
        )  # fmt: skip
        log.info("features: %s", Combination.from_config(c, self.group.backend))
        if c.enable_prefix_caching and num_states(limits.groups):
            log.info("the prefix cache is off: this model has recurrent states, which hold all tokens before")
        if (engine := self.engine) is None:
            engine = self._build_engine(started, policy)
            if started.pins is not None:
                self._cache_control.restore(started.pins, engine)
        else:
            engine.start_epoch(limits, policy, started.epoch)
        self._cache_control.start_epoch(engine, started)

    def _build_engine(self, started: Started, policy: BatchingPolicy) -> EngineCore:
        vocab_size, hidden_size = started.loaded.vocab_size, started.loaded.hidden_size
        if (compiler := self._structured.compiler) is not None:
            compiler.set_vocab_size(vocab_size)
        mask_maker, backend = self._structured.mask_thread or INLINE_MASKS, self.group.backend
        start = CoreStart(started.limits, started.epoch, vocab_size, hidden_size, compiler, mask_maker, backend)
        self.engine = self._factory.core(start, policy)
        for listener in self._listeners:
            listener.attach(self.engine, start)
        forget_headers()
        end_start_up()
        return self.engine

    # -- out -----------------------------------------------------------------------------------------------------

    def _send(self) -> None:
        if self.engine is not None:
            if self._ranks:
                try:
                    self._dispatch(self.engine)
                except StallError as error:
                    self.group.fail(str(error), time.monotonic())
                    self._act()
            self._publish()
            if self._ranks:
                for listener in self._listeners:
                    listener.on_turn(self.engine)
            for frontend, changes in self.cached_blocks.take(self.engine.store.now, self.engine.epoch.kv):
                self.frontends.send_if_connected(frontend, changes)

    def _report(self) -> None:
        """Send what is due to frontends besides the outputs of steps, and drop those that are gone."""
        if (taken := self._subscriptions.take(time.monotonic())) is not None:
            records, frontends = taken
            for frontend in frontends:
                self.frontends.send_if_connected(frontend, records)
        self._send_state()
        for frontend in self.frontends.take_gone():
            self._drop_frontend(frontend)

    def _send_state(self) -> None:
        """Give the signs of life that are due, with the engine's state, which may be due by itself."""
        now = time.monotonic()
        due = now >= self._next_sign
        if due:  # of its own time: reports of states that change do not put it off
            self._check_leadership(now)  # the process may have been stopped in the middle of this turn
            self._next_sign = now + SIGN_INTERVAL
            self._leadership.on_sign_of_life(now)
            self._alarm.set()
            self.workers.beat(self.group.on_sign_of_life(), self._ranks)
            self.frontends.end_leases(now - self.config.scheduler_timeout_seconds)
        if self._reports.is_due(now, self._status(), self.engine) or due:
            self._report_state()

    def _report_state(self) -> None:
        self.frontends.send_state_to_all(self._reports.report(self._status(), self._started, self.engine))

    def _drop_frontend(self, frontend: int) -> None:
        if self.engine is not None and (aborted := self.engine.drop_frontend(frontend)):
            log.warning("%d requests of frontend %d were aborted", aborted, frontend)
        self._subscriptions.set(frontend, subscribed=False)
        self.cached_blocks.set(frontend, subscribed=False)

    def _dispatch(self, engine: EngineCore) -> None:
        messages = engine.dispatch()
        for message in messages:
            if isinstance(message, SchedulerOutput):
                self.group.on_dispatch(message.step_id, time.monotonic(), StepSize.from_plan(message))
            if not self.workers.broadcast(self._ranks, message):
                messages.close()  # this ends the loop
                self._watch_workers()

    def _publish(self) -> None:
        if self.engine is None:
            return
        for client, outputs in self.engine.take_outputs():
            self.frontends.send(client, replace(outputs, incarnation=self.incarnation))

    def _status(self) -> GroupStatus:
        """Return the status of the group, or of the drain; a change is sent to all frontends at once."""
        status = self.group.status
        if self._draining and not self.group.failed:  # also while it waits for lost workers: it takes no new requests
            return status._replace(phase=EnginePhase.DRAINING, detail="stopping")
        return status


def run(config: SchedulerConfig) -> int:
    """Run one scheduler process until it is stopped.

    Returns: the exit status: 0, or 5 when the workers were lost. A scheduler that was replaced exits with 8.
    """
    start_log.debug("loading the tokenizer")
    structured = StructuredOutput.from_config(config)
    sys.setswitchinterval(SWITCH_INTERVAL)
    with stop_signals() as wakeup:
        incarnation = time.time_ns() // 1_000_000
        alarm = HangAlarm.install(HANG_FACTOR * config.scheduler_timeout_seconds)
        service = Service(config, incarnation, structured, alarm)
        start_log.debug(STARTED)
        try:
            status = service.run(wakeup)
        except OSError as error:  # no mistake of the configuration, after which it would not be started again
            raise RuntimeError(f"the scheduler failed while it served: {error}") from error
    zmq.Context.instance().term()  # waits until the last messages are sent
    return status
