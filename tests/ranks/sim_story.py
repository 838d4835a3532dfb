"""A random life of several requests as plans, with the tokens that one rank alone makes of them."""

from dataclasses import dataclass, field

import numpy as np

from protocol.codec import pack, unpack
from protocol.logprobs import Logprobs
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, SchedulerOutput
from tests.unit.worker.plans import (
    BLOCK,
    CONTEXT,
    GREEDY,
    VOCAB,
    Plans,
    Request,
    prompt,
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
"""Of one request: blocks are never used again."""


@dataclass
class Story:
    plans: list[SchedulerOutput] = field(default_factory=list)
    grammars: list[GrammarOutput | None] = field(default_factory=list)
    """Of each step, for one of its rows."""
    logprobs: list[Logprobs | None] = field(default_factory=list)
    tokens: list[dict[int, int]] = field(default_factory=list)
    """Slot -> token, per step."""
    resumed: int = 0
    shared: int = 0
    reused_at_once: int = 0
    """Slots given away by the plan that follows a step which sampled for them."""

    @property
    def steps(self) -> list[tuple[SchedulerOutput, GrammarOutput | None]]:
        return list(zip(self.plans, self.grammars, strict=True))

    @property
    def without_sampling(self) -> int:
        return sum(not any(plan.samples) for plan in self.plans)


def story(seed: int, steps: int = 50) -> Story:
    """Chunked prompts, prefix hits, requests that leave, come back, or give their slot to the next one at once."""
    rng = np.random.default_rng(seed)
    told, plans, runner = Story(), Plans(), sim_runner()
    alive: list[Request] = []
    seed_of_prompt = seed * 1000
    for _ in range(steps):
        for request in list(alive):
            if request.known >= MOST_TOKENS or (request.start and rng.random() < 0.04):
                alive.remove(request)
                plans.leave(request)
                plans._free_slots.insert(0, plans._free_slots.pop())
                told.reused_at_once += request.slot in (told.tokens[-1] if told.tokens else {})
                if rng.random() < 0.5 and request.known < MOST_TOKENS:
                    again = request.prompt + request.outputs
                    alive.append(plans.admit(again, request.params))
                    told.resumed += 1
        if len(alive) < 5 and rng.random() < 0.5:
            seed_of_prompt += 1
            ids, share, hit = prompt(seed_of_prompt, int(rng.integers(1, 30))), None, 0
            donors = [r for r in alive if BLOCK <= r.start <= len(r.prompt)]
            if donors and rng.random() < 0.5:
                share = donors[int(rng.integers(len(donors)))]
                hit = share.start // BLOCK * BLOCK
                ids = share.prompt[:hit] + ids
                told.shared += 1
            alive.append(plans.admit(ids, _params(rng), hit=hit, share=share))
        if not alive:
            continue
        chosen = [alive[i] for i in rng.permutation(len(alive))[: rng.choice([1, 1, 2, len(alive)])]]
        rows = [(r, r.left if rng.random() < 0.3 else int(rng.integers(1, r.left + 1))) for r in chosen]
        constrained = [
            request.slot for request, count in rows if count == request.left and rng.random() < 0.2
        ]
        plan = plans.step(*rows, grammar=bool(constrained))
        grammar = _grammar(rng, plan, constrained) if constrained else None
        runner.execute_model(plan)
        result = runner.sample_tokens(grammar).get()
        assert isinstance(result, ModelRunnerOutput)
        got = tokens(result)
        for request in chosen:
            if request.slot in got:
                request.outputs.append(got[request.slot])
        told.plans.append(plan)
        told.grammars.append(grammar)
        told.logprobs.append(result.logprobs)
        told.tokens.append(got)
    runner.shutdown()
    assert all(r.known <= CONTEXT for r in alive)
    return told


def _grammar(rng: np.random.Generator, plan: SchedulerOutput, slots: list[int]) -> GrammarOutput:
    masks = rng.integers(0, 2**31, (len(slots), -(-VOCAB // 32)), np.int32)
    order = unpack(plan.slots).tolist()
    assert slots == sorted(slots, key=order.index)
    return GrammarOutput(plan.epoch, plan.step_id, pack(slots), masks.tobytes())


def _params(rng: np.random.Generator) -> SamplingParams:
    return PARAMS[int(rng.integers(len(PARAMS)))]
