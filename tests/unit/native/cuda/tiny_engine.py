"""A tiny random model with a forward pass and a sampler, over any kernels."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from protocol.codec import pack
from protocol.membership import Assignment, Shard
from protocol.sampling import SamplingParams
from protocol.steps import GrammarOutput, NewRequest
from services.worker.backends.native.model.config import ModelConfig
from services.worker.backends.native.model.forward import ForwardPass
from services.worker.backends.native.model.model import Model
from services.worker.backends.native.model.partition import ModelPart
from services.worker.backends.native.sampling.sampler import SampledTokens, Sampler
from services.worker.backends.native.token_history import TokenHistory
from services.worker.batch.slots import BatchColumns, Rows
from services.worker.distributed.ranks import Ranks
from services.worker.kernels.interface.kernels import Kernels
from services.worker.weights import open_checkpoint
from tests.unit.native.eagle_heads import write_target

SLOTS, CONTEXT, BLOCK_SIZE = 9, 96, 4
CAPACITY = {"tokens": 128, "tiles": 12, "sampled": 12}


def write_tiny_model(directory: Path) -> Path:
    """A random checkpoint of two layers, with half as many KV heads as heads."""
    torch.manual_seed(5)
    return write_target(directory, layers=2)[0]


class TinyEngine:
    """`model`: directory of a checkpoint."""

    def __init__(self, model: Path, kernels: Kernels, dtype: torch.dtype = torch.float32) -> None:
        self.kernels = kernels
        part = ModelPart.from_shard(ModelConfig.from_checkpoint(model), Shard())
        self.model = Model(part, open_checkpoint(model), dtype, kernels, lambda *_: None)
        self.columns = BatchColumns(SLOTS, BLOCK_SIZE, CONTEXT)
        blocks = self.columns.block_table.shape[1]
        total = SLOTS * blocks
        self.tables = np.random.default_rng(0).permutation(total).astype(np.int32).reshape(SLOTS, blocks)
        self.history = TokenHistory(SLOTS, CONTEXT, part.whole.vocab_size, kernels)
        self.sampler = Sampler(self.columns, self.history, part.whole.vocab_size, kernels)
        ranks = Ranks(Assignment(1, 0, 1, BLOCK_SIZE, 1, 1)).join()
        table = torch.from_numpy(self.columns.block_table)
        self.forward = ForwardPass(self.model, ranks, total, BLOCK_SIZE, CONTEXT, table, (), CAPACITY)
        self.logits = torch.empty(0)

    def add(self, slot: int, prompt: Sequence[int], **params: object) -> None:
        tokens, blocks = np.array(prompt, np.int32).tobytes(), pack(self.tables[slot])
        wanted = SamplingParams(**{"max_tokens": 50, "temperature": 0.0, **params})
        request = NewRequest(slot, 1, tokens, len(prompt), blocks, wanted)
        self.columns.assign(request)
        self.history.assign(request)
        self.sampler.assign(slot)

    def step(self, rows: Sequence[tuple[int, int, int, bool]], grammar: GrammarOutput | None = None) -> SampledTokens:
        """Compute and sample rows: slot, start, count, whether a token is sampled."""
        slots, starts, counts = (np.array([row[i] for row in rows], np.int32) for i in range(3))
        samples = np.array([row[3] for row in rows], np.bool_)
        planned = Rows(slots, slots, starts, counts, samples, np.zeros(len(rows), np.int32))
        self.forward.lay_out(planned, self.history)
        logits = self.forward.run()
        self.logits = logits.clone()
        sampled = self.sampler.sample(logits, slots[samples], planned.ends[samples], grammar)
        self.history.append(slots[samples], planned.ends[samples], sampled.ids)
        return sampled
