"""The production scheduler core in front of native ranks, in one loop; the test decides when masks are made."""

import time
from collections import deque
from dataclasses import dataclass
from random import Random
from typing import Protocol

import numpy as np

from protocol.codec import pack, unpack
from protocol.requests import GenerateRequest
from protocol.sampling import SamplingParams, StructuredOutputParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, ReleaseSlots, SchedulerOutput
from services.scheduler.core.drafting import FixedDrafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.policies import BatchingPolicy, ChunkedPolicy
from services.worker.backends.native.runner import NativeRunner
from services.worker.backends.native.stages import NativeOutput
from tests.simulation.answers import CollectedAnswer, receive
from tests.simulation.grammar import Compilation, LateMasks

PATIENCE = 0.02
"""Seconds."""


class LaunchedSteps(Protocol):
    """Ranks that compute steps."""

    def launch(self, plan: SchedulerOutput) -> None: ...
    def add_masks(self, grammar: GrammarOutput) -> None: ...
    def release(self, slots: bytes) -> None: ...
    def ended(self) -> bool:
        """Return whether the oldest step has ended."""
        ...

    def result(self) -> ModelRunnerOutput:
        """Return the result of the oldest step, and forget it."""
        ...


class LocalSteps:
    """`LaunchedSteps` on one rank in this process."""

    def __init__(self, runner: NativeRunner) -> None:
        self._runner = runner
        self._outputs: deque[NativeOutput] = deque()

    def launch(self, plan: SchedulerOutput) -> None:
        self._runner.execute_model(plan)
        self._outputs.append(self._runner.sample_tokens(None))

    def add_masks(self, grammar: GrammarOutput) -> None:
        self._runner.add_masks(grammar)

    def release(self, slots: bytes) -> None:
        self._runner.release(np.array(unpack(slots)))

    def ended(self) -> bool:
        return self._outputs[0].result.done()

    def result(self) -> ModelRunnerOutput:
        result = self._outputs.popleft().get()
        assert isinstance(result, ModelRunnerOutput)
        return result


@dataclass
class ServedRequest(CollectedAnswer):
    prompt: list[int]
    params: SamplingParams
    structured: StructuredOutputParams | None = None


class EngineDriver:
    """Serves requests to their ends.

    Args:
        late: 0: masks are made at once; otherwise the seed that decides when they are made
        drafts: drafts per row
        patience: seconds after which a step that has not ended is considered to wait for its masks
        policy: None: chunked
    """

    def __init__(
        self,
        steps: LaunchedSteps,
        limits: Limits,
        vocab_size: int,
        depth: int,
        late: int = 0,
        drafts: int = 0,
        patience: float = PATIENCE,
        policy: BatchingPolicy | None = None,
    ) -> None:
        self._steps, self._late, self._random, self._patience = steps, late, Random(late), patience
        self._compilation, self._masks = Compilation(vocab_size), LateMasks()
        self.core = EngineCore(
            limits,
            policy or ChunkedPolicy(),
            depth,
            vocab_size,
            drafting=FixedDrafting(drafts),
            compiler=self._compilation,
            mask_maker=self._masks if late else INLINE_MASKS,
        )
        self._in_flight = 0

    def serve(self, requests: list[ServedRequest]) -> list[list[int]]:
        """Return the tokens of each request."""
        for number, r in enumerate(requests):
            message = GenerateRequest(number, pack(r.prompt), len(r.prompt), r.params, structured=r.structured)
            self.core.add(0, message)
        for ticket in list(self._compilation.waiting):
            self.core.on_grammar(ticket, self._compilation.finish(ticket))
        while any(request.finish is None for request in requests) or self._in_flight:
            self._make_masks(self._random.random() < 0.3)
            self._dispatch()
            if self._in_flight and self._wait():
                self._in_flight -= 1
                self.core.on_result(self._steps.result())
            else:
                self._make_masks(True)
            for _, outputs in self.core.take_outputs():
                receive(outputs, dict(enumerate(requests)))
        return [request.tokens for request in requests]

    def _dispatch(self) -> None:
        for message in self.core.dispatch():
            match message:
                case SchedulerOutput() as plan:
                    self._steps.launch(plan)
                    self._in_flight += 1
                case GrammarOutput() as grammar:
                    self._steps.add_masks(grammar)
                case ReleaseSlots(slots=slots):
                    self._steps.release(slots)

    def _make_masks(self, some: bool) -> None:
        while self._masks.waiting and some:
            ticket = self._random.choice(list(self._masks.waiting))
            self.core.on_masks(ticket, self._masks.finish(ticket))
            some = self._random.random() < 0.5

    def _wait(self) -> bool:
        """Return whether the oldest step has ended. False: it waits for masks."""
        deadline = time.monotonic() + self._patience
        while not self._steps.ended():
            if time.monotonic() > deadline and self._masks.waiting:
                return False
            time.sleep(5e-4)
        return True
