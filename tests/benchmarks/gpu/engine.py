"""The stages of the native runner without scheduler and sockets, over random weights."""

import gc
from pathlib import Path
from typing import Self

import numpy as np
import torch

from protocol.membership import Assignment, InitializeCache, Shard, Speculation
from protocol.steps import ModelRunnerOutput, SchedulerOutput
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
from tests.benchmarks.support.planned_batch import BLOCK_SIZE, I32, Params, PlannedBatch, greedy


class StageEngine(PlannedBatch):
    """A batch of random prompts. Drafts come from prompt lookup; prompts then repeat a few tokens."""

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
        super().__init__(batch, context, budget, drafts)
        self.shape, self.device = shape, kernels.device
        blocks = self.num_blocks
        lookup = Speculation("ngram", drafts, prompt_lookup_min=1, prompt_lookup_max=2)
        speculation = lookup if drafts else None
        assignment = Assignment(1, 0, 1, BLOCK_SIZE, batch, budget, speculation=speculation)
        ranks = Ranks(assignment).join()
        part = ModelPart.from_shard(shape, Shard())
        with torch.inference_mode():
            checkpoint = RandomCheckpoint(kernels.device.where, shape.num_layers)
            self.model = Model(part, checkpoint, dtype, kernels, lambda *_: None)
            target = TargetModel(lookup, self.model, Path(), checkpoint, BLOCK_SIZE, context)
            drafter = ngram_drafter(target) if drafts else None
            epoch = NativeEpoch(self.model, ranks, drafter, assignment, InitializeCache(blocks, context), blocks)
        self._stages = NativeStages(SlotTable(batch, BLOCK_SIZE, blocks, context), epoch, ranks)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Free the memory: the next engine is as large."""
        self._stages.close()
        del self._stages, self.model
        gc.collect()
        self.device.free()

    def launch(self, plan: SchedulerOutput) -> Output:
        self._stages.execute(plan)
        return self._stages.sample()

    def release(self, slots: I32) -> None:
        self._stages.release(slots)

    def prefill_random(self, length: int, params: Params = greedy) -> list[ModelRunnerOutput]:
        """Compute random prompts of all requests."""
        rng = np.random.default_rng(self._generation + 1)
        different = min(length, 8) if self._drafts else length
        prompts = [np.resize(rng.integers(0, self.shape.vocab_size, different), length) for _ in range(self.batch)]
        return self.prefill(np.array(prompts, np.int32), params)
