"""The scheduler's core and the vLLM backend in one process. Each `VllmRun` is one epoch with the same weights."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random
from types import TracebackType
from typing import Any, Self

import numpy as np

from protocol.codec import Decoder, encode, pack, unpack
from protocol.kv_groups import MAX_GROUPS, ONE_GROUP
from protocol.lora import LoRAAdapter
from protocol.media import Media
from protocol.membership import Assignment, InitializeCache, Speculation
from protocol.pooling import PoolingParams
from protocol.requests import GenerateRequest
from protocol.sampling import Pooling, SamplingParams, StructuredOutputParams
from protocol.steps import GrammarOutput, ModelRunnerOutput, ReleaseSlots, SchedulerOutput, StepMessage
from services.checkpoint import DEMO_MODEL
from services.config import SchedulerConfig, WorkerConfig
from services.scheduler.core.drafting import Drafting, FixedDrafting
from services.scheduler.core.engine import EngineCore
from services.scheduler.core.limits import Limits
from services.scheduler.grammar import INLINE_MASKS
from services.scheduler.policies import make_policy
from services.worker.backends.vllm import VllmRunner
from services.worker.backends.vllm.platforms.choice import worker_platform
from services.worker.backends.vllm.platforms.interface import WorkerPlatform
from services.worker.batch.slots import EMPTY
from services.worker.runner import Output
from services.worker.session import Session, StepAction
from services.worker.step_queue import SampleStep, StepQueue
from tests.simulation.answers import CollectedAnswer, receive
from tests.simulation.grammar import Compilation, LateMasks

BLOCK = 32
CONTEXT = 256
VOCAB = 4096
MAX_SEQS = 16
CHUNK = 64
MESSAGES: Decoder[StepMessage] = Decoder(StepMessage)
RESULTS: Decoder[ModelRunnerOutput] = Decoder(ModelRunnerOutput)


@dataclass
class VllmStream(CollectedAnswer):
    """A request and its answer."""

    prompt: list[int]
    params: SamplingParams
    structured: StructuredOutputParams | None = None
    pooling: Pooling = Pooling.NONE
    pooling_params: PoolingParams | None = None
    embedding: list[float] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Number of tokens in each message."""
    aborted: bool = False
    lora: LoRAAdapter | None = None
    media: Media | None = None


class VllmWorker:
    """One `VllmRunner`, and the epochs that it enters."""

    def __init__(
        self,
        speculation: Speculation | None = None,
        create_platform: Callable[[WorkerConfig], WorkerPlatform] = worker_platform,
        max_loras: int = 0,
        context: int = CONTEXT,
        chunk: int = CHUNK,
        **config: Any,
    ) -> None:
        settings = {
            "model": str(DEMO_MODEL), "backend": "vllm", "threads": 1, "enforce_eager": True,
            "kv_cache_memory_bytes": 64 << 20,
        }  # fmt: skip
        self.runner = VllmRunner(WorkerConfig.model_validate(settings | config), create_platform)
        self.speculation, self.max_loras = speculation, max_loras
        self.context, self.chunk = context, chunk
        self.leaves_rows_out = self.runner.identify().leaves_rows_out
        self.epoch = 0
        self.loads = 0

    def enter(self, num_blocks: int) -> Session:
        assignment = self.next_assignment()
        session = Session()
        session.leaves_rows_out = self.leaves_rows_out
        session.on(assignment)
        self.loaded = self.runner.load(assignment, self._progress)
        session.loaded()
        cache = InitializeCache(num_blocks, self.context + (self.loaded.pooling is not None))
        session.on(cache)
        self.runner.init_kv_cache(cache)
        session.ready()
        return session

    def next_assignment(self) -> Assignment:
        """Return the assignment of the next epoch."""
        self.epoch += 1
        sizes = BLOCK, 2 * MAX_SEQS, self.chunk, self.context
        settings = {"speculation": self.speculation, "max_loras": self.max_loras, "max_lora_rank": 8}
        groups = 1 if self.has_model_drafter else MAX_GROUPS
        return Assignment(self.epoch, 0, 1, *sizes, max_kv_groups=groups, **settings)

    @property
    def has_model_drafter(self) -> bool:
        return self.speculation is not None and self.speculation.method != "ngram"

    def _progress(self, phase: str, fraction: float) -> None:
        self.loads += fraction == 0.0


class VllmRun:
    """One epoch. Messages pass through the codec; results are read as late as the depth allows."""

    def __init__(
        self,
        worker: VllmWorker,
        depth: int,
        num_blocks: int = 200,
        prefix_caching: bool = True,
        policy: str = "chunked",
        drafting: Drafting | None = None,
        late: int = 0,
    ) -> None:
        """
        Args:
            drafting: None: the number of drafts of the worker's assignment.
            late: 0: masks are made at once; otherwise the seed that decides when they are made.
        """
        speculation = worker.speculation
        drafts = speculation.num_speculative_tokens if speculation is not None else 0
        limits = Limits(
            *(MAX_SEQS, worker.chunk, worker.context, num_blocks, BLOCK, prefix_caching),
            lookahead=drafts * worker.has_model_drafter,
            drafts_in_flight=depth * drafts,
            leaves_rows_out=worker.leaves_rows_out and policy != "phased",
            max_loras=worker.max_loras,
        )
        self.compilation, self.masks = Compilation(VOCAB), LateMasks()
        self._random = Random(late)
        self._worker, self._runner = worker, worker.runner
        self._session = worker.enter(num_blocks)
        limits = replace(limits, groups=worker.loaded.groups or ONE_GROUP)
        if worker.loaded.media is not None:
            limits = replace(limits, encoder_budget=worker.chunk)
        if (pooling := worker.loaded.pooling) is not None:
            limits = replace(
                limits,
                max_model_len=worker.loaded.max_model_len,
                enable_prefix_caching=prefix_caching and not pooling.whole_prompts,
                pools_only=True,
                whole_prompts=pooling.whole_prompts,
            )
        config = SchedulerConfig.model_validate(
            {"batching_policy": policy, "block_size": BLOCK, "max_num_batched_tokens": worker.chunk}
        )
        self.core = EngineCore(
            limits,
            make_policy(config, limits),
            depth,
            worker.loaded.vocab_size,
            epoch=worker.epoch,
            drafting=drafting or FixedDrafting(drafts),
            compiler=self.compilation,
            mask_maker=self.masks if late else INLINE_MASKS,
            hidden_size=worker.loaded.hidden_size,
        )
        self._queue = StepQueue()
        self._outputs: deque[Output] = deque()
        self.counts: list[int] = []
        """Number of tokens of every row in the results, including rows of requests that had ended."""
        self.streams: dict[int, VllmStream] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.leave()

    def add(self, number: int, stream: VllmStream) -> VllmStream:
        self.streams[number] = stream
        tokens = stream.prompt + stream.tokens
        message = GenerateRequest(
            number,
            pack(tokens),
            len(stream.prompt),
            stream.params,
            structured=stream.structured,
            pooling=stream.pooling,
            lora=stream.lora,
            pooling_params=stream.pooling_params,
            media=stream.media,
        )
        self.core.add(0, message)
        for ticket in list(self.compilation.waiting):
            self.core.on_grammar(ticket, self.compilation.finish(ticket))
        return stream

    def abort(self, number: int) -> None:
        self.streams.pop(number).aborted = True
        self.core.abort(0, [number])

    def run_step(self) -> None:
        """Fill the queue, then apply the oldest result; if its step waits for masks, make some."""
        self.make_masks(self._random.random() < 0.3)
        self.dispatch()
        if self._outputs:
            self.apply_result()
        else:
            self.make_masks()

    def apply_result(self) -> None:
        """Wait for the oldest result and apply it."""
        result = self._next_result()
        self.core.on_result(RESULTS.decode(encode(result)))
        self.counts += unpack(result.counts).tolist()
        self._publish()

    def _next_result(self) -> ModelRunnerOutput:
        result = self._outputs.popleft().get()
        assert isinstance(result, ModelRunnerOutput)
        return result

    def make_masks(self, some: bool = True) -> None:
        """Finish at least one of the masks that are being made, unless not `some`."""
        while self.masks.waiting and some:
            ticket = self._random.choice(list(self.masks.waiting))
            self.core.on_masks(ticket, self.masks.finish(ticket))
            some = self._random.random() < 0.5

    def dispatch(self) -> None:
        """Send what can be sent, and compute until a step waits for its masks: the worker reads all messages first."""
        for message in self.core.dispatch():
            action = self._session.on(MESSAGES.decode(encode(message)))
            assert isinstance(action, SchedulerOutput | GrammarOutput | ReleaseSlots)
            self._queue.put(action, 0.0)
        while (queued := self._queue.next()) is not None:
            self._execute(queued.action)

    def _execute(self, action: StepAction | SampleStep) -> None:
        match action:
            case SchedulerOutput() as step:
                self._runner.execute_model(step)
                if not self._queue.waits:
                    self._outputs.append(self._runner.sample_tokens(None))
            case SampleStep(grammar):
                self._outputs.append(self._runner.sample_tokens(grammar))
            case release:
                self._runner.release(unpack(release.slots))  # type: ignore[union-attr]

    def finish(self) -> dict[int, VllmStream]:
        """Run until all requests have ended; then every slot is empty: the clean drain (docs/invariants.md)."""
        while self.core.requests or self.core.queue:
            self.run_step()
        self.dispatch()
        assert (self._runner.table.generation == EMPTY).all()
        assert not self._runner.engine.runner.requests
        return self.streams

    def serve(self, *streams: VllmStream) -> list[VllmStream]:
        for number, stream in enumerate(streams):
            self.add(number, stream)
        self.finish()
        return list(streams)

    def serve_one(self, number: int, stream: VllmStream) -> VllmStream:
        self.add(number, stream)
        self.finish()
        return stream

    def _publish(self) -> None:
        for _, message in self.core.take_outputs():
            receive(message, self.streams, exact=False)
            numbers, counts = np.unique(unpack(message.numbers, np.uint32), return_counts=True)
            for number, count in zip(numbers.tolist(), counts.tolist(), strict=True):
                self.streams[number].rows.append(count)
            for embedding in message.embeddings:
                values = np.frombuffer(embedding.values, np.float32)
                self.streams[embedding.number].embedding = values.tolist()
