"""The native backend: one rank that computes with torch and compiled kernels on the CPU.

The ids that a step samples are input of later steps, so they go where input is looked up: to the first stage, with the
drafts for the next step, which nobody else proposes. Without stages that is the team that sampled them; with stages the
last sends them to the first (feedback.py). Within a team the first rank hands them to the others. With drafts, who is
not told of tokens does not know where a request really is: each stage tells the next one with every step.
"""

import socket
import time
from pathlib import Path

import numpy as np
import torch
from msgspec.structs import replace
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache, Loaded, Shard
from protocol.rows import LogprobRows
from protocol.steps import NO_DRAFT, GrammarOutput, SchedulerOutput, StepTimes
from services.checkpoint import default_dtype
from services.config import WorkerConfig
from services.worker import machine
from services.worker.backends.native.acceptance import Places
from services.worker.backends.native.attention import Context
from services.worker.backends.native.batch import Batch
from services.worker.backends.native.config import ModelConfig
from services.worker.backends.native.drafters import create
from services.worker.backends.native.drafters.base import Advance, Drafter, Slots, Target
from services.worker.backends.native.drafts import Drafts, as_told, told
from services.worker.backends.native.feedback import Feedback
from services.worker.backends.native.kernels.team import set_num_threads
from services.worker.backends.native.kv_cache import KVCache
from services.worker.backends.native.linear import activation_dtype
from services.worker.backends.native.logprobs import PromptScores
from services.worker.backends.native.model import HiddenStates, Model
from services.worker.backends.native.outcome import Outcome
from services.worker.backends.native.partition import Part, tensor_parallel_sizes
from services.worker.backends.native.sampler import Sampled, Sampler
from services.worker.backends.native.state import TokenHistory
from services.worker.backends.native.step import Pending, Result
from services.worker.backends.pooling import Pooler
from services.worker.batch.slots import PlanError, Rows, SlotTable
from services.worker.batch.staging import MAX_STEPS_IN_FLIGHT
from services.worker.distributed.ranks import Ranks
from services.worker.runner import ForwardDone, Identity, LoadError, Output, Progress
from services.worker.weights import Checkpoint, located

NO_DRAFTS = np.empty((0, 0), np.int32)


class NativeRunner:
    """A `ModelRunner`. Llama, Mistral, Qwen2 and Qwen3 checkpoints in float32 or bfloat16."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config
        self._identity: Identity | None = None
        self._model: Model | None = None
        self._drafter: Drafter | None = None
        """On the output rank, where there is speculation."""
        self._made_for: tuple[object, ...] = ()
        self._ranks: Ranks | None = None
        self._pending: Pending | None = None

    def identify(self) -> Identity:
        """As it was when first asked: what is in memory stays what was registered."""
        if self._identity is None:
            directory = located(self._config)
            config = ModelConfig.from_directory(directory)
            self._identity = Identity(
                model_hash=_digest(directory, Checkpoint(directory)),
                dtype=str(_dtype(self._config, config)).removeprefix("torch."),
                tensor_parallel_sizes=tensor_parallel_sizes(config),
                max_pipeline_parallel_size=config.num_layers,
            )
        return self._identity

    @torch.inference_mode()
    def load(
        self, assignment: Assignment, progress: Progress, listener: socket.socket | None = None
    ) -> Loaded:
        """Threads are the user's number, or this process's cores divided by the ranks on this machine."""
        self._ranks, self._assignment = Ranks(assignment, listener), assignment
        self._ranks.join()
        threads = self._config.threads or max(1, machine.cores() // self._ranks.on_this_machine)
        torch.set_num_threads(threads)
        model = self._weights(assignment.shard, progress)
        limit = _context(model.part.whole, assignment.max_model_len)
        self._drafter = self._drafts_by(assignment, model, limit)
        set_num_threads(threads)
        if activation_dtype(self._dtype) == torch.float32:
            # Little is left to torch then, and its threads wait spinning on cores that others want.
            torch.set_num_threads(1)
        bytes_per_block = KVCache.bytes_per_block(model.config, assignment.block_size, self._dtype)
        bytes_per_block += self._drafter.bytes_per_block if self._drafter is not None else 0
        return Loaded(
            model_hash=self.identify().model_hash,
            vocab_size=model.part.whole.vocab_size,
            max_model_len=limit,
            bytes_per_block=bytes_per_block,
            num_blocks=self._affordable(bytes_per_block, limit),
            hidden_size=model.part.whole.hidden_size,
        )

    def _weights(self, shard: Shard, progress: Progress) -> Model:
        """Read now, or kept from an epoch before."""
        if self._model is None or self._model.part.shard != shard:
            self._model = None  # freed before the next ones are read
            directory = located(self._config)
            config, checkpoint = ModelConfig.from_directory(directory), Checkpoint(directory)
            if _digest(directory, checkpoint) != self.identify().model_hash:
                raise LoadError(f"the files in {directory} have changed; start this worker again")
            self._dtype = _dtype(self._config, config)
            self._model = Model(Part.of(config, shard), checkpoint, self._dtype, progress)
        return self._model

    def _drafts_by(self, assignment: Assignment, model: Model, limit: int) -> Drafter | None:
        """Made now, or kept from an epoch before, for the same model."""
        speculation = assignment.speculation
        if speculation is None or not self._parts()[1].is_output:
            return None
        made_for = speculation, model, assignment.block_size, limit
        if self._drafter is None or self._made_for != made_for:
            self._drafter = None  # freed before the next one is read
            directory = located(self._config)
            files = directory, Checkpoint(directory)
            target = Target(speculation, model, *files, self._dtype, assignment.block_size, limit)
            self._drafter, self._made_for = create(target), made_for
        return self._drafter

    def _affordable(self, bytes_per_block: int, max_model_len: int) -> int:
        """Blocks that fit; not more than all slots together could fill."""
        budget = machine.cache_budget(self._config.kv_cache_memory_bytes)
        blocks = budget // bytes_per_block
        if blocks < 1:
            raise LoadError(
                f"{budget} bytes hold no KV block; one takes {bytes_per_block}: raise --kv-cache-memory-bytes"
            )
        per_request = -(-max_model_len // self._assignment.block_size)
        return int(min(blocks, self._assignment.num_slots * per_request))

    @torch.inference_mode()
    def init_kv_cache(self, init: InitializeCache) -> None:
        model, ranks = self._parts()
        slots, block_size = self._assignment.num_slots, self._assignment.block_size
        self._cache = KVCache(model.config, init.num_blocks, block_size, self._dtype)
        self._table = SlotTable(slots, block_size, init.num_blocks, init.max_model_len)
        self._history = TokenHistory(slots, init.max_model_len, model.part.whole.vocab_size)
        self._feedback = Feedback(slots, most=max(MAX_STEPS_IN_FLIGHT, 2 * ranks.pipeline.size))
        speculation = self._assignment.speculation
        most = speculation.num_speculative_tokens if speculation is not None else 0
        self._drafts = Drafts(slots, most, model.part.whole.vocab_size)
        if self._drafter is not None:
            self._drafter.begin(Slots(self._table, self._history, init.num_blocks))
        self._sampler = Sampler(self._table, self._history, model.part.whole.vocab_size)
        self._pooler = Pooler(slots, model.part.whole.hidden_size)
        self._pending = None

    def _parts(self) -> tuple[Model, Ranks]:
        if self._model is None or self._ranks is None:
            raise RuntimeError("no model is loaded in this epoch")
        return self._model, self._ranks

    @torch.inference_mode()
    def execute_model(self, step: SchedulerOutput) -> None:
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step.step_id} was executed but never sampled")
        model, ranks = self._parts()
        planned = self._table.apply(step)
        self._assign(step, ranks)
        rows = self._settled(planned, ranks)
        batch = Batch.of(rows)
        ids = self._history.gather(batch.slots, batch.positions) if ranks.pipeline.is_first else None
        pooled = self._pooler.rows(step, rows, self._table) if ranks.is_output else None
        prompts = self._prompts(rows) if ranks.pipeline.is_last else None
        context = Context(batch, self._cache, self._table.block_table)
        hidden = HiddenStates(self._drafter.reads) if self._drafter is not None else None
        prepared = time.monotonic()
        logits = model.forward(ids, context, ranks, pooled, prompts, hidden)
        times = StepTimes(prepared=prepared, forward_began=prepared, forward_ended=time.monotonic())
        self._pending = pending = Pending(step, rows, logits, hidden, pooled, prompts, times)
        if ranks.pipeline.is_first and ranks.pipeline.size > 1 and pending.sampling:
            drafts = step.num_speculative_tokens
            self._feedback.expect(pending.slots, pending.firsts, drafts, pending.message())

    def _assign(self, step: SchedulerOutput, ranks: Ranks) -> None:
        """Tokens are kept where they are input, and where rules of sampling look at them."""
        for request in step.new if ranks.pipeline.is_first or ranks.is_output else ():
            self._history.assign(request)
            if ranks.pipeline.is_first:
                self._feedback.assign(request.slot)
            self._drafts.assign(request.slot)
            if ranks.is_output:
                self._sampler.assign(request.slot)
            if self._drafter is not None:
                self._drafter.assign(request.slot)

    def _prompts(self, rows: Rows) -> PromptScores | None:
        return PromptScores.of(rows, self._table, self._sampler.scorer, self._history)

    def _settled(self, planned: Rows, ranks: Ranks) -> Rows:
        """The plan's rows where they really stand. The last stage samples what moves them and the first one is told of
        it; all others hear of it from the stage before.

        Raises: PlanError, also where the last stage knows of another position than it is told.
        """
        stages = ranks.pipeline
        if stages.is_first and stages.size > 1:
            self._take_feedback(planned, ranks)
        rows = planned
        if stages.is_first or ranks.is_output:
            rows = self._drafts.settle(planned, self._history)
        if stages.size == 1 or not self._drafts.speculates:
            return rows
        if not stages.is_first:
            own = rows
            rows = as_told(
                planned, stages.receive_rows(torch.empty(2, len(planned.slots), dtype=torch.int32))
            )
            if ranks.is_output and not torch.equal(told(own), told(rows)):
                raise PlanError(f"the stage before takes slots {own.slots.tolist()} to be elsewhere")
        if not stages.is_last:
            stages.send_rows(told(rows))
        return rows

    def _take_feedback(self, rows: Rows, ranks: Ranks) -> None:
        """Waits for the outcomes of the steps that sampled these rows last, and learns them."""
        for message in self._feedback.due(rows.slots):
            if ranks.tensor_parallel.is_first:
                ranks.pipeline.receive_feedback(message.body)
            outcome = Outcome.read(ranks.tensor_parallel.broadcast(message.body), message.drafts)
            stay = self._feedback.wanted(message)
            self._learn(message.slots[stay], message.firsts[stay], outcome.where(stay))

    @torch.inference_mode()
    def sample_tokens(self, grammar: GrammarOutput | None) -> Output:
        pending, self._pending = self._pending, None
        if pending is None:
            raise RuntimeError("no step was executed that could be sampled")
        _, ranks = self._parts()
        if not ranks.is_output:
            if ranks.pipeline.size == 1 and pending.sampling:
                message = ranks.tensor_parallel.broadcast(pending.message())
                outcome = Outcome.read(message, pending.step.num_speculative_tokens)
                self._learn(pending.slots, pending.firsts, outcome)
            return ForwardDone(replace(pending.times, sampled=time.monotonic()))
        sampled = self._sampled(pending, grammar)
        if pending.sampling:
            self._learn(pending.slots, pending.firsts, Outcome(sampled.ids, sampled.counts, NO_DRAFTS))
        drafts = self._proposed(pending, sampled)
        if pending.sampling and ranks.assignment.world_size > 1:
            message = Outcome(sampled.ids, sampled.counts, drafts).write(pending.message())
            if ranks.pipeline.size > 1:
                ranks.pipeline.send_feedback(message)
            else:
                ranks.tensor_parallel.broadcast(message)
        scored = [pending.prompts.logprobs] if pending.prompts is not None else []
        scored += [sampled.logprobs] if sampled.logprobs is not None else []
        joined = LogprobRows.concatenate(scored) if scored else None
        times = replace(pending.times, sampled=time.monotonic())
        return Result(pending.step, pending.rows, sampled, drafts, joined, pending.pooled, times)

    def _sampled(self, pending: Pending, grammar: GrammarOutput | None) -> Sampled:
        """Of the rows that sample."""
        step, rows = pending.step, pending.rows
        assert pending.logits is not None, "the output rank has the logits"
        if not step.has_structured_output_requests:
            grammar = None
        elif grammar is None or grammar.step_id != step.step_id:
            raise RuntimeError(f"step {step.step_id} needs its own grammar bitmask to be sampled")
        drafts = rows.drafts[rows.samples]
        return self._sampler.sample(pending.logits, pending.slots, pending.firsts, grammar, drafts)

    def _learn(self, slots: NDArray[np.int32], firsts: NDArray[np.int32], outcome: Outcome) -> None:
        """Of rows whose first tokens stand at `firsts`: tokens stand in the history from now on, and drafts wait for
        the next row of their slot."""
        places = Places.of(slots, firsts, outcome.counts - np.int32(1))
        self._history.append(places.slots, places.positions, outcome.ids)
        self._drafts.advance(slots, firsts, outcome.counts)
        self._drafts.propose(slots, outcome.drafts)

    def _proposed(self, pending: Pending, sampled: Sampled) -> NDArray[np.int32]:
        """int32[sampling rows, k]: what the drafter proposes now; what it keeps of each request goes on as well."""
        k = pending.step.num_speculative_tokens
        if self._drafter is None:
            return np.full((len(sampled.counts), k), NO_DRAFT, np.int32)
        rows = pending.rows
        kept = rows.counts
        if rows.drafts.any():
            kept = kept.copy()
            kept[rows.samples] += sampled.counts - 1 - rows.drafts[rows.samples]
        states = pending.states(kept)
        least = pending.step.least_chance
        columns = rows.slots, rows.generations, rows.starts, kept, rows.samples
        drafts = self._drafter.propose(Advance(*columns, states, least), k)
        self._drafts.propose(pending.slots, drafts)
        return drafts

    def release(self, slots: NDArray[np.int32]) -> None:
        self._table.release(slots)

    def leave(self) -> None:
        self._ranks = self._pending = None
        if self._drafter is not None and hasattr(self, "_drafts"):
            self._drafter.end()
        for name in ("_cache", "_table", "_history", "_drafts", "_feedback", "_sampler", "_pooler"):
            self.__dict__.pop(name, None)

    def abort(self) -> None:
        ranks = self._ranks
        if ranks is not None:
            ranks.abort()

    def shutdown(self) -> None:
        self.leave()
        self._model = self._drafter = None


def _digest(directory: Path, checkpoint: Checkpoint) -> str:
    return checkpoint.digest((directory / "config.json").read_bytes())


def _dtype(worker: WorkerConfig, model: ModelConfig) -> torch.dtype:
    wanted = worker.dtype if worker.dtype != "auto" else default_dtype(worker.model) or model.dtype
    return torch.bfloat16 if wanted == "bfloat16" else torch.float32


def _context(config: ModelConfig, wanted: int) -> int:
    if wanted > config.max_position:
        raise LoadError(
            f"max_model_len {wanted} is more than the {config.max_position} positions of the model; "
            "lower --max-model-len"
        )
    return wanted or config.max_position
