"""The native backend's kernels on a static batch, without scheduler and transport.

Each wave prefills its prompts in one step and then decodes all of them together to the last token, with two steps in
flight, so it is the most that the kernels allow. Several ranks compute as one tensor-parallel group; all of them make
the same plans.
"""

import multiprocessing
import socket
import time

import numpy as np

from protocol.membership import Assignment, InitializeCache
from protocol.steps import SchedulerOutput
from services.cli.bench.load import prompts
from services.config import BenchConfig, WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.distributed.rendezvous import listen
from services.worker.runner import Output
from tests.benchmarks.support.planned_batch import BLOCK_SIZE, I32, PlannedBatch
from tests.benchmarks.support.servers import BatchLoad

DEPTH = 2
"""Decode steps in flight: the next one is prepared while one is computed."""


class StaticBatch(PlannedBatch):
    """A loaded runner with one slot per request."""

    def __init__(
        self,
        config: WorkerConfig,
        batch: int,
        prompt: int,
        output: int,
        group: tuple[int, int, str] = (0, 1, ""),
        listener: socket.socket | None = None,
    ) -> None:
        """`group`: rank, number of ranks, and address of the first rank."""
        super().__init__(batch, prompt + output, batch * prompt)
        self.output = output
        self.runner = NativeRunner(config)
        self.prefill_s = self.decode_s = 0.0
        rank, ranks, rendezvous = group
        assignment = Assignment(1, rank, ranks, BLOCK_SIZE, batch, batch * prompt, 0, ranks, 1, rendezvous)
        loaded = self.runner.load(assignment, lambda phase, fraction: None, listener)
        self.runner.init_kv_cache(InitializeCache(self.num_blocks, loaded.max_model_len))

    def launch(self, plan: SchedulerOutput) -> Output:
        self.runner.execute_model(plan)
        return self.runner.sample_tokens(None)

    def release(self, slots: I32) -> None:
        self.runner.release(slots)

    def run(self, prompts: I32) -> None:
        """Run one wave: greedy output for `prompts`, int32[batch, prompt]."""
        began = time.perf_counter()
        self.prefill(prompts)
        prefilled = time.perf_counter()
        self.decode(self.output - 1, DEPTH)
        self.prefill_s, self.decode_s = prefilled - began, time.perf_counter() - prefilled


def measure(load: BatchLoad, ranks: int = 1) -> dict[str, float]:
    """Return the metrics of a load. With several ranks, the others are processes."""
    if ranks == 1:
        return _measure_rank(load, (0, 1, ""), None)
    listener = listen("127.0.0.1")
    address = "127.0.0.1:" + str(listener.getsockname()[1])
    groups = [(rank, ranks, address) for rank in range(ranks)]
    context = multiprocessing.get_context("spawn")
    others = [context.Process(target=_measure_rank, args=(load, group, None), daemon=True) for group in groups[1:]]
    for other in others:
        other.start()
    try:
        return _measure_rank(load, groups[0], listener)
    finally:
        for other in others:
            other.terminate()
            other.join()


def _measure_rank(load: BatchLoad, group: tuple[int, int, str], listener: socket.socket | None) -> dict[str, float]:
    random = BenchConfig(random_input_len=load.prompt)
    rows = np.array(prompts(random, load.batch * load.waves, random.seed), np.int32)
    config = WorkerConfig(model=str(load.model), dtype=load.dtype, threads=load.threads)
    batch = StaticBatch(config, load.batch, load.prompt, load.output, group, listener)
    batch.run(rows[: load.batch])  # warm-up
    prefill, decode = 0.0, 0.0
    started = time.perf_counter()
    for wave in range(load.waves):
        batch.run(rows[wave * load.batch : (wave + 1) * load.batch])
        prefill, decode = prefill + batch.prefill_s, decode + batch.decode_s
    seconds = time.perf_counter() - started
    tokens = load.waves * load.batch * load.output
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
        "prefill_s": prefill / load.waves,
        "decode_step_ms": decode * 1000 / load.waves / max(1, load.output - 1),
    }
