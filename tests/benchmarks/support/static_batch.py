"""The native backend's kernels on a static batch, without scheduler and transport. Prints JSON.

Each wave prefills its prompts in one step and then decodes all of them together to the last token, with two steps in
flight, so it is the most that the kernels allow. With `--ranks N`, N processes compute as one tensor-parallel group;
all of them make the same plans.
"""

import argparse
import json
import socket
import subprocess
import sys
import time
from collections import deque

import numpy as np
from numpy.typing import NDArray

from protocol.membership import Assignment, InitializeCache
from protocol.sampling import SamplingParams
from protocol.steps import NewRequest, SchedulerOutput
from services.cli.bench.load import prompts
from services.config import BenchConfig, WorkerConfig
from services.worker.backends.native.runner import NativeRunner
from services.worker.distributed.rendezvous import listen
from services.worker.runner import Output
from tests.benchmarks.support.report import add_ints

BLOCK = 16
DEPTH = 2
"""Decode steps in flight: the next one is prepared while one is computed."""
I32 = NDArray[np.int32]


class StaticBatch:
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
        self.batch, self.prompt, self.output = batch, prompt, output
        self._slots = np.arange(batch, dtype=np.int32)
        self.blocks = -(-(prompt + output) // BLOCK)
        self.step_id = self.wave = 0
        self.runner = NativeRunner(config)
        self.prefill_s = self.decode_s = 0.0
        rank, ranks, rendezvous = group
        assignment = Assignment(1, rank, ranks, BLOCK, batch, batch * prompt, 0, ranks, 1, rendezvous)
        loaded = self.runner.load(assignment, lambda phase, fraction: None, listener)
        self.runner.init_kv_cache(InitializeCache(batch * self.blocks, loaded.max_model_len))

    def run(self, tokens: I32) -> None:
        """Run one wave: greedy output for `tokens`, int32[batch, prompt]."""
        began = time.perf_counter()
        self.prefill(tokens, [SamplingParams(max_tokens=self.output, temperature=0.0)] * self.batch)
        prefilled = time.perf_counter()
        flying: deque[Output] = deque()
        for position in self.positions:
            flying.append(self.decode(position))
            if len(flying) == DEPTH:
                flying.popleft().get()
        while flying:
            flying.popleft().get()
        self.prefill_s, self.decode_s = prefilled - began, time.perf_counter() - prefilled
        self.release()

    @property
    def positions(self) -> range:
        """Position of each decode step."""
        return range(self.prompt, self.prompt + self.output - 1)

    def prefill(self, tokens: I32, params: list[SamplingParams]) -> None:
        """Prefill `tokens`, int32[batch, prompt], in one step."""
        self.wave += 1
        table = np.arange(self.batch * self.blocks, dtype=np.int32).reshape(self.batch, self.blocks)
        new = [
            NewRequest(slot, self.wave, tokens[slot].tobytes(), self.prompt, table[slot].tobytes(), params[slot])
            for slot in range(self.batch)
        ]
        self._launch(0, self.prompt, new).get()

    def decode(self, position: int) -> Output:
        return self._launch(position, 1, [])

    def release(self) -> None:
        self.runner.release(self._slots)

    def _launch(self, start: int, count: int, new: list[NewRequest]) -> Output:
        slots = self._slots
        self.step_id += 1
        plan = SchedulerOutput(
            epoch=1,
            step_id=self.step_id,
            slots=slots.tobytes(),
            generations=np.full_like(slots, self.wave).tobytes(),
            starts=np.full_like(slots, start).tobytes(),
            counts=np.full_like(slots, count).tobytes(),
            samples=b"\x01" * self.batch,
            new=new,
        )
        self.runner.execute_model(plan)
        return self.runner.sample_tokens(None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--dtype", default="bfloat16")
    add_ints(parser, threads=2, batch=16, prompt=128, output=128, waves=4, ranks=1, rank=0)
    parser.add_argument(
        "--rendezvous", default="", help="address of the first rank; set when the first rank starts the others"
    )
    args = parser.parse_args()
    listener, others = None, []
    if args.ranks > 1 and not args.rank:
        listener = listen("127.0.0.1")
        args.rendezvous = "127.0.0.1:" + str(listener.getsockname()[1])
        command = [sys.executable, *sys.argv, f"--rendezvous={args.rendezvous}"]
        others = [subprocess.Popen([*command, f"--rank={rank}"]) for rank in range(1, args.ranks)]
    try:
        result = measure(args, listener)
    finally:
        for other in others:
            other.terminate()
            other.wait()
    if not args.rank:
        print(json.dumps(result))


def measure(args: argparse.Namespace, listener: socket.socket | None) -> dict[str, float]:
    load = BenchConfig(random_input_len=args.prompt, random_output_len=args.output)
    rows = np.array(prompts(load, args.batch * args.waves, load.seed), np.int32)
    batch = StaticBatch(
        WorkerConfig(model=args.model, dtype=args.dtype, threads=args.threads),
        args.batch,
        args.prompt,
        args.output,
        (args.rank, args.ranks, args.rendezvous),
        listener,
    )
    batch.run(rows[: args.batch])  # warm-up
    prefill, decode = 0.0, 0.0
    started = time.perf_counter()
    for wave in range(args.waves):
        batch.run(rows[wave * args.batch : (wave + 1) * args.batch])
        prefill, decode = prefill + batch.prefill_s, decode + batch.decode_s
    seconds = time.perf_counter() - started
    tokens = args.waves * args.batch * args.output
    return {
        "tokens_per_s": tokens / seconds,
        "seconds": seconds,
        "tokens": tokens,
        "prefill_s": prefill / args.waves,
        "decode_step_ms": decode * 1000 / args.waves / max(1, args.output - 1),
    }


if __name__ == "__main__":
    main()
