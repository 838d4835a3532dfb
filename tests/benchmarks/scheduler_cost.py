"""Cost of the scheduler per step: forming a step and applying its result, every request decoding, no model.

Prompts have different lengths, so that block boundaries are spread evenly over the steps. Prefix caching is on and two
steps are in flight. Prints the mean time per step in microseconds and the size of a plan in bytes.
"""

import gc
import statistics
import time

import numpy as np

from protocol.codec import pack, unpack
from protocol.sampling import SamplingParams
from services.scheduler.core.apply import ResultApplier
from services.scheduler.core.limits import Limits
from services.scheduler.core.parts import DEFAULT_PARTS
from services.scheduler.core.plan import StepPlanner
from services.scheduler.core.request import Request
from services.scheduler.core.results import DecodedResult
from services.scheduler.policies import ChunkedPolicy
from tests.benchmarks.support.report import report

PROMPT, OUTPUT, STEPS, REPEATS = 128, 1500, 480, 3


def build(running: int, block_size: int = 16) -> tuple[StepPlanner, ResultApplier]:
    limits = Limits(
        max_num_seqs=running,
        max_num_batched_tokens=max(8192, running * (PROMPT + block_size) + 1),
        max_model_len=2048,
        num_blocks=running * (1024 // block_size + 2) + 64,
        block_size=block_size,
    )
    store = DEFAULT_PARTS.build_store(None)
    epoch = DEFAULT_PARTS.build_epoch(1, limits, ChunkedPolicy())
    lifecycle = DEFAULT_PARTS.lifecycle(store, epoch)
    for number in range(running):
        tokens = (number * 7919 + np.arange(PROMPT + number % block_size) * 31) % 3700 + 300
        params = SamplingParams(max_tokens=OUTPUT, temperature=0.0)
        store.waiting.add(Request(0, number, tokens.astype(np.int32), len(tokens), params, number))
    return StepPlanner(store, epoch, lifecycle, None), ResultApplier(store, epoch, lifecycle, None)


def run(running: int) -> dict[str, float]:
    """Return the mean times of a step and its parts, microseconds."""
    planner, applier = build(running)
    queue, schedule_s, update_s, sizes = [planner.schedule(), planner.schedule()], [], [], []
    token_ids = (np.arange(running) * 13 % 3700 + 300).astype(np.int32)
    gc.collect()
    gc.freeze()
    for index in range(STEPS + 20):
        step, plan = queue.pop(0)  # type: ignore[misc]
        assert len(step.slots) == running
        started = time.perf_counter()
        applier.apply(step, DecodedResult.one_token_each(unpack(pack(token_ids))))
        applier.store.take_outputs()
        middle = time.perf_counter()
        queue.append(planner.schedule())
        ended = time.perf_counter()
        if index >= 20:
            update_s.append(middle - started)
            schedule_s.append(ended - middle)
            sizes.append(
                sum(map(len, (plan.slots, plan.generations, plan.starts, plan.counts, plan.samples)))
            )
    gc.unfreeze()
    us = 1e6
    return {
        "step_us": us * (statistics.mean(schedule_s) + statistics.mean(update_s)),
        "step_median_us": us * statistics.median(a + b for a, b in zip(schedule_s, update_s, strict=True)),
        "schedule_us": us * statistics.mean(schedule_s),
        "update_us": us * statistics.mean(update_s),
        "plan_bytes": statistics.mean(sizes),
    }


def main() -> None:
    repeats = {str(running): [run(running) for _ in range(REPEATS)] for running in (64, 256, 1024)}
    best = {running: min(rows, key=lambda row: row["step_us"]) for running, rows in repeats.items()}
    report(
        "scheduler_cost",
        title="forming a step + applying its result, all requests decoding",
        rows=[{"running": running, **row} for running, row in best.items()],
        figures={
            "step_us": {running: row["step_us"] for running, row in best.items()},
            "growth_256_to_1024": best["1024"]["step_us"] / best["256"]["step_us"],
        },
        settings={"prompt": PROMPT, "steps": STEPS, "block_size": 16, "in_flight": 2, "prefix_caching": True},
        repeats=repeats,
    )


if __name__ == "__main__":
    main()
