"""The stages of the native runner without scheduler and sockets, over random weights."""

import gc
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Self

import numpy as np
import torch

from protocol.membership import Assignment, InitializeCache, Shard, Speculation
from protocol.sampling import SamplingParams
from protocol.steps import ModelRunnerOutput, NewRequest, SchedulerOutput, StepTimes
from services.worker.backends.native.drafters.base import TargetModel
from services.worker.backends.native.drafters.ngram import ngram_drafter
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.stages import NativeStages
from services.worker.batch.slots import SlotTable
from services.worker.distributed.ranks import Ranks
from services.worker.kernels.interface.kernels import Kernels
from services.worker.runner import Output
from tests.benchmarks.gpu.shapes import RandomCheckpoint

BLOCK_SIZE = 16
Params = Callable[[int], SamplingParams]
"""Parameters of the request in a slot."""


def greedy(slot: int) -> SamplingParams:
    return SamplingParams(max_tokens=1 << 20, temperature=0.0)


def column(values: list[int]) -> bytes:
    return np.array(values, np.int32).tobytes()


class StageEngine:
    """A batch of requests of equal length: prefill once, then decode.

    Args:
        context: tokens of a request's blocks. With drafts, each step takes as many as if all were accepted.
        budget: tokens of the largest step
        drafts: number of drafts of a row, from prompt lookup; prompts then repeat a few tokens
    """

    def __init__(
        self,
        shape: ModelConfig,
        kernels: Kernels,
        dtype: torch.dtype,
        batch: int,
        context: int,
        budget: int,
        drafts: int = 0,
    ) -> None:
        self.shape, self.batch, self.device = shape, batch, kernels.device
        self._context, self._budget, self._drafts = context, budget, drafts
        blocks = batch * -(-context // BLOCK_SIZE)
        lookup = Speculation("ngram", drafts, prompt_lookup_min=1, prompt_lookup_max=2)
        speculation = lookup if drafts else None
        assignment = Assignment(1, 0, 1, BLOCK_SIZE, batch, budget, speculation=speculation)
        ranks = Ranks(assignment).join()
        part = ModelPart.from_shard(shape, Shard())
        with torch.inference_mode():
            checkpoint = RandomCheckpoint(kernels.device.where)
            self.model = Model(part, checkpoint, dtype, kernels, lambda *_: None)
            target = TargetModel(lookup, self.model, Path(), checkpoint, BLOCK_SIZE, context)
            drafter = ngram_drafter(target) if drafts else None
            epoch = NativeEpoch(self.model, ranks, drafter, assignment, InitializeCache(blocks, context), blocks)
        self._stages = NativeStages(SlotTable(batch, BLOCK_SIZE, blocks, context), epoch, ranks)
        self._steps = self._length = self._generation = 0
        self._flying: deque[Output] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the memory: the next engine is as large."""
        self._stages.close()
        del self._stages, self.model
        gc.collect()
        self.device.free()

    def prefill(self, length: int, params: Params = greedy) -> list[ModelRunnerOutput]:
        """Compute random prompts of all requests, one step after the other, as many whole prompts in each as fit.
        Requests of an earlier prefill have ended."""
        if self._generation:
            self._stages.release(np.arange(self.batch, dtype=np.int32))
        self._generation += 1
        rng = np.random.default_rng(self._generation)
        together, self._length = max(1, self._budget // length), length
        results = []
        for first in range(0, self.batch, together):
            slots = list(range(first, min(first + together, self.batch)))
            new = [self._request(slot, self._prompt(rng, length), params) for slot in slots]
            results += self._launched(self._plan(slots, 0, length, new), depth=1)
        return results

    def decode(self, steps: int, depth: int) -> list[ModelRunnerOutput]:
        """Compute a token of every request in each step, with `depth` steps in flight."""
        results: list[ModelRunnerOutput] = []
        for _ in range(steps):
            plan = self._plan(list(range(self.batch)), self._length, 1, [], self._drafts)
            self._length += 1 + self._drafts
            results += self._launched(plan, depth)
        while self._flying:
            results.append(_result(self._flying.popleft()))
        return results

    def _prompt(self, rng: np.random.Generator, length: int) -> np.ndarray:
        different = min(length, 8) if self._drafts else length
        return np.resize(rng.integers(0, self.shape.vocab_size, different), length)

    def _request(self, slot: int, prompt: np.ndarray, params: Params) -> NewRequest:
        each = -(-self._context // BLOCK_SIZE)
        blocks = list(range(slot * each, (slot + 1) * each))
        tokens = prompt.astype(np.int32).tobytes()
        return NewRequest(slot, self._generation, tokens, len(prompt), column(blocks), params(slot))

    def _plan(
        self, slots: list[int], start: int, count: int, new: list[NewRequest], drafts: int = 0
    ) -> SchedulerOutput:
        self._steps += 1
        rows = len(slots)
        columns = (column([each] * rows) for each in (self._generation, start, count + drafts))
        return SchedulerOutput(
            *(1, self._steps, column(slots), *columns, bytes([1] * rows), new),
            drafts=column([drafts] * rows) if drafts else b"",
            num_speculative_tokens=self._drafts,
        )

    def _launched(self, plan: SchedulerOutput, depth: int) -> list[ModelRunnerOutput]:
        """Launch a step; return the result of the oldest one, if `depth` steps are in flight."""
        self._stages.execute(plan)
        self._flying.append(self._stages.sample())
        return [_result(self._flying.popleft())] if len(self._flying) >= depth else []


def _result(output: Output) -> ModelRunnerOutput:
    result = output.get()
    assert not isinstance(result, StepTimes)
    return result
