"""Which engine has each open request: requests are placed, move, and go to another engine if theirs refuses them.

Its rules are in docs/invariants.md: one owner, and moved stream.
"""

import itertools
import logging
import time
from collections import Counter, deque

from msgspec.structs import replace
from typing_extensions import TypedDict

from protocol.block_names import TOKEN_BYTES, names_of
from protocol.requests import CacheAction, ControlCache, EnginePhase, Finish, FinishReason
from protocol.sampling import Pooling
from services.frontend.engine.engine import ConnectedEngine
from services.frontend.engine.engines import Engines
from services.frontend.engine.ledger import NOBODY, LedgerEntry, RequestLedger
from services.frontend.errors import APIError
from services.frontend.placement import Decision, Hold, LoadAhead, Move, Place, Placement, Reason

log = logging.getLogger("runahead.frontend")

RETRY_AFTER = 5.0
"""Seconds after which a client may try again if no engine is expected to serve."""
REJECTED_PAUSE = 1.0
"""Seconds until a request that was admitted once, and for which no other engine has room, is sent again."""
MAX_MOVES = 100
"""Moves of streams that are kept for the page."""


class MoveEntry(TypedDict):
    at: float
    """Seconds since 1970."""
    request_id: str
    source: str
    target: str
    reason: str
    """lost, draining, slow or prefilled."""
    output_tokens: int
    """Tokens that the former engine had delivered."""


class Owners:
    """Carries out what placement decides."""

    def __init__(self, engines: Engines, ledger: RequestLedger, placement: Placement) -> None:
        self._engines, self._ledger, self._placement = engines, ledger, placement
        self._numbers = itertools.count(1)
        self.decisions = Counter[tuple[str, str, str]]()
        """Decisions over all time: what was decided, the engine that it is about ("": none), and the reason."""
        self.latest_moves: deque[MoveEntry] = deque(maxlen=MAX_MOVES)

    def enter(self, entry: LedgerEntry) -> None:
        """Place a new request. Raises: APIError, when no engine can take it now; it is closed then"""
        self._place(entry)
        if entry.engine == NOBODY:
            self.decisions["hold", NOBODY, "not_ready"] += 1

    def _place(self, entry: LedgerEntry) -> None:
        """Send a request that has no owner to the engine that placement chooses, or let it wait.

        Raises: APIError, if no engine takes it; it is closed then
        """
        match self._decide(entry):
            case Place(engine=name, reason=reason):
                self.decisions["place", name, reason] += 1
                self._ledger.assign(entry, name)
                self._engines[name].submit_open()
            case Hold():
                pass
            case refused:
                self.decisions["refuse", NOBODY, "no_engine"] += 1
                self._ledger.close(entry.request.number)
                why = [f"engine {name} refuses it: {text}" for name, text in entry.refusals.items()]
                message = "; ".join([refused.message, *why, "try again later"])
                raise APIError(503, message, retry_after=RETRY_AFTER, logged=refused.message)

    def _decide(self, entry: LedgerEntry, *refused: str) -> Decision:
        """Return what placement decides for a request, in which the fields that depend on its engine are set.
        `refused`: engines that have no room for it."""
        request, identity = entry.request, entry.identity or self._engines.identity
        excluded, for_good = (*entry.refusals, *refused), (*entry.refusals,) if entry.num_admissions else ()
        decision = self._placement.place(entry.key, request.token_ids, request.salt, identity, excluded, for_good)
        if isinstance(decision, Place):
            entry.set_kv_peers(self._kv_peers(decision.holder))
            goes_on = request.pooling is Pooling.NONE and not entry.refusals  # the prompt is all of an embedding
            entry.only_prompt = decision.reason is Reason.PREFILL and goes_on
        return decision

    def settle(self) -> None:
        """Place the requests that have no owner, move those that must leave theirs, and send what is unsent."""
        for entry in self._ledger.waiting:
            # Sent meanwhile, as an engine was lost; or no engine had room for it
            if entry.engine != NOBODY or entry.held_until > time.monotonic():
                continue
            try:
                self._place(entry)
            except APIError as error:
                entry.stream.finish(error)
        for move in self._placement.moves():
            self._move(move)
        for name in self._ledger.owners_of_unsent():
            if (engine := self._engines.get(name)) is not None:
                engine.submit_open()

    def _move(self, move: Move) -> None:
        if (entry := self._ledger.with_key(move.key)) is None:
            return
        source, number = self._engines.get(move.source), entry.request.number
        if source is not None:
            source.abort([number])
        entry.set_kv_peers(self._kv_peers(move.source))
        entry.only_prompt = False
        self._ledger.move(number, self.next_number(), move.target, is_fault=move.reason is Reason.LOST)
        self.decisions["move", move.source, move.reason] += 1
        self.latest_moves.append(
            {
                "at": time.time(),
                "request_id": entry.request.request_id,
                "source": move.source,
                "target": move.target,
                "reason": move.reason,
                "output_tokens": len(entry.stream.output),
            }
        )
        log.debug(
            "request moved: request_id=%s number=%d tokens=%d from=%s to=%s: %s",
            entry.request.request_id, entry.request.number, len(entry.stream.output), move.source, move.target,
            move.reason,
        )  # fmt: skip

    def on_blocks(self, engine: ConnectedEngine, stored: list[bytes], removed: list[bytes] | None) -> None:
        """An engine has sent what its prefix cache holds from now on, and no longer; None: no block of before."""
        name = engine.name
        if removed is None:
            self._placement.on_blocks_cleared(name)
        elif removed:
            self._placement.on_blocks_removed(name, removed)
        for ahead in self._placement.on_blocks_stored(name, stored) if stored else ():
            self._load_ahead(ahead)

    def _load_ahead(self, ahead: LoadAhead) -> None:
        """Let an engine fetch the blocks of a prompt that are complete, before its stream moves there."""
        entry, target = self._ledger.with_key(ahead.key), self._engines.get(ahead.target)
        if entry is None or not entry.only_prompt or target is None:
            return
        if peers := self._kv_peers(entry.engine):
            tokens = entry.request.token_ids[: ahead.num_tokens * TOKEN_BYTES]
            names = names_of(entry.request.salt, tokens, target.state.block_size)
            message = ControlCache(0, CacheAction.LOAD, names=b"".join(names), kv_peers=peers)
            target.connection.send_quietly(message)

    def on_finish(self, engine: ConnectedEngine, finish: Finish) -> Finish | APIError | None:
        """Return the end of a request for its client. None: it goes on, as its prompt is computed, another engine
        admits it, now or later, or it is not a request of this engine."""
        entry = self._ledger.entry(finish.number)
        if entry is None or entry.engine != engine.name:
            return None
        match finish.reason:
            case FinishReason.LENGTH if entry.only_prompt:
                return self._on_prompt_computed(entry, finish)
            case FinishReason.ERROR if engine.state.phase is EnginePhase.FAILED:
                return self._on_failed_for_good(entry, finish)
            case FinishReason.ERROR if finish.by_settings:
                return self._on_not_loaded(entry, engine, finish)
            case FinishReason.REJECTED:
                return self._on_rejected(entry, engine, finish)
            case FinishReason.INVALID:
                return self._on_invalid(entry, engine, finish)
        return finish

    def _on_prompt_computed(self, entry: LedgerEntry, finish: Finish) -> Finish | None:
        """Move the stream to the engine that decodes it, unless the output ends here."""
        is_over = len(entry.stream.output) >= entry.request.params.max_tokens
        if is_over or (move := self._placement.prefilled(entry.key)) is None:
            return finish
        self._move(move)
        return None

    def _on_failed_for_good(self, entry: LedgerEntry, finish: Finish) -> Finish | None:
        if not any(e.ready and e.identity == entry.identity for e in self._engines.values()):
            return finish
        self._take_from_owner(entry, is_fault=True)
        return None

    def _on_rejected(self, entry: LedgerEntry, engine: ConnectedEngine, finish: Finish) -> Finish | None:
        """Ask another engine, as this one has no room. A stream that was admitted before waits if all reject it."""
        entry.num_admissions -= 1
        entry.rejections.add(engine.name)
        self._engines.report(engine)
        if isinstance(self._place_again(entry, *entry.rejections), Place):  # they have the prompt, which attracts it
            return None
        if not entry.num_admissions:
            return finish
        self._take_from_owner(entry, is_fault=False)
        entry.rejections.clear()
        entry.held_until = time.monotonic() + REJECTED_PAUSE
        return None

    def _on_invalid(self, entry: LedgerEntry, engine: ConnectedEngine, finish: Finish) -> Finish | APIError | None:
        """Ask an engine with other settings, if it is for the settings that this one refuses the request."""
        entry.num_admissions -= 1
        if not (entry.num_admissions or finish.by_settings):
            return finish
        alike = [e for e in self._engines.values() if not entry.num_admissions and e.settings == engine.settings]
        entry.refusals |= {e.name: finish.message for e in (engine, *alike)}
        decision = self._place_again(entry)
        if isinstance(decision, Place):
            return None
        if entry.num_admissions:
            self._take_from_owner(entry, is_fault=False)
            return None
        why = "; ".join(dict.fromkeys(entry.refusals.values()))
        if isinstance(decision, Hold):
            return APIError(503, f"{why}; an engine with other settings is not ready; try again later")
        return replace(finish, message=why)

    def _on_not_loaded(self, entry: LedgerEntry, engine: ConnectedEngine, finish: Finish) -> Finish | None:
        """Ask another engine, whose workers may be able to load the adapter, now or when it is back."""
        entry.refusals[engine.name] = finish.message
        decision = self._place_again(entry)
        if isinstance(decision, Hold):
            self._take_from_owner(entry, is_fault=False)
        return None if isinstance(decision, Place | Hold) else finish

    def _place_again(self, entry: LedgerEntry, *refused: str) -> Decision:
        """Send a request that an engine has refused to another one, if there is one now."""
        decision = self._decide(entry, *refused)
        if isinstance(decision, Place):
            self._ledger.move(entry.request.number, self.next_number(), decision.engine, is_fault=False)
        return decision

    def _take_from_owner(self, entry: LedgerEntry, is_fault: bool) -> None:
        """Let a request wait for an engine."""
        self._placement.on_ended(entry.key)
        self._ledger.move(entry.request.number, self.next_number(), NOBODY, is_fault)

    def _kv_peers(self, engine: str) -> list[str]:
        """Return where workers fetch KV blocks of an engine; []: nowhere. The workers of a lost scheduler may live."""
        found = self._engines.get(engine)
        return [] if found is None else found.state.kv_peers

    def next_number(self) -> int:
        """Return a uint32 that no open request has, also after the counter has wrapped around."""
        while (number := next(self._numbers) & 0xFFFFFFFF) in self._ledger:
            pass
        return number
