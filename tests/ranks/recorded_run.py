"""A random run of several requests: its plans, and the tokens that one rank alone makes of them."""

from dataclasses import dataclass, field

import numpy as np

from protocol.codec import unpack
from protocol.logprobs import Logprobs
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput, SchedulerOutput
from tests.unit.worker.plans import (
    BLOCK,
    CONTEXT,
    GREEDY,
    VOCAB,
    PlanBuilder,
    SlotRequest,
    grammar_output,
    prompt,
    result_of,
    sampled,
    sim_runner,
    tokens,
)

PARAMS = (
    GREEDY,
    sampled(7, logprobs=1),
    sampled(8, top_k=5, top_p=0.9),
    sampled(9, min_p=0.01),
    sampled(10, frequency_penalty=-2.0, repetition_penalty=0.3, logprobs=2, prompt_logprobs=0),
)
MOST_TOKENS = 60
"""Largest number of tokens of a request; blocks are never used again."""


@dataclass
class RecordedRun:
    """Plans in order, with the results of one rank."""

    plans: list[SchedulerOutput] = field(default_factory=list)
    grammars: list[GrammarOutput | None] = field(default_factory=list)
    """Grammar of each step, for some of its rows."""
    logprobs: list[Logprobs | None] = field(default_factory=list)
    tokens: list[dict[int, int]] = field(default_factory=list)
    """Slot -> token, per step."""
    resumed: int = 0
    shared: int = 0
    reused_at_once: int = 0
    """Slots that are assigned again by the plan after a step which sampled for them."""

    @property
    def steps(self) -> list[tuple[SchedulerOutput, GrammarOutput | None]]:
        return list(zip(self.plans, self.grammars, strict=True))

    @property
    def without_sampling(self) -> int:
        """Number of steps without a sampling row."""
        return sum(not any(plan.samples) for plan in self.plans)


class _Recorder:
    """Admits and releases requests at random, and runs their plans on one rank."""

    def __init__(self, seed: int) -> None:
        self._rng, self._prompt_seed = np.random.default_rng(seed), seed * 1000
        self._plans, self._runner = PlanBuilder(), sim_runner()
        self._alive: list[SlotRequest] = []
        self.run = RecordedRun()

    def step(self) -> None:
        self._release_some()
        if len(self._alive) < 5 and self._rng.random() < 0.5:
            self._admit()
        if self._alive:
            self._execute()

    def close(self) -> None:
        self._runner.shutdown()
        assert all(request.known <= CONTEXT for request in self._alive)

    def _release_some(self) -> None:
        rng, run = self._rng, self.run
        for request in list(self._alive):
            if request.known >= MOST_TOKENS or (request.start and rng.random() < 0.04):
                self._alive.remove(request)
                self._plans.release(request, reuse_slot=True)
                run.reused_at_once += request.slot in (run.tokens[-1] if run.tokens else {})
                if rng.random() < 0.5 and request.known < MOST_TOKENS:
                    again = request.prompt + request.outputs
                    self._alive.append(self._plans.admit(again, request.params))
                    run.resumed += 1

    def _admit(self) -> None:
        rng = self._rng
        self._prompt_seed += 1
        ids, share, hit = prompt(self._prompt_seed, int(rng.integers(1, 30))), None, 0
        donors = [r for r in self._alive if BLOCK <= r.start <= len(r.prompt)]
        if donors and rng.random() < 0.5:
            share = donors[int(rng.integers(len(donors)))]
            hit = share.start // BLOCK * BLOCK
            ids = share.prompt[:hit] + ids
            self.run.shared += 1
        params = self._draw_params()
        self._alive.append(self._plans.admit(ids, params, hit=hit, share=share))

    def _draw_params(self) -> SamplingParams:
        return PARAMS[int(self._rng.integers(len(PARAMS)))]

    def _execute(self) -> None:
        rng, run, alive = self._rng, self.run, self._alive
        chosen = [alive[i] for i in rng.permutation(len(alive))[: rng.choice([1, 1, 2, len(alive)])]]
        rows = [(r, r.left if rng.random() < 0.3 else int(rng.integers(1, r.left + 1))) for r in chosen]
        constrained = [request for request, count in rows if count == request.left and rng.random() < 0.2]
        plan = self._plans.step(*rows, masked=constrained)
        grammar = self._draw_grammar(plan) if constrained else None
        self._runner.execute_model(plan)
        if grammar is not None:
            self._runner.add_masks(grammar)
        result = result_of(self._runner.sample_tokens(None))
        sampled_tokens = tokens(result)
        for request in chosen:
            if request.slot in sampled_tokens:
                request.outputs.append(sampled_tokens[request.slot])
        run.plans.append(plan)
        run.grammars.append(grammar)
        run.logprobs.append(result.logprobs)
        run.tokens.append(sampled_tokens)

    def _draw_grammar(self, plan: SchedulerOutput) -> GrammarOutput:
        slots = unpack(plan.masked).tolist()
        masks = self._rng.integers(0, 2**31, (len(slots), -(-VOCAB // 32)), np.int32)
        return grammar_output(plan, slots, masks.tobytes())


def record(seed: int, steps: int = 50) -> RecordedRun:
    """Record a run with chunked prompts, prefix hits, resumed requests and slots that are assigned again at once."""
    recorder = _Recorder(seed)
    for _ in range(steps):
        recorder.step()
    recorder.close()
    return recorder.run
