"""The placement core: events of engines and requests in, decisions out. No sockets, no clock."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.frontend.placement.decisions import (
    Decision,
    EngineReport,
    Hold,
    Move,
    Place,
    Reason,
    Refuse,
)
from services.frontend.placement.engine_states import MAY_SERVE, MOVES_STREAMS, Condition

RETRY_AFTER = 5.0


@dataclass(slots=True)
class _Engine:
    report: EngineReport
    streams: dict[int, str] = field(default_factory=dict)
    """Identity by key."""
    removed: bool = False


class Placement:
    """Engines by name, and where each open request is placed."""

    def __init__(self) -> None:
        self._engines: dict[str, _Engine] = {}
        self._engine_of: dict[int, str] = {}

    def advance(self, now: float) -> None:
        """Set the time. Call it before other events and regularly. `now`: monotonic seconds."""

    def on_engine(self, name: str, report: EngineReport) -> None:
        """An engine is new, or its report has changed. Call it at least every second for each engine."""
        if (engine := self._engines.get(name)) is None:
            self._engines[name] = _Engine(report)
        else:
            engine.report, engine.removed = report, False

    def on_engine_removed(self, name: str) -> None:
        """An engine is listed no longer. Its streams move; unknown names are ignored."""
        if (engine := self._engines.get(name)) is not None:
            engine.report, engine.removed = EngineReport(Condition.GONE), True
            self._drop(name)

    def on_blocks_stored(self, name: str, block_names: Sequence[bytes]) -> None:
        """An engine's prefix cache has these blocks, named as by `protocol.block_names`."""

    def on_blocks_removed(self, name: str, block_names: Sequence[bytes]) -> None:
        """An engine's prefix cache has these blocks no longer."""

    def on_blocks_cleared(self, name: str) -> None:
        """An engine's prefix cache is empty."""

    def place(self, key: int, token_bytes: bytes, salt: str = "", identity_required: str = "") -> Decision:
        """Choose the engine of a request. A key that is placed already is placed anew.

        Args:
            token_bytes: int32[...], little-endian: the prompt, and output that was delivered already.
            salt: the request's cache salt.
            identity_required: identity of the engine that has sent output of this request; "": any engine will do.
        """
        self.on_ended(key)
        found = [
            (engine.report.queue_seconds, engine.report.num_streams + len(engine.streams), name)
            for name, engine in self._engines.items()
            if engine.report.condition is Condition.READY
            and (not identity_required or engine.report.identity == identity_required)
        ]
        if found:
            name = min(found)[2]
            self._put(key, name)
            return Place(name, Reason.ONLY_ENGINE if len(found) == 1 else Reason.NO_PREFIX)
        for engine in self._engines.values():
            identity = engine.report.identity
            if (
                engine.report.condition in MAY_SERVE
                and not engine.removed
                and (not identity_required or not identity or identity == identity_required)
            ):
                return Hold("no engine is ready")
        return Refuse(RETRY_AFTER, "no engine takes requests")

    def on_ended(self, key: int) -> None:
        """A request has ended. Unknown keys are ignored."""
        if (name := self._engine_of.pop(key, None)) is not None:
            del self._engines[name].streams[key]
            self._drop(name)

    def moves(self) -> list[Move]:
        """Return the streams that move now. Call it regularly, and when an engine has changed."""
        found = []
        for source, engine in list(self._engines.items()):
            if engine.report.condition not in MOVES_STREAMS:
                continue
            reason = Reason.LOST if engine.report.condition is Condition.GONE else Reason.DRAINING
            for key, identity in list(engine.streams.items()):
                targets = [
                    (other.report.queue_seconds, len(other.streams), name)
                    for name, other in self._engines.items()
                    if other.report.condition is Condition.READY
                    and identity
                    and other.report.identity == identity
                ]
                if targets:
                    target = min(targets)[2]
                    del engine.streams[key]
                    self._put(key, target)
                    found.append(Move(key, source, target, reason))
            self._drop(source)
        return found

    def _put(self, key: int, name: str) -> None:
        self._engine_of[key] = name
        self._engines[name].streams[key] = self._engines[name].report.identity

    def _drop(self, name: str) -> None:
        if self._engines[name].removed and not self._engines[name].streams:
            del self._engines[name]
