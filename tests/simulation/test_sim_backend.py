"""Every combination of parameters on the simulator backend: scheduler core, session and runner together.

Their tokens equal those of the plain reference sampler (same tokens; docs/invariants.md).
"""

from collections import deque
from dataclasses import dataclass, replace
from random import Random

import numpy as np
import pytest

from protocol.codec import Decoder, encode, pack, unpack
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.requests import FinishReason, GenerateRequest
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, ReleaseSlots, SchedulerOutput, StepMessage
from services.scheduler.core.drafting import FixedDrafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.policies import ChunkedPolicy
from services.worker.backends.sim.model.hidden_states import HIDDEN_SIZE
from services.worker.runner import Output
from services.worker.sampling.reference import TokenLogprobs
from services.worker.session import Session
from tests.simulation.answers import CollectedAnswer, receive
from tests.simulation.grammar import Automaton, Compilation
from tests.simulation.parameters import MATRIX, STRUCTURED, with_parameters
from tests.unit.worker.plans import BLOCK, CONTEXT, SLOTS, VOCAB, prompt, result_of, sim_runner
from tests.unit.worker.sim_reference import answer, assert_scored

STORM = Limits(SLOTS // 2, 24, CONTEXT, num_blocks=24, block_size=BLOCK)
MESSAGES: Decoder[StepMessage] = Decoder(StepMessage)
RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)


@dataclass
class ReceivedText(CollectedAnswer):
    """A request and its answer."""

    text: list[int]
    params: SamplingParams
    structured: StructuredOutputParams | None


class SimEngine:
    """Scheduler and worker in one process. Messages pass the codec; results are read as late as the depth allows.

    Args:
        drafts: drafts per row.
    """

    def __init__(self, depth: int, drafts: int = 0) -> None:
        self.compilation = Compilation(VOCAB)
        limits = replace(STORM, drafts_in_flight=depth * drafts)
        self.core = EngineCore(
            limits,
            ChunkedPolicy(),
            depth,
            VOCAB,
            drafting=FixedDrafting(drafts),
            compiler=self.compilation,
            hidden_size=HIDDEN_SIZE,
        )
        speculation = Speculation("ngram", drafts) if drafts else None
        self.runner, self.session = sim_runner(speculation=speculation), Session()
        self.session.on(Assignment(1, 0, 1, BLOCK, SLOTS, 512))
        self.session.loaded()
        self.session.on(InitializeCache(STORM.num_blocks, CONTEXT))
        self.session.ready()
        self.outputs: deque[Output] = deque()
        self.texts: dict[int, ReceivedText] = {}
        self.deferred = 0

    def add(self, received: ReceivedText) -> None:
        number = len(self.texts)
        self.texts[number] = received
        self.core.add(
            0,
            GenerateRequest(
                number, pack(received.text), len(received.text), received.params, structured=received.structured
            ),
        )
        for ticket in list(self.compilation.waiting):
            self.core.on_grammar(ticket, self.compilation.finish(ticket))

    def step(self) -> None:
        """Fill the queue, and apply the oldest result."""
        for message in self.core.dispatch():
            match self.session.on(MESSAGES.decode(encode(message))):
                case SchedulerOutput() as step:
                    self.runner.execute_model(step)
                    self.outputs.append(self.runner.sample_tokens(None))
                case GrammarOutput() as grammar:
                    self.runner.add_masks(grammar)
                case ReleaseSlots(slots=slots):
                    self.runner.release(unpack(slots))
                case other:
                    raise AssertionError(f"unexpected {other}")
        self.deferred += bool(self.core.queue.unmasked)
        if self.outputs:
            result = result_of(self.outputs.popleft())
            self.core.on_result(RESULTS.decode(encode(result)))
        for _, outputs in self.core.take_outputs():
            receive(outputs, self.texts)


def expected(received: ReceivedText, params: SamplingParams, structured: StructuredOutputParams | None) -> list[int]:
    def mask(output: list[int]) -> np.ndarray:
        assert structured is not None
        grammar = Automaton.from_params(structured, VOCAB, ())
        assert all(map(grammar.accept, output))
        return grammar.mask()

    return answer(received.text, params, params.max_tokens, mask if structured else None)


def assert_answered(received: ReceivedText) -> None:
    text, params = received.text, received.params
    assert received.finish.reason is FinishReason.LENGTH
    assert received.tokens == expected(received, params, received.structured)
    everything = text + received.tokens
    wanted = set() if params.logprobs is None else set(range(len(text), len(everything)))
    wanted |= set() if params.prompt_logprobs is None else set(range(1, len(text)))
    assert received.scores.keys() == wanted
    for position, (rank, ids, values) in received.scores.items():
        count = params.logprobs if position >= len(text) else params.prompt_logprobs
        entry = TokenLogprobs(rank, np.array(ids, np.int32), np.array(values, np.float32))
        assert_scored(entry, everything[:position], everything[position], count or 0)


def cells() -> list[object]:
    """Return every parameter with every number of drafts and depth.

    `make soak` runs all of them; per change, each parameter runs without drafts and with some.
    """
    found: list[object] = []
    for i, name in enumerate((*MATRIX, "bias", "allowed ids")):
        per_change = {((5, 2), (3, 1), (1, 2), (3, 3))[i % 4], (0, 1 + i % 3)}
        for drafts, depth in ((0, 1), (0, 2), (0, 3), (1, 2), (3, 1), (3, 3), (5, 2)):
            marks = () if (drafts, depth) in per_change else (pytest.mark.soak,)
            found.append(pytest.param(name, drafts, depth, marks=marks))
    return found


@pytest.mark.parametrize(("name", "drafts", "depth"), cells())
def test_the_permutation_matrix_on_the_simulator_backend(name: str, drafts: int, depth: int) -> None:
    """Requests join and leave in every step, three of four have the parameter, and blocks are scarce."""
    rng, engine = Random(name), SimEngine(depth, drafts)
    names = (name, name, name, rng.choice(MATRIX))
    while len(engine.texts) < 16 or engine.core.requests:
        for _ in range(min(rng.choice((1, 1, 2)), 16 - len(engine.texts))):
            seed = rng.choice((None, None, 7))
            base = SamplingParams(
                max_tokens=rng.randint(6, 18), temperature=0.0 if seed is None else 1.0, seed=seed or 0
            )
            sampling, structured = with_parameters(names[len(engine.texts) % 4], base, rng, VOCAB)
            engine.add(ReceivedText(prompt(rng.randrange(6), rng.randint(16, 44)), sampling, structured))
        engine.step()
    engine.runner.shutdown()
    assert engine.core.store.counters["num_preemptions"] > 0
    assert bool(engine.deferred) == (STRUCTURED in name and depth > 1)
    counters = engine.core.store.counters
    if drafts:
        assert 0 < counters["spec_decode_num_accepted_tokens"] < counters["spec_decode_num_draft_tokens"]
    for received in engine.texts.values():
        assert_answered(received)
    bare = [
        (received, expected(received, SamplingParams(max_tokens=received.params.max_tokens, temperature=0.0), None))
        for i, received in enumerate(engine.texts.values())
        if i % 4 != 3 and not received.params.temperature
    ]
    changed = [received for received, tokens in bare if received.tokens != tokens]
    unchanging = name in ("none", "logprobs", "prompt logprobs")
    assert len(bare) > 2
    assert not changed if unchanging else len(changed) > len(bare) // 2
