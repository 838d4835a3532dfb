"""A frontend process around the production `EngineClient`, and the HTTP clients that it serves."""

import asyncio
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec.structs import astuple, replace

from protocol.lora import LoRAAdapter
from protocol.requests import Finish, FinishReason
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.transport import HandshakeRefused
from services.frontend.engine.addresses import numbered
from services.frontend.engine.client import NO_PROMPT, EngineClient, failure
from services.frontend.engine.streams import RawLogprobs, RequestStream, ResponseStream
from services.frontend.errors import APIError
from services.frontend.placement import Placement
from services.frontend.placement.records import Record
from tests.simulation.grammar import Automaton
from tests.simulation.reference import ExpectedAnswer, reference
from tests.simulation.whole.device import MAX_MODEL_LEN, VOCAB
from tests.simulation.whole.hub import SimulatedProcess
from tests.simulation.whole.loop import VirtualLoop
from tests.simulation.whole.network import SimulatedNetwork

RETRY = 0.5
"""Seconds until a client that was refused with 429 or 503 asks again."""
REFUSED_FOR_NOW = (429, 503)
EXIT_REFUSED = 4
PREFILL_TOKENS = 6
"""Prompt tokens that an engine of the role `prefill` computes for another one."""


@dataclass
class SimulatedChoice:
    """One choice of an answer, as the client has it."""

    params: SamplingParams
    expected: ExpectedAnswer
    tokens: list[int] = field(default_factory=list)
    scored: set[int] = field(default_factory=set)
    embedding: bytes = b""
    finish: Finish | None = None
    submitted: list[int] = field(default_factory=list)
    """Output of the frontend's ledger, with which the request is submitted again."""


@dataclass
class ClientRequest:
    """One HTTP request, with its n choices."""

    name: str
    at: float
    """When the client sends it."""
    prompt: list[int]
    choices: list[SimulatedChoice]
    structured: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE
    lora: LoRAAdapter | None = None
    leaves_after: float | None = None
    """Seconds after which the client closes its connection; None: it does not."""
    is_poison: bool = False
    """It takes down the workers or the scheduler, and must be refused."""
    outcome: str = ""
    """"": open; "done", "left", "broken" (its frontend has ended), or the status of its error."""
    error: str = ""
    num_refusals: int = 0


def make_choice(
    prompt: list[int],
    params: SamplingParams,
    structured: StructuredOutputParams | None = None,
    pooling: Pooling = Pooling.NONE,
) -> SimulatedChoice:
    grammar = None if structured is None else Automaton.from_params(structured, VOCAB, params.eos_token_ids)
    return SimulatedChoice(params, reference(prompt, params, MAX_MODEL_LEN, VOCAB, grammar, pooling))


class ChoiceStream(RequestStream):
    """The stream of one choice."""

    __slots__ = ("choice",)

    def __init__(self, response: ResponseStream, choice: SimulatedChoice) -> None:
        super().__init__(response)
        self.choice = choice
        choice.submitted = self.output

    def feed(self, tokens: list[int], end: Finish | None, now: float) -> bytes:
        self.choice.tokens += tokens
        if end is not None:
            if (error := failure(end)) is not None:
                raise error
            self.choice.finish = end
            self.has_ended = True
        return b""

    def add_logprobs(self, logprobs: RawLogprobs) -> None:
        self.choice.scored.add(logprobs.position)

    def add_embedding(self, values: bytes) -> None:
        self.choice.embedding = values


class SimulatedFrontend:
    def __init__(
        self,
        network: SimulatedNetwork,
        name: str,
        endpoints: list[str],
        silence: float,
        patience: float,
        timeout: float,
    ) -> None:
        self.process = SimulatedProcess(network.hub, name)
        self.loop = VirtualLoop(network, self.process)
        self.addresses = numbered(endpoints)
        self.blocks = defaultdict[str, set[bytes]](set)
        """Names that engines have reported and not taken back."""
        placement = Placement(seed=int(self.process.clock_offset), record=self._follow)
        self.engine = EngineClient(self.addresses, 1024, silence, patience, timeout, placement=placement)
        self.requests: list[ClientRequest] = []
        self.happened = network.happened
        self.process.on_end.append(self._break_connections)
        self.process.do(self._start)

    def _follow(self, record: Record) -> None:
        match record.__struct_config__.tag, *astuple(record):
            case "blocks_stored", name, names:
                self.blocks[name].update(names)
            case "blocks_removed", name, names:
                self.blocks[name].difference_update(names)
            case "blocks_cleared", name:
                self.blocks[name].clear()
            case "load_ahead", *_:
                self.happened["blocks loaded ahead"] += 1

    def _start(self) -> None:
        self.loop.create_task(self._run())

    async def _run(self) -> None:
        try:
            await self.engine.run()
        except HandshakeRefused:
            self.engine.fail_all(APIError(503, "the scheduler refused this frontend"))
            await asyncio.sleep(0.1)  # uvicorn writes the last bytes
            self.process.end(EXIT_REFUSED)

    def _break_connections(self) -> None:
        for request in self.requests:
            request.outcome = request.outcome or "broken"

    def do(self, action: Callable[[], None]) -> None:
        """Run a callback in its loop: now, after its stop, or never."""
        self.process.do(lambda: self.loop.call_soon(action))

    def accept(self, request: ClientRequest) -> None:
        """A client has sent a request."""
        if not self.process.alive:
            request.outcome = "broken"
            return
        self.requests.append(request)
        self.process.do(lambda: self._accept(request))

    def _accept(self, request: ClientRequest) -> None:
        task = self.loop.create_task(self._serve(request))
        if request.leaves_after is not None:
            self.loop.call_later(request.leaves_after, task.cancel)

    async def _serve(self, request: ClientRequest) -> None:
        try:
            await self._answer(request)
            outcome, error = "done", ""
        except APIError as failed:
            outcome, error = str(failed.status), str(failed)
        except asyncio.CancelledError:
            outcome, error = "left", ""
        if self.process.alive:
            request.outcome, request.error = outcome, error
            self.process.hub.log(self.process.name, "request", request.name, outcome, error)

    async def _answer(self, request: ClientRequest) -> None:
        """Raises: APIError"""
        response = ResponseStream(self.engine.flush_queue, request.name)
        streams: list[RequestStream] = []
        try:
            while len(streams) < len(request.choices):
                stream = ChoiceStream(response, request.choices[len(streams)])
                fields = {"request_id": request.name, "structured": request.structured, "pooling": request.pooling}
                fields["lora"] = request.lora
                try:
                    self.engine.submit(stream, request.prompt, stream.choice.params, replace(NO_PROMPT, **fields))
                except APIError as error:
                    response.num_open -= 1
                    if error.status not in REFUSED_FOR_NOW or streams:
                        raise
                    request.num_refusals += 1
                    await asyncio.sleep(RETRY)
                else:
                    streams.append(stream)
            await response.last()
        finally:
            self.engine.abort(streams)


def check_answer(request: ClientRequest, noisy: bool = False) -> None:
    """Each token once, in order, and equal to the run without faults. An error or a client that leaves cuts it."""
    for choice in request.choices:
        expected = choice.expected
        got, whole = choice.tokens, expected.tokens
        assert got == whole[: len(got)], f"request {request.name}: {got}, not {whole}"
        kept = choice.submitted
        assert kept == whole[: len(kept)], f"request {request.name}: {kept} is kept, not {whole}"
        if request.outcome == "done":
            assert got == whole, f"request {request.name}: {len(got)} of {len(whole)} tokens"
            assert choice.finish.reason is expected.reason, f"request {request.name}: {choice.finish.reason!r}"
            assert choice.finish.stop_reason == expected.stop_reason
            missing = set(expected.scores) - choice.scored
            if noisy:
                # A frame that has log-probabilities of the prompt alone has no index by which its loss is noticed. A
                # connection of ZeroMQ loses none; noise does.
                missing -= set(range(len(request.prompt)))
            assert not missing, f"request {request.name}: log-probabilities at {sorted(missing)}"
            assert choice.embedding == expected.embedding
            assert expected.reason is not FinishReason.ERROR
