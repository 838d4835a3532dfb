"""Effect of even microbatches: `balanced` against `chunked` on four pipeline stages.

Simulated: the production scheduler and policies with modelled stages and links on a virtual clock (tests/simulation/
pipeline.py). The settings are those of a published comparison (256 requests of 128 tokens in and 128 out, Llama-2-13b
on four 12 GB cards, 146.24 s greedy and 70.19 s balanced) and similar ones. tests/simulation/test_balanced.py has the
bounds at other depths and with arrivals over time.

Measured: a scheduler and four simulated stages as processes, with a quarter of the requests and of their lengths, and
costs per token and per token of context scaled so that a step takes equally long; compared with the simulation.

Native: the same for a scheduler and two stages of the native backend with one thread each, which multiply real
matrices. The costs of the simulation are fitted to the steps of `chunked`; those of `balanced` are predicted.
"""

import argparse
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protocol.codec import unpack
from protocol.records import StepRecord
from services.scheduler.core.limits import Limits
from services.scheduler.policies import BalancedPolicy, BatchingPolicy, ChunkedPolicy
from tests.benchmarks.support.engine_client import engine
from tests.benchmarks.support.random_llama import SHAPES, random_llama
from tests.benchmarks.support.report import report
from tests.simulation.pipeline import Costs, PipelineJob, PipelineRun, cards, simulate, spread

STAGES, REQUESTS, LENGTH, BLOCK, SEATS = 4, 256, 128, 16, 256
DEPTH = STAGES + 1
POLICIES: dict[str, type[BatchingPolicy]] = {"chunked": ChunkedPolicy, "balanced": BalancedPolicy}
QUARTER = 4
PUBLISHED = 1
"""Index in `SETTINGS` of the setting closest to the published run. Its latencies were fitted to the greedy total
only."""


@dataclass(frozen=True)
class Setting:
    kv_tokens: int
    budget: int
    costs: Costs
    note: str = ""

    @property
    def limits(self) -> Limits:
        return Limits(SEATS, self.budget, 512, self.kv_tokens // BLOCK, BLOCK, False, STAGES)


SLOW, NEAR, FAR = cards(1e-3, 10e-3), cards(1e-3, 5e-3), cards(4e-3, 10e-3)
TEN_GBE = cards(1e-3, 5e-3, bandwidth=1180e6)
SETTINGS = [
    Setting(16_000, 16_384, SLOW),
    Setting(16_000, 16_384, FAR, "published"),
    Setting(16_000, 16_384, replace(FAR, blocking=True), "blocking"),
    Setting(17_000, 16_384, NEAR),
    Setting(17_000, 32_768, NEAR),
    Setting(17_000, 8_192, NEAR),
    Setting(17_000, 2_048, NEAR),
    Setting(80_000, 2_048, NEAR, "all fit"),
    Setting(80_000, 8_192, NEAR, "all fit"),
    Setting(80_000, 32_768, NEAR, "all fit"),
    Setting(17_000, 16_384, TEN_GBE, "10 GbE"),
    Setting(80_000, 32_768, Costs(base=NEAR.base, weights=NEAR.weights), "weights"),
]


def pair(limits: Limits, depth: int, costs: Costs, jobs: Sequence[PipelineJob]) -> dict[str, PipelineRun]:
    return {name: simulate(policy(), limits, depth, costs, jobs) for name, policy in POLICIES.items()}


def figures(run: PipelineRun) -> dict[str, object]:
    """Return the metrics of a run; times in seconds."""
    return {
        "total": run.total,
        "tokens_per_s": run.throughput,
        "steps": len(run.steps),
        "bubbles": run.bubbles,
        "preemptions": run.preemptions,
        "ttft": spread(run.ttft),
        "itl": spread(run.itl),
    }


def row(setting: Setting, runs: Mapping[str, PipelineRun]) -> dict[str, object]:
    """Return one row of the table: milliseconds of a hop and of a dispatch, seconds of each policy and the share of the
    time in which its stages are idle, and the ratio of the policies."""
    greedy, balanced = runs["chunked"], runs["balanced"]
    return {
        "KV": setting.kv_tokens,
        "budget": setting.budget,
        "ms": f"{setting.costs.hop * 1e3:.0f}/{setting.costs.dispatch * 1e3:.0f}",
        "chunked": greedy.total,
        "idle": f"{np.mean(greedy.bubbles):.0%}",
        "balanced": balanced.total,
        "idle ": f"{np.mean(balanced.bubbles):.0%}",
        "ratio": ratio(runs),
        "note": setting.note,
    }


def ratio(runs: Mapping[str, PipelineRun]) -> float:
    """Return the time of the greedy policy relative to the balanced one."""
    return runs["chunked"].total / runs["balanced"].total


# -- real processes ----------------------------------------------------------------------------------------------


def quarter() -> Setting:
    """Return the published setting for a quarter of the requests and lengths, with costs per token scaled to match."""
    costs = SETTINGS[PUBLISHED].costs
    return Setting(
        16_000 // QUARTER**2,
        16_384 // QUARTER**2,
        replace(
            costs,
            token=costs.token * QUARTER,
            hop_token=costs.hop_token * QUARTER,
            context=costs.context * QUARTER**2,
            dispatch=0.0,  # real processes: a millisecond or less
        ),
    )


@dataclass(frozen=True)
class StagesRun:
    """A load on a scheduler and stages as processes; each rank is a stage."""

    seconds: float
    """From the first request to the last token, at the client."""
    records: Sequence[StepRecord]
    tokens: int
    preemptions: int

    @property
    def bubbles(self) -> list[float]:
        """Share of the time from the first forward pass to the last one in which each stage is idle, including the
        filling and draining of the pipeline."""
        passes = [(rank.rank, rank.times) for record in self.records for rank in record.ranks]
        busy = defaultdict[int, float](float)
        for stage, times in passes:
            busy[stage] += times.forward_ended - times.forward_began
        whole = max(times.forward_ended for _, times in passes) - min(times.forward_began for _, times in passes)
        return [1 - seconds / whole for _, seconds in sorted(busy.items())]

    def figures(self) -> dict[str, object]:
        """Return the metrics of the run; times in seconds."""
        return {
            "seconds": self.seconds,
            "tokens_per_s": self.tokens / self.seconds,
            "tokens_per_microbatch": [scheduled_tokens(record) for record in self.records],
            "bubbles": [round(share, 4) for share in self.bubbles],
            "preemptions": self.preemptions,
        }


def scheduled_tokens(record: StepRecord) -> int:
    return int(unpack(record.scheduled).sum())


def run_stages(
    num_stages: int,
    prompts: Sequence[NDArray[np.int32]],
    output: int,
    scheduler: Mapping[str, object],
    worker: Mapping[str, object],
) -> StagesRun:
    """Run all requests at once on a scheduler and `num_stages` workers. The mappings are settings by field name.

    Raises: RuntimeError, if a request fails; TimeoutError, if the engine sends no messages.
    """
    with engine({"pipeline_parallel_size": num_stages, **scheduler}, worker, num_stages) as client:
        client.subscribe()
        began = time.monotonic()
        for number, prompt in enumerate(prompts):
            client.generate(prompt, number, output)
        while client.finished < len(prompts):
            client.receive()
        seconds = time.monotonic() - began
        for finish in client.finishes:
            if finish.message:
                raise RuntimeError(f"request {finish.number}: {finish.message}")
        while sum(int(unpack(record.generated).sum()) for record in client.records) < client.tokens:
            client.receive()
    preemptions = sum(finish.num_preemptions for finish in client.finishes)
    return StagesRun(seconds, client.records, client.tokens, preemptions)


def measure(policy: str, setting: Setting) -> StagesRun:
    """Run the whole load at once on a scheduler and four stages as processes."""
    costs, length = setting.costs, LENGTH // QUARTER
    rng = np.random.default_rng(0)
    scheduler = {
        "batching_policy": policy,
        "block_size": BLOCK // QUARTER,
        "num_gpu_blocks_override": setting.kv_tokens // (BLOCK // QUARTER),
        "max_num_batched_tokens": setting.budget,
        "max_num_seqs": SEATS // QUARTER,
        "max_model_len": 512 // QUARTER,
    }
    worker = {
        "backend": "sim",
        "sim_vocab_size": 32_000,
        "sim_step_ms": costs.base * STAGES * 1e3,
        "sim_weights_ms": costs.weights * STAGES * 1e3,
        "sim_prefill_token_us": costs.token * STAGES * 1e6,
        "sim_decode_us": costs.token * STAGES * 1e6,
        "sim_context_token_ns": costs.context * STAGES * 1e9,
        "sim_hop_ms": costs.hop * 1e3,
        "sim_hop_token_us": costs.hop_token * 1e6,
    }
    prompts = [rng.integers(300, 30_000, length).astype(np.int32) for _ in range(REQUESTS // QUARTER)]
    return run_stages(STAGES, prompts, length, scheduler, worker)


def predict(policy: str, setting: Setting) -> PipelineRun:
    limits = Limits(
        SEATS // QUARTER,
        setting.budget,
        512 // QUARTER,
        setting.kv_tokens // (BLOCK // QUARTER),
        BLOCK // QUARTER,
        True,
        STAGES,
    )
    jobs = [PipelineJob(LENGTH // QUARTER, LENGTH // QUARTER)] * (REQUESTS // QUARTER)
    return simulate(POLICIES[policy](), limits, DEPTH, setting.costs, jobs)


def compared(runs: Mapping[str, StagesRun], predictions: Mapping[str, PipelineRun]) -> dict[str, Any]:
    """Print each policy's measured time and bubbles beside the predicted ones. Return the metrics and the ratios of the
    policies."""
    for name, run in runs.items():
        seconds, total = run.seconds, predictions[name].total
        print(
            f"{name}: measured {seconds:.2f} s, predicted {total:.2f} s ({seconds / total - 1:+.1%}); "
            f"bubbles {np.mean(run.bubbles):.1%}, predicted {np.mean(predictions[name].bubbles):.1%}"
        )
    return {
        "measured": {name: run.figures() for name, run in runs.items()},
        "predicted": {name: figures(run) for name, run in predictions.items()},
        "measured_ratio": runs["chunked"].seconds / runs["balanced"].seconds,
        "predicted_ratio": ratio(predictions),
    }


def compare_sim() -> dict[str, Any]:
    setting = quarter()
    runs = {name: measure(name, setting) for name in POLICIES}
    return compared(runs, {name: predict(name, setting) for name in POLICIES})


# -- native stages ------------------------------------------------------------------------------------------------

NATIVE_STAGES, NATIVE_DEPTH = 2, 3


def native_limits(requests: int) -> Limits:
    """All requests fit, and the budget of a step covers most of their prompts, so `chunked` forms uneven steps."""
    return Limits(requests, 2048, 512, 2 * requests * LENGTH // BLOCK, BLOCK, False, NATIVE_STAGES)


def measure_native(policy: str, model: str, requests: int) -> StagesRun:
    limits, rng = native_limits(requests), np.random.default_rng(0)
    path = str(random_llama(model))
    scheduler = {
        "model": path,
        "batching_policy": policy,
        "block_size": limits.block_size,
        "num_gpu_blocks_override": limits.num_blocks,
        "max_num_batched_tokens": limits.max_num_batched_tokens,
        "max_num_seqs": limits.max_num_seqs,
        "max_model_len": limits.max_model_len,
        "enable_prefix_caching": False,
    }
    worker = {"backend": "native", "model": path, "threads": 1, "dtype": "float32"}
    prompts = [rng.integers(300, 1000, LENGTH).astype(np.int32) for _ in range(requests)]
    return run_stages(NATIVE_STAGES, prompts, LENGTH, scheduler, worker)


def fitted(run: StagesRun) -> Costs:
    """Return the costs of a step and of a token, by least squares over the forward passes of all stages."""
    passes = [(scheduled_tokens(record), rank.times) for record in run.records for rank in record.ranks]
    tokens = np.array([count for count, _ in passes], np.float64)
    seconds = np.array([times.forward_ended - times.forward_began for _, times in passes])
    columns = np.stack([np.ones_like(tokens), tokens], 1)
    (base, token), *_ = np.linalg.lstsq(columns, seconds, rcond=None)
    return Costs(base=max(0.0, float(base)), token=max(0.0, float(token)))


def compare_native(model: str, requests: int) -> dict[str, Any]:
    runs = {name: measure_native(name, model, requests) for name in POLICIES}
    costs, jobs = fitted(runs["chunked"]), [PipelineJob(LENGTH, LENGTH)] * requests
    predicted = pair(native_limits(requests), NATIVE_DEPTH, costs, jobs)
    fit = f"{1e3 * costs.base:.2f} ms per step, {1e6 * costs.token:.1f} us per token"
    print(f"\n{model} on {NATIVE_STAGES} native stages: {fit}")
    return {"costs": {"base": costs.base, "token": costs.token}, **compared(runs, predicted)}


def main(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--no-processes", action="store_true", help="skip the measurements with processes")
    parser.add_argument("--native-model", default="m155", choices=SHAPES)
    parser.add_argument("--native-requests", type=int, default=32)
    args = parser.parse_args()

    jobs = [PipelineJob(LENGTH, LENGTH)] * REQUESTS
    runs = [pair(setting.limits, DEPTH, setting.costs, jobs) for setting in SETTINGS]
    ratios = [ratio(both) for both in runs]
    sim = {} if args.no_processes else compare_sim()
    native = {} if args.no_processes else compare_native(args.native_model, args.native_requests)
    report(
        "balanced_policy",
        title=f"{REQUESTS} requests, {LENGTH} tokens in and out, {STAGES} stages, {DEPTH} steps in flight; seconds",
        rows=[row(*line) for line in zip(SETTINGS, runs, strict=True)],
        figures={
            "published_setting_ratio": ratios[PUBLISHED],
            "worst_ratio": min(ratios[:-1]),
            "measured_ratio": sim.get("measured_ratio"),
            "predicted_ratio": sim.get("predicted_ratio"),
            "native_measured_ratio": native.get("measured_ratio"),
            "native_predicted_ratio": native.get("predicted_ratio"),
        },
        settings={
            "native_model": args.native_model,
            "native_requests": args.native_requests,
            "stages": STAGES,
            "depth": DEPTH,
            "block_size": BLOCK,
            "max_num_seqs": SEATS,
        },
        repeats={
            "runs": [{name: figures(run) for name, run in both.items()} for both in runs],
            "sim": sim,
            "native": native,
        },
    )
