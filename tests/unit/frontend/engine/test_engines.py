"""Streams that move between engines, over real sockets: one owner at any time, each token once."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from protocol.block_names import names_of
from protocol.codec import Decoder, pack, unpack
from protocol.records import CachedBlocks, Subscribe
from protocol.requests import (
    AbortRequest,
    CacheAction,
    CacheControlled,
    ClientMessage,
    ControlCache,
    Embedding,
    EngineMessage,
    EnginePhase,
    EngineState,
    Finish,
    FinishReason,
    FrontendAlive,
    GenerateRequest,
    RequestOutputs,
    RoundTrips,
)
from protocol.sampling import SamplingParams
from protocol.suspects import SUSPECT_AFTER
from protocol.transport import PeerGone, Server
from services.frontend.engine import availability, connection, owners
from services.frontend.engine import engines as engines_module
from services.frontend.engine.addresses import EngineAddress, numbered
from services.frontend.engine.client import NO_PROMPT, EngineClient
from services.frontend.engine.ledger import GUILTY, NOBODY
from services.frontend.engine.streams import FlushQueue, ResponseStream
from services.frontend.errors import APIError
from services.frontend.placement import Place, Reason
from tests.unit.frontend.engine.test_streams import RecordingStream
from tests.waiting import PATIENCE

MODEL, OTHER_MODEL = "one model", "another model"
BLOCK = 4


class ScriptedEngine:
    """A scheduler that does what the test says."""

    def __init__(self, endpoint: str, incarnation: int, identity: str = MODEL) -> None:
        self.server, self._decoder = Server(endpoint, {"frontend"}), Decoder(ClientMessage)
        self.incarnation, self.identity, self.phase = incarnation, identity, EnginePhase.READY
        self.detail = ""
        self.peers: list[bytes] = []
        self.requests: list[GenerateRequest] = []
        self.aborted: list[int] = []
        self.subscriptions: list[Subscribe] = []
        self.loads: list[ControlCache] = []
        self.role, self.kv_peers = "both", list[str]()
        self.adapted_modules: tuple[str, ...] = ()
        self.num_signs = 0
        """Signs of life on all connections."""
        self.deaf_after: int | None = None
        """Signs of life after which none arrives; its states still do."""
        self.unanswered: list[float] = []
        self.resets = True

    def turn(self) -> None:
        for peer, message in self.server.messages(self._decoder):
            match message:
                case GenerateRequest():
                    self.requests.append(message)
                case AbortRequest(numbers=numbers):
                    self.aborted += numbers
                case FrontendAlive(number=number):
                    self.num_signs += 1
                    self.send_state(number)
                case Subscribe():
                    self.subscriptions.append(message)
                case ControlCache(number=number, action=CacheAction.RESET):
                    if self.resets:
                        self.server.send(peer, CacheControlled(number))
                case ControlCache():
                    self.loads.append(message)
                case _:
                    if peer not in self.peers:
                        self.peers.append(peer)
                        self.send_state()

    def send_state(self, number: int = 0) -> None:
        heard = number if self.deaf_after is None else min(number, self.deaf_after)
        state = EngineState(
            self.phase, self.detail, incarnation=self.incarnation, identity=self.identity, max_model_len=100, lease=1,
            block_size=BLOCK, round_trips=RoundTrips(heard, self.unanswered), info={"role": self.role},
            kv_peers=self.kv_peers, adapted_modules=self.adapted_modules, stats={"num_signs": self.num_signs},
        )  # fmt: skip
        with contextlib.suppress(PeerGone):  # the frontend has left this engine
            self.server.send(self.peers[-1], state)

    def send(
        self, number: int, first: int, *tokens: int, ends: bool = False, why: FinishReason = FinishReason.STOP
    ) -> None:
        """Send tokens of a request from an index on."""
        indices = range(first, first + len(tokens))
        finished = [Finish(number, why, retry_after=9.0 * (why is FinishReason.REJECTED))] if ends else []
        columns = pack([number] * len(tokens)), pack([*indices]), pack([*tokens])
        self.server.send(self.peers[-1], RequestOutputs(*columns, finished, incarnation=self.incarnation))

    def refuse(
        self, number: int, why: str, by_settings: bool = True, reason: FinishReason = FinishReason.INVALID
    ) -> None:
        finish = Finish(number, reason, message=why, by_settings=by_settings)
        self.server.send(self.peers[-1], RequestOutputs(b"", b"", b"", [finish], incarnation=self.incarnation))

    def send_blocks(self, number: int, stored: list[bytes], removed: list[bytes] | None = None) -> None:
        self.server.send(self.peers[-1], CachedBlocks(number, b"".join(stored), b"".join(removed or [])))

    def enter(self, phase: EnginePhase) -> None:
        self.phase = phase
        self.send_state()

    def close(self) -> None:
        self.server.close(0)


class Fleet:
    """A frontend's client with two engines, or three."""

    def __init__(self, directory: Path, identities: Sequence[str], patience: float) -> None:
        self._endpoints = [f"ipc://{directory}/{name}" for name in "abc"[: len(identities)]]
        self.engines = [ScriptedEngine(endpoint, 10 + i, identities[i]) for i, endpoint in enumerate(self._endpoints)]
        self.client = EngineClient(numbered(self._endpoints), 8, 10.0, patience, 600.0)

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(PATIENCE):
            while not condition():
                for engine in self.engines:
                    if not engine.server.socket.closed:
                        engine.turn()
                await asyncio.sleep(0.005)

    async def serve(self) -> None:
        await self.until(lambda: all(engine.ready for engine in self.client.engines.values()))

    async def submit(self, prompt: list[int], salt: str = "") -> tuple[RecordingStream, ScriptedEngine, ScriptedEngine]:
        """Submit a request; return its stream, its engine and the other one, when the engine has it."""
        stream = RecordingStream(ResponseStream(FlushQueue()))
        before = [len(engine.requests) for engine in self.engines]
        params = SamplingParams(20, seed=5, min_tokens=2)
        self.client.submit(stream, prompt, params, replace(NO_PROMPT, cache_salt=salt))
        await self.until(lambda: before != [len(engine.requests) for engine in self.engines])
        owner = self.engines[int(self.client.ledger.entry(stream.number).engine)]  # type: ignore[union-attr]
        return stream, owner, self.engines[1 - self.engines.index(owner)]

    async def stream(self, *prompt: int) -> tuple[RecordingStream, ScriptedEngine, ScriptedEngine]:
        """Submit a request; return as `submit` does, when its first token has arrived, which is 7."""
        stream, owner, other = await self.submit([*prompt])
        owner.send(stream.number, 0, 7)
        await self.until(lambda: stream.output == [7])
        return stream, owner, other

    def restart(self, engine: ScriptedEngine, incarnation: int, identity: str = MODEL) -> None:
        index = self.engines.index(engine)
        engine.close()
        self.engines[index] = ScriptedEngine(self._endpoints[index], incarnation, identity)


@asynccontextmanager
async def connected(client: EngineClient) -> AsyncIterator[asyncio.Task[None]]:
    """Run a client within this context."""
    running = asyncio.create_task(client.run())
    try:
        yield running
    finally:
        running.cancel()
        await asyncio.wait({running})


@asynccontextmanager
async def fleet(
    directory: Path, *identities: str, patience: float = 300.0, serves: bool = True
) -> AsyncIterator[Fleet]:
    """`serves`: all engines are ready."""
    made = Fleet(directory, identities or (MODEL, MODEL), patience)
    try:
        async with connected(made.client):
            if serves:
                await made.serve()
            yield made
    finally:
        for engine in made.engines:
            engine.close()


async def moved_stream(engines: Fleet, how: str) -> RecordingStream:
    """Move a stream after two tokens; its former owner still sends tokens, and the end."""
    stream, owner, other = await engines.submit([1, 2])
    number = stream.number
    owner.send(number, 0, 7, 8)
    await engines.until(lambda: stream.output == [7, 8])
    if how == "lost":
        owner.close()
    else:
        owner.enter(EnginePhase.DRAINING if how == "drained" else EnginePhase.RECOVERING)
    await engines.until(lambda: other.requests)
    (again,) = other.requests
    assert (unpack(again.token_ids).tolist(), again.num_prompt_tokens) == ([1, 2, 7, 8], 2)
    assert (again.params.seed, again.age > 0, again.attempts) == (5, True, int(how != "drained"))
    if how != "lost":
        await engines.until(lambda: owner.aborted)
        owner.send(number, 2, 66, 67, ends=True)
        owner.detail = "after the late answer"
        owner.send_state()
        name = str(engines.engines.index(owner))
        await engines.until(lambda: engines.client.engines[name].state.detail == owner.detail)
    other.send(again.number, 2, 9, 10, ends=True)
    await engines.until(lambda: stream.end is not None)
    return stream


@pytest.mark.parametrize("how", ["drained", "lost", "without workers"])
async def test_a_stream_goes_on_elsewhere_and_a_late_answer_is_dropped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setattr(availability, "RECOVERY_GRACE", 0.1)
    async with fleet(tmp_path) as engines:
        stream = await moved_stream(engines, how)
        assert stream.output == [7, 8, 9, 10]
        assert stream.tokens == stream.output
        assert stream.end.reason is FinishReason.STOP  # type: ignore[union-attr]
        moves = {reason: n for (kind, _, reason), n in engines.client.owners.decisions.items() if kind == "move"}
        assert moves == {Reason.DRAINING if how == "drained" else Reason.LOST: 1}
        assert not engines.client.num_open


FORGED: dict[str, Callable[[int], EngineMessage]] = {
    "an end": lambda number: RequestOutputs(b"", b"", b"", [Finish(number, FinishReason.STOP)]),
    "a refusal": lambda number: RequestOutputs(b"", b"", b"", [Finish(number, FinishReason.INVALID, by_settings=True)]),
    "the next token": lambda number: RequestOutputs(pack([number]), pack([1]), pack([66])),
    "a token after a gap": lambda number: RequestOutputs(pack([number]), pack([9]), pack([66])),
    "an embedding": lambda number: RequestOutputs(
        pack([number]), pack([1]), pack([6]), [], None, [Embedding(number, b"")]
    ),
    "a bad statistic": lambda _: EngineState(EnginePhase.READY, stats={"num_requests_running": math.nan}),
    "a bad name of a statistic": lambda _: EngineState(EnginePhase.READY, stats={"a\n": 1.0}),
    "a bad name of a feature": lambda _: EngineState(EnginePhase.READY, info={"a\n": "b"}),
}


@pytest.mark.parametrize("kind", FORGED)
async def test_an_engine_that_is_wrong_changes_no_request_of_another(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    async with fleet(tmp_path) as engines:
        stream, owner, wrong = await engines.stream(1)
        name, message = str(engines.engines.index(wrong)), FORGED[kind](stream.number)
        if isinstance(message, RequestOutputs):
            message = replace(message, incarnation=wrong.incarnation)
        wrong.server.send(wrong.peers[-1], message)
        wrong.enter(EnginePhase.RECOVERING)  # the message before it was read
        await engines.until(lambda: engines.client.engines[name].state.phase is EnginePhase.RECOVERING)
        owner.send(stream.number, 1, 8, ends=True)
        await engines.until(lambda: stream.end is not None)
        assert (stream.output, stream.end.reason) == ([7, 8], FinishReason.STOP)  # type: ignore[union-attr]
        ignored = "outputs of a request that another engine has are ignored: number=1 (1 so far)"
        refused = "bad message from the scheduler: not a valid message"
        assert f"engine {name}: {ignored if isinstance(message, RequestOutputs) else refused}" in caplog.text


async def test_no_stream_moves_to_another_model_and_no_request_goes_there(tmp_path: Path) -> None:
    """Not even when the engine with its model is gone, and a successor has other weights: it ends with an error."""
    async with fleet(tmp_path, MODEL, OTHER_MODEL, serves=False) as engines:
        first, second = engines.engines
        second.phase = EnginePhase.LOADING
        await engines.until(lambda: engines.client.ready)
        second.phase = EnginePhase.READY
        await engines.serve()
        stream, owner, other = await engines.stream(1)
        assert owner is first
        engines.restart(first, 20, OTHER_MODEL)
        await engines.until(lambda: stream.end is not None)
        assert "no other engine has the model" in stream.end.message  # type: ignore[union-attr]
        assert not other.requests


async def test_a_stream_whose_engine_returns_with_another_model_waits_for_its_own(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.stream(1)
        first, second = (engines.client.engines[str(engines.engines.index(engine))] for engine in (owner, other))
        other.enter(EnginePhase.RECOVERING)
        await engines.until(lambda: not second.ready)
        engines.restart(owner, 20, OTHER_MODEL)
        await engines.until(lambda: first.state.identity == OTHER_MODEL and first.ready)
        assert stream.end is None
        other.enter(EnginePhase.READY)
        await engines.until(lambda: other.requests)
        assert unpack(other.requests[0].token_ids).tolist() == [1, 7]


async def test_a_request_that_kills_engine_after_engine_is_refused(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        stream, victim, _ = await engines.submit([1])
        for attempt in range(1, SUSPECT_AFTER + 1):
            next_one = engines.engines[1 - engines.engines.index(victim)]
            engines.restart(victim, 20 + attempt)
            await engines.until(lambda: next_one.requests)  # noqa: B023
            assert next_one.requests[-1].attempts == attempt
            victim = next_one
            await engines.serve()
        engines.restart(victim, 30)
        await engines.until(lambda: stream.end is not None)
        assert stream.end.message == GUILTY  # type: ignore[union-attr]
        assert all(not engine.requests for engine in engines.engines)


async def test_a_scheduler_without_workers_is_sent_nothing(tmp_path: Path) -> None:
    """Their loss would count for requests that came after it: a suspect would be refused."""
    async with fleet(tmp_path) as engines:
        await engines.serve()
        stream, owner, other = await engines.submit([1])
        other.phase = EnginePhase.RECOVERING
        other.send_state()
        engines.restart(owner, owner.incarnation)
        (owner,) = (engine for engine in engines.engines if engine is not other)
        owner.phase = EnginePhase.RECOVERING
        await engines.until(lambda: owner.num_signs > 1)
        assert not owner.requests
        owner.phase = EnginePhase.READY
        await engines.until(lambda: owner.requests)
        assert owner.requests[0].number == stream.number


async def test_an_engine_that_is_listed_no_longer_is_left_when_its_streams_have_moved(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.submit([1])
        kept = engines.client.engines[str(engines.engines.index(other))]
        engines.client.engines.set_addresses([kept.address])
        await engines.until(lambda: other.requests and len(engines.client.engines) == 1)
        other.send(other.requests[0].number, 0, 7, ends=True)
        await engines.until(lambda: stream.end is not None)
        assert owner.aborted
        assert {*engines.client.ledger.streams} == {NOBODY, kept.name}, "nothing is kept of an engine that has left"


async def test_streams_leave_an_engine_that_gets_another_address(tmp_path: Path) -> None:
    """They wait for it no longer than for an engine that is lost."""
    async with fleet(tmp_path, patience=0.2) as engines:
        stream, owner, other = await engines.submit([1])
        addresses = {name: engine.address for name, engine in engines.client.engines.items()}
        name = str(engines.engines.index(owner))
        addresses[name] = EngineAddress(name, f"ipc://{tmp_path}/nowhere")
        engines.client.engines.set_addresses([*addresses.values()])
        await engines.until(lambda: other.requests)
        assert other.requests[0].attempts == 0, "that is no death"
        nowhere = EngineAddress(str(engines.engines.index(other)), addresses[name].endpoint)
        engines.client.engines.set_addresses([addresses[name], nowhere])
        await engines.until(lambda: stream.end is not None)


async def test_an_engine_that_has_failed_keeps_no_request_from_new_weights(tmp_path: Path) -> None:
    async with fleet(tmp_path, MODEL, OTHER_MODEL, serves=False) as engines:
        first, second = engines.engines
        second.phase = EnginePhase.LOADING
        await engines.until(lambda: engines.client.ready)
        second.phase = EnginePhase.READY
        await engines.serve()
        first.enter(EnginePhase.FAILED)
        await engines.until(lambda: engines.client.engines["0"].state.phase is EnginePhase.FAILED)
        first.close()
        await engines.until(lambda: engines.client.ready)
        _, owner, _ = await engines.submit([1])
        assert owner is second


async def test_an_engine_that_was_never_there_keeps_no_request_from_new_weights(tmp_path: Path) -> None:
    async with fleet(tmp_path, serves=False) as engines:
        engines.engines[1].close()
        await engines.until(lambda: engines.client.ready)
        engines.restart(engines.engines[0], 20, OTHER_MODEL)
        await engines.until(lambda: engines.client.state.identity == OTHER_MODEL and engines.client.ready)
        await engines.submit([1])


@pytest.mark.parametrize("loses_workers", [False, True])
async def test_a_partition_is_no_death(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, loses_workers: bool) -> None:
    """The stream moves, and is not blamed once the same scheduler is connected again. One that has left workers which
    were lost stays blamed."""
    monkeypatch.setattr(availability, "RECOVERY_GRACE", 0.1)
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.submit([1])
        if loses_workers:
            owner.enter(EnginePhase.RECOVERING)
            await engines.until(lambda: other.requests)
        engines.restart(owner, owner.incarnation, owner.identity)
        entry = engines.client.ledger.entry
        await engines.until(lambda: other.requests)
        await engines.serve()
        assert entry(stream.number).attempts == int(loses_workers)  # type: ignore[union-attr]


async def test_a_drop_is_refused_and_a_reset_incomplete_while_an_engine_is_not_connected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its workers may live, and the next scheduler would adopt the blocks. One that lacks workers answers late."""
    async with fleet(tmp_path) as engines:

        async def is_reset() -> bool:
            asked = asyncio.create_task(engines.client.reset_prefix_cache(reset_running=False))
            await engines.until(asked.done)
            return asked.result()

        assert await is_reset()
        monkeypatch.setattr(connection, "ANSWER_TIMEOUT", 1.0)
        engines.engines[1].resets, engines.engines[1].detail = False, "no worker"
        engines.engines[1].send_state()
        await engines.until(lambda: engines.client.engines["1"].state.detail == "no worker")
        with pytest.raises(APIError) as late:
            await is_reset()
        assert late.value.status == 503
        assert "engine 1: the scheduler did not answer (no worker); unless it is lost, it empties" in str(late.value)
        monkeypatch.undo()
        engines.engines[1].close()
        await engines.until(lambda: not engines.client.engines["1"].connection.is_open)
        with pytest.raises(APIError, match="engine 1 is not connected"):
            await engines.client.control_cache(lambda _, number: ControlCache(number, CacheAction.DROP), is_drop=True)
        assert not await is_reset()


async def test_a_drop_fails_if_a_scheduler_is_replaced_meanwhile(tmp_path: Path) -> None:
    """The next one may load the blocks from an engine that had not dropped them."""
    async with fleet(tmp_path) as engines:
        control = engines.client.control_cache(lambda _, number: ControlCache(number, CacheAction.DROP), is_drop=True)
        asked = asyncio.create_task(control)
        first, second = engines.engines
        await engines.until(lambda: first.loads and second.loads)
        first.server.send(first.peers[-1], CacheControlled(first.loads[0].number))
        first.detail = "answered"
        first.send_state()
        await engines.until(lambda: engines.client.engines["0"].state.detail == first.detail)
        engines.restart(first, 20)
        await engines.until(lambda: engines.client.engines["0"].state.incarnation == 20)
        second.server.send(second.peers[-1], CacheControlled(second.loads[0].number))
        with pytest.raises(APIError, match="engine 0 was lost meanwhile"):
            await asked


async def test_blocks_that_an_engine_reports_attract_requests_of_their_salt_alone(tmp_path: Path) -> None:
    """A report that is missing voids all before it, and all names are requested again."""
    prompt, follows = [*range(40)], Subscribe(steps=False, cached_blocks=True)
    async with fleet(tmp_path) as engines:
        placement, decisions = engines.client.placement, engines.client.owners.decisions
        await engines.until(lambda: all(engine.subscriptions == [follows] for engine in engines.engines))
        holder, names = engines.engines[1], names_of("one key", pack(prompt), BLOCK)

        async def is_found(salt: str) -> bool:
            """Place a request, end it, and let its engine lose what was placed."""
            before = decisions["place", "1", Reason.PREFIX]
            stream, owner, _ = await engines.submit(prompt, salt)
            engines.client.abort([stream])
            found = decisions["place", "1", Reason.PREFIX] > before
            assert not found or owner is holder
            for name in engines.client.engines:
                placement.on_blocks_removed(name, [] if found else names_of(salt, pack(prompt), BLOCK))
            return found

        assert not await is_found("one key")
        holder.send_blocks(0, names)
        await engines.until(lambda: placement.num_block_names == len(names))
        assert await is_found("one key")
        assert not await is_found("another key")
        holder.send_blocks(1, [], names)
        await engines.until(lambda: not placement.num_block_names)
        assert not await is_found("one key")
        holder.send_blocks(2, names)
        await engines.until(lambda: placement.num_block_names)
        holder.send_blocks(4, names_of("another key", pack(prompt), BLOCK))  # the third one is missing
        none = Subscribe(steps=False)
        await engines.until(lambda: holder.subscriptions == [follows, none, follows])
        holder.send_blocks(5, names_of("another key", pack(prompt), BLOCK))  # sent before that arrived
        assert not await is_found("one key")
        assert not await is_found("another key")
        holder.send_blocks(0, names)
        await engines.until(lambda: placement.num_block_names)
        assert await is_found("one key")


async def test_an_engine_loads_what_is_complete_of_a_prompt_that_will_go_on_there(tmp_path: Path) -> None:
    prompt = [*range(600)]
    async with fleet(tmp_path, serves=False) as engines:
        computing, decoding = engines.engines
        computing.role, computing.kv_peers, decoding.role = "prefill", ["tcp://peer"], "decode"
        await engines.until(lambda: all(engine.subscriptions for engine in engines.engines))
        stream, owner, _ = await engines.submit(prompt, "salt")
        [request] = computing.requests
        assert (owner, request.params.max_tokens, request.params.min_tokens) == (computing, 1, 1)
        names = names_of("salt", pack(prompt), BLOCK)
        computing.send_blocks(0, names[:40])
        expected = ControlCache(0, CacheAction.LOAD, names=b"".join(names[:32]), kv_peers=["tcp://peer"])
        await engines.until(lambda: decoding.loads == [expected])
        computing.send(request.number, 0, 7, ends=True, why=FinishReason.LENGTH)
        await engines.until(lambda: decoding.requests)
        [moved] = decoding.requests
        assert (moved.kv_peers, moved.params.max_tokens) == (["tcp://peer"], 20)
        assert len(decoding.loads) == 1
        decoding.send(moved.number, 1, 8, ends=True)
        await engines.until(lambda: stream.end is not None)
        single, shared = RecordingStream(ResponseStream(FlushQueue())), replace(NO_PROMPT, cache_salt="other")
        engines.client.submit(single, prompt, SamplingParams(1, seed=5), shared)
        await engines.until(lambda: len(computing.requests) == 2)
        computing.send(single.number, 0, 7, ends=True, why=FinishReason.LENGTH)
        await engines.until(lambda: single.end is not None)
        assert len(decoding.requests) == 1, "it ends where its prompt was computed"


async def test_a_request_that_its_engine_rejects_is_new_and_fetches_blocks_from_no_former_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with fleet(tmp_path, serves=False) as engines:
        first, second = engines.engines
        first.kv_peers, second.kv_peers = ["tcp://first"], ["tcp://second"]
        await engines.serve()
        decisions = iter([Place("0", Reason.LOAD, holder="1"), Place("1", Reason.LOAD)])
        monkeypatch.setattr(engines.client.placement, "place", lambda *_: next(decisions))
        _, owner, other = await engines.submit([1])
        [request] = owner.requests
        assert request.kv_peers == ["tcp://second"]
        owner.send(request.number, 0, ends=True, why=FinishReason.REJECTED)
        await engines.until(lambda: other.requests)
        assert other.requests[0].kv_peers == []
        assert other.requests[0].age == 0.0, "limits of load and the order of arrival hold for it as for a new one"


async def test_a_request_that_engines_reject_goes_to_one_that_has_less_of_its_prompt(tmp_path: Path) -> None:
    async with fleet(tmp_path, MODEL, MODEL, MODEL) as engines:
        stream, owner, _ = await engines.submit([*range(400)])
        others = [*engines.engines]
        for _ in range(2):
            others.remove(owner)
            owner.refuse(stream.number, "full", reason=FinishReason.REJECTED)
            await engines.until(lambda: any(engine.requests for engine in others))
            [owner] = [engine for engine in others if engine.requests]
            engines.client.check_load()  # that one has room


@pytest.mark.parametrize("identity", [MODEL, OTHER_MODEL])
async def test_requests_are_shed_if_no_engine_that_could_get_them_has_room(tmp_path: Path, identity: str) -> None:
    """The other engine has no workers, or another model."""
    async with fleet(tmp_path, MODEL, identity) as engines:
        stream, owner, other = await engines.submit([1])
        if identity == MODEL:
            other.enter(EnginePhase.RECOVERING)
            await engines.until(lambda: sum(engine.ready for engine in engines.client.engines.values()) == 1)
        owner.send(stream.number, 0, ends=True, why=FinishReason.REJECTED)
        await engines.until(lambda: stream.end is not None)
        with pytest.raises(APIError, match="overloaded"):
            engines.client.check_load()
        assert engines.client.num_shed == 1


async def test_an_answer_with_choices_on_two_engines_is_aborted_on_both(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        first, owner, other = await engines.submit([1])
        second, *_ = await engines.submit([2])
        if not other.requests:
            owner.send(second.number, 0, ends=True, why=FinishReason.REJECTED)
            await engines.until(lambda: other.requests)
        engines.client.abort([first, second])
        await engines.until(lambda: owner.aborted and other.aborted)


async def test_streams_of_an_engine_that_fails_go_on_elsewhere(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.submit([1])
        owner.send(stream.number, 0, 7)
        owner.enter(EnginePhase.FAILED)
        owner.send(stream.number, 1, ends=True, why=FinishReason.ERROR)
        await engines.until(lambda: other.requests)
        assert unpack(other.requests[0].token_ids).tolist() == [1, 7]
        assert other.requests[0].attempts == 1


async def test_a_stream_for_which_no_other_engine_has_room_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owners, "REJECTED_PAUSE", 3600.0)
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.stream(1)
        owner.close()
        for attempt in range(1, 4):
            await engines.until(lambda: len(other.requests) == attempt)  # noqa: B023
            assert unpack(other.requests[-1].token_ids).tolist() == [1, 7]
            other.send(stream.number, 1, ends=True, why=FinishReason.REJECTED)
            await engines.until(lambda: engines.client.ledger.waiting)
            engines.client.owners.settle()
            [entry] = engines.client.ledger.waiting
            entry.held_until = 0.0
        await engines.until(lambda: len(other.requests) == 4)
        other.send(stream.number, 1, 8, ends=True)
        await engines.until(lambda: stream.end is not None)
        assert stream.output == [7, 8]


async def test_a_request_whose_adapter_no_engine_can_load_ends_with_the_reason(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.submit([1])
        owner.refuse(stream.number, "no file", reason=FinishReason.ERROR)
        await engines.until(lambda: other.requests)
        other.refuse(stream.number, "no room", reason=FinishReason.ERROR)
        await engines.until(lambda: stream.end is not None)
        assert (stream.end.reason, stream.end.message) == (FinishReason.ERROR, "no room")  # type: ignore[union-attr]


async def test_requests_are_sent_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by the next check, and not when a scheduler sends its state."""
    monkeypatch.setattr(engines_module, "CHECK_INTERVAL", 3600.0)
    async with fleet(tmp_path) as engines:
        stream, owner, other = await engines.submit([1])
        owner.refuse(stream.number, "full", reason=FinishReason.REJECTED)
        await engines.until(lambda: other.requests)


async def test_a_new_request_that_settings_refuse_goes_to_an_engine_with_others(tmp_path: Path) -> None:
    """One that no engine would serve is refused at once."""
    async with fleet(tmp_path, MODEL, MODEL, MODEL, serves=False) as engines:
        engines.engines[2].adapted_modules = ("q_proj", "v_proj")
        await engines.serve()
        assert engines.client.adapted_modules == ["q_proj", "v_proj"], "the worker there would fail with another module"
        stream, owner, _ = await engines.submit([1, 2])
        owner.refuse(stream.number, "too long")
        await engines.until(lambda: sum(len(engine.requests) for engine in engines.engines) == 2)
        [other] = [engine for engine in engines.engines if engine.requests and engine is not owner]
        assert other.adapted_modules != owner.adapted_modules
        other.refuse(stream.number, "too long here, too")
        await engines.until(lambda: stream.end is not None)
        assert (stream.end.reason, stream.end.message) == (FinishReason.INVALID, "too long; too long here, too")  # type: ignore[union-attr]
        stream, owner, _ = await engines.submit([1, 2])
        owner.refuse(stream.number, "no grammar", by_settings=False)
        await engines.until(lambda: stream.end is not None)
        assert sum(len(engine.requests) for engine in engines.engines) == 3
        engines.engines[2].enter(EnginePhase.RECOVERING)
        await engines.until(lambda: not engines.client.engines["2"].ready)
        stream, owner, _ = await engines.submit([1, 2])
        owner.refuse(stream.number, "too long")
        await engines.until(lambda: stream.end is not None)
        assert isinstance(stream.end, APIError)
        assert stream.end.status == 503, "it is served later"
        engines.engines[1].adapted_modules = ("k_proj", "q_proj")
        engines.engines[1].send_state()
        await engines.until(lambda: engines.client.adapted_modules == ["q_proj"])


@pytest.mark.parametrize("how", ["drained", "lost", "drained; changed", "lost; changed"])
@pytest.mark.parametrize("reason", [FinishReason.INVALID, FinishReason.ERROR])
async def test_a_stream_that_others_refuse_returns_to_its_engine_or_ends(
    tmp_path: Path, how: str, reason: FinishReason
) -> None:
    """It was valid there, so that is no fault of its client, also if settings are not known to be the reason. It waits
    for an engine that is lost as long as that one is expected back. Those that refuse it get it with other settings.
    The workers of one that ends it with an error cannot load its adapter."""
    changed = how.endswith("changed")
    async with fleet(tmp_path, patience=2.0 if how == "lost" else 300.0) as engines:
        stream, owner, other = await engines.stream(1, 2)
        if how.startswith("drained"):
            owner.enter(EnginePhase.DRAINING)
        else:
            owner.close()
        await engines.until(lambda: other.requests)
        by_settings = how == "lost" or reason is FinishReason.ERROR
        other.refuse(stream.number, "too long", by_settings, reason)
        if changed:
            await engines.until(lambda: engines.client.ledger.waiting or len(owner.requests) == 2)
            other.adapted_modules = ("q_proj",)
            other.send_state()
            await engines.until(lambda: len(other.requests) == 2)
            return
        if how == "drained":
            await engines.until(lambda: len(owner.requests) == 2)
            assert unpack(owner.requests[1].token_ids).tolist() == [1, 2, 7]
            owner.send(stream.number, 1, 8, ends=True)
        else:
            await engines.until(lambda: engines.client.ledger.waiting)
        await engines.until(lambda: stream.end is not None)
        assert len(other.requests) == 1
        if how == "drained":
            assert stream.output == [7, 8]
        else:
            assert isinstance(stream.end, APIError)
            assert stream.end.status == 503
            assert f"engine {engines.engines.index(other)} refuses it: too long" in stream.end.message


async def test_a_stream_whose_connection_breaks_while_its_engine_drains_goes_on_there(tmp_path: Path) -> None:
    async with fleet(tmp_path, MODEL, "other") as engines:
        _, owner, _ = await engines.stream(1)
        index = engines.engines.index(owner)
        engines.restart(owner, owner.incarnation, owner.identity)
        engines.engines[index].phase = EnginePhase.DRAINING
        await engines.until(lambda: not engines.client.engines[str(index)].ready)
        new = engines.client.ledger.open(RecordingStream(ResponseStream(FlushQueue())), NO_PROMPT, 0.0)
        engines.client.ledger.assign(new, str(index))
        await engines.until(lambda: engines.engines[index].requests)
        [again] = engines.engines[index].requests
        assert unpack(again.token_ids).tolist() == [1, 7]
        engines.restart(engines.engines[index], owner.incarnation + 5, owner.identity)
        await engines.until(lambda: len(engines.engines[index].requests) == 2)
        attempts = [request.attempts for request in engines.engines[index].requests]
        assert attempts == [0, 0], "the end of a scheduler that drains is no death"


async def test_the_blocks_of_an_only_engine_are_not_followed(tmp_path: Path) -> None:
    async with fleet(tmp_path) as engines:
        first, second = engines.engines
        await engines.until(lambda: first.subscriptions and second.subscriptions)
        engines.client.engines.set_addresses([engines.client.engines["0"].address])
        await engines.until(lambda: len(first.subscriptions) == 2)
        assert first.subscriptions[-1] == Subscribe(steps=False)
