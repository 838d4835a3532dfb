"""One engine as a frontend sees it: the connection to its scheduler, its state, and the rows of its messages."""

import hashlib
import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from protocol.block_names import split_names
from protocol.codec import Decoder, ProtocolError
from protocol.logprobs import Logprobs
from protocol.records import CachedBlocks, StepRecords, Subscribe
from protocol.requests import AbortRequest, CacheControlled, EngineMessage, EnginePhase, EngineState, Finish
from protocol.rows import LogprobRows, OutputRows
from protocol.security import Security
from protocol.transport import HandshakeRefused
from services.frontend.engine.addresses import EngineAddress
from services.frontend.engine.availability import SIZES, Availability, Recovery, checked
from services.frontend.engine.connection import SchedulerConnection
from services.frontend.engine.ledger import RequestLedger
from services.frontend.engine.output_pace import OutputPace
from services.frontend.engine.streams import RawLogprobs
from services.frontend.errors import APIError
from services.frontend.placement import Condition, EngineReport, Role
from services.frontend.steps.ring import StepRing

log = logging.getLogger("runahead.frontend")

MAX_SHEDDING = 1.0
"""Seconds after a refusal for load in which no further request is sent to the scheduler, at most."""


class ConnectedEngine(Availability):
    """
    Args:
        ledger: the open requests of all engines.
        silence, patience, tokenizer: as of `EngineClient`.
        recoveries: receives losses and returns of the engine.
        on_change: called when the engine was lost, or has sent its state.
        on_finish: called with the end of a request, before it is removed from the ledger. Returns the end for the
            client; None: the request goes on at another engine, or is not one of this engine.
        on_blocks: called with names of KV blocks that its prefix cache has from now on, and with those that it has no
            longer; None for these: it has no block but the first ones.
    """

    def __init__(
        self,
        address: EngineAddress,
        ledger: RequestLedger,
        silence: float,
        patience: float,
        security: Security,
        tokenizer: str,
        recoveries: deque[Recovery],
        on_change: Callable[["ConnectedEngine"], None],
        on_finish: Callable[["ConnectedEngine", Finish], Finish | APIError | None],
        on_blocks: Callable[["ConnectedEngine", list[bytes], list[bytes] | None], None],
    ) -> None:
        super().__init__(address.name, patience, recoveries)
        self.address = address
        self.connection = SchedulerConnection(
            address.name,
            address.endpoint,
            security.with_server_key(address.public_key),
            silence,
            self._on_frame,
            self._on_loss,
        )
        self._ledger = ledger
        self._tokenizer = tokenizer
        self._max_silence = silence
        self._on_change, self._on_finish, self._on_blocks = on_change, on_finish, on_blocks
        self._logged_condition = self.condition
        self.is_listed = True
        """False: it is kept until it owns no request."""
        self.refusal = ""
        """Reason why it, or this frontend, has refused the connection; "": it has not."""
        self.overloaded_until = 0.0
        """Until then the scheduler refuses new requests for load; monotonic seconds."""
        self._pace = OutputPace()
        self._steps: StepRing | None = None
        self._follows_blocks = False
        self._subscribed = Subscribe(steps=False)
        """The subscription that the scheduler has."""
        self._next_blocks = 0
        """Number of the next message with names of blocks."""
        self._lost_incarnation = 0
        self._num_foreign = 0
        """Messages about open requests of other engines."""
        self._decoder: Decoder[EngineMessage] = Decoder(EngineMessage)

    @property
    def identity(self) -> str:
        """Digest of everything that the tokens of a request depend on, and of the length that a request may have; "":
        not known."""
        state = self.state
        if not state.identity:
            return ""
        parts = f"{state.identity} {state.tokenizer} {state.max_model_len} {state.vocab_size}"
        return hashlib.sha256(parts.encode()).hexdigest()[:32]

    @property
    def settings(self) -> tuple[object, ...]:
        """Values that the engine's checks of a request depend on."""
        return self.identity, self.state.info, *(getattr(self.state, name) for name in SIZES)

    @property
    def status(self) -> str:
        """Condition in one word, for people."""
        if self.refusal:
            return "refused"
        if self.condition is Condition.CONNECTING:
            return self.state.phase.name.lower().replace("_", " ")
        return str(self.condition)

    @property
    def role(self) -> Role:
        role = self.state.info.get("role", "")
        return Role(role) if role in {*Role} else Role.BOTH

    def report(self) -> EngineReport:
        """Return what placement needs."""
        state, stats = self.state, self.state.stats
        num_streams = stats.get("num_requests_running", 0.0) + stats.get("num_requests_waiting", 0.0)
        return EngineReport(
            self.condition,
            self.identity,
            max(stats.get("expected_queue_seconds", 0.0), self.overloaded_until - time.monotonic()),
            state.block_size,
            stats.get("seconds_per_prompt_token", 0.0),
            int(num_streams),
            self._pace.seconds,
            self.role,
        )

    def _log_condition(self) -> None:
        before, self._logged_condition = self._logged_condition, self.condition
        if before is not self.condition:
            log.info("engine %s: %s -> %s", self.name, before, self.condition)

    def drain(self, draining: bool) -> None:
        """Let the streams of this engine move to others, and send it no new ones; or take that back."""
        self.draining = draining
        self._log_condition()

    def watch(self, now: float, is_stopping: bool = False) -> bool:
        """Notice silence. Return True if the engine is no longer expected back. `now`: monotonic seconds;
        `is_stopping`: this frontend drains."""
        self.connection.check(now)
        if self.connection.in_doubt and self.condition is not Condition.GONE:
            self.on_doubt(now)
        self.check_workers(now)
        self._log_condition()
        return self.gives_up(now, self.connection.is_open, is_stopping)

    def follow_steps(self, steps: StepRing | None) -> None:
        """Subscribe to step records, which `steps` receives; None: end the subscription."""
        self._steps = steps
        self._subscribe()

    def follow_blocks(self, follows: bool) -> None:
        """Subscribe to the names of the blocks in its prefix cache, or end the subscription."""
        self._follows_blocks = follows
        self._subscribe()

    def submit_open(self) -> None:
        """Send what the scheduler does not have yet. While it lacks workers nothing is sent: the loss would count for
        requests that came after it."""
        if not self.connection.is_open or not self.executes or self.state.phase is EnginePhase.RECOVERING:
            return
        ledger, scheduler = self._ledger, (self.name, self.state.incarnation)
        before = ledger.resubmitted
        only_again = self.state.phase is EnginePhase.DRAINING  # it refuses new ones
        for message in ledger.submissions(scheduler, self.identity, time.monotonic(), only_again):
            if not self.connection.send(message):
                return
        if (count := ledger.resubmitted - before) > 0:
            log.info("engine %s: %d open requests were submitted again", self.name, count)

    def abort(self, numbers: list[int]) -> None:
        """End requests there whose outputs are no longer needed."""
        self.connection.send_quietly(AbortRequest(numbers, self.state.incarnation))

    def on_refused(self, why: str) -> None:
        """It, or this frontend, has refused the connection."""
        self.refusal = why
        if self.condition is not Condition.GONE:
            self._on_loss(is_expelled=False)

    # -- events --------------------------------------------------------------------------------------------------

    def _on_loss(self, is_expelled: bool) -> None:
        """Its requests wait for its next scheduler, or move."""
        self._subscribed = Subscribe(steps=False)
        self._lost_incarnation = self.state.incarnation
        if is_expelled:
            self._ledger.expelled(self.name)
        self._ledger.disconnected(self.name, is_death=self.state.phase is not EnginePhase.DRAINING)
        self.on_lost(time.monotonic())
        self._log_condition()
        self._on_change(self)

    def _on_new_state(self, state: EngineState) -> None:
        """Raises: HandshakeRefused, if the scheduler compiles grammars for another tokenizer."""
        ours, theirs = self._tokenizer, state.tokenizer
        if ours and theirs and ours != theirs:
            raise HandshakeRefused(
                f"tokenizer mismatch: tokenizer.json of this frontend has the digest {ours}, that of the scheduler "
                f"{theirs}; give both the same --model and --tokenizer"
            )
        self.connection.on_state(state)
        if not self.connection.is_open:
            return
        if self.condition is Condition.GONE and state.incarnation and state.incarnation == self._lost_incarnation:
            self._ledger.returned((self.name, state.incarnation))
        self.refusal, now, settings = "", time.monotonic(), self.settings
        self._pace.on_stats(state.stats, now)
        self.on_state(checked(state, self._max_silence), now)
        if self.settings != settings:
            self._ledger.forget_refusals(self.name)
        self._log_condition()
        self._subscribe()
        self.submit_open()
        self._on_change(self)

    def _subscribe(self) -> None:
        """Send what is subscribed to, if that has changed, or the connection is new."""
        wanted, had = Subscribe(self._steps is not None, self._follows_blocks), self._subscribed
        if wanted == had or not self.state.incarnation or not self.connection.is_open:
            return
        if self._steps is not None and not had.steps:
            self._steps.on_connected()
        if wanted.cached_blocks and not had.cached_blocks:
            self._next_blocks = 0
        self._subscribed = wanted
        self.connection.send_quietly(wanted)

    def _on_cached_blocks(self, message: CachedBlocks) -> None:
        """Raises: ProtocolError"""
        if message.number not in (0, self._next_blocks):
            if self._next_blocks:
                log.info("engine %s: reports of its blocks are missing; all are asked for again", self.name)
                self._on_blocks(self, [], None)
                self.follow_blocks(False)
                self.follow_blocks(True)
            return  # also what was sent before the new subscription arrived
        stored, removed = split_names(message.stored), split_names(message.removed)
        self._next_blocks = message.number + 1
        self._on_blocks(self, stored, removed if message.number else None)

    def _on_frame(self, frame: bytes) -> None:
        try:
            message = self._decoder.decode(frame)
            if isinstance(message, EngineState):
                self._on_new_state(message)
                return
            if isinstance(message, StepRecords):
                if self._steps is not None:
                    self._steps.add(message, time.monotonic())
                return
            if isinstance(message, CachedBlocks):
                self._on_cached_blocks(message)
                return
            if isinstance(message, CacheControlled):
                self.connection.on_answer(message)
                return
            if message.incarnation != self.state.incarnation:
                log.warning("engine %s: a message of another scheduler was dropped", self.name)
                return
            rows = OutputRows.from_message(message)
            self._group_logprobs(message.logprobs)
        except ProtocolError as error:  # it may have had tokens; the requests submitted again get them
            self.connection.on_bad_message(error)
            return
        ledger, owned = self._ledger, self._ledger.streams[self.name]
        for number, count in message.cached.items():
            stream = owned.get(number)
            if stream is not None and stream.num_cached is None:  # the first engine's: the next one fetches its blocks
                stream.num_cached = count
        strays = ledger.deliver(self.name, rows.numbers.tolist(), rows.indices.tolist(), rows.token_ids.tolist())
        for embedding in message.embeddings:
            if (stream := owned.get(embedding.number)) is not None:
                stream.add_embedding(embedding.values)
        strays += [finish.number for finish in message.finished if finish.number not in owned]
        self._check_strays(strays)
        for finish in message.finished:
            if finish.retry_after:
                self.overloaded_until = time.monotonic() + min(finish.retry_after, MAX_SHEDDING)
            if (end := self._on_finish(self, finish)) is not None:
                ledger.end(finish.number, end)
        if message.finished and ledger.has_unsent:
            self._on_change(self)

    def _check_strays(self, numbers: list[int]) -> None:
        """Count and log outputs of requests that are not this engine's. Those of requests that have moved or ended have
        numbers that are not open."""
        if (number := next(filter(self._ledger.__contains__, numbers), None)) is not None:
            self._num_foreign += 1
            if not self._num_foreign & (self._num_foreign - 1):  # a peer that is wrong must not fill the log
                text = "engine %s: outputs of a request that another engine has are ignored: number=%d (%d so far)"
                log.warning(text, self.name, number, self._num_foreign)

    def _group_logprobs(self, logprobs: Logprobs | None) -> None:
        """Raises: ProtocolError, before anything was stored"""
        if logprobs is None:
            return
        rows, owned = LogprobRows.from_message(logprobs), self._ledger.streams[self.name]
        ids, values, begin = rows.token_ids.tolist(), rows.values.tolist(), 0
        undefined = np.isnan(rows.values)
        columns = rows.owners.view(np.uint32), rows.positions, rows.token_ranks, rows.counts
        for number, position, rank, count in zip(*(column.tolist() for column in columns), strict=True):
            end = begin + count
            if (stream := owned.get(number)) is not None:
                if undefined[begin:end].any():
                    stream.response.fail(APIError(500, "the model gave a log-probability that is no number"))
                stream.add_logprobs(RawLogprobs(position, rank, ids[begin:end], values[begin:end]))
            begin = end
