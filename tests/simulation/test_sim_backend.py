"""The permutation matrix with the worker that is shipped: core, scheduler, session and the simulator backend, checked
against the plain reference sampler (spec 2(e) 2)."""

from collections import deque
from dataclasses import dataclass, field, replace
from random import Random

import numpy as np
import pytest

from protocol.codec import Decoder, encode, pack, unpack
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.requests import Finish, FinishReason, GenerateRequest
from protocol.rows import LogprobRows
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.steps import ModelRunnerOutput, StepMessage
from services.scheduler.core.drafting import FixedDrafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.policies import ChunkedPolicy
from services.worker.backends.sim.extras import HIDDEN_SIZE
from services.worker.runner import Output
from services.worker.sampling.reference import TokenLogprobs
from services.worker.session import Execute, Sample, Session
from tests.simulation.grammar import Automaton, Compilation
from tests.simulation.parameters import MATRIX, STRUCTURED, asked
from tests.unit.worker.plans import BLOCK, CONTEXT, SLOTS, VOCAB, prompt, sim_runner
from tests.unit.worker.sim_reference import answer, assert_scored

STORM = Limits(SLOTS // 2, 24, CONTEXT, num_blocks=24, block_size=BLOCK)
MESSAGES: Decoder[StepMessage] = Decoder(StepMessage)
RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)


@dataclass
class Client:
    text: list[int]
    params: SamplingParams
    structured: StructuredOutputParams | None
    tokens: list[int] = field(default_factory=list)
    scores: dict[int, tuple[int, list[int], bytes]] = field(default_factory=dict)
    """Position -> rank, ids and values that came first."""
    finish: Finish | None = None


class Engine:
    """Every message crosses the codec; results are read as late as the depth allows; up to `drafts` are proposed."""

    def __init__(self, depth: int, drafts: int = 0) -> None:
        self.compilation = Compilation(VOCAB)
        limits = replace(STORM, drafts_in_flight=depth * drafts)
        self.core = EngineCore(
            limits,
            ChunkedPolicy(),
            depth,
            VOCAB,
            drafting=FixedDrafting(drafts) if drafts else None,
            compiler=self.compilation,
            hidden_size=HIDDEN_SIZE,
        )
        how = Speculation("ngram", drafts) if drafts else None
        self.runner, self.session = sim_runner(speculation=how), Session()
        self.session.on(Assignment(1, 0, 1, BLOCK, SLOTS, 512))
        self.session.loaded()
        self.session.on(InitializeCache(STORM.num_blocks, CONTEXT))
        self.session.ready()
        self.outputs: deque[Output] = deque()
        self.clients: list[Client] = []
        self.deferred = 0

    def add(self, client: Client) -> None:
        number = len(self.clients)
        self.clients.append(client)
        self.core.add(
            0,
            GenerateRequest(
                number, pack(client.text), len(client.text), client.params, structured=client.structured
            ),
        )
        for ticket in list(self.compilation.waiting):
            self.core.on_grammar(ticket, self.compilation.finish(ticket))

    def turn(self) -> None:
        """Fills the queue, and lets the oldest result arrive."""
        for message in self.core.dispatch():
            match self.session.on(MESSAGES.decode(encode(message))):
                case Execute(step):
                    self.runner.execute_model(step)
                    if not step.has_structured_output_requests:
                        self.outputs.append(self.runner.sample_tokens(None))
                case Sample(grammar):
                    self.outputs.append(self.runner.sample_tokens(grammar))
                case release:
                    self.runner.release(unpack(release.slots))  # type: ignore[union-attr]
        self.deferred += self.core.queue.unsampled is not None
        if self.outputs:
            result = self.outputs.popleft().get()
            assert result is not None
            self.core.on_result(RESULTS.decode(encode(result)))
        self._publish()

    def _publish(self) -> None:
        for _, message in self.core.take_outputs():
            columns = (unpack(message.numbers, np.uint32), unpack(message.indices), unpack(message.token_ids))
            for number, index, token in zip(*(column.tolist() for column in columns), strict=True):
                assert index == len(self.clients[number].tokens)
                self.clients[number].tokens.append(token)
            if message.logprobs is not None:
                self._score(LogprobRows.from_message(message.logprobs))
            for finish in message.finished:
                self.clients[finish.number].finish = finish

    def _score(self, rows: LogprobRows) -> None:
        at = 0
        for number, position, count, rank in zip(*(column.tolist() for column in rows[:4]), strict=True):
            ids, values = rows.token_ids[at : at + count].tolist(), rows.values[at : at + count].tobytes()
            at += count
            first = self.clients[number].scores.setdefault(position, (rank, ids, values))
            assert first == (rank, ids, values), "what came again is not what came first"


def expected(client: Client, params: SamplingParams, structured: StructuredOutputParams | None) -> list[int]:
    def mask(output: list[int]) -> np.ndarray:
        assert structured is not None
        grammar = Automaton.of(structured, VOCAB, ())
        assert all(map(grammar.accept, output))
        return grammar.mask()

    return answer(client.text, params, params.max_tokens, mask if structured else None)


def assert_answered(client: Client) -> None:
    text, params = client.text, client.params
    assert client.finish is not None
    assert client.finish.reason is FinishReason.LENGTH
    assert client.tokens == expected(client, params, client.structured)
    everything = text + client.tokens
    wanted = set() if params.logprobs is None else set(range(len(text), len(everything)))
    wanted |= set() if params.prompt_logprobs is None else set(range(1, len(text)))
    assert client.scores.keys() == wanted
    for position, (rank, ids, values) in client.scores.items():
        count = params.logprobs if position >= len(text) else params.prompt_logprobs
        entry = TokenLogprobs(rank, np.array(ids, np.int32), np.frombuffer(values, np.float32))
        assert_scored(entry, everything[:position], everything[position], count or 0)


@pytest.mark.parametrize(("drafts", "depth"), [(0, 1), (0, 2), (0, 3), (1, 2), (3, 1), (3, 3), (5, 2)])
@pytest.mark.parametrize("name", MATRIX)
def test_the_permutation_matrix_on_the_simulator_backend(name: str, drafts: int, depth: int) -> None:
    """Requests join and leave in every step, three of four with the parameter, and blocks never suffice; with drafts
    (spec 2(e) 2) and without."""
    rng, engine = Random(name), Engine(depth, drafts)
    names = (name, name, name, rng.choice(MATRIX))
    while len(engine.clients) < 16 or engine.core.requests:
        for _ in range(min(rng.choice((1, 1, 2)), 16 - len(engine.clients))):
            seed = rng.choice((None, None, 7))
            base = SamplingParams(
                max_tokens=rng.randint(6, 18), temperature=0.0 if seed is None else 1.0, seed=seed or 0
            )
            sampling, structured = asked(names[len(engine.clients) % 4], base, rng, VOCAB)
            engine.add(Client(prompt(rng.randrange(6), rng.randint(16, 44)), sampling, structured))
        engine.turn()
    engine.runner.shutdown()
    assert engine.core.store.counters["preemptions"] > 0
    assert bool(engine.deferred) == (STRUCTURED in name and depth > 1)
    counters = engine.core.store.counters
    if drafts:
        assert 0 < counters["spec_decode_num_accepted_tokens"] < counters["spec_decode_num_draft_tokens"]
    for client in engine.clients:
        assert_answered(client)
    bare = [
        (client, expected(client, SamplingParams(max_tokens=client.params.max_tokens, temperature=0.0), None))
        for i, client in enumerate(engine.clients)
        if i % 4 != 3 and not client.params.temperature
    ]
    changed = [client for client, tokens in bare if client.tokens != tokens]
    unchanging = name in ("none", "logprobs", "prompt logprobs")
    assert len(bare) > 2
    assert not changed if unchanging else len(changed) > len(bare) // 2
