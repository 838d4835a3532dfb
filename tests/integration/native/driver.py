"""Drives a `NativeRunner` with hand-made plans: a plain block allocator and one slot per request, no scheduler."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import cycle, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from protocol.membership import Assignment, InitializeCache, Loaded, Speculation
from protocol.rows import EmbeddingRows, LogprobRows, StepRows
from protocol.sampling import Pooling, SamplingParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, NewRequest, SchedulerOutput
from services.config import WorkerConfig
from services.worker.backends.mask_inbox import MaskInbox
from services.worker.backends.native.epoch import NativeEpoch
from services.worker.backends.native.runner import NativeRunner
from services.worker.backends.native.step import ComputedStep, NativeResult
from services.worker.batch.slots import Rows, SlotTable
from services.worker.kernels.interface.buffers import Buffers
from services.worker.runner import ForwardDone, ModelRunner, Output

BLOCK_SIZE, NUM_SLOTS, NUM_BLOCKS = 4, 16, 512
GREEDY = SamplingParams(max_tokens=1000, temperature=0.0)


def i32(*values: int) -> bytes:
    return np.array(values, np.int32).tobytes()


def ints(data: bytes) -> list[int]:
    return np.frombuffer(data, np.int32).tolist()


def compute_within(mode: TorchDispatchMode, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `mode` see what runners compute: a mode of torch belongs to one thread."""

    def within(method: Callable[..., Any]) -> Callable[..., Any]:
        def watched(*args: Any) -> Any:
            with mode:
                return method(*args)

        return watched

    for method in (NativeEpoch.execute, NativeEpoch.sample):
        monkeypatch.setattr(NativeEpoch, method.__name__, within(method))


def garble(table: SlotTable) -> None:
    """Overwrite columns of the host that only the computation of a step would read, and must not."""
    for column in (table.block_table, table.top_k, table.logprobs, table.prompt_logprobs, table.num_prompt):
        column[:] = 7
    for column in (table.temperature, table.top_p, table.min_p):
        column[:] = np.nan
    table.seed[:] = 99
    table.penalized[:] = table.edited[:] = True
    table.pooling[:] = Pooling.MEAN
    table.banned[:] = [(3,)] * table.num_slots


def poison(buffers: Buffers) -> None:
    """Fill all rows with garbage: NaN, or the smallest integer."""
    for value in vars(buffers).values():
        for tensor in value if isinstance(value, tuple) else (value,):
            if isinstance(tensor, torch.Tensor):
                tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min)


class GarblingRunner(NativeRunner):
    """A runner that leaves garbage behind, so that tests notice who reads it: in the table of the host when a step is
    prepared, and in the buffers of the forward pass when it was sampled."""

    def init_kv_cache(self, init: InitializeCache) -> None:
        super().init_kv_cache(init)
        table, epoch = self._stages.get().table, self.epoch
        apply_plan, sample = table.apply_plan, epoch.sample

        def applied(plan: StepRows, new: list[NewRequest]) -> Rows:
            rows = apply_plan(plan, new)
            garble(table)
            return rows

        def sampled(pending: ComputedStep, masks: MaskInbox) -> NativeResult | ForwardDone:
            result = sample(pending, masks)
            epoch.device.launch(lambda: poison(epoch.forward.buffers))
            return result

        vars(table)["apply_plan"], vars(epoch)["sample"] = applied, sampled


class Score(NamedTuple):
    """Log-probabilities at one position: the token itself, then the most likely ones."""

    rank: int
    ids: list[int]
    values: list[float]


@dataclass
class DrivenRequest:
    """One request in a slot, as the scheduler would know it."""

    slot: int
    generation: int
    prompt: list[int]
    params: SamplingParams
    blocks: list[int]
    computed: int = 0
    known: int = 0
    """Tokens known or promised."""
    output: list[int] = field(default_factory=list)
    sent: bool = False
    pooling: Pooling = Pooling.NONE
    embedding: bytes = b""
    """float32[hidden size], once it is there"""
    scores: dict[int, "Score"] = field(default_factory=dict)
    """By position, the first that came."""
    drafted: int = 0
    accepted: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.output

    @property
    def promised(self) -> int:
        """Output tokens, those included that a step in flight samples."""
        return self.known - len(self.prompt)


@dataclass(frozen=True)
class Launched:
    """A step in flight."""

    rows: list[tuple[DrivenRequest, int]]
    plan: SchedulerOutput
    output: Output
    logits: Callable[[], torch.Tensor]


class RunnerDriver:
    """Loads `model` and holds its batch. With `speculation` every sampling row of a request has as many drafts as the
    step that sampled for it last asked for."""

    def __init__(
        self,
        model: Path,
        block_size: int = BLOCK_SIZE,
        max_model_len: int = 0,
        runner: ModelRunner | None = None,
        speculation: Speculation | None = None,
        keeps_logits: bool = True,
        **config: object,
    ) -> None:
        """`keeps_logits`: wait for each forward pass and copy its logits. Without, step N+1 is prepared while step N
        computes."""
        self.keeps_logits = keeps_logits
        self.block_size, self.speculation = block_size, speculation
        self.rests = False
        """Speculation rests in the next step."""
        self.k = speculation.num_speculative_tokens if speculation else 0
        """Drafts to ask for in the next step."""
        self.min_acceptance = 0.0
        """Minimum probability of acceptance of these drafts."""
        self.promised_drafts: dict[int, int] = {}
        """By slot, for its next row."""
        self.runner = runner or GarblingRunner(WorkerConfig(model=str(model), **{"threads": 1, **config}))
        self.assignment = Assignment(
            1, 0, 1, self.block_size, NUM_SLOTS, 2048, max_model_len, speculation=self.speculation
        )
        self.loaded = self.load()
        self.max_model_len = self.loaded.max_model_len
        self.runner.init_kv_cache(InitializeCache(NUM_BLOCKS, self.max_model_len))
        self.steps = 0
        self.generation = 0
        self.free_blocks = list(np.random.default_rng(0).permutation(NUM_BLOCKS))
        self.free_slots = list(range(NUM_SLOTS))
        self.released: list[int] = []
        self.logits: list[torch.Tensor] = []
        """float32[rows, vocab] of each step, as the sampler got them."""

    def load(self) -> Loaded:
        return self.runner.load(self.assignment, lambda phase, fraction: None)

    @property
    def epoch(self) -> NativeEpoch:
        """The present epoch of a `NativeRunner`."""
        return self.runner.epoch

    def add(
        self,
        prompt: list[int],
        params: SamplingParams = GREEDY,
        prefix: DrivenRequest | None = None,
        hit: int = 0,
        pooling: Pooling = Pooling.NONE,
    ) -> DrivenRequest:
        """A request in a fresh slot; its first `hit` tokens lie in the blocks of `prefix`, already computed."""
        assert hit % self.block_size == 0
        assert prefix is None or prefix.tokens[:hit] == prompt[:hit]
        self.generation += 1
        blocks = prefix.blocks[: hit // self.block_size] if prefix else []
        return DrivenRequest(
            self.free_slots.pop(0), self.generation, prompt, params, list(blocks), hit, len(prompt),
            pooling=pooling,
        )  # fmt: skip

    def preempt(self, request: DrivenRequest) -> DrivenRequest:
        """Its slot and blocks are given up; it comes back elsewhere, with all tokens it has."""
        self.released.append(request.slot)
        self.promised_drafts.pop(request.slot, None)
        again = self.add(request.tokens, request.params)
        return DrivenRequest(
            again.slot, again.generation, request.prompt, request.params, [], 0, again.known, request.output,
            pooling=request.pooling, scores=request.scores,
        )  # fmt: skip

    def plan(self, rows: list[tuple[DrivenRequest, int]]) -> SchedulerOutput:
        """The plan that computes the next so many tokens of each request."""
        new, block_slots, block_ids, starts, samples, drafts = [], [], [], [], [], []
        for request, count in rows:
            starts.append(request.computed)
            request.computed += count
            samples.append(request.computed == request.known)
            room = self.max_model_len - request.computed
            promised = self.promised_drafts.pop(request.slot, 0)
            drafts.append(min(promised, room) if samples[-1] else 0)
            request.computed += drafts[-1]
            positions = min(request.computed + self.k, self.max_model_len)  # a drafter's look-ahead
            grown = [int(self.free_blocks.pop()) for _ in range(-(-positions // self.block_size) - len(request.blocks))]
            request.blocks += grown
            if request.sent:
                block_slots += [request.slot] * len(grown)
                block_ids += grown
            else:
                new.append(
                    NewRequest(
                        request.slot, request.generation, i32(*request.tokens), len(request.prompt),
                        i32(*request.blocks), request.params, request.pooling,
                    )
                )  # fmt: skip
                request.sent = True
            request.known += samples[-1] + drafts[-1]
            if samples[-1]:
                self.promised_drafts[request.slot] = self.k
        self.steps += 1
        released, self.released = self.released, []
        return SchedulerOutput(
            epoch=1,
            step_id=self.steps,
            slots=i32(*(r.slot for r, _ in rows)),
            generations=i32(*(r.generation for r, _ in rows)),
            starts=i32(*starts),
            counts=i32(*(count + more for (_, count), more in zip(rows, drafts, strict=True))),
            samples=bytes(samples),
            new=new,
            block_slots=i32(*block_slots),
            block_ids=i32(*block_ids),
            released=i32(*released),
            drafts=i32(*drafts) if any(drafts) else b"",
            num_speculative_tokens=self.k,
            min_acceptance=self.min_acceptance,
            speculation_rests=self.rests,
        )

    def launch(self, rows: list[tuple[DrivenRequest, int]], grammar: GrammarOutput | None = None) -> Launched:
        """One step, executed and sampled, not read."""
        plan = self.plan(rows)
        self.runner.execute_model(plan)
        logits = self.pending_logits()
        if grammar is not None:
            self.runner.add_masks(grammar)
        return Launched(rows, plan, self.runner.sample_tokens(None), logits)

    def pending_logits(self) -> Callable[[], torch.Tensor]:
        if not self.keeps_logits:
            return lambda: torch.empty(0)
        logits = self.epoch.logits.clone()
        return lambda: logits

    def collect(self, launched: Launched) -> ModelRunnerOutput:
        """Reads a step; tokens go to their requests."""
        result = launched.output.get()
        self.logits.append(launched.logits())
        by_slot = {request.slot: request for request, _ in launched.rows}
        tokens = iter(ints(result.token_ids))
        planned = dict(zip(ints(launched.plan.slots), ints(launched.plan.drafts), strict=False))
        drafted = ints(result.drafted) or [0] * len(by_slot)
        for slot, count, tried in zip(ints(result.slots), ints(result.counts), drafted, strict=False):
            request, rejected = by_slot[slot], planned.get(slot, 0) - (count - 1)
            request.output += islice(tokens, count)
            request.computed -= rejected
            request.known -= rejected
            request.drafted += tried
            request.accepted += count - 1
        assert not list(tokens)
        if result.embeddings:
            for slot, embedding in EmbeddingRows.from_message(result).by_slot().items():
                by_slot[slot].embedding = embedding
        if result.logprobs is not None:
            rows, first = LogprobRows.from_message(result.logprobs), 0
            columns = (rows.owners, rows.positions, rows.token_ranks, rows.counts)
            for slot, at, rank, count in zip(*(column.tolist() for column in columns), strict=True):
                entries = slice(first, first := first + count)
                score = Score(rank, rows.token_ids[entries].tolist(), rows.values[entries].tolist())
                by_slot[slot].scores.setdefault(at, score)
        return result

    def step(self, rows: list[tuple[DrivenRequest, int]], grammar: GrammarOutput | None = None) -> ModelRunnerOutput:
        return self.collect(self.launch(rows, grammar))

    def generate(self, requests: list[DrivenRequest], tokens: int, chunk: int = 10_000, depth: int = 1) -> None:
        """Runs all requests together, prompts in chunks, until each has so many output tokens."""
        self.interleave([requests], tokens, chunk, depth)

    def interleave(self, batches: list[list[DrivenRequest]], tokens: int, chunk: int = 10_000, depth: int = 1) -> None:
        """Steps of the batches in turn, `depth` of them in flight, until each request has so many output tokens, or a
        few more where drafts were accepted."""
        flying: deque[Launched] = deque()
        for batch in cycle(batches):
            rows = [(r, min(chunk, r.known - r.computed)) for r in batch if r.promised < tokens]
            if rows:
                flying.append(self.launch(rows))
            elif not any(r.promised < tokens for other in batches for r in other):
                if not flying:
                    break
                self.collect(flying.popleft())  # its drafts may have been wrong
            if len(flying) == depth:
                self.collect(flying.popleft())
        while flying:
            self.collect(flying.popleft())

    def finish(self, request: DrivenRequest) -> None:
        self.runner.release(np.array([request.slot], np.int32))
        self.promised_drafts.pop(request.slot, None)
        self.free_slots.append(request.slot)
